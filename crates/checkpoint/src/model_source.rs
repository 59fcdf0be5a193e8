use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::folder::{SkippedCheckpoint, find_latest, list_checkpoints, resolve_name_file};
use crate::hub_cache::resolve_model;
use crate::hugging_face::HuggingFaceDirectory;
use crate::manifest::MANIFEST_FILE;
use crate::model_files::MODEL_FILES;
use crate::stored::StoredTensors;
use std::path::{Path, PathBuf};

/// Name of the subfolder of a run's folder that contains its checkpoints.
pub const CHECKPOINTS_FOLDER: &str = "checkpoints";

/// A checkpoint or model directory with a model's weights, opened from a path that a user gave.
#[derive(Debug)]
pub enum ModelSource {
    /// A checkpoint, opened by its own path or as the newest one of a run.
    Checkpoint {
        /// The checkpoint.
        checkpoint: Checkpoint,
        /// Newer checkpoints of the run that do not open; report them to the user.
        skipped: Vec<SkippedCheckpoint>,
    },
    /// A Hugging Face model directory.
    HuggingFace(HuggingFaceDirectory),
}

impl ModelSource {
    /// Opens a checkpoint or a Hugging Face model directory. `path` is a checkpoint, a file `checkpoints/best` or `checkpoints/latest` of a
    /// run, a run's folder or its `checkpoints` folder, a model directory, or the [name](resolve_model) of a model in the Hugging Face
    /// cache. For a run, opens the newest checkpoint that can be opened.
    ///
    /// # Errors
    /// If `path` is none of these, or does not open.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let path = &resolve_model(&resolve_name_file(path))?;
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

    /// Returns the model's weights, under their stored names.
    pub fn weights(&self) -> StoredTensors {
        match self {
            ModelSource::Checkpoint { checkpoint, .. } => checkpoint.weights(),
            ModelSource::HuggingFace(directory) => directory.tensors().clone(),
        }
    }

    /// Returns the contents of a small file stored with the model, such as `config.json` or `tokenizer.json`. `None` if there is no file of
    /// that name.
    ///
    /// # Errors
    /// If the file cannot be read or is damaged.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        match self {
            ModelSource::Checkpoint { checkpoint, .. } => checkpoint.read_file(name),
            ModelSource::HuggingFace(directory) => directory.read_file(name),
        }
    }

    /// Returns the name and the contents of every file that describes the model or its tokenizer. [`export`](crate::export()) should write
    /// these files next to the weights.
    ///
    /// # Errors
    /// If a file cannot be read or is damaged.
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

/// Returns the folder of checkpoints for `path`: its subfolder [`CHECKPOINTS_FOLDER`] if there is one, else `path` itself.
pub fn checkpoints_folder(path: &Path) -> PathBuf {
    let inner = path.join(CHECKPOINTS_FOLDER);
    if inner.is_dir() { inner } else { path.to_owned() }
}
