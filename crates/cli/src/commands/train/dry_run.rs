//! `trireme train --dry-run`: checks a run and prints what it would do.

use super::preparation::{check, check_plan, check_weights, with_corpus_and_steps};
use super::process::ProcessContext;
use crate::console::Output;
use crate::planning::{PlannedRun, Workers, Workload, language_model, sequences_of};
use anyhow::Result;
use std::io::Write;
use trireme_data::Corpus;
use trireme_planner::format_memory_table;
use trireme_train::config::Config;
use trireme_train::{
    Samples, check_corpus_inputs, current_corpus, earlier_run_error, model_config, resume_point,
};

/// Maximum number of bytes that are read of inputs that are not prepared.
const CHECKED_BYTES_MAX: u64 = 64 << 20;

/// Performs the checks that `train` makes before its first step, and prints what the run would do. Writes nothing, and reads at most 64 MiB
/// of unprepared text.
pub(super) fn dry_run(config: &Config, process: ProcessContext<'_>) -> Result<()> {
    if let Some(earlier) = earlier_run_error(config)? {
        return Err(earlier.into());
    }
    let workers = Workers::local(config, &process.share.limits, process.simd_level);
    let source = process.source;
    let mut text = String::new();
    let (config, plan) = match process.custom_task {
        Some(task) => {
            let config = with_corpus_and_steps(config.clone(), None, process)?;
            let sample = Samples::open(&**task, &config)?.train.sample();
            check_weights(&config)?;
            let workload = Workload::Task { task: &**task, sample: &sample };
            let plan = check_plan(PlannedRun { config: &config, source, workload, workers })?;
            (config, plan)
        }
        None => match current_corpus(config)? {
            Some(found) => {
                let config = with_corpus_and_steps(config.clone(), Some(found.version), process)?;
                let corpus = Corpus::open(&config.data().folder)?;
                let (tokens, folder) = (corpus.train.tokens.num_tokens(), corpus.folder.display());
                text += &format!("data: {tokens} tokens to train on, in {folder}\n");
                let plan = check(&config, &corpus, source, workers)?;
                (config, plan)
            }
            None => {
                let inputs = config.data().inputs.iter().map(|path| path.display().to_string());
                let inputs = inputs.collect::<Vec<_>>().join(", ");
                let folder = config.data().folder.display();
                model_config(config, check_corpus_inputs(config, CHECKED_BYTES_MAX)?)?;
                text += &format!("data: would be prepared from {inputs} into {folder}\n");
                check_weights(config)?;
                let model = language_model(config)?;
                let workload = Workload::Language { model: &model, sequences: sequences_of(config) };
                let plan = check_plan(PlannedRun { config, source, workload, workers })?;
                (config.clone(), plan)
            }
        },
    };
    let (steps, epochs) = (config.training().steps, config.training().epochs);
    text += &match resume_point(&config)? {
        Some(checkpoint) => {
            let (step, path) = (checkpoint.step(), checkpoint.path().display());
            format!("would resume after step {step} of {steps}, from {path}\n")
        }
        // The number of steps is known once the text is prepared.
        None if epochs > 0.0 && text.contains("would be prepared") => {
            format!("would train {epochs} passes over the data from the beginning\n")
        }
        None => format!("would train {steps} steps from the beginning\n"),
    };
    text += &format!("run folder: {}\n{workers}\n\n", config.run_folder().display());
    text += &plan.map_or_else(String::new, |plan| {
        format_memory_table(&[("predicted", plan.prediction.peaks, plan.prediction.total())])
    });
    Ok(Output.write_all(text.as_bytes())?)
}
