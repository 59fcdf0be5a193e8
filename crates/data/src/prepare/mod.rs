//! Preparation of a corpus: tokenizes text on disk and writes token files.
//!
//! Inputs are decompressed (`decompress.rs`; with the feature `parquet`, `parquet_rows.rs` reads Parquet files).
//! `records.rs` parses lines of JSON and elements of JSON arrays. A [`ChatTemplate`](crate::ChatTemplate) formats
//! messages as text, and marks the bytes of answers and the names of special tokens that a user has typed
//! (`chat/marks.rs`). `tokenizer/special_tokens.rs` has the special tokens around a text. The tokens are written to one
//! token file. If only answers count in the loss, a second file, the loss mask, says which tokens these are.

mod batch;
mod decompress;
mod files;
mod fingerprint;
mod inputs;
mod json_array;
mod options;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod pipeline;
mod reader;
mod records;
mod report;
mod split;
mod staging;
mod surrogates;
pub(crate) mod text_field;
mod utf8;

pub use files::{REPORT_FILE, TRAIN_FILE, TRAIN_MASK_FILE, VALIDATION_FILE, VALIDATION_MASK_FILE};
pub use options::{PrepareOptions, TokenizerChoice};
pub use report::{ConvertedFormats, PrepareReport, Skipped, Source, SplitSize};
pub use staging::ExistingCorpus;
pub use utf8::InvalidUtf8;

use crate::chat::CHAT_TEMPLATE_FILE;
use crate::tokenizer::{BYTES_TOKENIZER_FILE, SpaceAtSplit, TOKENIZER_FILE};
use crate::{Corpus, DataError, TokenFile, TokenFileWriter, Tokenizer};
use batch::Batch;
use inputs::Inputs;
use options::STDIN;
use pipeline::Writers;
use reader::{CorpusReader, ReadCounts};
use staging::{Staging, is_interrupted};
use std::fs::{self, File};
use std::io::{self, BufReader};
use std::iter;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use trireme_base::spawn_scoped_thread;

/// All files that preparing a corpus may write, except [`REPORT_FILE`].
const OUTPUT_FILES: [&str; 7] = [
    TRAIN_FILE,
    VALIDATION_FILE,
    TRAIN_MASK_FILE,
    VALIDATION_MASK_FILE,
    TOKENIZER_FILE,
    BYTES_TOKENIZER_FILE,
    CHAT_TEMPLATE_FILE,
];
/// Vocabulary size of a loss mask: 0 for tokens that do not count in the loss, 1 for those that do.
const MASK_VOCABULARY_SIZE: usize = 2;
const ALL_FILE: &str = "all.tokens";
const ALL_MASK_FILE: &str = "all.mask.tokens";
/// Name of the copy of the standard input before its format is known.
const STDIN_FILE: &str = "stdin";
/// Interval of progress reports while the tokenizer library trains. The library itself reports no progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of bytes that a BPE tokenizer is trained on. More text hardly improves it, and memory grows with the
/// number of distinct words.
const BPE_TRAINING_BYTES_MAX: u64 = 128 << 20;

/// The phases of [`prepare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Reads the corpus to train a tokenizer. Progress is in bytes of input.
    TrainTokenizer,
    /// Tokenizes the corpus. Progress is in bytes of input.
    Tokenize,
    /// Separates the validation tokens from the training tokens. Progress is in tokens.
    Split,
}

/// An observer of the progress of [`prepare`].
pub trait Progress: Sync {
    /// Called when `done` of `total` units of `phase` are done: often, and from any thread.
    fn advance(&self, phase: Phase, done: u64, total: u64);
}

/// A [`Progress`] that ignores all reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn advance(&self, _phase: Phase, _done: u64, _total: u64) {}
}

/// Tokenizes the inputs and writes [`TRAIN_FILE`], [`VALIDATION_FILE`] (unless nothing is held out), the loss masks if
/// only some tokens count, the tokenizer, the chat template if one is given, and [`REPORT_FILE`] into the output
/// folder.
///
/// A text file is one document. In JSON Lines files, and in files that are one JSON array, each object is a document. Each document is
/// followed by the tokenizer's end-of-document token, if it has one. Validation documents are drawn from the whole corpus and held out
/// completely. A document that is longer than the whole validation part cannot be held out completely: all such documents are
/// concatenated, and the tail of the concatenation is held out. If too few complete documents fit, the tail of the whole corpus is held out
/// instead. Long texts are tokenized in pieces of at most 128 KiB, split between words if possible. The output depends only on the inputs
/// and the options, not on the number of threads.
///
/// Cost: memory for a few batches of 128 KiB per thread, regardless of the size of the corpus; twice the size of the
/// tokens on disk while it runs; one pass over the corpus, and a second one if a tokenizer is trained.
///
/// # Errors
/// If an input is missing, unreadable or of the wrong kind, the inputs contain no text, the tokenizer fails, or the
/// output cannot be written. The output folder is then unchanged, with one exception: if the new files are complete but
/// cannot be moved into place, the folder has no [`REPORT_FILE`] and is treated as not prepared.
pub fn prepare(options: &PrepareOptions, progress: &dyn Progress) -> Result<PrepareReport, DataError> {
    stage(options, ExistingCorpus::Replace, progress)?.commit()
}

/// A complete corpus in a staging folder. Dropping it deletes the files.
#[derive(Debug)]
pub struct StagedCorpus {
    staging: Staging,
    report: PrepareReport,
}

impl StagedCorpus {
    /// Opens the staged corpus for training.
    ///
    /// # Errors
    /// As [`Corpus::open`].
    pub fn corpus(&self) -> Result<Corpus, DataError> {
        Corpus::open(&self.staging.path(""))
    }

    /// Moves the corpus into the output folder, where it replaces a corpus of an earlier [`prepare`].
    ///
    /// # Errors
    /// If the files cannot be moved. The folder then has no [`REPORT_FILE`] and is treated as not prepared.
    pub fn commit(self) -> Result<PrepareReport, DataError> {
        let is_made = |name: &&str| self.staging.path(name).exists();
        let made: Vec<&str> = OUTPUT_FILES.into_iter().filter(is_made).collect();
        self.staging.commit(&OUTPUT_FILES, &made, REPORT_FILE)?;
        Ok(self.report)
    }
}

/// Prepares a corpus as [`prepare`] does, but does not move it into place. Files in the output folder do not change.
///
/// # Errors
/// As [`prepare`], and if the folder contains a corpus that `existing` says to keep.
pub fn stage(
    options: &PrepareOptions,
    existing: ExistingCorpus,
    progress: &dyn Progress,
) -> Result<StagedCorpus, DataError> {
    options.check()?;
    // Missing inputs are reported before the output folder is created, unless the standard input must be stored there
    // first.
    let inputs = if options.reads_stdin() { None } else { Some(Inputs::collect(options)?) };
    let staging = Staging::new(&options.out, &OUTPUT_FILES, REPORT_FILE, existing)?;
    let inputs = match inputs {
        Some(inputs) => inputs,
        None => {
            let spooled = spool_stdin(&staging)?;
            let path = |input: &PathBuf| if input.as_os_str() == STDIN { &spooled } else { input }.clone();
            let mut inputs = Inputs::of(&options.inputs.iter().map(path).collect::<Vec<_>>(), options)?;
            let own = inputs.files.iter_mut().filter(|file| file.path == spooled);
            own.for_each(|file| file.display_path = "standard input".into());
            inputs
        }
    };
    let validation_inputs = Inputs::of(&options.validation_inputs, options)?;
    let fingerprint = options.fingerprint(&inputs)?;
    let has_loss_mask = CorpusReader::begins_with_answers(options, &inputs)?
        || CorpusReader::begins_with_answers(options, &validation_inputs)?;
    let tokenizer = choose_tokenizer(options, &inputs, progress)?;
    let options = &with_literal_names(options, &tokenizer);

    let mask = has_loss_mask.then_some(ALL_MASK_FILE);
    let (mut counts, mut ends) = tokenize(options, &inputs, &tokenizer, &staging, ALL_FILE, mask, progress)?;
    // Inputs at the end of the list may have no documents.
    ends.resize(options.inputs.len(), ends.last().copied().unwrap_or(0));
    let SplitCorpus { train, mut validation, cumulative_tokens: tokens_at } =
        split(options, &staging, has_loss_mask, &ends, progress)?;
    if !options.validation_inputs.is_empty() {
        let (name, mask) = (VALIDATION_FILE, has_loss_mask.then_some(VALIDATION_MASK_FILE));
        let (validation_counts, _) =
            tokenize(options, &validation_inputs, &tokenizer, &staging, name, mask, progress)?;
        counts.add_contents(&validation_counts);
        let written = TokenFile::open_unverified(&staging.path(VALIDATION_FILE))?;
        validation =
            Some(SplitSize { num_tokens: written.num_tokens(), num_documents: written.num_documents() });
    }
    tokenizer.save(&staging.path(""))?;
    if let Some(template) = &options.chat_template {
        let path = staging.path(CHAT_TEMPLATE_FILE);
        crate::files::replace(&path, template.source().as_bytes())?;
    }

    let sources = options.weights.iter().zip(&options.inputs).enumerate().map(|(index, (&weight, input))| {
        let num_tokens = tokens_at[index] - index.checked_sub(1).map_or(0, |before| tokens_at[before]);
        Source { input: input.display().to_string(), weight, num_tokens }
    });
    let report = PrepareReport {
        inputs: options.inputs.iter().map(|path| path.display().to_string()).collect(),
        tokenizer: options.tokenizer.to_string(),
        tokenizer_crc32: Some(crc32fast::hash(tokenizer.file().1)),
        tokenizer_sha256: Some(tokenizer.sha256()?),
        has_loss_mask,
        sources: sources.collect(),
        vocabulary_size: tokenizer.vocabulary_size(),
        end_of_document: tokenizer.end_of_document(),
        unknown_end_of_document: tokenizer.unknown_end_of_document().map(str::to_owned),
        unknown_end_of_answer: options.chat_template.as_ref().and_then(|template| {
            let end = template.end_of_answer().filter(|_| has_loss_mask)?;
            let is_name = end.starts_with('<') && end.ends_with('>');
            (is_name && tokenizer.special_token_id(end).is_none()).then(|| end.to_owned())
        }),
        train,
        validation,
        num_files: counts.num_files,
        input_bytes: inputs.bytes,
        skipped: skipped(&inputs, &counts),
        num_invalid_utf8_replaced: counts.num_replaced,
        foreign_forms: counts.converted_formats,
        num_literal_names: counts.num_literal_names,
        num_split_conversations: counts.num_split_conversations,
        fingerprint,
    };
    if let Some(source) = report.sources.iter().find(|source| source.num_tokens == 0) {
        return Err(DataError::EmptySource { input: source.input.clone() });
    }
    report.write(&staging.path(REPORT_FILE))?;
    Ok(StagedCorpus { staging, report })
}

/// Returns the options with a chat template that treats the names of the tokenizer's special tokens in messages as
/// plain text, unless the options say that they are special tokens.
fn with_literal_names(options: &PrepareOptions, tokenizer: &Tokenizer) -> PrepareOptions {
    let mut options = options.clone();
    if !options.special_tokens_in_messages {
        let template = options.chat_template.take();
        options.chat_template = template.map(|template| template.with_special_tokens_as_text(tokenizer));
    }
    options
}

/// Copies the standard input to a file, so that it can be read more than once.
fn spool_stdin(staging: &Staging) -> Result<PathBuf, DataError> {
    let aside = staging.path(STDIN_FILE);
    let write = |source| DataError::Write { path: aside.clone(), source };
    let mut file = File::create(&aside).map_err(write)?;
    io::copy(&mut io::stdin().lock(), &mut file).map_err(write)?;
    let read = |source| DataError::Read { path: aside.clone(), source };
    let mut start = BufReader::new(File::open(&aside).map_err(read)?);
    // Without a file name, only the content indicates the format.
    let name =
        if reader::begins_with_record(&mut start).map_err(read)? { "stdin.jsonl" } else { "stdin.txt" };
    let spooled = staging.path(name);
    fs::rename(&aside, &spooled).map_err(write)?;
    Ok(spooled)
}

/// Whether an output folder contains no corpus, complete or damaged. Files that an interrupted preparation left do not
/// count.
///
/// # Errors
/// If the folder cannot be read.
pub fn has_no_corpus(folder: &Path) -> Result<bool, DataError> {
    let holds = |name: &str| folder.join(name).try_exists();
    let is_free = || Ok(is_interrupted(folder, REPORT_FILE)? || !(holds(REPORT_FILE)? || holds(TRAIN_FILE)?));
    is_free().map_err(|source| DataError::Read { path: folder.to_owned(), source })
}

/// Reads approximately the first `bytes_max` bytes of the inputs, and checks for errors that [`prepare`] would report.
/// Writes nothing.
///
/// # Errors
/// As [`prepare`], except errors of the tokenizer and the output.
pub fn check_inputs(options: &PrepareOptions, bytes_max: u64) -> Result<(), DataError> {
    options.check()?;
    let lists = [
        (Inputs::collect(options)?, &options.inputs),
        (Inputs::of(&options.validation_inputs, options)?, &options.validation_inputs),
    ];
    for (inputs, paths) in &lists {
        let has_answers = CorpusReader::begins_with_answers(options, inputs)?;
        let mut reader = CorpusReader::new(options, inputs, SpaceAtSplit::Keep, has_answers);
        let mut has_text = paths.is_empty();
        while let Some(batch) = reader.next_batch()? {
            has_text = true;
            if batch.input_bytes_read > bytes_max {
                break;
            }
        }
        if !has_text {
            return Err(DataError::EmptyCorpus { skipped: skipped(inputs, &reader.counts).to_string() });
        }
    }
    Ok(())
}

/// Whether the output folder contains the corpus that [`prepare`] would write: the options and the inputs' paths, sizes
/// and modification times are unchanged, and the tokenizer is intact. Reads the metadata of each input file, but not
/// its contents.
///
/// # Errors
/// If an option is invalid, an input is missing, or a folder cannot be read.
pub fn is_up_to_date(options: &PrepareOptions) -> Result<bool, DataError> {
    options.check()?;
    if options.reads_stdin() {
        return Ok(false);
    }
    let fingerprint = options.fingerprint(&Inputs::collect(options)?)?;
    // If the report is missing or cannot be parsed, the corpus must be prepared again.
    let Ok(report) = PrepareReport::read(&options.out) else { return Ok(false) };
    let parts = iter::once([TRAIN_FILE, TRAIN_MASK_FILE])
        .chain(report.validation.map(|_| [VALIDATION_FILE, VALIDATION_MASK_FILE]));
    let mut expected_files =
        parts.flat_map(|[tokens, mask]| iter::once(tokens).chain(report.has_loss_mask.then_some(mask)));
    Ok(report.fingerprint == fingerprint
        && expected_files.all(|name| options.out.join(name).is_file())
        && Tokenizer::stored_file(&options.out).is_ok())
}

fn choose_tokenizer(
    options: &PrepareOptions,
    inputs: &Inputs,
    progress: &dyn Progress,
) -> Result<Tokenizer, DataError> {
    let vocabulary_size = match &options.tokenizer {
        TokenizerChoice::Bytes => return Ok(Tokenizer::bytes()),
        TokenizerChoice::File(path) => return Tokenizer::from_file(path),
        TokenizerChoice::OfModel { tokenizer, .. } => return Ok(Tokenizer::clone(tokenizer)),
        TokenizerChoice::TrainBpe { vocabulary_size } => *vocabulary_size,
    };
    let stride = inputs.bytes.div_ceil(BPE_TRAINING_BYTES_MAX).max(1) as usize;
    let mut reader = CorpusReader::new(options, inputs, SpaceAtSplit::Keep, true);
    let mut failure = None;
    let num_read = &AtomicU64::new(0);
    let batches = iter::from_fn(|| {
        let batch = reader.next_batch().unwrap_or_else(|error| {
            failure = Some(error);
            None
        })?;
        num_read.store(batch.input_bytes_read, Ordering::Relaxed);
        Some(batch)
    });
    let pieces = |batch: Batch| batch.pieces().map(|(text, _)| text.to_owned()).collect::<Vec<_>>();
    let (done, is_done) = mpsc::channel::<()>();
    let advance = || progress.advance(Phase::TrainTokenizer, num_read.load(Ordering::Relaxed), inputs.bytes);
    let tokenizer = thread::scope(|scope| {
        let train = move || {
            let _done = done;
            Tokenizer::train_bpe(batches.step_by(stride).flat_map(pieces), vocabulary_size)
        };
        let training = spawn_scoped_thread(scope, "tokenizer-training", train)
            .map_err(|source| DataError::Spawn { source })?;
        let mut last = None;
        while is_done.recv_timeout(PROGRESS_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let read = num_read.load(Ordering::Relaxed);
            // While reading stalls, progress stops as well, so that a hanging disk is noticed. After all input is read, reports continue,
            // because learning the merges takes long.
            if last.replace(read) != Some(read) || read >= inputs.bytes {
                advance();
            }
        }
        advance();
        training.join().unwrap_or_else(|panic| resume_unwind(panic))
    });
    failure.map_or(tokenizer, Err)
}

/// Tokenizes all inputs into one token file, and into a loss mask if a name for it is given. Also returns the number of
/// documents up to the end of each input; trailing inputs without documents may have no entry.
fn tokenize(
    options: &PrepareOptions,
    inputs: &Inputs,
    tokenizer: &Tokenizer,
    staging: &Staging,
    name: &str,
    mask_name: Option<&str>,
    progress: &dyn Progress,
) -> Result<(ReadCounts, Vec<u64>), DataError> {
    let reader = CorpusReader::new(options, inputs, tokenizer.space_at_split()?, mask_name.is_some());
    let mut writers = Writers {
        tokens: TokenFileWriter::create(&staging.path(name), tokenizer.vocabulary_size())?,
        loss_mask: mask_name
            .map(|name| TokenFileWriter::create(&staging.path(name), MASK_VOCABULARY_SIZE))
            .transpose()?,
        cumulative_documents: Vec::new(),
    };
    let counts = pipeline::tokenize(reader, tokenizer, options.num_threads, &mut writers, |done| {
        progress.advance(Phase::Tokenize, done, inputs.bytes);
    })?;
    if writers.tokens.num_documents() == 0 {
        return Err(DataError::EmptyCorpus { skipped: skipped(inputs, &counts).to_string() });
    }
    // If no text has a token, documents have only the end-of-document token, unless the post-processor adds other tokens.
    let num_ends = tokenizer.end_of_document().map_or(0, |_| writers.tokens.num_documents());
    if writers.tokens.num_tokens() <= num_ends {
        return Err(DataError::NoTokens);
    }
    let documents_at = std::mem::take(&mut writers.cumulative_documents);
    writers.finish()?;
    Ok((counts, documents_at))
}

/// The training and validation parts of a corpus.
struct SplitCorpus {
    train: SplitSize,
    validation: Option<SplitSize>,
    /// Number of training tokens up to the end of each input.
    cumulative_tokens: Vec<u64>,
}

/// Splits [`ALL_FILE`] into [`TRAIN_FILE`] and, if tokens are held out, [`VALIDATION_FILE`], and the loss mask
/// likewise. `ends` holds the number of documents up to the end of each input.
fn split(
    options: &PrepareOptions,
    staging: &Staging,
    has_mask: bool,
    ends: &[u64],
    progress: &dyn Progress,
) -> Result<SplitCorpus, DataError> {
    let all_path = staging.path(ALL_FILE);
    let all = TokenFile::open_unverified(&all_path)?;
    if options.validation_fraction == 0.0 {
        let train = SplitSize { num_tokens: all.num_tokens(), num_documents: all.num_documents() };
        let tokens_at = |end: &u64| match end.checked_sub(1) {
            Some(last) => Ok(all.document(last.min(all.num_documents() - 1))?.end),
            None => Ok(0),
        };
        let tokens_at = ends.iter().map(tokens_at).collect::<Result<_, DataError>>()?;
        let masks = has_mask.then_some((ALL_MASK_FILE, TRAIN_MASK_FILE));
        for (from, to) in iter::once((ALL_FILE, TRAIN_FILE)).chain(masks) {
            let path = staging.path(from);
            fs::rename(&path, staging.path(to)).map_err(|source| DataError::Write { path, source })?;
        }
        return Ok(SplitCorpus { train, validation: None, cumulative_tokens: tokens_at });
    }
    let create = |name, vocabulary_size| TokenFileWriter::create(&staging.path(name), vocabulary_size);
    let mut train = create(TRAIN_FILE, all.vocabulary_size())?;
    let mut validation = create(VALIDATION_FILE, all.vocabulary_size())?;
    let mut tokens_at = vec![0; ends.len()];
    let fraction = options.validation_fraction;
    split::split(&all, fraction, &mut train, &mut validation, |num_documents, num_tokens, train| {
        progress.advance(Phase::Split, num_tokens, all.num_tokens());
        let ended = ends.iter().zip(&mut tokens_at).filter(|(end, _)| **end >= num_documents);
        ended.for_each(|(_, tokens)| *tokens = train.num_tokens());
    })?;
    if has_mask {
        let all = TokenFile::open_unverified(&staging.path(ALL_MASK_FILE))?;
        let mut train = create(TRAIN_MASK_FILE, MASK_VOCABULARY_SIZE)?;
        let mut validation = create(VALIDATION_MASK_FILE, MASK_VOCABULARY_SIZE)?;
        split::split(&all, fraction, &mut train, &mut validation, |_, num_tokens, _| {
            progress.advance(Phase::Split, num_tokens, all.num_tokens());
        })?;
        train.finish()?;
        validation.finish()?;
    }
    let parts = (SplitSize::of(&train), Some(SplitSize::of(&validation)));
    train.finish()?;
    validation.finish()?;
    Ok(SplitCorpus { train: parts.0, validation: parts.1, cumulative_tokens: tokens_at })
}

fn skipped(inputs: &Inputs, counts: &ReadCounts) -> Skipped {
    Skipped { binary: counts.num_binary, empty: counts.num_empty, ..inputs.skipped }
}
