//! Runs executors on ranks that are threads: every layout has the same bits, or nearly the same values, as one rank.

mod asynchronous;
mod axes;
mod bf16_parameters;
mod common;
mod compression;
mod detached;
mod disk_faults;
mod early_updates;
mod expert_parallel;
mod experts;
mod families;
mod fp8;
mod fusion;
mod generation;
mod golden_experts;
mod hashes;
mod layouts;
mod loss_scaling;
mod momentum;
mod non_language_model;
mod pipeline;
mod reduce_dtype;
mod relocation;
mod sharding;
mod state_bytes;
mod zero_plus_plus;
