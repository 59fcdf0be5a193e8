//! `trireme prepare`: converts text to token files.

use crate::console::{Output, progress_bar};
use crate::diagnostics::print_diagnostic;
use crate::numbers::with_noun;
use anyhow::{anyhow, bail};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use indicatif::ProgressBar;
use std::fmt;
use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Heartbeat};
use trireme_checkpoint::{CheckpointError, ModelSource};
use trireme_data::{
    ChatTemplate, InvalidUtf8, Phase, PrepareOptions, PrepareReport, Progress, Source, SplitSize,
    TOKENIZER_FILE, TRAIN_FILE, TokenizerChoice, VALIDATION_FILE, is_up_to_date, prepare,
};
use trireme_train::{
    chat_template_for, chat_template_next_to, chat_template_without_files, model_tokenizer, users_of_corpus,
};

const EXAMPLES: &str = "\
Examples:
  trireme prepare book.txt --out corpus
      One text, one token per byte; the last twentieth is held out for validation.
  trireme prepare docs src --extension md,rs --train-bpe 8192 --out corpus
      Folders of text, with a tokenizer trained on them.
  trireme prepare part-*.jsonl.gz --field content --tokenizer gpt2 --out corpus
      JSON Lines, one document per line, with the tokenizer of a model in the folder gpt2.
  trireme prepare chat.jsonl book.txt --weights 3,1 --tokenizer model --out corpus
      Conversations, sampled three times as often as a text. Only their answers contribute to the loss.
  zcat dump.gz | trireme prepare - --validation held-out.txt --out corpus
      The standard input, with a separate text to validate on.

To train on the corpus, put `folder = \"corpus\"` into the [data] section of a config.
If no input and no option has changed since the last run, the command does nothing.";

/// Convert text files, folders and JSON Lines into token files for training.
///
/// Writes train.tokens, validation.tokens, the tokenizer and a report, prepare.json, into one folder. Uses all cores, and little memory
/// regardless of the input size. A text file is one document; so is each line of a .jsonl, .ndjson or .json file, or each element if the
/// file is one JSON array. Folders are searched recursively. Hidden entries, folders named target, symbolic links and binary files in them
/// are skipped and counted.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PrepareArgs {
    /// Text files, JSON Lines files and folders, read in this order; `-` is the standard input. Files may be compressed (.gz, .zst).
    #[arg(value_name = "INPUT", required = true)]
    inputs: Vec<PathBuf>,
    /// Sampling weight of each input, such as 3,1. By default, inputs are sampled in proportion to their tokens.
    #[arg(long, value_name = "NUMBER", value_delimiter = ',')]
    weights: Vec<f64>,
    /// Inputs to validate on, instead of a fraction of the others.
    #[arg(long, value_name = "INPUT", num_args = 1.., conflicts_with = "validation_fraction")]
    validation: Vec<PathBuf>,
    /// Jinja template that formats `messages` as text: a file, or `chatml`. Defaults to the one next to the tokenizer.
    #[arg(long, value_name = "TEMPLATE")]
    chat_template: Option<PathBuf>,
    /// Let the names of special tokens in `messages` be those tokens. By default they are text, because a user may have typed them.
    #[arg(long)]
    special_tokens_in_messages: bool,
    /// Replace a corpus that runs have been trained on.
    #[arg(long)]
    force: bool,
    /// Folder to write to.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// `bytes` (257 tokens, no file needed), a Hugging Face tokenizer.json, or the folder of a model or run that has one.
    #[arg(long, value_name = "TOKENIZER", default_value = "bytes")]
    tokenizer: PathBuf,
    /// Train a byte-level BPE tokenizer with at most N tokens on the input, such as 8192.
    #[arg(long, value_name = "N", conflicts_with = "tokenizer")]
    train_bpe: Option<usize>,
    /// Field of each JSON object that contains the text. Objects without it may have `messages` (with `role` and `content`), a `prompt` and
    /// its `completion`, or the fields of ShareGPT (`conversations`) or Alpaca (`instruction`, `output`); then only the answers contribute
    /// to the loss.
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Read only files with these extensions from folders. By default, all text files.
    #[arg(long = "extension", value_name = "EXT", value_delimiter = ',')]
    extensions: Vec<String>,
    /// How to handle bytes that are not valid UTF-8: replace each invalid sequence with U+FFFD and count the
    /// replacements, or refuse them with an error that names the file and the byte.
    #[arg(long, default_value_t, value_parser = invalid_utf8())]
    invalid_utf8: InvalidUtf8,
    /// Fraction of tokens held out for validation: whole documents, or the tail of the last document if documents are longer than the
    /// held-out part. 0 holds out none. 0.05 by default.
    #[arg(long, value_name = "SHARE")]
    validation_fraction: Option<f64>,
    /// Number of tokenizer threads; all cores by default. Does not affect the result.
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
}

pub(crate) fn run(args: &PrepareArgs) -> anyhow::Result<()> {
    let options = options(args)?;
    let mut out = Output;
    let report = if is_up_to_date(&options)? {
        writeln!(out, "nothing to do: {} is up to date", options.out.display())?;
        PrepareReport::read(&options.out)?
    } else {
        let users = users_of_corpus(&options.out)?;
        if let Some(run) = users.first().filter(|_| !args.force) {
            bail!(
                "{} was used by the run in {}, which could not be resumed with another text; choose another folder, or pass --force to replace it",
                options.out.display(),
                run.display()
            );
        }
        prepare(&options, &PreparationProgress::new(Heartbeat::new()))?
    };
    Ok(write!(out, "{}", Summary { report: &report, out: &options.out })?)
}

fn invalid_utf8() -> impl TypedValueParser<Value = InvalidUtf8> {
    PossibleValuesParser::new(InvalidUtf8::ALL.map(InvalidUtf8::name)).try_map(|name| name.parse())
}

fn options(args: &PrepareArgs) -> anyhow::Result<PrepareOptions> {
    let defaults = PrepareOptions::new(args.inputs.clone(), args.out.clone());
    let extensions = args.extensions.iter().map(|extension| extension.trim_start_matches('.').to_owned());
    let template = args.chat_template.as_deref();
    let (tokenizer, chat_template) = match args.train_bpe {
        Some(vocabulary_size) => {
            (TokenizerChoice::TrainBpe { vocabulary_size }, chat_template_without_files(template)?)
        }
        None => tokenizer(&args.tokenizer, template)?,
    };
    let fraction = args.validation_fraction.unwrap_or(defaults.validation_fraction);
    Ok(PrepareOptions {
        tokenizer,
        chat_template,
        special_tokens_in_messages: args.special_tokens_in_messages,
        weights: args.weights.clone(),
        validation_inputs: args.validation.clone(),
        field: args.field.clone(),
        extensions: extensions.collect(),
        invalid_utf8: args.invalid_utf8,
        validation_fraction: if args.validation.is_empty() { fraction } else { 0.0 },
        num_threads: args.threads.unwrap_or(defaults.num_threads),
        ..defaults
    })
}

/// Returns the tokenizer with this name, and the chat template that is given or else belongs to the tokenizer, if there is one.
fn tokenizer(
    name: &Path,
    template: Option<&Path>,
) -> anyhow::Result<(TokenizerChoice, Option<ChatTemplate>)> {
    if name == Path::new("bytes") {
        return Ok((TokenizerChoice::Bytes, chat_template_without_files(template)?));
    }
    if name.is_file() {
        return Ok((TokenizerChoice::File(name.to_owned()), chat_template_next_to(template, name)?));
    }
    let source = match ModelSource::open(name) {
        Ok(source) => source,
        // A folder may have a tokenizer and no weights.
        Err(_) if name.join(TOKENIZER_FILE).is_file() => {
            return tokenizer(&name.join(TOKENIZER_FILE), template);
        }
        Err(error @ CheckpointError::Incomplete { .. }) => return Err(error.into()),
        Err(_) if !name.exists() => bail!(
            "the tokenizer {} does not exist; give `bytes`, a tokenizer.json, or the folder of a model or run",
            name.display()
        ),
        Err(error) => return Err(error.into()),
    };
    let missing = || anyhow!("{} has no tokenizer", name.display());
    let tokenizer = Arc::new(model_tokenizer(&source)?.ok_or_else(missing)?);
    let choice = TokenizerChoice::OfModel { model: name.to_owned(), tokenizer };
    Ok((choice, chat_template_for(template, &source)?))
}

/// Interval of progress lines where there is no terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(2);

/// A progress bar on a terminal, else a line on standard error every [`LINE_INTERVAL`].
#[derive(Debug)]
pub(crate) struct PreparationProgress {
    /// Shows waiting ranks that this one makes progress.
    heartbeat: Heartbeat,
    bar: Option<ProgressBar>,
    /// The phase that is shown, and the time of the last line.
    shown: Mutex<(Option<Phase>, Instant)>,
}

impl PreparationProgress {
    pub(crate) fn new(heartbeat: Heartbeat) -> Self {
        let template = "{msg:<31} {wide_bar} {percent:>3}%  time left {eta}";
        let bar = std::io::stderr().is_terminal().then(|| progress_bar(None, template));
        PreparationProgress { heartbeat, bar, shown: Mutex::new((None, Instant::now())) }
    }
}

impl Drop for PreparationProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Progress for PreparationProgress {
    fn advance(&self, phase: Phase, done: u64, total: u64) {
        self.heartbeat.beat();
        let mut shown = self.shown.lock().expect("no thread panics while it shows progress");
        let (shown_phase, last_line) = &mut *shown;
        let is_new_phase = shown_phase.replace(phase) != Some(phase);
        match &self.bar {
            Some(bar) => {
                if is_new_phase {
                    bar.reset();
                    bar.set_length(total);
                    bar.set_message(title(phase));
                }
                bar.set_position(done);
            }
            None if last_line.elapsed() >= LINE_INTERVAL => {
                *last_line = Instant::now();
                let percent = done.saturating_mul(100) / total.max(1);
                print_diagnostic(&format!("{}: {percent}%", title(phase)));
            }
            None => {}
        }
    }
}

fn title(phase: Phase) -> &'static str {
    match phase {
        Phase::TrainTokenizer => "training a tokenizer",
        Phase::Tokenize => "tokenizing",
        Phase::Split => "splitting off validation tokens",
    }
}

struct Summary<'a> {
    report: &'a PrepareReport,
    out: &'a Path,
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { report, out } = self;
        let line =
            |f: &mut fmt::Formatter<'_>, name: &str, SplitSize { num_tokens, num_documents }: SplitSize| {
                let documents = if num_documents == 1 { "document" } else { "documents" };
                writeln!(f, "  {name:<20} {num_tokens:>14} tokens  {num_documents:>10} {documents}")
            };
        writeln!(f, "{}:", out.display())?;
        line(f, TRAIN_FILE, report.train)?;
        if let Some(validation) = report.validation {
            line(f, VALIDATION_FILE, validation)?;
        }
        let files = with_noun(report.num_files as usize, "file");
        writeln!(f, "  read {files}, {}; skipped {}", Bytes(report.input_bytes), report.skipped)?;
        let num_replaced = report.num_invalid_utf8_replaced;
        if num_replaced > 0 {
            writeln!(f, "  replaced {num_replaced} invalid UTF-8 sequences with U+FFFD")?;
        }
        writeln!(f, "  tokenizer {}, vocabulary {}", report.tokenizer, report.vocabulary_size)?;
        if report.has_loss_mask {
            writeln!(f, "  loss on answers only")?;
        }
        for Source { input, weight, num_tokens } in &report.sources {
            writeln!(f, "  weight {weight} for {num_tokens} tokens of {input}")?;
        }
        for note in report.notes() {
            writeln!(f, "  note: {note}")?;
        }
        if report.num_literal_names > 0 {
            writeln!(
                f,
                "  hint: [data] special_tokens_in_messages or --special-tokens-in-messages says what such names are"
            )?;
        }
        writeln!(
            f,
            "\nTo train on it, add this to the config (the model's vocabulary must be at least as large):"
        )?;
        writeln!(f, "  [data]\n  folder = {:?}", out.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: PrepareArgs,
    }

    fn parse(words: &str) -> Result<PrepareOptions, String> {
        let words = std::iter::once("prepare").chain(words.split_whitespace());
        let command = Command::try_parse_from(words).map_err(|error| error.to_string())?;
        options(&command.args).map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_the_options_are_the_defaults() {
        let defaults = PrepareOptions::new(vec!["a".into(), "b".into()], "c".into());
        assert_eq!(parse("a b --out c"), Ok(defaults));
    }

    #[test]
    fn flags_reach_the_options() {
        let options = parse(
            "a --out c --train-bpe 300 --field body --extension .md,rs --extension txt --invalid-utf8 refuse \
             --validation-fraction 0 --threads 3 --special-tokens-in-messages",
        )
        .unwrap();
        assert_eq!(options.tokenizer, TokenizerChoice::TrainBpe { vocabulary_size: 300 });
        assert_eq!(options.field, "body");
        assert_eq!(options.extensions, ["md", "rs", "txt"]);
        assert_eq!(options.invalid_utf8, InvalidUtf8::Refuse);
        assert!(options.special_tokens_in_messages);
        assert_eq!((options.validation_fraction, options.num_threads.get()), (0.0, 3));
    }

    #[test]
    fn a_tokenizer_may_be_a_file_or_the_folder_of_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, "{}").unwrap();
        for name in [folder.path(), &file] {
            let options = parse(&format!("a --out c --tokenizer {}", name.display())).unwrap();
            assert_eq!(options.tokenizer, TokenizerChoice::File(file.clone()));
        }
        assert!(
            parse("a --out c --tokenizer gpt9").unwrap_err().contains("the tokenizer gpt9 does not exist")
        );
        assert!(parse("a --out c --tokenizer bytes --train-bpe 300").is_err());
    }

    #[test]
    fn inputs_and_output_must_be_given() {
        assert!(parse("a").is_err());
        assert!(parse("--out c").is_err());
    }
}
