use crate::StoredDType;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use trireme_base::{DType, Rank};
use trireme_comm::CommError;
use trireme_plan::{Extent, PlacementError};

/// The errors of saving, loading and exporting checkpoints and model directories.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum CheckpointError {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}; check the free space and the permissions", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot rename {} to {}", from.display(), to.display())]
    Rename { from: PathBuf, to: PathBuf, source: io::Error },
    #[error("cannot remove {}", path.display())]
    Remove { path: PathBuf, source: io::Error },
    /// The path is neither a folder nor the name of a model on this machine.
    #[error(
        "{} does not exist; expected the folder of a run, a checkpoint, or a Hugging Face model directory. The Hugging Face cache in {} has no model \
         of that name either; to fetch one, build with `--features hub`, or run huggingface_hub.snapshot_download(\"{}\") in Python",
        name.display(),
        cache.display(),
        name.display()
    )]
    NoSuchModel { name: PathBuf, cache: PathBuf },
    #[error(
        "the model {name} is incomplete in the Hugging Face cache: {} lacks {missing}, so its download was interrupted. Finish it in Python with \
         huggingface_hub.snapshot_download(\"{name}\"), or name the model {name} in a build with `--features hub`",
        path.display()
    )]
    Incomplete { name: String, path: PathBuf, missing: String },
    #[error(
        "cannot fetch the model {}: {reason}; set HF_TOKEN if it is private, HF_ENDPOINT to use a mirror, or HF_HUB_OFFLINE=1 to fetch nothing",
        name.display()
    )]
    Fetch { name: PathBuf, reason: String },
    #[error(
        "{} does not exist; expected the folder of a run, a checkpoint, or a Hugging Face model directory{}",
        path.display(),
        sibling_folders_hint(path)
    )]
    NoSuchFolder { path: PathBuf },
    #[error("{} contains {found}; expected {expected}", path.display())]
    NothingToOpen { path: PathBuf, found: &'static str, expected: &'static str },
    #[error("{} is damaged: {reason}; use another copy", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("{} is damaged, according to rank {rank}: {reason}", path.display())]
    DamagedElsewhere { path: PathBuf, rank: Rank, reason: String },
    /// This rank found another checkpoint under the path that rank 0 has opened.
    #[error(
        "{} is not the checkpoint that rank 0 opened: here the manifest has checksum {found:08x}, on rank 0 {expected}; \
         give all hosts the same copy",
        path.display()
    )]
    OtherCheckpoint {
        path: PathBuf,
        found: u32,
        /// Checksum of the manifest on rank 0, as hexadecimal text.
        expected: String,
    },
    /// Another rank cannot use the checkpoint, for a reason other than damage.
    #[error("{} cannot be used on rank {rank}: {reason}", path.display())]
    UnusableElsewhere { path: PathBuf, rank: Rank, reason: String },
    #[error("{} has format version {found}; this program reads version {known}", path.display())]
    FormatVersion { path: PathBuf, found: u64, known: u64 },
    #[error("tensor '{name}' is not stored in {}", path.display())]
    NoSuchTensor { name: String, path: PathBuf },
    #[error("{extent:?} is not within tensor '{name}' of shape {shape:?}")]
    OutsideTensor { name: String, shape: Vec<usize>, extent: Extent },
    #[error("tensor '{name}' has {expected} bytes, but the buffer has {found}")]
    WrongLength { name: String, expected: usize, found: usize },
    #[error("cannot fetch tensor '{name}' from its location")]
    Source { name: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("tensor '{name}' is stored as {dtype}, which cannot be read; convert it to F32, F16 or BF16")]
    UnreadableDType { name: String, dtype: StoredDType },
    #[error(
        "tensor '{name}' has the value {value}, which {dtype} cannot represent; export it in another dtype, such as bf16 or f32"
    )]
    Unrepresentable { name: String, value: f64, dtype: DType },
    #[error(
        "the weights in {} are quantized (quantization_config with quant_method {method}; '{name}' is stored as {dtype}), which is not \
         supported; dequantize them first (in Python: AutoModelForCausalLM.from_pretrained(folder), dequantize(), \
         save_pretrained(another_folder))",
        path.display()
    )]
    Quantized {
        path: PathBuf,
        method: String,
        /// The first tensor that is not stored as floating-point numbers of 16 bits or more.
        name: String,
        dtype: StoredDType,
    },
    /// The stored tensors are not the expected ones. Lists every difference.
    #[error("{} does not contain the expected tensors{}:{}", path.display(), prefix_hint(mismatches), list(mismatches))]
    Mismatches { path: PathBuf, mismatches: Vec<Mismatch> },
    #[error("tensors '{first}' and '{second}' both map to '{name}'")]
    SameName { name: String, first: String, second: String },
    #[error("'{name}' is not a valid tensor name in a checkpoint: {reason}")]
    TensorName { name: String, reason: &'static str },
    #[error(
        "'{name}' is not a valid file name in a checkpoint; use a plain name that the checkpoint does not use itself"
    )]
    FileName { name: String },
    #[error("cannot save a tensor")]
    Placement(#[from] PlacementError),
    #[error("a mesh of {mesh} ranks does not match a group of {group}")]
    MeshSize { mesh: usize, group: usize },
    /// The state or the parts are too large for a manifest.
    #[error(
        "the checkpoint's manifest would have {bytes} bytes, more than {bytes_max}; store large state in tensors"
    )]
    ManifestTooLarge { bytes: usize, bytes_max: u64 },
    #[error(
        "cannot save step {step}: {} is complete and not older; resume from it, move it away, or use another folder",
        existing.display()
    )]
    NotNewer { step: u64, existing: PathBuf },
    #[error(
        "rank {rank} does not save the same step, mesh and tensors as rank 0; all ranks must call save together"
    )]
    RanksDisagree { rank: Rank },
    /// This rank's part of a save failed; earlier checkpoints are untouched.
    #[error("the checkpoint of step {step} was not saved: it failed on this rank, {rank}")]
    SaveFailedHere { step: u64, rank: Rank, source: Box<CheckpointError> },
    /// Another rank's part of a save failed; earlier checkpoints are untouched.
    #[error("the checkpoint of step {step} was not saved: it failed on rank {rank}: {reason}")]
    SaveFailedElsewhere { step: u64, rank: Rank, reason: String, is_out_of_space: bool },
    /// The ranks could not exchange the result of a save. The checkpoint is either complete, and found when the run resumes, or absent.
    #[error(
        "whether the checkpoint of step {step} was saved is not known: the ranks could not exchange their results"
    )]
    Exchange { step: u64, source: CommError },
    #[error("{} is not empty; choose another folder, or pass --force to replace it", path.display())]
    TargetExists { path: PathBuf },
    #[error("{} is inside the run or checkpoint {}; choose a folder outside of it", path.display(), run.display())]
    TargetInRun { path: PathBuf, run: PathBuf },
    #[error(
        "{} was not replaced: it contains {}, which no export writes; choose another folder, or remove this one \
         yourself",
        path.display(),
        foreign.display()
    )]
    TargetIsNotExport { path: PathBuf, foreign: PathBuf },
}

impl CheckpointError {
    /// Returns whether a checkpoint differs from what was written, so that an older one may be intact. Missing permission to read a folder
    /// is not damage, and neither is a newer version of the format.
    pub fn is_damage(&self) -> bool {
        match self {
            CheckpointError::Damaged { .. }
            | CheckpointError::DamagedElsewhere { .. }
            | CheckpointError::NothingToOpen { .. } => true,
            CheckpointError::Read { source, .. } => {
                matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof)
                    || source.raw_os_error() == Some(EIO)
            }
            _ => false,
        }
    }

    /// Returns whether a disk is full or a quota is used up. The same write may succeed later.
    pub fn is_out_of_space(&self) -> bool {
        match self {
            CheckpointError::Write { source, .. } | CheckpointError::Rename { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
            ),
            CheckpointError::SaveFailedHere { source, .. } => source.is_out_of_space(),
            CheckpointError::SaveFailedElsewhere { is_out_of_space, .. } => *is_out_of_space,
            _ => false,
        }
    }
}

/// The system's error number for an unreadable sector, for which [`io::ErrorKind`] has no name.
const EIO: i32 = 5;

/// A difference between the stored tensors and the expected tensors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum Mismatch {
    #[error("missing: '{name}' of shape {shape:?}")]
    Missing { name: String, shape: Vec<usize> },
    /// The tensor is stored, but not expected.
    #[error("unexpected: '{name}' of shape {shape:?}")]
    Extra { name: String, shape: Vec<usize> },
    #[error("'{name}' has shape {stored:?}, expected {expected:?}")]
    Shape { name: String, expected: Vec<usize>, stored: Vec<usize> },
    #[error("'{name}' is stored as {stored}, which cannot be read as {expected}")]
    DType { name: String, expected: DType, stored: StoredDType },
}

const LISTED_MAX: usize = 20;

fn list(mismatches: &[Mismatch]) -> String {
    let mut text: String =
        mismatches.iter().take(LISTED_MAX).map(|mismatch| format!("\n  {mismatch}")).collect();
    if mismatches.len() > LISTED_MAX {
        text += &format!("\n  and {} more", mismatches.len() - LISTED_MAX);
    }
    text
}

/// Returns a hint with the prefix of the stored names, if removing a prefix from an unexpected name gives a missing name.
fn prefix_hint(mismatches: &[Mismatch]) -> String {
    let missing: BTreeSet<&str> = mismatches
        .iter()
        .filter_map(|mismatch| match mismatch {
            Mismatch::Missing { name, .. } => Some(&name[..]),
            _ => None,
        })
        .collect();
    let prefix = |name: &str| {
        let ends = name.match_indices('.').map(|(index, _)| index + 1);
        ends.into_iter().find(|&end| missing.contains(&name[end..])).map(|end| name[..end].to_owned())
    };
    let found = mismatches.iter().find_map(|mismatch| match mismatch {
        Mismatch::Extra { name, .. } => prefix(name),
        _ => None,
    });
    found.map_or_else(String::new, |prefix| {
        format!("; the names stored begin with '{prefix}', so store the tensors without that prefix")
    })
}

/// Returns a hint that names the first few folders in the parent of a missing folder.
fn sibling_folders_hint(missing: &Path) -> String {
    const NUM_SHOWN_MAX: usize = 5;
    let Some(parent) = missing.parent().filter(|parent| !parent.as_os_str().is_empty()) else {
        return String::new();
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> =
        folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names.truncate(NUM_SHOWN_MAX);
    if names.is_empty() {
        String::new()
    } else {
        format!("; in {} there is {}", parent.display(), names.join(", "))
    }
}
