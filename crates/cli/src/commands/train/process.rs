//! Facts about this process that the modules of `trireme train` share.

use crate::host::HostShare;
use crate::planning::{ConfigSource, Workers};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;
use trireme_comm::Group;
use trireme_tensor::SimdLevel;
use trireme_train::Task;
use trireme_train::config::Config;

#[derive(Clone, Copy)]
pub(super) struct ProcessContext<'a> {
    pub(super) source: ConfigSource<'a>,
    /// This worker's share of its host.
    pub(super) share: &'a HostShare,
    pub(super) started: Instant,
    /// Rank of this worker among the workers of its host, if a launcher has started it.
    pub(super) local_rank: Option<usize>,
    /// The SIMD level of this process's kernels.
    pub(super) simd_level: SimdLevel,
    /// The task that the program trains; `None` for a language model.
    pub(super) custom_task: Option<&'a Arc<dyn Task>>,
}

impl<'a> ProcessContext<'a> {
    pub(super) fn workers(&self, config: &Config, group: &Group) -> Workers<'a> {
        Workers::of(config, group, self.share, self.simd_level)
    }
}

pub(super) fn log_folder(config: &Config) -> PathBuf {
    config.run_folder().join("logs")
}
