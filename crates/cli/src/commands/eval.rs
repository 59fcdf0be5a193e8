//! `trireme eval`: measures how good a model is.

use super::prepare::PreparationProgress;
use crate::console::{Output, progress_bar};
use crate::diagnostics::print_diagnostic;
use crate::numbers::with_noun;
use crate::simd::device_options;
use crate::temporary::temporary_folder;
use anyhow::{Result, anyhow, bail};
use indicatif::ProgressBar;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use trireme_base::Heartbeat;
use trireme_checkpoint::ModelSource;
use trireme_data::{
    ChatTemplate, Corpus, PrepareOptions, Question, REPORT_FILE, Tokenizer, TokenizerChoice, prepare,
};
use trireme_tensor::Device;
use trireme_train::{Evaluation, Evaluator, chat_template_for, model_tokenizer};

const EXAMPLES: &str = "\
Examples:
  trireme eval runs/book held-out.txt
      Loss, perplexity and bits per byte of a text.
  trireme eval runs/book corpus
      The same for what a prepared corpus holds out for validation.
  trireme eval model questions.jsonl
      How many questions with choices are answered, as lm-evaluation-harness scores them. Each line
      is an object such as {\"context\": \"2 + 2 =\", \"choices\": [\"3\", \"4\"], \"answer\": 1}.
      A space goes before each choice, unless `delimiter` says otherwise. With `messages` in place
      of `context`, the chat template makes the prompt, and nothing goes before a choice.";

/// Measure how good a model is, on texts or on questions with choices.
///
/// In conversations and completions, only the answers count. Runs in one process, in f32.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EvalArgs {
    /// The folder of a run (its newest checkpoint), a checkpoint, or a Hugging Face model directory.
    model: PathBuf,
    /// Text files and folders, JSON Lines, the folder of a prepared corpus, or a file of questions.
    #[arg(required = true)]
    data: Vec<PathBuf>,
    /// Tokens per sequence; by default as many as the model supports, up to 1024. `train` validates with `[training] seq_len`.
    #[arg(long, value_name = "N")]
    seq_len: Option<usize>,
    /// Field of each JSON object that contains the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Jinja template that formats `messages` as text: a file, or `chatml`. Defaults to the model's own.
    #[arg(long, value_name = "TEMPLATE")]
    chat_template: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Load the weights even if they contain NaN or infinity.
    #[arg(long)]
    allow_non_finite: bool,
    /// Number of threads; all cores by default.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    threads: usize,
}

pub(crate) fn run(args: &EvalArgs) -> Result<()> {
    let device = Device::cpu(device_options(args.threads)?)?;
    let source = ModelSource::open(&args.model)?;
    let tokenizer = model_tokenizer(&source)?;
    let tokenizer = Arc::new(tokenizer.ok_or_else(|| anyhow!("{} has no tokenizer", args.model.display()))?);
    let template = chat_template_for(args.chat_template.as_deref(), &source)?;
    let template = template.map(|template| template.with_special_tokens_as_text(&tokenizer));
    let mut evaluator = Evaluator::load(&args.model, args.allow_non_finite, args.seq_len, &device)?;
    evaluator.notices().iter().for_each(|notice| print_diagnostic(&format!("note: {notice}")));
    for file in args.data.iter().filter(|path| path.is_file()) {
        if !Question::is_question_file(file)? {
            continue;
        }
        if args.data.len() > 1 {
            bail!("{} has questions, which are evaluated alone; leave the other inputs out", file.display());
        }
        let questions = Question::read_all(file, template.as_ref())?;
        return evaluate_questions(args, &mut evaluator, &tokenizer, &questions);
    }
    let (corpus, _scratch) = corpus(args, template, &tokenizer)?;
    let found = evaluate(&mut evaluator, &corpus, &tokenizer)?;
    show(args, &found, evaluator.seq_len())
}

/// Returns the corpus to evaluate. If it had to be prepared, the second value is its temporary folder.
fn corpus(
    args: &EvalArgs,
    chat_template: Option<ChatTemplate>,
    tokenizer: &Arc<Tokenizer>,
) -> Result<(Corpus, Option<TempDir>)> {
    if let [folder] = &args.data[..]
        && folder.join(REPORT_FILE).is_file()
    {
        let corpus = Corpus::open(folder)?;
        if corpus.tokenizer_sha256()? != tokenizer.sha256()? {
            bail!(
                "{} does not have the tokenizer of {}; give the text itself, which is tokenized with the model's",
                folder.display(),
                args.model.display()
            );
        }
        if corpus.validation.is_none() {
            print_diagnostic(&format!(
                "note: {} holds nothing out for validation, so all of it is evaluated, including text that the model may have been trained on",
                folder.display()
            ));
        }
        return Ok((corpus, None));
    }
    let scratch = temporary_folder("trireme-eval-")?;
    let options = PrepareOptions {
        tokenizer: TokenizerChoice::OfModel { model: args.model.clone(), tokenizer: Arc::clone(tokenizer) },
        chat_template,
        field: args.field.clone(),
        validation_fraction: 0.0,
        ..PrepareOptions::new(args.data.clone(), scratch.path().join("corpus"))
    };
    prepare(&options, &PreparationProgress::new(Heartbeat::new()))?;
    Ok((Corpus::open(&options.out)?, Some(scratch)))
}

fn bar(what: &'static str) -> ProgressBar {
    progress_bar(None, "evaluating {wide_bar} {pos}/{len} {msg}  {eta} left").with_message(what)
}

fn evaluate(evaluator: &mut Evaluator, corpus: &Corpus, tokenizer: &Tokenizer) -> Result<Evaluation> {
    let bar = bar("sequences");
    let progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let end = tokenizer.end_of_document();
    let num_bytes = |tokens: &[u32]| {
        let tokens: Vec<u32> = tokens.iter().copied().filter(|&token| Some(token) != end).collect();
        Ok(tokenizer.num_bytes(&tokens)?)
    };
    let found = evaluator.evaluate_corpus(
        corpus.evaluation_tokens(),
        corpus.report.has_loss_mask,
        num_bytes,
        progress,
    );
    bar.finish_and_clear();
    Ok(found?)
}

fn show(args: &EvalArgs, found: &Evaluation, seq_len: usize) -> Result<()> {
    let (loss, perplexity, bits) = (found.loss(), found.perplexity(), found.bits_per_byte());
    if args.json {
        let found = json!({
            "loss": loss,
            "perplexity": perplexity,
            "bits_per_byte": bits,
            "num_tokens": found.num_tokens,
            "num_bytes": found.num_bytes,
            "seq_len": seq_len,
        });
        return Ok(writeln!(Output, "{found}")?);
    }
    writeln!(Output, "loss: {loss:.4} nats per token ({} tokens, sequences of {seq_len})", found.num_tokens)?;
    writeln!(Output, "perplexity: {perplexity:.3}")?;
    let bits = bits.map_or_else(|| "unknown".to_owned(), |bits| format!("{bits:.4}"));
    Ok(writeln!(Output, "bits per byte: {bits} ({} bytes)", found.num_bytes)?)
}

/// Returns the share of correctly answered questions and its standard error, which is unknown for a single question.
fn score(answered: &[bool]) -> (f64, Option<f64>) {
    let count = answered.len() as f64;
    let mean = answered.iter().filter(|answered| **answered).count() as f64 / count;
    let squares: f64 = answered.iter().map(|&answered| (f64::from(answered) - mean).powi(2)).sum();
    (mean, (count > 1.0).then(|| (squares / (count - 1.0)).sqrt() / count.sqrt()))
}

fn evaluate_questions(
    args: &EvalArgs,
    evaluator: &mut Evaluator,
    tokenizer: &Tokenizer,
    questions: &[Question],
) -> Result<()> {
    let bar = bar("questions");
    bar.set_length(questions.len() as u64);
    let (mut likeliest, mut likeliest_per_character, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for question in questions {
        let mut found = Vec::new();
        for choice in question.tokens(tokenizer)? {
            found.push(evaluator.log_likelihood(&choice.tokens, choice.num_context)?);
        }
        let per_character = found.iter().zip(&question.choices).map(|(found, choice)| {
            // lm-evaluation-harness divides by the characters of the choice, without the delimiter before it.
            found / choice.chars().count() as f64
        });
        likeliest.push(argmax(found.iter().copied()) == question.answer);
        likeliest_per_character.push(argmax(per_character) == question.answer);
        all.push(found);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (accuracy, normalized) = (score(&likeliest), score(&likeliest_per_character));
    if args.json {
        let found = json!({
            "acc": accuracy.0,
            "acc_stderr": accuracy.1,
            "acc_norm": normalized.0,
            "acc_norm_stderr": normalized.1,
            "num_questions": questions.len(),
            "log_likelihoods": all,
        });
        return Ok(writeln!(Output, "{found}")?);
    }
    let line = |name: &str, (mean, standard_error): (f64, Option<f64>)| {
        let error = standard_error.map_or_else(String::new, |error| format!(" +- {:.2} %", 100.0 * error));
        format!("{name}: {:.2} %{error}", 100.0 * mean)
    };
    writeln!(Output, "{} ({})", line("acc", accuracy), with_noun(questions.len(), "question"))?;
    Ok(writeln!(Output, "{} (by likelihood per character)", line("acc_norm", normalized))?)
}

/// Returns the index of the first largest value; 0 without values.
fn argmax(values: impl Iterator<Item = f64>) -> usize {
    let largest = values.enumerate().reduce(|best, next| if next.1 > best.1 { next } else { best });
    largest.map_or(0, |(index, _)| index)
}
