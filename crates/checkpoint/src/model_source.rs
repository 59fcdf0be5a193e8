use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::folder::{SkippedCheckpoint, find_latest, follow_name, list_checkpoints};
use crate::hub_cache::resolve_model;
use crate::hugging_face::HuggingFaceDirectory;
use crate::manifest::MANIFEST_FILE;
use crate::model_files::MODEL_FILES;
use crate::stored::StoredTensors;
use std::path::{Path, PathBuf};

/// The subfolder of a run's folder with its checkpoints.
pub const CHECKPOINTS_FOLDER: &str = "checkpoints";

/// Whatever a path given by a user holds that has a model's weights.
#[derive(Debug)]
pub enum ModelSource {
    /// A checkpoint, or the newest one of a run.
    Checkpoint {
        /// The checkpoint.
        checkpoint: Checkpoint,
        /// Newer ones of the run that do not open; tell the user.
        skipped: Vec<SkippedCheckpoint>,
    },
    /// A Hugging Face model directory.
    HuggingFace(HuggingFaceDirectory),
}

impl ModelSource {
    /// Opens a checkpoint (also by the name `checkpoints/best` or `checkpoints/latest` of a run), the newest checkpoint of a run's folder or of its `checkpoints` folder, or a
    /// Hugging Face model directory, also by the [name](resolve_model) of a model in the Hugging Face cache.
    ///
    /// # Errors
    /// If `path` is none of these, or what it holds does not open.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = &resolve_model(&follow_name(path))?;
        if path.join(MANIFEST_FILE).is_file() {
            let checkpoint = Checkpoint::open(path)?;
            return Ok(ModelSource::Checkpoint { checkpoint, skipped: Vec::new() });
        }
        let folder = checkpoints_folder(path);
        if list_checkpoints(&folder)?.is_empty() {
            return HuggingFaceDirectory::open(path).map(ModelSource::HuggingFace);
        }
        let mut skipped = Vec::new();
        match find_latest(&folder, &mut skipped)? {
            Some(checkpoint) => Ok(ModelSource::Checkpoint { checkpoint, skipped }),
            None => Err(skipped.swap_remove(0).reason),
        }
    }

    /// The model's weights, under the names they are stored with.
    pub fn weights(&self) -> StoredTensors {
        match self {
            ModelSource::Checkpoint { checkpoint, .. } => checkpoint.weights(),
            ModelSource::HuggingFace(directory) => directory.tensors().clone(),
        }
    }

    /// The contents of a small file stored with the model, such as `config.json` or `tokenizer.json`;
    /// `None` if there is none of that name.
    ///
    /// # Errors
    /// If it cannot be read or is damaged.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        match self {
            ModelSource::Checkpoint { checkpoint, .. } => checkpoint.read_file(name),
            ModelSource::HuggingFace(directory) => directory.read_file(name),
        }
    }

    /// Name and contents of every file that describes the model or its tokenizer: what
    /// [`export`](crate::export()) should write beside the weights.
    ///
    /// # Errors
    /// If one cannot be read or is damaged.
    pub fn model_files(&self) -> Result<Vec<(&'static str, Vec<u8>)>, CheckpointError> {
        let read = |name| self.read_file(name).transpose().map(|contents| Ok((name, contents?)));
        MODEL_FILES.into_iter().filter_map(read).collect()
    }

    /// The folder that was opened.
    pub fn path(&self) -> &Path {
        match self {
            ModelSource::Checkpoint { checkpoint, .. } => checkpoint.path(),
            ModelSource::HuggingFace(directory) => directory.path(),
        }
    }
}

/// The folder of checkpoints that `path` is or, as a run's folder, has.
pub fn checkpoints_folder(path: &Path) -> PathBuf {
    let inner = path.join(CHECKPOINTS_FOLDER);
    if inner.is_dir() { inner } else { path.to_owned() }
}
