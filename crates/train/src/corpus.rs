//! The location of a run's corpus. A corpus that a checkpoint may refer to is never replaced: another version is prepared next to it, in
//! `folder-2`, `folder-3` and so on. Only a corpus within the folder of a run without checkpoints is replaced.

use crate::checkpointing::{CORPUS, samples_of};
use crate::config::{Change, Config};
use crate::error::TrainError;
use crate::pretrained::{Pretrained, chat_template, check_tokenizer, tokenizer_choice};
use crate::resume::choose_checkpoint;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use trireme_base::{open_regular, open_regular_with};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, list_checkpoints};
use trireme_data::{
    ChatTemplate, Corpus, DataError, ExistingCorpus, MaskedTokens, PrepareOptions, PrepareReport, Progress,
    Source, TokenFile, TokenizerChoice, check_inputs, has_no_corpus, is_up_to_date, stage,
};

/// The name of the loss mask's checksum in the identity of the samples.
const LOSS_MASK: &str = "loss mask";

/// The name of the sources' weights in the identity of the samples.
const WEIGHTS: &str = "weights";

/// The state in which [`ensure_corpus`] found the corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CorpusState {
    /// The corpus fits the config.
    Current,
    /// The corpus was prepared by this call.
    Prepared,
    /// The inputs or their preparation have changed, but the resumed run keeps the corpus that it began with.
    Kept,
}

/// The corpus of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCorpus {
    /// Version 1 is in the folder that the config names, version n in `folder-n`.
    pub version: u64,
    /// The state in which the corpus was found.
    pub state: CorpusState,
}

/// Returns the folder of a version of the corpus in `folder`.
pub fn corpus_folder(folder: &Path, version: u64) -> PathBuf {
    // Drops a trailing slash, after which the number would name a folder inside.
    let mut name = folder.components().collect::<PathBuf>().into_os_string();
    if version > 1 {
        name.push(format!("-{version}"));
    }
    name.into()
}

/// Finds the corpus of a run, or prepares it from the inputs that the config names. A resuming run uses the corpus that its checkpoint was
/// trained on, because another corpus would change the order of samples. A new run uses a corpus of its inputs as they are now. A prepared
/// corpus is moved to its folder only if `check` accepts it.
///
/// # Errors
/// The error of `check`, or a failure to read or to prepare the corpus. Also fails if the corpus of the checkpoint to resume from does not
/// exist and cannot be prepared again.
pub fn ensure_corpus<E: From<TrainError>>(
    config: &Config,
    progress: &dyn Progress,
    check: impl FnOnce(&Corpus) -> Result<(), E>,
) -> Result<RunCorpus, E> {
    let parts = text_processing(config)?;
    let check = |corpus: &Corpus| {
        check_tokenizer(config, parts.pretrained.as_ref(), corpus)?;
        check(corpus)
    };
    loop {
        let (version, existing, resumed) = match find_corpus(config, &parts)? {
            CorpusSearch::Found(found) => {
                let folder = corpus_folder(&config.data().folder, found.version);
                check(&Corpus::open(&folder).map_err(TrainError::from)?)?;
                return Ok(found);
            }
            CorpusSearch::Free { version, existing, resumed } => (version, existing, resumed),
        };
        let options = prepare_options(config, &parts, version);
        let staged = match stage(&options, existing, progress) {
            // Another run that shares the folder has prepared this version first.
            Err(DataError::Occupied { .. })
                if existing == ExistingCorpus::Keep
                    && !has_no_corpus(&options.out).map_err(TrainError::from)? =>
            {
                continue;
            }
            staged => staged.map_err(TrainError::from)?,
        };
        let corpus = staged.corpus().map_err(TrainError::from)?;
        if let Some(resumed) = resumed {
            resumed.check(&corpus)?;
        }
        check(&corpus)?;
        staged.commit().map_err(TrainError::from)?;
        return Ok(RunCorpus { version, state: CorpusState::Prepared });
    }
}

/// Returns the corpus of a run, or `None` if [`ensure_corpus`] would have to prepare it.
///
/// # Errors
/// If a checkpoint or the folder cannot be used, or if the corpus has another tokenizer than the model.
pub fn current_corpus(config: &Config) -> Result<Option<RunCorpus>, TrainError> {
    let parts = text_processing(config)?;
    let found = match find_corpus(config, &parts)? {
        CorpusSearch::Found(found) => found,
        CorpusSearch::Free { .. } => return Ok(None),
    };
    let corpus = Corpus::open(&corpus_folder(&config.data().folder, found.version))?;
    check_tokenizer(config, parts.pretrained.as_ref(), &corpus)?;
    Ok(Some(found))
}

/// Reads the first `bytes_max` bytes of the inputs from which [`ensure_corpus`] would prepare the corpus. Returns a lower bound of the
/// vocabulary size: a tokenizer that is trained on the inputs may have more tokens.
///
/// # Errors
/// If an input cannot be read or parsed.
pub fn check_corpus_inputs(config: &Config, bytes_max: u64) -> Result<usize, TrainError> {
    let parts = text_processing(config)?;
    check_inputs(&prepare_options(config, &parts, 1), bytes_max)?;
    Ok(parts.tokenizer.vocabulary_size_min()?)
}

fn text_processing(config: &Config) -> Result<TextProcessing, TrainError> {
    let pretrained = Pretrained::open(config)?;
    if config.data().inputs.is_empty() {
        return Ok(TextProcessing { tokenizer: TokenizerChoice::Bytes, chat_template: None, pretrained });
    }
    let tokenizer = tokenizer_choice(config, pretrained.as_ref())?;
    let chat_template = chat_template(config, pretrained.as_ref())?;
    Ok(TextProcessing { tokenizer, chat_template, pretrained })
}

/// The tokenizer and the chat template that turn inputs into tokens, and the pretrained model of the run, if there is one.
struct TextProcessing {
    tokenizer: TokenizerChoice,
    chat_template: Option<ChatTemplate>,
    pretrained: Option<Pretrained>,
}

/// The file in a corpus that lists the folders of the runs that have used it, one per line.
const USERS_FILE: &str = "used-by.txt";

/// Records in a corpus outside of the run's folder that the run uses it, so that it is not replaced without the user's consent.
pub(crate) fn record_use(config: &Config) {
    let folder = &config.data().folder;
    let run_folder = config.run_folder();
    if is_within(folder, &run_folder) {
        return;
    }
    let run_folder = fs::canonicalize(&run_folder).unwrap_or(run_folder);
    let is_noted = recorded_users(folder).is_ok_and(|users| users.contains(&run_folder));
    if !is_noted {
        // A failure is ignored, because a corpus that cannot be written is not replaced either.
        let mut options = fs::OpenOptions::new();
        let file = open_regular_with(&folder.join(USERS_FILE), options.create(true).append(true));
        let _ = file.and_then(|mut file| writeln!(file, "{}", run_folder.display()));
    }
}

/// Returns the folders of runs that have used the corpus in `folder` and have checkpoints.
///
/// # Errors
/// If the folder cannot be read.
pub fn users_of_corpus(folder: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let mut users = recorded_users(folder)?;
    users.retain(|run| list_checkpoints(&run.join(CHECKPOINTS_FOLDER)).is_ok_and(|found| !found.is_empty()));
    Ok(users)
}

/// Returns the folders of all runs that have used the corpus in `folder`, as recorded by [`record_use`].
fn recorded_users(folder: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let path = folder.join(USERS_FILE);
    let text = match open_regular(&path).and_then(io::read_to_string) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        text => text.map_err(|source| DataError::Read { path, source })?,
    };
    Ok(text.lines().map(PathBuf::from).collect())
}

/// Returns the properties of the training tokens that are recorded in checkpoints. Training on corpora with the same identity gives the
/// same results.
pub(crate) fn corpus_identity(train: &MaskedTokens, sources: &[Source]) -> BTreeMap<String, String> {
    let checksum = |file: &TokenFile| format!("{:08x}", file.fingerprint().unwrap_or_default());
    let weights = || sources.iter().map(|source| source.weight.to_string()).collect::<Vec<_>>().join(" ");
    let mask = train.loss_mask.as_ref().map(|mask| (LOSS_MASK.to_owned(), checksum(mask)));
    let weights = (!sources.is_empty()).then(|| (WEIGHTS.to_owned(), weights()));
    [(CORPUS.to_owned(), checksum(&train.tokens))].into_iter().chain(mask).chain(weights).collect()
}

enum CorpusSearch {
    Found(RunCorpus),
    /// No corpus fits. This version can be prepared.
    Free {
        version: u64,
        existing: ExistingCorpus,
        resumed: Option<ResumedCorpus>,
    },
}

struct ResumedCorpus {
    path: PathBuf,
    samples: BTreeMap<String, String>,
}

impl ResumedCorpus {
    fn check(&self, corpus: &Corpus) -> Result<(), TrainError> {
        let identity = corpus_identity(&corpus.train, &corpus.report.sources);
        for name in [CORPUS, LOSS_MASK, WEIGHTS] {
            let [found, expected] = [&self.samples, &identity].map(|samples| samples.get(name));
            if found != expected {
                let [found, expected] =
                    [found, expected].map(|value| value.map_or_else(|| "none".to_owned(), String::clone));
                let (path, what) = (self.path.clone(), name.to_owned());
                return Err(TrainError::ResumeDiffers { path, what, found, expected });
            }
        }
        Ok(())
    }
}

fn has_inputs(report: &PrepareReport, inputs: &[PathBuf]) -> bool {
    report.inputs.iter().eq(inputs.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().iter())
}

fn find_corpus(config: &Config, parts: &TextProcessing) -> Result<CorpusSearch, TrainError> {
    let data = config.data();
    if data.inputs.is_empty() {
        return Ok(CorpusSearch::Found(RunCorpus { version: 1, state: CorpusState::Current }));
    }
    let resumed = resumed_corpus(config)?;
    let is_replaceable =
        is_within(&data.folder, &config.run_folder()) && !has_checkpoints(&config.run_folder())?;
    let mut taken = BTreeSet::new();
    let mut kept = None;
    for version in versions(&data.folder)? {
        if has_no_corpus(&corpus_folder(&data.folder, version))? {
            continue;
        }
        taken.insert(version);
        let is_current = || is_up_to_date(&prepare_options(config, parts, version));
        let Some(resumed) = &resumed else {
            if is_current()? {
                return Ok(CorpusSearch::Found(RunCorpus { version, state: CorpusState::Current }));
            }
            continue;
        };
        let Ok(corpus) = Corpus::open(&corpus_folder(&data.folder, version)) else { continue };
        if resumed.check(&corpus).is_err() {
            continue;
        }
        // A corpus with the same training tokens may have other validation tokens. Inputs that no longer exist count as changed.
        if is_current().unwrap_or(false) {
            return Ok(CorpusSearch::Found(RunCorpus { version, state: CorpusState::Current }));
        }
        // If the names of the inputs differ, the user has chosen other data.
        if has_inputs(&corpus.report, &data.inputs) {
            kept = kept.or(Some(version));
        }
    }
    if let Some(version) = kept {
        return Ok(CorpusSearch::Found(RunCorpus { version, state: CorpusState::Kept }));
    }
    let first_free =
        (1..).find(|version| !taken.contains(version)).expect("there are more numbers than folders");
    let (version, existing) =
        if is_replaceable { (1, ExistingCorpus::Replace) } else { (first_free, ExistingCorpus::Keep) };
    Ok(CorpusSearch::Free { version, existing, resumed })
}

/// Returns 1 and the number of every other version that has a folder. The numbers may be far apart: a folder may be called `corpus-2026`
/// for another reason.
fn versions(folder: &Path) -> Result<BTreeSet<u64>, TrainError> {
    let first = corpus_folder(folder, 1);
    let parent = first.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let prefix = format!("{}-", first.file_name().unwrap_or_default().to_string_lossy());
    let find = || -> io::Result<BTreeSet<u64>> {
        let mut versions = BTreeSet::from([1]);
        for entry in fs::read_dir(parent)? {
            let name = entry?.file_name();
            let version = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse::<u64>().ok());
            versions.extend(version.filter(|version| *version > 1));
        }
        Ok(versions)
    };
    match find() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::from([1])),
        versions => versions.map_err(|source| TrainError::RunFolder { path: parent.to_owned(), source }),
    }
}

/// Returns whether the path `folder` is within `outer`. A path with `..` is not.
fn is_within(folder: &Path, outer: &Path) -> bool {
    folder.starts_with(outer) && !folder.components().any(|part| part == Component::ParentDir)
}

/// Returns whether this run, or an earlier run that was moved aside within its folder, has checkpoints.
fn has_checkpoints(run_folder: &Path) -> Result<bool, TrainError> {
    if !list_checkpoints(&run_folder.join(CHECKPOINTS_FOLDER))?.is_empty() {
        return Ok(true);
    }
    let holds_checkpoints = || -> io::Result<bool> {
        for entry in fs::read_dir(run_folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() && entry.path().join(CHECKPOINTS_FOLDER).try_exists()? {
                return Ok(true);
            }
        }
        Ok(false)
    };
    match holds_checkpoints() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        holds => holds.map_err(|source| TrainError::RunFolder { path: run_folder.to_owned(), source }),
    }
}

fn resumed_corpus(config: &Config) -> Result<Option<ResumedCorpus>, TrainError> {
    if config.checkpoint().allow_changed.contains(&Change::Data) {
        return Ok(None);
    }
    Ok(choose_checkpoint(config, &mut Vec::new())?.and_then(|checkpoint| {
        let samples = samples_of(&checkpoint).filter(|samples| samples.contains_key(CORPUS))?;
        Some(ResumedCorpus { path: checkpoint.path().to_owned(), samples })
    }))
}

fn prepare_options(config: &Config, parts: &TextProcessing, version: u64) -> PrepareOptions {
    let data = config.data();
    PrepareOptions {
        tokenizer: parts.tokenizer.clone(),
        chat_template: parts.chat_template.clone(),
        special_tokens_in_messages: data.special_tokens_in_messages,
        weights: data.weights.clone(),
        validation_inputs: data.validation_inputs.clone(),
        field: data.field.clone(),
        extensions: data.extensions.clone(),
        invalid_utf8: data.invalid_utf8,
        validation_fraction: data.validation_fraction,
        ..PrepareOptions::new(data.inputs.clone(), corpus_folder(&data.folder, version))
    }
}
