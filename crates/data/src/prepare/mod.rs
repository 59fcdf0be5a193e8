//! Text on disk to token files.

mod batch;
mod inputs;
mod json_lines;
mod options;
mod pipeline;
mod reader;
mod report;
mod split;
mod staging;
mod utf8;

pub use inputs::Skipped;
pub use options::{PrepareOptions, TokenizerChoice};
pub use report::{Part, PrepareReport};
pub use utf8::InvalidUtf8;

use crate::tokenizer::{BYTES_TOKENIZER_FILE, SpaceAtCut, TOKENIZER_FILE};
use crate::{Corpus, DataError, TokenFile, TokenFileWriter, Tokenizer};
use batch::Batch;
use inputs::Inputs;
use reader::{CorpusReader, ReadCounts};
use staging::{Staging, is_interrupted};
use std::fs;
use std::iter;
use std::path::Path;

/// The tokens to train on, in the folder of a prepared corpus.
pub const TRAIN_FILE: &str = "train.tokens";
/// The tokens held out for validation, in the folder of a prepared corpus.
pub const VALIDATION_FILE: &str = "validation.tokens";
/// What was prepared and how; written last, so a folder that has it is complete.
pub const REPORT_FILE: &str = "prepare.json";

const OUTPUT_FILES: [&str; 4] = [TRAIN_FILE, VALIDATION_FILE, TOKENIZER_FILE, BYTES_TOKENIZER_FILE];
const ALL_FILE: &str = "all.tokens";
/// Text that a BPE tokenizer is trained on: more improves it little, and the memory grows with its distinct
/// words.
const BPE_TRAINING_BYTES_MAX: u64 = 128 << 20;

/// What [`prepare`] is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Reading the corpus to train a tokenizer; in bytes of input.
    TrainTokenizer,
    /// Turning the corpus into tokens; in bytes of input.
    Tokenize,
    /// Setting the validation tokens apart; in tokens.
    Split,
}

/// Hears how far [`prepare`] is.
pub trait Progress: Sync {
    /// `done` of `total` units of `phase` are done. Called often, from any thread.
    fn advance(&self, phase: Phase, done: u64, total: u64);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn advance(&self, _phase: Phase, _done: u64, _total: u64) {}
}

/// Tokenizes the inputs and writes [`TRAIN_FILE`], [`VALIDATION_FILE`] (unless nothing is held out), the
/// tokenizer and [`REPORT_FILE`] into the output folder.
///
/// A text file is one document, and so is the text of each JSON object; each is followed by the tokenizer's
/// token for the end of a document, if it has one. Whole documents are held out, drawn from the whole corpus;
/// where they are too few or too large for that, the tail of the corpus is. The output's bits depend on the
/// inputs and the options, not on the number of threads. A long text is tokenized in pieces of at most
/// 128 KiB, cut between two words where there are any.
///
/// Takes memory for a few batches of 128 KiB a thread, however large the corpus; twice the size of the tokens
/// on the disk while it runs; and one pass over the corpus, two if a tokenizer is trained.
///
/// # Errors
/// If an input is missing, unreadable or of the wrong kind, all of them hold no text, the tokenizer fails, or
/// the output cannot be written. What was in the output folder is then as before; if the new files are complete
/// but cannot be moved into their place, the folder has no [`REPORT_FILE`] and counts as not prepared.
pub fn prepare(options: &PrepareOptions, progress: &dyn Progress) -> Result<PrepareReport, DataError> {
    stage(options, Existing::Replace, progress)?.commit()
}

/// What becomes of a corpus that is in the output folder already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// The new one takes its place.
    Replace,
    /// It stays, and preparing is refused.
    Keep,
}

/// A corpus that is complete, and not yet in its place. Dropping it removes it.
#[derive(Debug)]
pub struct StagedCorpus {
    staging: Staging,
    report: PrepareReport,
}

impl StagedCorpus {
    /// Opens it for training.
    ///
    /// # Errors
    /// As [`Corpus::open`].
    pub fn corpus(&self) -> Result<Corpus, DataError> {
        Corpus::open(&self.staging.path(""))
    }

    /// Puts it into the output folder, in place of what [`prepare`] wrote there earlier.
    ///
    /// # Errors
    /// If the files cannot be moved. The folder then has no [`REPORT_FILE`] and counts as not prepared.
    pub fn commit(self) -> Result<PrepareReport, DataError> {
        let is_made = |name: &&str| self.staging.path(name).exists();
        let made: Vec<&str> = OUTPUT_FILES.into_iter().filter(is_made).collect();
        self.staging.commit(&OUTPUT_FILES, &made, REPORT_FILE)?;
        Ok(self.report)
    }
}

/// Does all that [`prepare`] does but putting the files into their place: what is in the output folder stays as it is.
///
/// # Errors
/// As [`prepare`]; and if the folder holds a corpus that is to be kept.
pub fn stage(
    options: &PrepareOptions,
    existing: Existing,
    progress: &dyn Progress,
) -> Result<StagedCorpus, DataError> {
    options.check()?;
    let inputs = Inputs::collect(options)?;
    let fingerprint = options.fingerprint(&inputs)?;
    let staging = Staging::new(&options.out, &OUTPUT_FILES, REPORT_FILE, existing)?;
    let tokenizer = choose_tokenizer(options, &inputs, progress)?;

    let counts = tokenize(options, &inputs, &tokenizer, &staging, progress)?;
    let (train, validation) = split(options, &staging, progress)?;
    tokenizer.save(&staging.path(""))?;

    let report = PrepareReport {
        inputs: options.inputs.iter().map(|path| path.display().to_string()).collect(),
        tokenizer: options.tokenizer.to_string(),
        tokenizer_crc32: Some(crc32fast::hash(tokenizer.file().1)),
        tokenizer_sha256: Some(tokenizer.sha256()?),
        vocabulary_size: tokenizer.vocabulary_size(),
        end_of_document: tokenizer.end_of_document(),
        train,
        validation,
        num_files: counts.num_files,
        input_bytes: inputs.bytes,
        skipped: skipped(&inputs, counts),
        num_invalid_utf8_replaced: counts.num_replaced,
        fingerprint,
    };
    report.write(&staging.path(REPORT_FILE))?;
    Ok(StagedCorpus { staging, report })
}

/// Whether an output folder holds no corpus, whole or damaged. What an interrupted preparation has left is none.
///
/// # Errors
/// If the folder cannot be read.
pub fn is_free(folder: &Path) -> Result<bool, DataError> {
    let holds = |name: &str| folder.join(name).try_exists();
    let is_free = || Ok(is_interrupted(folder, REPORT_FILE)? || !(holds(REPORT_FILE)? || holds(TRAIN_FILE)?));
    is_free().map_err(|source| DataError::Read { path: folder.to_owned(), source })
}

/// Whether the output folder holds what [`prepare`] would write: no input (by path, size and time of change)
/// and no option differs from then, and the tokenizer is whole. Costs a look at each input file, without reading
/// it.
///
/// # Errors
/// If an input is missing or a folder cannot be read.
pub fn is_current(options: &PrepareOptions) -> Result<bool, DataError> {
    let fingerprint = options.fingerprint(&Inputs::collect(options)?)?;
    // A report that is missing or cannot be understood is replaced by preparing again.
    let Ok(report) = PrepareReport::read(&options.out) else { return Ok(false) };
    let expected_files = iter::once(TRAIN_FILE).chain(report.validation.map(|_| VALIDATION_FILE));
    Ok(report.fingerprint == fingerprint
        && expected_files.into_iter().all(|name| options.out.join(name).is_file())
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
    let one_in = inputs.bytes.div_ceil(BPE_TRAINING_BYTES_MAX).max(1) as usize;
    let mut reader = CorpusReader::new(options, inputs, SpaceAtCut::Keep);
    let mut failure = None;
    let batches = iter::from_fn(|| {
        let batch = reader.next_batch().unwrap_or_else(|error| {
            failure = Some(error);
            None
        })?;
        progress.advance(Phase::TrainTokenizer, batch.input_bytes_read, inputs.bytes);
        Some(batch)
    });
    let pieces = |batch: Batch| batch.pieces().map(|(text, _)| text.to_owned()).collect::<Vec<_>>();
    let tokenizer = Tokenizer::train_bpe(batches.step_by(one_in).flat_map(pieces), vocabulary_size);
    failure.map_or(tokenizer, Err)
}

/// Makes [`ALL_FILE`], the tokens of the whole corpus.
fn tokenize(
    options: &PrepareOptions,
    inputs: &Inputs,
    tokenizer: &Tokenizer,
    staging: &Staging,
    progress: &dyn Progress,
) -> Result<ReadCounts, DataError> {
    let reader = CorpusReader::new(options, inputs, tokenizer.space_at_cut()?);
    let mut writer = TokenFileWriter::create(&staging.path(ALL_FILE), tokenizer.vocabulary_size())?;
    let counts = pipeline::tokenize(reader, tokenizer, options.num_threads, &mut writer, |done| {
        progress.advance(Phase::Tokenize, done, inputs.bytes);
    })?;
    if writer.num_documents() == 0 {
        return Err(DataError::EmptyCorpus { skipped: skipped(inputs, counts).to_string() });
    }
    writer.finish()?;
    Ok(counts)
}

/// Makes [`TRAIN_FILE`] and, where something is held out, [`VALIDATION_FILE`] from [`ALL_FILE`].
fn split(
    options: &PrepareOptions,
    staging: &Staging,
    progress: &dyn Progress,
) -> Result<(Part, Option<Part>), DataError> {
    let all_path = staging.path(ALL_FILE);
    let all = TokenFile::open_unverified(&all_path)?;
    if options.validation_fraction == 0.0 {
        let train = Part { num_tokens: all.num_tokens(), num_documents: all.num_documents() };
        fs::rename(&all_path, staging.path(TRAIN_FILE))
            .map_err(|source| DataError::Write { path: all_path, source })?;
        return Ok((train, None));
    }
    let mut train = TokenFileWriter::create(&staging.path(TRAIN_FILE), all.vocabulary_size())?;
    let mut validation = TokenFileWriter::create(&staging.path(VALIDATION_FILE), all.vocabulary_size())?;
    split::split(&all, options.validation_fraction, &mut train, &mut validation, |done| {
        progress.advance(Phase::Split, done, all.num_tokens());
    })?;
    let parts = (Part::of(&train), Some(Part::of(&validation)));
    train.finish()?;
    validation.finish()?;
    Ok(parts)
}

fn skipped(inputs: &Inputs, counts: ReadCounts) -> Skipped {
    Skipped { binary: counts.num_binary, empty: counts.num_empty, ..inputs.skipped }
}
