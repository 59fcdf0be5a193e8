//! The files of a Hugging Face model directory.

use crate::CONFIG_FILE;
use crate::error::CheckpointError;
use crate::files::{JSON_BYTES_MAX, damaged, read_bounded};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use trireme_base::parse_json;

pub(crate) const MODEL_FILE: &str = "model.safetensors";

pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Files of a model directory that describe the model or its tokenizer and are exported with the weights. They have the names that
/// transformers gives them, except `tokenizer.bytes.json`, which marks a model whose tokens are the bytes of the text.
pub(crate) const MODEL_FILES: [&str; 11] = [
    CONFIG_FILE,
    "tokenizer.json",
    "tokenizer.bytes.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
];

/// The index of a model whose weights are in several files.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ShardIndex {
    #[serde(default)]
    pub(crate) metadata: serde_json::Value,
    pub(crate) weight_map: BTreeMap<String, String>,
}

pub(crate) fn has_pickles(folder: &Path) -> bool {
    ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| folder.join(name).exists())
}

/// Returns the first weight file that a model directory lacks, in the order of names: a file that the index lists, or the single file.
/// `None` if all exist, or if the weights are PyTorch pickle files.
pub(crate) fn missing_weights(folder: &Path) -> Result<Option<String>, CheckpointError> {
    if folder.join(MODEL_FILE).is_file() {
        return Ok(None);
    }
    if folder.join(INDEX_FILE).is_file() {
        let files = read_index(folder)?.weight_map.into_values();
        return Ok(files.filter(|file| !folder.join(file).is_file()).min());
    }
    Ok((!has_pickles(folder)).then(|| MODEL_FILE.to_owned()))
}

pub(crate) fn read_index(folder: &Path) -> Result<ShardIndex, CheckpointError> {
    let path = folder.join(INDEX_FILE);
    parse_json(&read_bounded(&path, JSON_BYTES_MAX)?)
        .and_then(serde_json::from_value)
        .map_err(|error| damaged(&path, format!("it is invalid: {error}")))
}
