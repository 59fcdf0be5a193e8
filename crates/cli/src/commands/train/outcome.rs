//! The report of a run at its end.

use crate::launch::INVOKED_AS_VARIABLE;
use crate::planning::Plan;
use anyhow::Result;
use trireme_base::{Bytes, quoted};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, best_step};
use trireme_data::bigram_baseline;
use trireme_model::Sampling;
use trireme_planner::format_memory_table;
use trireme_tensor::Parameters;
use trireme_train::config::{Config, Resume, TaskKind};
use trireme_train::metrics::MemoryPeakBytes;
use trireme_train::{
    GenerationSettings, LanguageTask, RunSummary, TrainError, Trainer, all_gather_json, forward_executor,
    generate_text,
};

/// Returns a table of peak memory by category: the maximum predicted over all ranks, the peak measured on this rank and, with several
/// ranks, the maximum measured over all ranks. Collective.
pub(super) fn memory_table(trainer: &Trainer<'_>, plan: &Plan) -> Result<String> {
    let executor = trainer.executor();
    let own = MemoryPeakBytes::measured(executor.device());
    let predicted = (plan.memory_peak_bytes(), plan.prediction.host);
    let all = all_gather_json(executor.group(), &[predicted, (own, executor.host_bytes_peak())])?;
    let most = |which: usize| {
        let of_ranks = all.iter().map(|reported| reported[which]);
        of_ranks.reduce(|one, other| (one.0.max(other.0), one.1.max(other.1))).expect("a world has ranks")
    };
    let ((predicted_max, predicted_host_max), (worst, worst_on_host)) = (most(0), most(1));
    let mut columns = vec![("predicted", predicted_max), ("measured", own)];
    if all.len() > 1 {
        columns = vec![("predicted", predicted_max), ("on rank 0", own), ("max over ranks", worst)];
    }
    let columns: Vec<_> =
        columns.into_iter().map(|(heading, peaks)| (heading, peaks.categories, peaks.total)).collect();
    let since = trainer.moved_after().map(|step| format!("since units moved after step {step}:\n"));
    let mut text = format!("\n{}{}", since.unwrap_or_default(), format_memory_table(&columns));
    if predicted_host_max > 0 {
        let [predicted, measured] =
            [predicted_host_max, worst_on_host].map(|num_bytes| Bytes(num_bytes as u64));
        text += &format!(
            "in addition, state outside the device took {measured} of host memory, transfers included; the prediction \
             was {predicted}\n"
        );
    }
    if let Some(memory) = executor.device().gpu_memory()? {
        let [others, total] = [memory.others(), memory.total].map(|num_bytes| Bytes(num_bytes as u64));
        text += &format!(
            "in addition, CUDA, NCCL and other programs used {others} of the {total} of the GPU of rank 0\n"
        );
    }
    Ok(text)
}

/// Returns a line with the validation loss and, for a language model, the loss of the bigram baseline. `None` without a validation loss.
pub(super) fn loss_summary(language: Option<&LanguageTask>, summary: &RunSummary) -> Result<Option<String>> {
    let Some(loss) = summary.validation_loss else { return Ok(None) };
    let Some((train, Some(validation))) = language.map(LanguageTask::tokens) else {
        return Ok(Some(format!("validation loss {loss:.4}")));
    };
    // The bigram baseline is no measure for answers.
    if language.is_some_and(LanguageTask::learns_answers) {
        return Ok(Some(format!("validation loss {loss:.4} nats per token")));
    }
    let baseline = bigram_baseline(train, validation).map_err(TrainError::from)?;
    let verdict = if loss < baseline { "below" } else { "not below" };
    Ok(Some(format!(
        "validation loss {loss:.4} nats per token, {verdict} the bigram baseline of {baseline:.4}"
    )))
}

/// Returns the lines for a run that a signal or the time limit has stopped. The process that received the signal has already reported it.
pub(super) fn stop_report(config: &Config, summary: &RunSummary) -> Vec<String> {
    let (step, steps) = (summary.step, config.training().steps);
    let mut lines = vec![format!("stopped after step {step} of {steps}")];
    match &summary.checkpoint {
        Some((saved, path)) if *saved == step => {
            // Workers are started by a path that the user has not typed.
            let program = std::env::var_os(INVOKED_AS_VARIABLE).or_else(|| std::env::args_os().next());
            let words = program.into_iter().chain(std::env::args_os().skip(1));
            let words = words.map(|word| quoted(&word.to_string_lossy()));
            let command = words.collect::<Vec<_>>().join(" ");
            // With another setting, the same command would begin a new run.
            let resume = if config.checkpoint().resume == Resume::Auto { "" } else { " --resume auto" };
            lines.push(format!("checkpoint: {}", path.display()));
            lines.push(format!("to resume: {command}{resume}"));
        }
        _ => lines.push("no checkpoint was written, because [checkpoint] enable is false".to_owned()),
    }
    lines
}

pub(super) fn files_and_next_steps(
    config: &Config,
    summary: &RunSummary,
    learns_answers: bool,
) -> Vec<String> {
    let folder = config.run_folder();
    let folder = folder.display();
    let mut lines =
        vec![format!("run folder: {folder} (metrics.jsonl, config.toml, logs, TensorBoard events)")];
    lines.extend(summary.checkpoint.as_ref().map(|(_, path)| format!("last checkpoint: {}", path.display())));
    if let Some((step, loss)) = summary.best_validation.filter(|(step, _)| *step != summary.step) {
        let kept = match best_step(&config.run_folder().join(CHECKPOINTS_FOLDER)) {
            Some(best) if best == step => format!(", in {folder}/{CHECKPOINTS_FOLDER}/best"),
            _ => String::new(),
        };
        lines.push(format!("lowest validation loss: {loss:.4} after step {step}{kept}"));
    }
    lines.push("next steps:".to_owned());
    if config.task_kind() == TaskKind::LanguageModel {
        let run = quoted(&folder.to_string());
        let prompt = match config.generate().prompt.as_str() {
            blank if blank.trim().is_empty() && learns_answers => {
                " --prompt \"…\"   # with --chat after conversations".to_owned()
            }
            blank if blank.trim().is_empty() => String::new(),
            prompt => format!(" --prompt {}", quoted(prompt)),
        };
        lines.extend([
            format!("  trireme generate {run}{prompt}"),
            format!("  trireme eval {run} DATA"),
            format!("  trireme checkpoint export {run} exported   # a Hugging Face model directory"),
        ]);
    }
    lines.push(format!("  tensorboard --logdir {}", quoted(&config.run().folder.to_string_lossy())));
    lines
}

pub(super) fn sample_text(
    config: &Config,
    language: &LanguageTask,
    trainer: &Trainer<'_>,
    weights: Parameters,
) -> Result<String> {
    let generate = config.generate();
    let settings = GenerationSettings {
        prompt: generate.prompt.clone().into(),
        num_tokens: generate.num_tokens,
        sampling: Sampling {
            temperature: generate.temperature as f32,
            top_k: generate.top_k,
            top_p: generate.top_p as f32,
            min_p: generate.min_p as f32,
        },
        seed: generate.seed,
        stop_at_end: false,
        end_tokens: Vec::new(),
        stop_tokens: Vec::new(),
        stop: Vec::new(),
    };
    let mut text = settings.prompt.text.clone();
    let take = |piece: &str| text.push_str(piece);
    // The sample is generated on the host, because the device still holds the training state.
    let host = trainer.executor().device().host()?;
    let model_config = language.model_config();
    // Generation uses a KV cache, which has its own limit.
    let model = model_config.build(0, &host)?;
    let mut executor = forward_executor(model_config, model, weights, &host)?;
    generate_text(&mut executor, model_config, language.tokenizer(), &settings, take)?;
    Ok(text)
}
