//! Checkpoints: names and placements in, files out.
//!
//! A checkpoint is a folder `step-N`: safetensors files with parts of tensors, and a manifest,
//! `checkpoint.json`, that says which part lies where, with a checksum of everything. Since the manifest
//! speaks of boxes within whole tensors and not of ranks, any layout reads what any layout wrote.
//!
//! - [`plan_save`] decides, purely, which rank writes which part: each element once.
//! - [`save`] executes that on every rank of a group and publishes the folder; a crash at any moment leaves
//!   the last complete checkpoint in place.
//! - [`Checkpoint`] opens such a folder, [`HuggingFaceDirectory`] a model directory; both give
//!   [`StoredTensors`], which reads any extent of any tensor. [`ModelSource`] opens whichever a path holds.
//! - [`export()`] writes a Hugging Face model directory.
//!
//! # The folder
//! ```text
//! checkpoints/
//!   latest                       "step-40", for people and other programs
//!   best                         "step-20", the lowest validation loss, if one was named
//!   step-40/
//!     checkpoint.json            the manifest
//!     shard-00000.safetensors    what rank 0 wrote; its tensors are called `name`, or `name@8,0` for a part
//!     shard-00001.safetensors      that begins at index 8 of dim 0 and 0 of dim 1
//!     config.toml, config.json   small files given to save
//!   step-50.partial-3fa94c01/    a save that a crash has cut short; the next save or resume removes it
//!   step-40.damaged-90c1f2e7/    a checkpoint that could not be read back; nothing removes it
//! ```
//! The manifest is one JSON object: `format`, `format_version`, `step`, `state` (the caller's), `tensors` (each
//! with `dtype`, `shape` and `parts`, a part being a `file`, an `extent` and the `crc32` of its bytes), `files`
//! (each with `size` and `crc32`), and last `crc32`, of all of the manifest's text before that member.

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian and their bytes are used as they are");

mod checkpoint;
mod error;
mod export;
mod extent;
mod files;
mod folder;
#[cfg(feature = "hub")]
mod hub;
mod hub_cache;
mod hugging_face;
mod manifest;
mod model_files;
mod model_source;
mod publication;
mod safetensors_file;
mod save;
mod save_plan;
mod stored;
mod tidying;
mod verification;

pub use checkpoint::Checkpoint;
pub use error::{CheckpointError, Mismatch};
pub use export::{ModelExport, SHARD_BYTES_MAX, export};
pub use files::ExtraFile;
pub use folder::{SkippedCheckpoint, best_step, find_latest, list_checkpoints, open_newest, set_aside};
pub use hub_cache::resolve_model;
pub use hugging_face::HuggingFaceDirectory;
pub use model_source::{CHECKPOINTS_FOLDER, ModelSource, checkpoints_folder};
pub use safetensors::Dtype as StoredDType;
pub use save::{InMemory, Saved, Snapshot, TensorSource, WriteBytes, save};
pub use save_plan::{PART_BYTES_MAX, WritePart, plan_save};
pub use stored::{StoredTensor, StoredTensors};
pub use tidying::{mark_best, tidy};

/// What the names of optimizer state begin with, as in `optimizer.exp_avg.<parameter>`; tensors of a
/// checkpoint without it are the model's weights.
pub const OPTIMIZER_PREFIX: &str = "optimizer.";

/// The file of a model directory or checkpoint that describes the model.
pub const CONFIG_FILE: &str = "config.json";
