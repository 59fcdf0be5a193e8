//! One file a command, and the options that several have.

pub(crate) mod bench;
pub(crate) mod checkpoint;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod costs;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod flight_recorder;
pub(crate) mod generate;
pub(crate) mod init;
pub(crate) mod plan;
pub(crate) mod prepare;
pub(crate) mod prove_kernels;
pub(crate) mod report;
pub(crate) mod train;
