//! Training runs, from the config to the checkpoint.

mod common;
mod compression;
mod fp8;
mod offload_faults;
mod offload_memory;
mod optimizers;
mod padding;
mod resume;
mod skipped_steps;
mod validations;
