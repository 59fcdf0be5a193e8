//! `trireme data`: shows samples of prepared corpora.

use super::check_config_path;
use super::init::DEFAULT_CONFIG;
use super::prepare::PreparationProgress;
use crate::console::Output;
use crate::numbers::with_noun;
use anyhow::{Result, bail, ensure};
use clap::{Args, Subcommand};
use std::env;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use trireme_base::{Heartbeat, printable};
use trireme_data::{Corpus, REPORT_FILE, Tokenizer};
use trireme_train::config::Config;
use trireme_train::{
    CorpusSamples, RunLock, SampleView, TrainError, corpus_folder, current_corpus, ensure_corpus,
};

/// Maximum number of samples whose learned tokens are counted.
const COUNTED_SAMPLES_MAX: u64 = 10_000;
/// Maximum number of samples without learned tokens whose indices are printed.
const NAMED_SAMPLES_MAX: usize = 10;

const SHOW_EXAMPLES: &str = "\
Examples:
  trireme data show chat.toml
      The first sample that `trireme train chat.toml` learns from.
  trireme data show chat.toml --sample 100 --num-samples 3 --set training.seq_len=512
      Samples 100 to 102 of the run, with longer sequences.
  trireme data show corpus --validation --tokens
      The first sample of what a prepared corpus holds out, one token per line.

The model reads all tokens, and learns to predict those that are marked. On a terminal they are
green and the others gray, in two shades that tell tokens apart. Elsewhere, or with NO_COLOR set,
they stand in \u{27e6}brackets\u{27e7}. Special tokens are shown by name, and ends of lines as \u{21b5}.";

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    Show(ShowArgs),
}

/// Show samples as a model trains on them.
///
/// Prints the text of samples with the tokens that contribute to the loss, the borders of documents, special tokens and padding; how many
/// tokens of a sample are learned; and which samples have nothing to learn. If the inputs of a config are not prepared yet, prepares them
/// as `trireme train` would.
#[derive(Debug, Args)]
#[command(after_help = SHOW_EXAMPLES)]
pub(crate) struct ShowArgs {
    /// Folder of a prepared corpus, or config file.
    #[arg(value_name = "CORPUS|CONFIG", default_value = DEFAULT_CONFIG)]
    path: PathBuf,
    /// Index of the first sample to show, in the order of the run, from 0.
    #[arg(long, value_name = "N", default_value_t = 0)]
    sample: u64,
    /// Number of samples to show.
    #[arg(long, value_name = "N", default_value_t = 1)]
    num_samples: u64,
    /// Show validation samples.
    #[arg(long)]
    validation: bool,
    /// Print one line for each token, with its id.
    #[arg(long)]
    tokens: bool,
    /// Override a key of the config, such as training.seq_len=512; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

pub(crate) fn run(command: &DataCommand) -> Result<()> {
    let DataCommand::Show(args) = command;
    show(args)
}

fn show(args: &ShowArgs) -> Result<()> {
    let config = config(&args.path, &args.overrides)?;
    let corpus = Corpus::open(&config.data().folder)?;
    let tokenizer = Tokenizer::load(&corpus.folder)?;
    let mut samples = CorpusSamples::open(&config, &corpus, args.validation)?;
    let num_samples = samples.num_samples();
    let file = if args.validation { "validation" } else { "train" };
    let what = if corpus.report.has_loss_mask { "answers" } else { "all tokens" };
    let attention = if samples.masks_documents() { "within" } else { "across" };
    writeln!(
        Output,
        "{}, {file}: {} of {} tokens, loss on {what}, attention {attention} documents\n",
        printable(&corpus.folder.display().to_string()),
        with_noun(num_samples as usize, "sample"),
        config.training().seq_len
    )?;
    let marks = Marks::for_output();
    let mut shown = args.sample..args.sample.saturating_add(args.num_samples);
    if args.validation {
        // Training reads its samples repeatedly, a validation reads them once.
        ensure!(args.sample < num_samples, "there are {num_samples} samples, numbered from 0");
        shown.end = shown.end.min(num_samples);
    }
    for index in shown {
        let view = samples.read(index)?;
        let pieces = pieces(&view, &tokenizer)?;
        let text = if args.tokens { table(&view, &pieces) } else { marks.text(&view, &pieces) };
        write!(Output, "{}\n{text}\n", heading(index, &view))?;
    }
    let num_counted = num_samples.min(COUNTED_SAMPLES_MAX);
    let learned = (0..num_counted).map(|index| samples.num_learned(index)).collect::<Result<Vec<_>, _>>()?;
    Ok(write!(Output, "{}", summary(&learned, num_samples))?)
}

/// Reads a config file and prepares its corpus if necessary, or returns the default config with the folder of a corpus.
fn config(path: &Path, overrides: &[String]) -> Result<Config> {
    if path.join(REPORT_FILE).is_file() {
        // Samples do not depend on the model.
        let text = "[model]\narchitecture = \"llama\"\n[data]\nfolder = \".\"\n";
        let config = Config::parse(text, Path::new("defaults"), overrides, None)?;
        return Ok(config.with_data_folder(path.to_owned()));
    }
    if path.is_dir() {
        bail!("{} contains no prepared corpus; give the folder of one, or a config", path.display());
    }
    check_config_path(path)?;
    let config = Config::load(path, overrides, None)?;
    let found = match current_corpus(&config)? {
        Some(found) => found,
        None => {
            let _lock = RunLock::of_run(&config)?;
            ensure_corpus::<TrainError>(&config, &PreparationProgress::new(Heartbeat::new()), |_| Ok(()))?
        }
    };
    let folder = corpus_folder(&config.data().folder, found.version);
    Ok(config.with_data_folder(folder))
}

fn heading(index: u64, view: &SampleView) -> String {
    let end = view.start + view.tokens.len() as u64;
    let num_learned = view.is_learned.iter().filter(|learned| **learned).count();
    let num_documents = (0..view.tokens.len()).filter(|&token| view.begins_document(token)).count();
    let padding = match view.num_padding {
        0 => String::new(),
        padding => format!(", {padding} tokens of padding"),
    };
    format!(
        "sample {index}: tokens {} to {end} of the file, in {}; {num_learned} learned, {} only read{padding}",
        view.start,
        with_noun(num_documents, "document"),
        view.tokens.len() - num_learned,
    )
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    /// Text of the token, or the name of a special token. A character that consists of several tokens belongs to the last of them.
    text: String,
    is_special: bool,
}

fn pieces(view: &SampleView, tokenizer: &Tokenizer) -> Result<Vec<Piece>> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut decoder = tokenizer.stream_decoder();
    for (index, &token) in view.tokens.iter().enumerate() {
        let special = tokenizer.special_token_name(token);
        if special.is_some() || view.begins_document(index) {
            append_to_last(
                &mut pieces,
                &std::mem::replace(&mut decoder, tokenizer.stream_decoder()).finish()?,
            );
        }
        pieces.push(match special {
            Some(name) => Piece { text: name.to_owned(), is_special: true },
            None => Piece { text: decoder.push(token)?, is_special: false },
        });
    }
    append_to_last(&mut pieces, &decoder.finish()?);
    Ok(pieces)
}

/// Appends `rest`, the text that a decoder returns at the end, to the text of the last token.
fn append_to_last(pieces: &mut [Piece], rest: &str) {
    if let Some(last) = pieces.last_mut() {
        last.text.push_str(rest);
    }
}

/// Line between two documents of a sample.
const NEXT_DOCUMENT: &str = "--- next document ---\n";

/// Returns the line that represents the padding of a sample; empty without padding.
fn padding_line(view: &SampleView) -> String {
    match view.num_padding {
        0 => String::new(),
        padding => format!("--- {padding} tokens of padding ---\n"),
    }
}

/// How learned tokens are marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marks {
    Colors,
    Brackets,
}

impl Marks {
    /// Returns colors on a terminal, unless NO_COLOR is set (no-color.org).
    fn for_output() -> Self {
        let refuses_color = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if io::stdout().is_terminal() && !refuses_color { Marks::Colors } else { Marks::Brackets }
    }

    fn text(self, view: &SampleView, pieces: &[Piece]) -> String {
        let mut text = String::new();
        let mut is_open = false;
        let close = |text: &mut String, is_open: &mut bool| {
            if std::mem::take(is_open) {
                text.push('\u{27e7}');
            }
        };
        for (index, (piece, &is_learned)) in pieces.iter().zip(&view.is_learned).enumerate() {
            if index > 0 && view.begins_document(index) {
                close(&mut text, &mut is_open);
                end_line(&mut text);
                text.push_str(NEXT_DOCUMENT);
            }
            let shown = printable(&piece.text).replace('\n', "\u{21b5}\n");
            match self {
                Marks::Brackets => {
                    if is_learned && !std::mem::replace(&mut is_open, true) {
                        text.push('\u{27e6}');
                    } else if !is_learned {
                        close(&mut text, &mut is_open);
                    }
                    text.push_str(&shown);
                }
                Marks::Colors => {
                    let color = match (is_learned, index % 2) {
                        (true, 0) => "32",
                        (true, _) => "92",
                        (false, 0) => "37",
                        (false, _) => "90",
                    };
                    let weight = if piece.is_special { "1;" } else { "" };
                    write!(text, "\x1b[{weight}{color}m{shown}\x1b[0m").expect("a string takes everything");
                }
            }
        }
        close(&mut text, &mut is_open);
        end_line(&mut text);
        text.push_str(&padding_line(view));
        text
    }
}

fn end_line(text: &mut String) {
    if !text.ends_with('\n') {
        text.push('\n');
    }
}

fn table(view: &SampleView, pieces: &[Piece]) -> String {
    let mut text = format!("{:>8} {:>8}  {:<7}  token\n", "position", "id", "learned");
    let rows = view.tokens.iter().zip(&view.is_learned).zip(pieces).enumerate();
    for (position, ((id, &is_learned), piece)) in rows {
        if position > 0 && view.begins_document(position) {
            text.push_str(NEXT_DOCUMENT);
        }
        let learned = if is_learned { "learned" } else { "" };
        let shown =
            if piece.is_special { printable(&piece.text).into_owned() } else { format!("{:?}", piece.text) };
        writeln!(text, "{position:>8} {id:>8}  {learned:<7}  {shown}").expect("a string takes everything");
    }
    text.push_str(&padding_line(view));
    text
}

/// Summarizes the number of learned tokens per sample. `learned` has one element for each of the first samples.
fn summary(learned: &[u64], num_samples: u64) -> String {
    let (Some(least), Some(most)) = (learned.iter().min(), learned.iter().max()) else {
        return String::new();
    };
    let mean = learned.iter().sum::<u64>() as f64 / learned.len() as f64;
    let which = if learned.len() as u64 == num_samples {
        String::new()
    } else {
        format!(" (of the first {})", with_noun(learned.len(), "sample"))
    };
    let mut text = format!("learned tokens per sample{which}: least {least}, mean {mean:.1}, most {most}\n");
    let empty = learned.iter().enumerate().filter(|(_, learned)| **learned == 0);
    let empty: Vec<String> = empty.map(|(index, _)| index.to_string()).collect();
    text += &match empty.len() {
        0 => "every sample has something to learn\n".to_owned(),
        count => {
            let more = if count > NAMED_SAMPLES_MAX { ", …" } else { "" };
            let named = empty[..count.min(NAMED_SAMPLES_MAX)].join(", ");
            format!("nothing to learn in {}: {named}{more}\n", with_noun(count, "sample"))
        }
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(documents: &[&str], learned: &[usize], num_padding: usize) -> SampleView {
        let mut tokens = Vec::new();
        let mut document_starts = Vec::new();
        for document in documents {
            let start = tokens.len() as u32;
            tokens.extend(document.bytes().map(|byte| if byte == b'#' { 256 } else { u32::from(byte) }));
            document_starts.resize(tokens.len(), start);
        }
        let is_learned = (0..tokens.len()).map(|token| learned.contains(&token)).collect();
        SampleView { start: 7, tokens, is_learned, document_starts, num_padding }
    }

    #[test]
    fn learned_tokens_documents_and_padding_are_marked() {
        let view = view(&["a\nb#", "cé\u{1b}"], &[2, 3, 5, 6], 9);
        let pieces = pieces(&view, &Tokenizer::bytes()).unwrap();
        assert_eq!(
            Marks::Brackets.text(&view, &pieces),
            "a\u{21b5}\n\u{27e6}b<|endoftext|>\u{27e7}\n--- next document ---\nc\u{27e6}é\u{27e7}\\u{1b}\n--- 9 tokens of padding ---\n"
        );
        let colored = Marks::Colors.text(&view, &pieces);
        assert!(colored.contains("\x1b[32mb\x1b[0m\x1b[1;92m<|endoftext|>\x1b[0m\n--- next"), "{colored:?}");
        assert_eq!(colored.matches('\x1b').count(), 2 * view.tokens.len());
        assert_eq!(
            heading(3, &view),
            "sample 3: tokens 7 to 15 of the file, in 2 documents; 4 learned, 4 only read, 9 tokens of padding"
        );
        let table = table(&view, &pieces);
        assert!(
            table.contains("       3      256  learned  <|endoftext|>\n--- next document ---\n"),
            "{table}"
        );
        assert!(
            table.contains("       7       27           \"\\u{1b}\"\n--- 9 tokens of padding ---\n"),
            "{table}"
        );
    }

    #[test]
    fn samples_without_anything_to_learn_are_named() {
        assert_eq!(
            summary(&[0, 4, 0, 2], 4),
            "learned tokens per sample: least 0, mean 1.5, most 4\nnothing to learn in 2 samples: 0, 2\n"
        );
        let many = summary(&[0; 11], 20);
        assert!(many.contains("(of the first 11 samples): ") && many.ends_with("8, 9, …\n"), "{many}");
        assert!(summary(&[3], 1).ends_with("every sample has something to learn\n"));
    }
}
