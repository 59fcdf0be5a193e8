//! Writing a Hugging Face model directory.

use crate::CONFIG_FILE;
use crate::error::CheckpointError;
use crate::extent::split;
use crate::files::{ExtraFile, FileStep, damaged, is_plain_name, parent_of, partial_suffix, reading};
use crate::folder::list_checkpoints;
use crate::hugging_face::{INDEX_FILE, MODEL_FILE, MODEL_FILES, ShardIndex};
use crate::manifest::MANIFEST_FILE;
use crate::model_source::CHECKPOINTS_FOLDER;
use crate::safetensors_file::SafetensorsWriter;
use crate::save_plan::PART_BYTES_MAX;
use crate::stored::{StoredTensor, StoredTensors};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use trireme_base::DType;
use trireme_plan::Extent;

/// Bytes of a model file unless said otherwise.
pub const SHARD_BYTES_MAX: u64 = 5 << 30;

/// A model to write as a Hugging Face directory.
#[derive(Debug, Clone, Copy)]
pub struct ModelExport<'a> {
    /// The weights under their Hugging Face names.
    pub tensors: &'a StoredTensors,
    /// Notes in the files with the weights, beside the tensors.
    pub notes: &'a [(&'a str, &'a str)],
    /// `config.json` and whatever else describes the model or its tokenizer.
    pub files: &'a [ExtraFile<'a>],
    /// A model of more bytes is written in several files with an index; no file exceeds this unless a
    /// single tensor does.
    pub shard_bytes_max: u64,
    /// Whether an export already there is replaced.
    pub force: bool,
}

/// Writes a model directory to `out`, aside first, then renamed: it appears complete or not at all.
///
/// Tensors are written in the dtype they are read in (f32 for F16 and BF16); a `config.json` that states
/// another one is corrected. Memory: at most 64 MiB of a tensor at a time.
///
/// # Errors
/// `out` lies in a run or a checkpoint; it is not empty and not to be replaced, or to be replaced but holds what no export
/// writes; tensors of a dtype
/// that cannot be read; reading and writing.
pub fn export(model: &ModelExport<'_>, out: &Path) -> Result<(), CheckpointError> {
    check_target(out, model.force)?;
    let out = &without_trailing_separator(out);
    let aside = with_partial_suffix(out);
    let result = write_aside(model, &aside).and_then(|()| publish(&aside, out, model.force));
    if result.is_err() {
        // Best effort: the error to report is the first one.
        let _ = fs::remove_dir_all(&aside);
    }
    result
}

fn check_target(out: &Path, force: bool) -> Result<(), CheckpointError> {
    if let Some(run) = run_around(out).map_err(reading(out))? {
        return Err(CheckpointError::TargetInRun { path: out.to_owned(), run });
    }
    let entries = match fs::read_dir(out) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(reading(out))?,
    };
    let mut foreign = None;
    let mut is_empty = true;
    for entry in entries {
        let entry = entry.map_err(reading(out))?;
        is_empty = false;
        let is_file = entry.file_type().map_err(reading(out))?.is_file();
        if !(is_file && entry.file_name().to_str().is_some_and(is_export_file)) {
            foreign = Some(entry.path());
        }
    }
    let path = out.to_owned();
    match (is_empty, force, foreign) {
        (true, ..) => Ok(()),
        (false, false, _) => Err(CheckpointError::TargetExists { path }),
        (false, true, Some(foreign)) => Err(CheckpointError::TargetIsNoExport { path, foreign }),
        (false, true, None) => Ok(()),
    }
}

/// The checkpoint or the run's folder that `out` is or lies in, if there is one.
fn run_around(out: &Path) -> io::Result<Option<PathBuf>> {
    // The name of `out` may not be there yet, and links above it may lead into a run.
    let there = out.ancestors().find(|folder| folder.exists());
    let there = there.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let there = fs::canonicalize(there)?;
    let is_of_run = |folder: &&Path| {
        folder.join(MANIFEST_FILE).is_file()
            || [CHECKPOINTS_FOLDER, "."].iter().any(|name| holds_checkpoint(&folder.join(name)))
    };
    Ok(there.ancestors().find(is_of_run).map(Path::to_owned))
}

fn holds_checkpoint(folder: &Path) -> bool {
    let checkpoints = list_checkpoints(folder).unwrap_or_default();
    checkpoints.iter().any(|(_, path)| path.join(MANIFEST_FILE).is_file())
}

/// Whether an export may write a file of this name.
fn is_export_file(name: &str) -> bool {
    let is_shard = || {
        let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
        numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(number, count)| {
            [number, count]
                .iter()
                .all(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
        })
    };
    MODEL_FILES.contains(&name) || [MODEL_FILE, INDEX_FILE].contains(&name) || is_shard()
}

/// A name for a sibling: `out/` and `out` are the same folder.
fn without_trailing_separator(path: &Path) -> PathBuf {
    path.components().collect()
}

fn with_partial_suffix(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(partial_suffix());
    name.into()
}

fn write_aside(model: &ModelExport<'_>, aside: &Path) -> Result<(), CheckpointError> {
    let shards = shards(model.tensors, model.shard_bytes_max)?;
    FileStep::CreateFolder(aside.to_owned()).execute()?;
    for file in model.files {
        if !is_plain_name(file.name) {
            return Err(CheckpointError::FileName { name: file.name.to_owned() });
        }
        let path = aside.join(file.name);
        let contents =
            if file.name == CONFIG_FILE { with_dtype(file.contents, &path)? } else { file.contents.to_vec() };
        FileStep::WriteFile { path, contents }.execute()?;
    }
    for (number, shard) in shards.iter().enumerate() {
        write_shard(model, shard, &aside.join(shard_name(number, shards.len())))?;
    }
    if shards.len() > 1 {
        let contents = serde_json::to_vec_pretty(&index(&shards)).expect("an index is JSON");
        FileStep::WriteFile { path: aside.join(INDEX_FILE), contents }.execute()?;
    }
    FileStep::SyncFolder(aside.to_owned()).execute()
}

/// Gives the folder its name. With `force`, an export of that name gives way first, and is removed last.
fn publish(aside: &Path, out: &Path, force: bool) -> Result<(), CheckpointError> {
    // Once more: writing may have taken long, and what appeared meanwhile is not ours to remove.
    check_target(out, force)?;
    let rename =
        |from: &Path, to: &Path| FileStep::Rename { from: from.to_owned(), to: to.to_owned() }.execute();
    let sync = FileStep::SyncFolder(parent_of(out).to_owned());
    let holds_anything = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    if !(force && holds_anything) {
        // The new folder may take the name of an empty one, but of no other: that would be an error.
        rename(aside, out)?;
        return sync.execute();
    }
    let replaced = with_partial_suffix(out);
    rename(out, &replaced)?;
    if let Err(error) = rename(aside, out) {
        rename(&replaced, out)?;
        return Err(error);
    }
    sync.execute()?;
    FileStep::Remove(replaced).execute()
}

/// A tensor to write, in the dtype it is read in.
struct Exported<'a> {
    name: &'a str,
    tensor: &'a StoredTensor,
    dtype: DType,
    bytes: u64,
}

/// Fills files with tensors in the order of their names. A model without tensors is one empty file.
fn shards(tensors: &StoredTensors, shard_bytes_max: u64) -> Result<Vec<Vec<Exported<'_>>>, CheckpointError> {
    let mut shards = vec![Vec::new()];
    let mut shard_bytes = 0;
    for (name, tensor) in tensors.iter() {
        let Some(dtype) = tensor.dtype() else {
            let (name, dtype) = (name.to_owned(), tensor.stored_dtype());
            return Err(CheckpointError::UnreadableDType { name, dtype });
        };
        let bytes = (Extent::whole(tensor.shape()).num_elements() * dtype.size()) as u64;
        if shard_bytes > 0 && shard_bytes + bytes > shard_bytes_max {
            shards.push(Vec::new());
            shard_bytes = 0;
        }
        shard_bytes += bytes;
        shards.last_mut().expect("there is a first shard").push(Exported { name, tensor, dtype, bytes });
    }
    Ok(shards)
}

fn shard_name(number: usize, num_shards: usize) -> String {
    match num_shards {
        1 => MODEL_FILE.to_owned(),
        _ => format!("model-{:05}-of-{num_shards:05}.safetensors", number + 1),
    }
}

fn write_shard(model: &ModelExport<'_>, shard: &[Exported<'_>], path: &Path) -> Result<(), CheckpointError> {
    let described =
        shard.iter().map(|exported| (exported.name.to_owned(), exported.dtype, exported.tensor.shape()));
    let mut writer = SafetensorsWriter::create(path, described, model.notes)?;
    let mut buffer = Vec::new();
    for Exported { name, tensor, dtype, .. } in shard {
        let elements_max = PART_BYTES_MAX as usize / dtype.size();
        for piece in split(&Extent::whole(tensor.shape()), elements_max) {
            buffer.resize(piece.num_elements() * dtype.size(), 0);
            model.tensors.read_into(name, &piece, &mut buffer)?;
            writer.write(&buffer)?;
        }
    }
    writer.finish().map(|_| ())
}

fn index(shards: &[Vec<Exported<'_>>]) -> ShardIndex {
    let total_size: u64 = shards.iter().flatten().map(|exported| exported.bytes).sum();
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let file = shard_name(number, shards.len());
        weight_map.extend(shard.iter().map(|exported| (exported.name.to_owned(), file.clone())));
    }
    ShardIndex { metadata: serde_json::json!({ "total_size": total_size }), weight_map }
}

/// The model's config, stating float32 where it states any dtype.
fn with_dtype(config_json: &[u8], path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let mut config: serde_json::Value = serde_json::from_slice(config_json)
        .map_err(|error| damaged(path, format!("the model's config is invalid: {error}")))?;
    let mut corrected = false;
    for key in ["torch_dtype", "dtype"] {
        if let Some(dtype) = config.get_mut(key).filter(|dtype| **dtype != "float32") {
            *dtype = "float32".into();
            corrected = true;
        }
    }
    // Unless something must change, the file stays as it is to the byte.
    Ok(if corrected {
        serde_json::to_vec_pretty(&config).expect("a config is JSON")
    } else {
        config_json.to_vec()
    })
}
