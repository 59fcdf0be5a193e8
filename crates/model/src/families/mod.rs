//! Families of models, one file each.
//!
//! A family's file reads and writes its Hugging Face `config.json`, and builds units with the names and layouts of its checkpoints.

mod config_json;
mod decoder;
mod deepseek_v3;
mod gemma2;
mod gpt2;
mod layers;
mod llama;
mod mistral;
mod mixtral;
mod names;
mod qwen2;
mod qwen3;
mod qwen3_moe;

pub use names::{canonical_names, tied_names};

use crate::config::Family;

const FAMILIES: &[Family] = &[
    gpt2::FAMILY,
    llama::FAMILY,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    gemma2::FAMILY,
    mixtral::FAMILY,
    qwen3_moe::FAMILY,
    deepseek_v3::FAMILY,
];
