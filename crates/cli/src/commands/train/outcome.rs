//! What a run shows when it has ended.

use crate::launch::INVOKED_AS_VARIABLE;
use crate::planning::Plan;
use anyhow::Result;
use trireme_base::{Bytes, Category, CategoryBytes, quoted};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, best_step};
use trireme_data::bigram_baseline;
use trireme_model::Sampling;
use trireme_planner::table;
use trireme_tensor::Parameters;
use trireme_train::config::{Config, Resume, Subject};
use trireme_train::metrics::MemoryPeakBytes;
use trireme_train::{
    LanguageTask, RunSummary, SampleSettings, TrainError, Trainer, forward_executor, sample,
};

/// The memory that the run has taken of each worker, next to what was predicted. Collective.
pub(super) fn memory_table(trainer: &Trainer<'_>, plan: &Plan) -> Result<String> {
    let MemoryPeakBytes { categories: peaks, total } = MemoryPeakBytes::measured(trainer.executor().device());
    let host = trainer.executor().host_bytes_peak();
    let predicted = plan.prediction;
    let numbers = |peaks: CategoryBytes, total: usize, host: usize| {
        Category::ALL.into_iter().map(move |category| peaks.get(category)).chain([total, host])
    };
    let own: Vec<u8> = numbers(peaks, total, host)
        .chain(numbers(predicted.peaks, predicted.total(), predicted.host))
        .flat_map(|bytes| (bytes as u64).to_le_bytes())
        .collect();
    let all = trainer.executor().group().all_gather_bytes(&own).wait()?;
    let most = |index: usize| {
        let of_rank = |bytes: &Vec<u8>| {
            let (numbers, _) = bytes.as_chunks::<8>();
            numbers.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes) as usize)
        };
        all.iter().map(of_rank).max().unwrap_or(0)
    };
    let num_categories = Category::ALL.len();
    // Where the predictions begin.
    let first = num_categories + 2;
    let mut columns = vec![("predicted", predicted.peaks, predicted.total()), ("measured", peaks, total)];
    if all.len() > 1 {
        let worst = CategoryBytes(std::array::from_fn(most));
        let foreseen = CategoryBytes(std::array::from_fn(|index| most(first + index)));
        columns = vec![
            ("predicted", foreseen, most(first + num_categories)),
            ("on rank 0", peaks, total),
            ("max over ranks", worst, most(num_categories)),
        ];
    }
    let since = trainer.moved_after().map(|step| format!("since units moved after step {step}:\n"));
    let mut text = format!("\n{}{}", since.unwrap_or_default(), table(&columns));
    if most(first + num_categories + 1) > 0 {
        let [predicted, measured] =
            [first + num_categories + 1, num_categories + 1].map(|index| Bytes(most(index) as u64));
        text += &format!(
            "in addition, state outside the device took {measured} of host memory, transfers included; the prediction \
             was {predicted}\n"
        );
    }
    Ok(text)
}

/// The validation loss; of a language model next to that of the bigram baseline.
pub(super) fn verdict(language: Option<&LanguageTask>, summary: &RunSummary) -> Result<Option<String>> {
    let Some(loss) = summary.validation_loss else { return Ok(None) };
    let Some((train, Some(validation))) = language.map(LanguageTask::tokens) else {
        return Ok(Some(format!("validation loss {loss:.4}")));
    };
    // Among answers, what a pair of tokens tells is no measure.
    if language.is_some_and(LanguageTask::learns_answers) {
        return Ok(Some(format!("validation loss {loss:.4} nats per token")));
    }
    let baseline = bigram_baseline(train, validation).map_err(TrainError::from)?;
    let verdict = if loss < baseline { "below" } else { "not below" };
    Ok(Some(format!(
        "validation loss {loss:.4} nats per token, {verdict} the bigram baseline of {baseline:.4}"
    )))
}

/// What to know of a run that a signal has ended. Which one it was, the process has said that heard it.
pub(super) fn stopped(config: &Config, summary: &RunSummary) -> Vec<String> {
    let (step, steps) = (summary.step, config.training().steps);
    let mut lines = vec![format!("stopped after step {step} of {steps}")];
    match &summary.checkpoint {
        Some((saved, path)) if *saved == step => {
            // Workers are started by a path that nobody has typed.
            let program = std::env::var_os(INVOKED_AS_VARIABLE).or_else(|| std::env::args_os().next());
            let words = program.into_iter().chain(std::env::args_os().skip(1));
            let words = words.map(|word| quoted(&word.to_string_lossy()));
            let command = words.collect::<Vec<_>>().join(" ");
            // Else the same command would begin again.
            let resume = if config.checkpoint().resume == Resume::Auto { "" } else { " --resume auto" };
            lines.push(format!("checkpoint: {}", path.display()));
            lines.push(format!("to resume: {command}{resume}"));
        }
        _ => lines.push("no checkpoint was written, because [checkpoint] enable is false".to_owned()),
    }
    lines
}

pub(super) fn whereabouts(config: &Config, summary: &RunSummary, learns_answers: bool) -> Vec<String> {
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
    if config.subject() == Subject::LanguageModel {
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
    let settings = SampleSettings {
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
    // Beside the training state, which is still there.
    let host = trainer.executor().device().host()?;
    let model_config = language.model_config();
    // A generation has its own limit of positions.
    let model = model_config.build(0, &host)?;
    let mut executor = forward_executor(model_config, model, weights, &host)?;
    sample(&mut executor, model_config, language.tokenizer(), &settings, take)?;
    Ok(text)
}
