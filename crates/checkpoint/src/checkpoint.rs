//! Opens checkpoints for reading.

use crate::error::CheckpointError;
use crate::files::{JSON_BYTES_MAX, damaged, open_file, read_bounded, reading};
use crate::manifest::{FileEntry, MANIFEST_FILE, Manifest, TensorEntry};
use crate::safetensors_file::{HeaderEntry, read_header};
use crate::save_plan::part_name;
use crate::stored::{StoredPart, StoredTensor, StoredTensors};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An open checkpoint. The manifest and the headers of the files have been read and agree, and every file has its recorded size. The bytes
/// of tensors are verified when they are read.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    path: PathBuf,
    fingerprint: u32,
    step: u64,
    state: serde_json::Value,
    /// Recorded size and checksum of each file except the manifest.
    pub(crate) files: BTreeMap<String, FileEntry>,
    tensors: StoredTensors,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`.
    ///
    /// # Errors
    /// If the manifest is missing, cannot be read, is damaged or of another version, or if files are missing, have another size, or hold
    /// other tensors than the manifest lists.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let manifest_path = folder.join(MANIFEST_FILE);
        if let Err(source) = fs::metadata(&manifest_path) {
            // Only a missing manifest means that there is no checkpoint. Another failure to access the file says nothing about the
            // checkpoint.
            if !matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) {
                return Err(reading(&manifest_path)(source));
            }
            let (found, expected) =
                ("no checkpoint", "a folder with checkpoint.json, such as checkpoints/step-40");
            return Err(CheckpointError::NothingToOpen { path: folder.to_owned(), found, expected });
        }
        let text = read_bounded(&manifest_path, JSON_BYTES_MAX)?;
        let manifest = Manifest::from_text(&text, &manifest_path)?;
        check_sizes(folder, &manifest.files)?;
        let tensors = locate(folder, manifest.tensors)?;
        Ok(Checkpoint {
            path: folder.to_owned(),
            fingerprint: crc32fast::hash(&text),
            step: manifest.step,
            state: manifest.state,
            files: manifest.files,
            tensors: StoredTensors::new(folder, tensors),
        })
    }

    /// Folder of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// CRC-32 of the manifest, which contains the checksums of everything else. Copies of a checkpoint have the same fingerprint; different
    /// checkpoints have different ones, except for collisions of CRC-32.
    pub fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// Optimizer step after which the checkpoint was saved.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The state that was given to [`save`](crate::save()).
    pub fn state(&self) -> &serde_json::Value {
        &self.state
    }

    /// Weights and optimizer state.
    pub fn tensors(&self) -> &StoredTensors {
        &self.tensors
    }

    /// The model's weights alone, without optimizer state.
    #[expect(clippy::missing_panics_doc, reason = "distinct names that are kept stay distinct")]
    pub fn weights(&self) -> StoredTensors {
        let keep = |name: &str| (!name.starts_with(crate::OPTIMIZER_PREFIX)).then(|| name.to_owned());
        self.tensors.renamed(keep).expect("names that stay differ")
    }

    /// Returns the name and the size in bytes of each file except the manifest.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|(name, entry)| (name.as_str(), entry.size))
    }

    /// Returns the contents of a small file that was given to [`save`](crate::save()), such as `config.json`. `None` if there is no file of
    /// that name.
    ///
    /// # Errors
    /// If the file cannot be read or has changed since it was written.
    pub fn read_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(entry) = self.files.get(name) else { return Ok(None) };
        let path = self.path.join(name);
        let contents = read_bounded(&path, entry.size)?;
        let crc32 = crc32fast::hash(&contents);
        if (contents.len() as u64, crc32) != (entry.size, entry.crc32) {
            let written = entry.crc32;
            let reason = format!("its checksum is {crc32:08x}, but was {written:08x} when written");
            return Err(damaged(&path, reason));
        }
        Ok(Some(contents))
    }
}

fn check_sizes(folder: &Path, files: &BTreeMap<String, FileEntry>) -> Result<(), CheckpointError> {
    for (name, entry) in files {
        let path = folder.join(name);
        let (_, size) = open_file(&path)?;
        if size != entry.size {
            return Err(damaged(&path, format!("it has {size} bytes, but {} were written", entry.size)));
        }
    }
    Ok(())
}

fn locate(
    folder: &Path,
    entries: BTreeMap<String, TensorEntry>,
) -> Result<BTreeMap<String, StoredTensor>, CheckpointError> {
    let mut headers: BTreeMap<String, (Arc<Path>, BTreeMap<String, HeaderEntry>)> = BTreeMap::new();
    let mut tensors = BTreeMap::new();
    for (name, TensorEntry { dtype, shape, parts: entries }) in entries {
        let mut parts = Vec::with_capacity(entries.len());
        for entry in entries {
            if !headers.contains_key(&entry.file) {
                let path: Arc<Path> = folder.join(&entry.file).into();
                let header = read_header(&path)?.entries;
                headers.insert(entry.file.clone(), (path, header));
            }
            let (path, header) = &headers[&entry.file];
            let part_name = part_name(&name, &shape, &entry.extent);
            let fits = |found: &&HeaderEntry| found.dtype == dtype && found.shape == entry.extent.shape;
            let Some(found) = header.get(&part_name).filter(fits) else {
                let wanted =
                    format!("it lacks '{part_name}' of dtype {dtype} and shape {:?}", entry.extent.shape);
                return Err(damaged(path, wanted));
            };
            let (file, offset) = (Arc::clone(path), found.offset);
            parts.push(StoredPart { file, offset, extent: entry.extent, crc32: Some(entry.crc32) });
        }
        tensors.insert(name, StoredTensor { dtype, shape, parts });
    }
    Ok(tensors)
}
