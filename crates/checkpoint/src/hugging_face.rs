//! Opens Hugging Face model directories for reading.

use crate::CONFIG_FILE;
use crate::error::CheckpointError;
use crate::files::{JSON_BYTES_MAX, damaged, is_plain_name, read_bounded, reading};
use crate::hub_cache::{cache_folder, cached_name, is_model_name};
use crate::model_files::{INDEX_FILE, MODEL_FILE, has_pickles, missing_weights, read_index};
use crate::safetensors_file::read_header;
use crate::stored::{StoredPart, StoredTensor, StoredTensors};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trireme_plan::Extent;

/// An open Hugging Face model directory: `config.json`, and `model.safetensors` or shards with `model.safetensors.index.json`. The headers
/// of the files have been read and checked, the bytes of the tensors have not.
#[derive(Debug, Clone)]
pub struct HuggingFaceDirectory {
    path: PathBuf,
    tensors: StoredTensors,
    notes: HashMap<String, String>,
}

impl HuggingFaceDirectory {
    /// Opens the model in `folder`. If there are both a single file and an index, the single file is read, as in transformers.
    ///
    /// If a shard lacks a tensor that the index places there, this function succeeds, and [`StoredTensors::check_against`] fails where the
    /// tensor is needed.
    ///
    /// # Errors
    /// If the safetensors files are missing, incomplete or damaged.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        if let (Some(name), true) = (cached_name(folder), folder.is_dir())
            && let Some(missing) = missing_weights(folder)?
        {
            return Err(CheckpointError::Incomplete { name, path: folder.to_owned(), missing });
        }
        let (tensors, notes) = if folder.join(MODEL_FILE).is_file() {
            let mut tensors = BTreeMap::new();
            let notes = add_file(&folder.join(MODEL_FILE), &mut tensors)?;
            (StoredTensors::new(folder, tensors), notes)
        } else if folder.join(INDEX_FILE).is_file() {
            read_shards(folder)?
        } else {
            return Err(match fs::metadata(folder) {
                Ok(_) => nothing_to_open(folder),
                Err(error) if error.kind() == ErrorKind::NotFound => match cache_folder() {
                    Some(cache) if is_model_name(folder) && !is_in_folder(folder) => {
                        CheckpointError::NoSuchModel { name: folder.to_owned(), cache }
                    }
                    _ => CheckpointError::NoSuchFolder { path: folder.to_owned() },
                },
                Err(error) => reading(folder)(error),
            });
        };
        Ok(HuggingFaceDirectory { path: folder.to_owned(), tensors, notes })
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors, under their names in the files.
    pub fn tensors(&self) -> &StoredTensors {
        &self.tensors
    }

    /// Returns the note `name` in the metadata of the weight files, if there is one: see [`ModelExport::notes`](crate::ModelExport::notes).
    pub fn note(&self, name: &str) -> Option<&str> {
        self.notes.get(name).map(String::as_str)
    }

    /// Returns the contents of a small file of the directory, such as `config.json`. `None` if there is no file of that name.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        let path = self.path.join(name);
        if !is_plain_name(name) || !path.exists() {
            return Ok(None);
        }
        read_bounded(&path, JSON_BYTES_MAX).map(Some)
    }
}

/// Returns whether the parent folder of `path` exists. Then `path` is meant as a path, not as the name of a model.
fn is_in_folder(path: &Path) -> bool {
    path.parent().is_some_and(|parent| !parent.as_os_str().is_empty() && parent.is_dir())
}

fn nothing_to_open(folder: &Path) -> CheckpointError {
    let (found, expected) = if has_pickles(folder) {
        (
            "PyTorch pickle files",
            "safetensors files (in Python: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another_folder), and the same with \
             AutoTokenizer)",
        )
    } else {
        let expected = if folder.join(CONFIG_FILE).is_file() {
            "model.safetensors or model.safetensors.index.json next to config.json"
        } else {
            "the folder of a run that has saved a checkpoint, a checkpoint with checkpoint.json, or a Hugging Face \
                 model directory with model.safetensors or model.safetensors.index.json"
        };
        ("no checkpoint and no model", expected)
    };
    CheckpointError::NothingToOpen { path: folder.to_owned(), found, expected }
}

/// Reads the headers of all shards that the index lists. Returns their tensors and notes.
fn read_shards(folder: &Path) -> Result<(StoredTensors, HashMap<String, String>), CheckpointError> {
    let (path, index) = (folder.join(INDEX_FILE), read_index(folder)?);
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    let (mut tensors, mut notes) = (BTreeMap::new(), HashMap::new());
    for file in files {
        if !is_plain_name(file) {
            return Err(damaged(&path, format!("it lists a file outside its folder, '{file}'")));
        }
        notes.extend(add_file(&folder.join(file), &mut tensors)?);
    }
    let absent = index.weight_map.into_iter().map(|(name, file)| (name, folder.join(file)));
    let absent = absent
        .filter(|(name, file)| !tensors.get(name).is_some_and(|tensor| tensor.is_stored_in(file)))
        .collect();
    Ok((StoredTensors::new(folder, tensors).with_absent(absent), notes))
}

/// Adds the tensors of one file to `tensors`, and returns the file's notes.
fn add_file(
    path: &Path,
    tensors: &mut BTreeMap<String, StoredTensor>,
) -> Result<HashMap<String, String>, CheckpointError> {
    let file: Arc<Path> = path.into();
    let header = read_header(path)?;
    for (name, entry) in header.entries {
        let (file, extent) = (Arc::clone(&file), Extent::full(&entry.shape));
        let part = StoredPart { file, offset: entry.offset, extent, crc32: None };
        let tensor = StoredTensor { dtype: entry.dtype, shape: entry.shape, parts: vec![part] };
        if tensors.contains_key(&name) {
            return Err(damaged(path, format!("it contains '{name}', which an earlier file also contains")));
        }
        tensors.insert(name, tensor);
    }
    Ok(header.metadata)
}
