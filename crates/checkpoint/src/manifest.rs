//! The manifest, `checkpoint.json`: the file of each part of each tensor, with a checksum of everything.

use crate::StoredDType;
use crate::error::CheckpointError;
use crate::extent::coverage_error;
use crate::files::{damaged, is_plain_name};
use crate::safetensors_file::readable_dtype;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use trireme_plan::Extent;

pub(crate) const MANIFEST_FILE: &str = "checkpoint.json";

const FORMAT: &str = "trireme-checkpoint";
const FORMAT_VERSION: u64 = 1;

/// The description of a checkpoint: everything but the contents of its files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    format: String,
    format_version: u64,
    pub(crate) step: u64,
    /// The state that the caller of `save` passed.
    pub(crate) state: serde_json::Value,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
    /// Every file of the folder except the manifest.
    pub(crate) files: BTreeMap<String, FileEntry>,
}

/// A tensor and its parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TensorEntry {
    pub(crate) dtype: StoredDType,
    pub(crate) shape: Vec<usize>,
    pub(crate) parts: Vec<PartEntry>,
}

/// A box of a tensor, and the file that contains it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PartEntry {
    pub(crate) file: String,
    pub(crate) extent: Extent,
    pub(crate) crc32: u32,
}

/// A file's size in bytes and the CRC-32 of all of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) size: u64,
    pub(crate) crc32: u32,
}

/// The members that every version of the format begins with.
#[derive(Deserialize)]
struct FormatHeader {
    format: String,
    format_version: u64,
}

impl Manifest {
    pub(crate) fn new(
        step: u64,
        state: serde_json::Value,
        tensors: BTreeMap<String, TensorEntry>,
        files: BTreeMap<String, FileEntry>,
    ) -> Self {
        Manifest { format: FORMAT.to_owned(), format_version: FORMAT_VERSION, step, state, tensors, files }
    }

    pub(crate) fn to_text(&self) -> String {
        append_checksum(&serde_json::to_string(self).expect("a manifest is JSON"))
    }

    /// Parses and checks an untrusted text. `path` is named in errors.
    pub(crate) fn from_text(text: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let invalid = |error: serde_json::Error| damaged(path, format!("it is invalid: {error}"));
        let json = verify_checksum(text).ok_or_else(|| damaged(path, "its checksum does not match"))?;
        let head: FormatHeader = serde_json::from_str(&json).map_err(invalid)?;
        if head.format != FORMAT {
            return Err(damaged(path, format!("its format is '{}'", head.format)));
        }
        if head.format_version != FORMAT_VERSION {
            let (path, found) = (path.to_owned(), head.format_version);
            return Err(CheckpointError::FormatVersion { path, found, known: FORMAT_VERSION });
        }
        let manifest: Manifest = serde_json::from_str(&json).map_err(invalid)?;
        manifest.check().map_err(|reason| damaged(path, reason))?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        if let Some(name) = self.files.keys().find(|name| !is_plain_name(name)) {
            return Err(format!("it lists a file outside its folder, '{name}'"));
        }
        for (name, tensor) in &self.tensors {
            if readable_dtype(tensor.dtype).is_none() {
                return Err(format!("tensor '{name}' has dtype {}, which cannot be read", tensor.dtype));
            }
            let extents: Vec<&Extent> = tensor.parts.iter().map(|part| &part.extent).collect();
            if let Some(problem) = coverage_error(&tensor.shape, &extents) {
                return Err(format!("tensor '{name}': {problem}"));
            }
            if let Some(part) = tensor.parts.iter().find(|part| !self.files.contains_key(&part.file)) {
                return Err(format!("tensor '{name}' has a part in '{}', which is not listed", part.file));
            }
        }
        Ok(())
    }
}

const CHECKSUM_START: &str = ",\"crc32\":";
const CHECKSUM_END: &str = "}\n";

/// Appends to a JSON object's text, as its last member, the CRC-32 of the text before that member.
fn append_checksum(json: &str) -> String {
    let body = json.strip_suffix('}').expect("an object");
    format!("{body}{CHECKSUM_START}{}{CHECKSUM_END}", crc32fast::hash(body.as_bytes()))
}

/// Returns the JSON text without its checksum. `None` if the checksum does not match.
fn verify_checksum(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let (body, crc32) = text.strip_suffix(CHECKSUM_END)?.rsplit_once(CHECKSUM_START)?;
    (crc32fast::hash(body.as_bytes()).to_string() == crc32).then(|| format!("{body}}}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Manifest {
        let part = |start: usize, shape: usize| PartEntry {
            file: "shard-00000.safetensors".into(),
            extent: Extent { start: vec![start], shape: vec![shape] },
            crc32: 7,
        };
        let tensor =
            TensorEntry { dtype: StoredDType::F32, shape: vec![5], parts: vec![part(0, 3), part(3, 2)] };
        Manifest::new(
            12,
            serde_json::json!({"tokens": 3}),
            BTreeMap::from([("w".to_owned(), tensor)]),
            BTreeMap::from([("shard-00000.safetensors".to_owned(), FileEntry { size: 20, crc32: 1 })]),
        )
    }

    fn read(manifest: &Manifest) -> Result<Manifest, CheckpointError> {
        Manifest::from_text(manifest.to_text().as_bytes(), Path::new("checkpoint.json"))
    }

    fn refusal(change: impl FnOnce(&mut Manifest)) -> String {
        let mut manifest = example();
        change(&mut manifest);
        read(&manifest).expect_err("the manifest is refused").to_string()
    }

    #[test]
    fn a_manifest_reads_as_it_was_written() {
        assert_eq!(read(&example()).unwrap(), example());
        let text = example().to_text();
        let json: serde_json::Value = serde_json::from_str(&text).expect("the sealed text is JSON");
        assert_eq!(json["step"], 12);
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_refused() {
        let text = example().to_text().into_bytes();
        for position in 0..text.len() {
            for bit in 0..8 {
                let mut flipped = text.clone();
                flipped[position] ^= 1 << bit;
                let read = Manifest::from_text(&flipped, Path::new("checkpoint.json"));
                assert!(read.is_err(), "bit {bit} of byte {position}");
            }
            assert!(Manifest::from_text(&text[..position], Path::new("checkpoint.json")).is_err());
        }
    }

    #[test]
    fn manifests_that_contradict_themselves_are_refused() {
        let tensor = |manifest: &mut Manifest| manifest.tensors.remove("w").unwrap();
        let put = |manifest: &mut Manifest, tensor| manifest.tensors.insert("w".into(), tensor);
        assert!(refusal(|manifest| manifest.format = "other".into()).contains("other"));
        assert!(refusal(|manifest| manifest.format_version = 2).contains("version 2"));
        for name in ["../w", "/w", "a/b", ""] {
            let refused = refusal(|manifest| {
                manifest.files.insert(name.into(), FileEntry { size: 0, crc32: 0 });
            });
            assert!(refused.contains("outside"), "{refused}");
        }
        let refused = refusal(|manifest| {
            let mut without_end = tensor(manifest);
            without_end.parts.pop();
            put(manifest, without_end);
        });
        assert!(refused.contains("contain 3 of 5"), "{refused}");
        let refused = refusal(|manifest| {
            let mut unlisted = tensor(manifest);
            unlisted.parts[1].file = "shard-00001.safetensors".into();
            put(manifest, unlisted);
        });
        assert!(refused.contains("not listed"), "{refused}");
        let refused = refusal(|manifest| {
            let mut unreadable = tensor(manifest);
            unreadable.dtype = StoredDType::C64;
            put(manifest, unreadable);
        });
        assert!(refused.contains("C64"), "{refused}");
    }
}
