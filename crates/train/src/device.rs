//! The device that a worker computes on.

use crate::config::{self, Config, DeviceName};
use std::sync::Arc;
use trireme_parallel::Spill;
use trireme_tensor::{Backend, DetachedOptions, Device, DeviceOptions, HugePages, Overflow};

/// How a worker with so many threads opens its device.
pub fn device_options(config: &Config, num_threads: usize) -> DeviceOptions {
    let budget = config.memory().device_budget.0.map(|bytes| bytes.0 as usize);
    let backend = match config.training().device {
        DeviceName::Cpu => Backend::Cpu,
        DeviceName::Detached => {
            Backend::Detached(DetachedOptions { seed: config.training().seed, ignored_wait: None })
        }
    };
    let huge_pages = match config.memory().huge_pages {
        config::HugePages::Reserved => HugePages::Reserved,
        // A process that has turned them off is given none.
        config::HugePages::Transparent | config::HugePages::Never => HugePages::Transparent,
    };
    DeviceOptions { num_threads, budget, backend, huge_pages, ..DeviceOptions::default() }
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
