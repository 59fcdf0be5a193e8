//! The built command, run as its users run it: in a folder of its own, with real files and processes.

mod bad_config;
mod bad_text;
mod bad_weights;
mod common;
mod control_groups;
mod corpora;
mod damage;
mod deaths;
mod disagreement;
mod experts;
mod full_disk;
mod hangs;
mod hosts;
mod journey;
mod ladder;
mod measuring;
mod memory;
mod pipeline;
mod places;
mod process_limits;
mod simd;
mod strangers;
mod tensor;
mod traces;
