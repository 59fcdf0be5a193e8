//! Export of Hugging Face model directories.

use crate::error::CheckpointError;
use crate::extent::split;
use crate::files::{ExtraFile, FileOperation, damaged, is_plain_name, parent_of, partial_suffix, reading};
use crate::folder::list_checkpoints;
use crate::manifest::MANIFEST_FILE;
use crate::model_files::{INDEX_FILE, MODEL_FILE, MODEL_FILES, ShardIndex};
use crate::model_source::CHECKPOINTS_FOLDER;
use crate::safetensors_file::SafetensorsWriter;
use crate::save_plan::PART_BYTES_MAX;
use crate::stored::{QUANTIZATION_KEY, StoredTensor, StoredTensors};
use crate::{CONFIG_FILE, StoredDType};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use trireme_base::{Bf16, DType, F16, json_text, parse_json};
use trireme_plan::Extent;

/// Default maximum size of a weight file in bytes.
pub const SHARD_BYTES_MAX: u64 = 5 << 30;

/// A model to write as a Hugging Face directory.
#[derive(Debug, Clone, Copy)]
pub struct ModelExport<'a> {
    /// The weights under their Hugging Face names.
    pub tensors: &'a StoredTensors,
    /// Notes in the metadata of the weight files: names and values.
    pub notes: &'a [(&'a str, &'a str)],
    /// `config.json` and the other files that describe the model or its tokenizer.
    pub files: &'a [ExtraFile<'a>],
    /// The floating-point dtype that floating-point tensors are written in. `None` keeps the stored dtype of each.
    pub dtype: Option<DType>,
    /// Maximum number of tensor bytes in a weight file. A larger model is written to several files with an index. A file exceeds the
    /// maximum only if it contains a single larger tensor.
    pub shard_bytes_max: u64,
    /// Whether to replace an existing export.
    pub force: bool,
}

/// Writes a model directory to `out`. The files are first written to another folder, which is then renamed, so `out` appears complete or
/// not at all.
///
/// The `dtype` in `config.json` becomes the dtype of most elements, and `quantization_config` is removed.
/// Memory: at most 64 MiB of a tensor at a time, and as much for its conversion.
///
/// # Errors
/// If `out` is in a run or a checkpoint; if it is not empty and `force` is false, or contains a file that no export writes; if weights are
/// quantized, or have a dtype that cannot be read; if the dtype to write cannot represent a value; if reading or writing fails.
pub fn export(model: &ModelExport<'_>, out: &Path) -> Result<(), CheckpointError> {
    check_target(out, model.force)?;
    // Removes a trailing separator, because a suffix is appended to the path below: `out/` and `out` are the same folder.
    let out = &out.components().collect::<PathBuf>();
    let partial = with_partial_suffix(out);
    let result = write_partial(model, &partial).and_then(|()| publish(&partial, out, model.force));
    if result.is_err() {
        // Best effort: the error to report is the first one.
        let _ = fs::remove_dir_all(&partial);
    }
    result
}

fn check_target(out: &Path, force: bool) -> Result<(), CheckpointError> {
    if let Some(run) = enclosing_run(out).map_err(reading(out))? {
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
        (false, true, Some(foreign)) => Err(CheckpointError::TargetIsNotExport { path, foreign }),
        (false, true, None) => Ok(()),
    }
}

/// Returns the checkpoint or the run's folder that is `out` or contains it, if there is one.
fn enclosing_run(out: &Path) -> io::Result<Option<PathBuf>> {
    // `out` may not exist yet, and links above it may lead into a run.
    let existing_ancestor = out.ancestors().find(|folder| folder.exists());
    let existing_ancestor =
        existing_ancestor.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let existing_ancestor = fs::canonicalize(existing_ancestor)?;
    let is_of_run = |folder: &&Path| {
        folder.join(MANIFEST_FILE).is_file()
            || [CHECKPOINTS_FOLDER, "."].iter().any(|name| holds_checkpoint(&folder.join(name)))
    };
    Ok(existing_ancestor.ancestors().find(is_of_run).map(Path::to_owned))
}

fn holds_checkpoint(folder: &Path) -> bool {
    let checkpoints = list_checkpoints(folder).unwrap_or_default();
    checkpoints.iter().any(|(_, path)| path.join(MANIFEST_FILE).is_file())
}

/// Returns whether an export may write a file of this name.
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

fn with_partial_suffix(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(partial_suffix());
    name.into()
}

fn write_partial(model: &ModelExport<'_>, partial: &Path) -> Result<(), CheckpointError> {
    let config = model.files.iter().find(|file| file.name == CONFIG_FILE);
    let config = config.map(|file| read_config(file.contents, &partial.join(CONFIG_FILE))).transpose()?;
    if let Some(config) = &config {
        model.tensors.check_quantization(config)?;
    }
    let shards = shards(model)?;
    FileOperation::CreateFolder(partial.to_owned()).execute()?;
    for file in model.files {
        if !is_plain_name(file.name) {
            return Err(CheckpointError::FileName { name: file.name.to_owned() });
        }
        let path = partial.join(file.name);
        let contents = match &config {
            Some(config) if file.name == CONFIG_FILE => config_of(file.contents, config, &shards),
            _ => file.contents.to_vec(),
        };
        FileOperation::WriteFile { path, contents }.execute()?;
    }
    for (number, shard) in shards.iter().enumerate() {
        write_shard(model, shard, &partial.join(shard_name(number, shards.len())))?;
    }
    if shards.len() > 1 {
        let contents = serde_json::to_vec_pretty(&index(&shards)).expect("an index is JSON");
        FileOperation::WriteFile { path: partial.join(INDEX_FILE), contents }.execute()?;
    }
    FileOperation::SyncFolder(partial.to_owned()).execute()
}

/// Renames the folder `partial` to `out`. With `force`, an existing export is renamed first and removed at the end.
fn publish(partial: &Path, out: &Path, force: bool) -> Result<(), CheckpointError> {
    // Checked again, because writing may have taken long: files that appeared since then must not be removed.
    check_target(out, force)?;
    let rename =
        |from: &Path, to: &Path| FileOperation::Rename { from: from.to_owned(), to: to.to_owned() }.execute();
    let sync = FileOperation::SyncFolder(parent_of(out).to_owned());
    let holds_anything = fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    if !(force && holds_anything) {
        // The rename replaces an empty folder, and fails if the folder is not empty.
        rename(partial, out)?;
        return sync.execute();
    }
    let replaced = with_partial_suffix(out);
    rename(out, &replaced)?;
    if let Err(error) = rename(partial, out) {
        rename(&replaced, out)?;
        return Err(error);
    }
    sync.execute()?;
    FileOperation::Remove(replaced).execute()
}

struct Exported<'a> {
    name: &'a str,
    tensor: &'a StoredTensor,
    read_dtype: DType,
    dtype: DType,
    bytes: u64,
}

/// Distributes tensors to files in the order of their names. A model without tensors is one empty file.
fn shards<'a>(model: &ModelExport<'a>) -> Result<Vec<Vec<Exported<'a>>>, CheckpointError> {
    model.tensors.check_index()?;
    let mut shards = vec![Vec::new()];
    let mut shard_bytes = 0;
    for (name, tensor) in model.tensors.iter() {
        let Some(read_dtype) = tensor.dtype() else {
            let (name, dtype) = (name.to_owned(), tensor.stored_dtype());
            return Err(CheckpointError::UnreadableDType { name, dtype });
        };
        let stored_dtype = match tensor.stored_dtype() {
            StoredDType::F16 => DType::F16,
            StoredDType::BF16 => DType::Bf16,
            _ => read_dtype,
        };
        let dtype = model.dtype.filter(|_| read_dtype.is_float()).unwrap_or(stored_dtype);
        let bytes = (Extent::full(tensor.shape()).num_elements() * dtype.size()) as u64;
        if shard_bytes > 0 && shard_bytes + bytes > model.shard_bytes_max {
            shards.push(Vec::new());
            shard_bytes = 0;
        }
        shard_bytes += bytes;
        let exported = Exported { name, tensor, read_dtype, dtype, bytes };
        shards.last_mut().expect("there is a first shard").push(exported);
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
    let (mut read, mut converted) = (Vec::new(), Vec::new());
    for &Exported { name, tensor, read_dtype, dtype, .. } in shard {
        let elements_max = PART_BYTES_MAX as usize / read_dtype.size();
        for piece in split(&Extent::full(tensor.shape()), elements_max) {
            read.resize(piece.num_elements() * read_dtype.size(), 0);
            model.tensors.read_into(name, &piece, &mut read)?;
            if dtype == read_dtype {
                writer.write(&read)?;
                continue;
            }
            converted.clear();
            convert(&read, read_dtype, dtype, &mut converted)
                .map_err(|value| CheckpointError::Unrepresentable { name: name.to_owned(), value, dtype })?;
            writer.write(&converted)?;
        }
    }
    writer.finish().map(|_| ())
}

/// Converts elements from one floating-point dtype (f32 or f64) to another, and appends them to `out`. The error is a finite element that
/// becomes infinite.
fn convert(elements: &[u8], from: DType, to: DType, out: &mut Vec<u8>) -> Result<(), f64> {
    for element in elements.chunks_exact(from.size()) {
        let value = match *element {
            [a, b, c, d] => f64::from(f32::from_le_bytes([a, b, c, d])),
            _ => f64::from_le_bytes(element.try_into().expect("elements are f32 or f64")),
        };
        let narrow = value as f32;
        let rounded = match to {
            DType::F16 => F16::from_f32(narrow).to_f32(),
            DType::Bf16 => Bf16::from_f32(narrow).to_f32(),
            _ => narrow,
        };
        if value.is_finite() && !rounded.is_finite() {
            return Err(value);
        }
        match to {
            DType::F16 => out.extend(F16::from_f32(narrow).to_bits().to_le_bytes()),
            DType::Bf16 => out.extend(Bf16::from_f32(narrow).to_bits().to_le_bytes()),
            DType::F64 => out.extend(value.to_le_bytes()),
            _ => out.extend(narrow.to_le_bytes()),
        }
    }
    Ok(())
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

fn read_config(config_json: &[u8], path: &Path) -> Result<Value, CheckpointError> {
    parse_json(config_json).map_err(|error| damaged(path, format!("the model's config is invalid: {error}")))
}

/// Returns the model's config for the written tensors: with the dtype of most elements, if it states a dtype, and without
/// `quantization_config`.
fn config_of(config_json: &[u8], config: &Value, shards: &[Vec<Exported<'_>>]) -> Vec<u8> {
    let mut config = config.clone();
    let mut is_corrected = config.as_object_mut().is_some_and(|map| map.remove(QUANTIZATION_KEY).is_some());
    let elements_of = |dtype: DType| {
        let written = shards.iter().flatten().filter(|exported| exported.dtype == dtype);
        written.map(|exported| exported.bytes / dtype.size() as u64).sum::<u64>()
    };
    let names = [
        (DType::F32, "float32"),
        (DType::Bf16, "bfloat16"),
        (DType::F16, "float16"),
        (DType::F64, "float64"),
    ];
    // If several dtypes have equally many elements, the first of them is taken.
    let (_, name) =
        names.into_iter().rev().max_by_key(|(dtype, _)| elements_of(*dtype)).expect("there are names");
    for key in ["torch_dtype", "dtype"] {
        if let Some(dtype) = config.get_mut(key).filter(|dtype| **dtype != name) {
            *dtype = name.into();
            is_corrected = true;
        }
    }
    // If nothing has to change, the file is copied byte for byte.
    if is_corrected { json_text(&config).into_bytes() } else { config_json.to_vec() }
}
