//! Where a run's corpus is. A corpus that a checkpoint may refer to is never replaced: another one is made beside it, as
//! `folder-2`, `folder-3` and so on.

use crate::checkpointing::corpus_of;
use crate::config::{self, Config, Resume};
use crate::error::TrainError;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, Checkpoint, find_latest, list_checkpoints};
use trireme_data::{
    Corpus, InvalidUtf8, PrepareOptions, PrepareReport, Progress, TokenizerChoice, is_current, stage,
};

/// How [`ensure_corpus`] found the corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CorpusState {
    /// As it should be.
    Current,
    /// It was prepared.
    Made,
    /// Its inputs have changed, but the run resumes with what it began with.
    Kept,
}

/// The corpus of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCorpus {
    /// Which of those beside each other it is: 1 is in the folder that the config names.
    pub version: u64,
    /// How it was found.
    pub state: CorpusState,
}

/// The folder of a version of the corpus in `folder`.
pub fn corpus_folder(folder: &Path, version: u64) -> PathBuf {
    let mut name = OsString::from(folder);
    if version > 1 {
        name.push(format!("-{version}"));
    }
    name.into()
}

/// Finds the corpus of a run, or prepares it from the inputs that the config names. A run that resumes takes the corpus that its
/// checkpoint was trained on, for another would be another order of samples; a new one takes one of its inputs as they are
/// today. What is prepared goes to its place only if `check` accepts it.
///
/// # Errors
/// What `check` returns; a checkpoint to resume from whose corpus is neither there nor can be made again; and what reading and
/// preparing return.
pub fn ensure_corpus<E: From<TrainError>>(
    config: &Config,
    progress: &dyn Progress,
    check: impl FnOnce(&Corpus) -> Result<(), E>,
) -> Result<RunCorpus, E> {
    let folder = &config.data().folder;
    match find_place(config)? {
        Place::Found(found) => {
            check(&Corpus::open(&corpus_folder(folder, found.version)).map_err(TrainError::from)?)?;
            Ok(found)
        }
        Place::Free { version, resumed } => {
            let options = prepare_options(config, version);
            let staged = stage(&options, progress).map_err(TrainError::from)?;
            let corpus = staged.corpus().map_err(TrainError::from)?;
            if let Some(ResumedCorpus { path, checksum }) = resumed
                && checksum != checksum_of(&corpus)
            {
                let (what, found, expected) = ("a corpus with checksum", checksum, checksum_of(&corpus));
                return Err(TrainError::ResumeDiffers { path, what, found, expected }.into());
            }
            check(&corpus)?;
            staged.commit().map_err(TrainError::from)?;
            Ok(RunCorpus { version, state: CorpusState::Made })
        }
    }
}

/// The checksum of a corpus, as checkpoints state it.
pub(crate) fn checksum_of(corpus: &Corpus) -> String {
    format!("{:08x}", corpus.train.fingerprint().unwrap_or_default())
}

enum Place {
    Found(RunCorpus),
    /// There is none yet, and this version can be made.
    Free {
        version: u64,
        resumed: Option<ResumedCorpus>,
    },
}

/// The corpus of the checkpoint to resume from.
struct ResumedCorpus {
    /// The checkpoint.
    path: PathBuf,
    checksum: String,
}

fn find_place(config: &Config) -> Result<Place, TrainError> {
    let data = config.data();
    if data.inputs.is_empty() {
        return Ok(Place::Found(RunCorpus { version: 1, state: CorpusState::Current }));
    }
    let resumed = resumed_corpus(config)?;
    let is_prepared = |version: &u64| PrepareReport::read(&corpus_folder(&data.folder, *version)).is_ok();
    for version in (1..).take_while(is_prepared) {
        let is_current = || is_current(&prepare_options(config, version));
        match &resumed {
            None if is_current()? => {
                return Ok(Place::Found(RunCorpus { version, state: CorpusState::Current }));
            }
            Some(resumed) if holds(&corpus_folder(&data.folder, version), &resumed.checksum) => {
                // Inputs that are gone have changed.
                let state =
                    if is_current().unwrap_or(false) { CorpusState::Current } else { CorpusState::Kept };
                return Ok(Place::Found(RunCorpus { version, state }));
            }
            _ => {}
        }
    }
    let is_replaceable =
        data.folder.starts_with(config.run_folder()) && !has_checkpoints(&config.run_folder())?;
    let free = (1..).find(|version| is_replaceable || !is_prepared(version));
    Ok(Place::Free { version: free.expect("there are more numbers than folders"), resumed })
}

fn holds(folder: &Path, checksum: &str) -> bool {
    Corpus::open(folder).is_ok_and(|corpus| checksum_of(&corpus) == checksum)
}

/// Whether this run, or an earlier one that was moved aside in its folder, has checkpoints.
fn has_checkpoints(run_folder: &Path) -> Result<bool, TrainError> {
    if !list_checkpoints(&run_folder.join(CHECKPOINTS_FOLDER))?.is_empty() {
        return Ok(true);
    }
    let entries = fs::read_dir(run_folder).into_iter().flatten().flatten();
    Ok(entries.into_iter().any(|entry| entry.path().join(CHECKPOINTS_FOLDER).is_dir()))
}

fn resumed_corpus(config: &Config) -> Result<Option<ResumedCorpus>, TrainError> {
    let checkpoint = match &config.checkpoint().resume {
        Resume::Never => None,
        Resume::From(path) => Some(Checkpoint::open(path)?),
        Resume::Auto => find_latest(&config.run_folder().join(CHECKPOINTS_FOLDER), &mut Vec::new())?,
    };
    Ok(checkpoint.and_then(|checkpoint| {
        let checksum = corpus_of(&checkpoint)?;
        Some(ResumedCorpus { path: checkpoint.path().to_owned(), checksum })
    }))
}

fn prepare_options(config: &Config, version: u64) -> PrepareOptions {
    let data = config.data();
    let tokenizer = match (&data.tokenizer, data.train_bpe) {
        (config::Tokenizer::File(path), _) => TokenizerChoice::File(path.clone()),
        (config::Tokenizer::Bytes, 0) => TokenizerChoice::Bytes,
        (config::Tokenizer::Bytes, vocabulary_size) => TokenizerChoice::TrainBpe { vocabulary_size },
    };
    PrepareOptions {
        tokenizer,
        field: data.field.clone(),
        extensions: data.extensions.clone(),
        invalid_utf8: match data.invalid_utf8 {
            config::InvalidUtf8::Replace => InvalidUtf8::Replace,
            config::InvalidUtf8::Refuse => InvalidUtf8::Refuse,
        },
        validation_fraction: data.validation_fraction,
        ..PrepareOptions::new(data.inputs.clone(), corpus_folder(&data.folder, version))
    }
}
