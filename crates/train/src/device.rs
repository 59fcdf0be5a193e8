//! The device that a worker computes on.

use crate::config::{Config, DeviceName, HugePages};
use crate::error::TrainError;
use rustix::thread::disable_transparent_huge_pages;
use std::num::NonZeroUsize;
use std::sync::Arc;
use trireme_parallel::Spill;
use trireme_tensor::{
    BackendKind, CpuFeatures, DetachedOptions, Device, DeviceOptions, Overflow, PageSource,
};

/// How a worker with so many threads opens its device.
pub fn device_options(config: &Config, num_threads: usize) -> DeviceOptions {
    let budget = config.memory().device_budget.0.map(|bytes| bytes.0 as usize);
    let backend = match config.training().device {
        DeviceName::Cpu => BackendKind::Cpu,
        DeviceName::Detached => {
            BackendKind::Detached(DetachedOptions { seed: config.training().seed, ignored_wait: None })
        }
    };
    let page_source = match config.memory().huge_pages {
        HugePages::Reserved => PageSource::Reserved,
        HugePages::Transparent | HugePages::Never => PageSource::Transparent,
    };
    DeviceOptions { num_threads, budget, backend, page_source, ..DeviceOptions::default() }
}

/// Opens it. With `huge_pages = "never"`, the whole process has none from now on.
pub(crate) fn open_device(
    config: &Config,
    num_threads: usize,
    features_max: Option<CpuFeatures>,
) -> Result<Device, TrainError> {
    if config.memory().huge_pages == HugePages::Never {
        disable_transparent_huge_pages(true).map_err(|error| TrainError::HugePages(error.into()))?;
    }
    Ok(Device::open(DeviceOptions { features_max, ..device_options(config, num_threads) })?)
}

/// Lets activations of uneven loads spill, if the config and the device allow it. Activations leave `reserved` bytes of the budget free.
pub(crate) fn spill(config: &Config, device: &Device, reserved: usize) -> Option<Arc<Spill>> {
    if !config.may_spill() || !device.reaches_host() {
        return None;
    }
    let spill = Arc::new(Spill::new(config.offload().folder.clone()));
    device.overflow_to(Arc::clone(&spill) as Arc<dyn Overflow>, reserved);
    Some(spill)
}

/// An equal share of this host's cores for each of `local_world_size` workers, at least one.
pub fn share_of_cores(local_world_size: usize) -> usize {
    (std::thread::available_parallelism().map_or(1, NonZeroUsize::get) / local_world_size.max(1)).max(1)
}

/// Threads of a worker: as the config says, or its `share` of the cores.
pub fn local_threads(config: &Config, share: usize) -> usize {
    match config.training().threads {
        0 => share,
        threads => threads,
    }
}
