//! Checkpoints that any parallel layout can load, and Hugging Face model directories. Saves sharded tensors to safetensors files and reads
//! any extent of any tensor.
//!
//! A checkpoint is a folder `step-N`. It contains safetensors files with parts of tensors, and a manifest, `checkpoint.json`, that records
//! the file of each part and a checksum of all contents. The manifest describes boxes within full tensors, not ranks, so any layout can
//! load a checkpoint that any other layout saved.
//!
//! - [`plan_save`] decides which rank writes which part, such that each element is written once. It is a pure function.
//! - [`save`] executes that plan on every rank of a group and publishes the folder. A crash at any moment leaves the last complete
//!   checkpoint in place.
//! - [`Checkpoint`] opens such a folder and [`HuggingFaceDirectory`] a model directory. Both provide [`StoredTensors`], which reads any
//!   extent of any tensor. [`ModelSource`] opens either, depending on what a path contains.
//! - [`export()`] writes a Hugging Face model directory.
//!
//! # The folder
//! ```text
//! checkpoints/
//!   latest                       "step-40", for people and other programs
//!   best                         "step-20", the checkpoint with the lowest validation loss, if one was marked
//!   step-40/
//!     checkpoint.json            the manifest
//!     shard-00000.safetensors    the parts that rank 0 wrote
//!     shard-00001.safetensors    the parts that rank 1 wrote
//!     config.toml, config.json   small files given to save
//!   step-50.partial-3fa94c01/    an unfinished save, interrupted by a crash; the next save or resume removes it
//!   step-40.damaged-90c1f2e7/    a checkpoint that could not be read back; nothing removes it
//! ```
//! In a shard, a full tensor has its own name. A part has a name such as `name@8,0` if it begins at index 8 of dim 0 and index 0 of dim 1.
//!
//! The manifest is one JSON object with the members `format`, `format_version`, `step`, `state` (given by the caller), `tensors` (each with
//! `dtype`, `shape` and `parts`; a part has a `file`, an `extent` and the `crc32` of its bytes), `files` (each with `size` and `crc32`),
//! and last `crc32`, which covers all of the manifest's text before that member.

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian and their bytes are used as they are");

mod checkpoint;
mod cleanup;
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
mod verification;

pub use checkpoint::Checkpoint;
pub use cleanup::{clean_up, mark_best};
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

/// Prefix of the names of optimizer state, as in `optimizer.exp_avg.<parameter>`. Tensors of a checkpoint without this prefix are the
/// model's weights.
pub const OPTIMIZER_PREFIX: &str = "optimizer.";

/// Name of the file in a model directory or checkpoint that describes the model.
pub const CONFIG_FILE: &str = "config.json";
