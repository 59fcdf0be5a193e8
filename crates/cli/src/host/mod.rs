//! The host of a worker: the limits of its control groups, its memory and its CPUs, and each worker's share of them.

mod control_groups;
mod cpu_limit;
mod memory_limit;
mod share;

pub(crate) use cpu_limit::CpuLimit;
pub(crate) use memory_limit::{MemoryLimit, Pages, SharedLimit};
pub(crate) use share::{HostShare, load_average};
