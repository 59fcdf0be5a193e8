//! What a run would do, without doing it.

use super::{Process, check, check_weights};
use crate::console::Output;
use crate::planning::{Blueprint, Job, Plan, Workers, language_model, sequences_of};
use anyhow::Result;
use std::io::Write;
use trireme_data::Corpus;
use trireme_planner::table;
use trireme_train::config::Config;
use trireme_train::{Samples, corpus_folder, current_corpus, resume_point};

/// Checks what `train` checks before its first step, and tells what it would do. Nothing is written.
pub(super) fn dry_run(config: &Config, process: Process<'_>) -> Result<()> {
    let workers = Workers::local(config, process.limit, process.features);
    let mut text = String::new();
    match process.own {
        Some(_) => check_weights(config)?,
        None => match current_corpus(config)? {
            Some(found) => {
                let folder = corpus_folder(&config.data().folder, found.version);
                let corpus = Corpus::open(&folder)?;
                check(config, &corpus, process.source, workers)?;
                let (tokens, folder) = (corpus.train.tokens.num_tokens(), folder.display());
                text += &format!("data: {tokens} tokens to train on, in {folder}\n");
            }
            None => {
                let inputs = config.data().inputs.iter().map(|path| path.display().to_string());
                let inputs = inputs.collect::<Vec<_>>().join(", ");
                let folder = config.data().folder.display();
                text += &format!("data: would be prepared from {inputs} into {folder}\n");
            }
        },
    }
    let steps = config.training().steps;
    text += &match resume_point(config)? {
        Some(checkpoint) => {
            let (step, path) = (checkpoint.step(), checkpoint.path().display());
            format!("would resume after step {step} of {steps}, from {path}\n")
        }
        None => format!("would train {steps} steps from the beginning\n"),
    };
    text += &format!("run folder: {}\n{workers}\n\n", config.run_folder().display());
    text += &match process.own {
        Some(task) => {
            let sample = Samples::open(&**task, config)?.train.sample();
            memory(config, process, Blueprint::Task { task: &**task, sample: &sample }, workers)?
        }
        None => {
            let model = language_model(config)?;
            let sequences = sequences_of(config);
            let blueprint = Blueprint::Language { model: &model, sequences };
            memory(config, process, blueprint, workers)?
        }
    };
    Ok(Output.write_all(text.as_bytes())?)
}

fn memory(
    config: &Config,
    process: Process<'_>,
    blueprint: Blueprint<'_>,
    workers: Workers<'_>,
) -> Result<String> {
    let job = Job { config, source: process.source, blueprint, workers };
    let plan = Plan::largest(job)?;
    plan.check(job)?;
    Ok(table(&[("predicted", plan.prediction.peaks, plan.prediction.total())]))
}
