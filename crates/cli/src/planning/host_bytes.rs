//! Memory of all workers of a host, against the limits that they share.

use super::limits::{GAP_DIVISOR, PROCESS_BYTES, launcher_bytes};
use super::plan::Plan;
use super::planned_run::Workers;
use crate::host::{MemoryLimit, Pages, SharedLimit};
use trireme_base::MemoryUse;
use trireme_tensor::ParameterTable;
use trireme_train::config::{Config, DeviceName, HugePages};

/// Bytes of a process outside (`ordinary`) and inside (`reserved`) the host's pool of huge pages.
#[derive(Debug, Clone, Copy, Default)]
struct ProcessBytes {
    ordinary: usize,
    reserved: usize,
}

impl ProcessBytes {
    fn of(self, pages: Pages) -> usize {
        match pages {
            Pages::Ordinary => self.ordinary,
            Pages::Reserved => self.reserved,
        }
    }

    fn combine(self, other: Self, with: impl Fn(usize, usize) -> usize) -> Self {
        ProcessBytes {
            ordinary: with(self.ordinary, other.ordinary),
            reserved: with(self.reserved, other.reserved),
        }
    }

    // Sums and products saturate, so that sizes beyond any machine still exceed its limit.
    fn plus(self, other: Self) -> Self {
        self.combine(other, usize::saturating_add)
    }

    fn times(self, number: usize) -> Self {
        self.combine(ProcessBytes { ordinary: number, reserved: number }, usize::saturating_mul)
    }
}

/// Memory of the workers of a host, and the limits on it.
#[derive(Debug)]
pub(super) struct HostBytes {
    /// All workers of this host, and the process that starts them.
    sum: ProcessBytes,
    largest: ProcessBytes,
    /// Memory that the first worker needs in addition for the sample at the end.
    sampling: ProcessBytes,
    num_workers: usize,
    limits: Vec<SharedLimit>,
}

impl HostBytes {
    pub(super) fn of_launcher(workers: Workers<'_>) -> Self {
        HostBytes {
            sum: ProcessBytes { ordinary: launcher_bytes(workers), reserved: 0 },
            largest: ProcessBytes::default(),
            sampling: ProcessBytes::default(),
            num_workers: workers.local_world_size,
            limits: workers.limits.to_vec(),
        }
    }

    /// Adds `num_workers` workers with this plan.
    pub(super) fn add(&mut self, plan: &Plan, config: &Config, num_workers: usize) {
        if num_workers > 0 {
            let process = process_bytes(&plan.prediction, config);
            self.sum = self.sum.plus(process.times(num_workers));
            self.largest = self.largest.combine(process, usize::max);
            self.sampling = self.sampling.plus(sampling_bytes(plan, config));
        }
    }

    pub(super) fn limit(&self, index: usize) -> &MemoryLimit {
        &self.limits[index].limit
    }

    pub(super) fn num_sharing(&self, index: usize) -> usize {
        self.limits[index].num_sharing.unwrap_or(self.num_workers)
    }

    /// Returns the bytes that count against the limit. If workers of other hosts share it, each worker counts as the largest
    /// worker of this host.
    pub(super) fn taken(&self, index: usize) -> usize {
        let number = self.num_sharing(index);
        let processes = if number == self.num_workers { self.sum } else { self.largest.times(number) };
        processes.plus(self.sampling).of(self.limit(index).pages)
    }

    /// Returns the index of the limit that is used up the most.
    pub(super) fn most_used_limit(&self) -> usize {
        let part = |index: &usize| self.taken(*index) as f64 / self.limit(*index).bytes.max(1) as f64;
        let all = 0..self.limits.len();
        all.max_by(|a, b| part(a).total_cmp(&part(b))).expect("the machine is always a limit")
    }
}

/// Returns the memory on the worker's host: without memory of the device, if that is a GPU.
fn on_host(prediction: &MemoryUse, config: &Config) -> MemoryUse {
    match config.training().device {
        DeviceName::Cuda => MemoryUse { own: 0, own_between_steps: 0, ..*prediction },
        DeviceName::Auto | DeviceName::Cpu | DeviceName::Detached => *prediction,
    }
}

/// Returns the bytes of a process on its host, uncounted memory included.
fn process_bytes(prediction: &MemoryUse, config: &Config) -> ProcessBytes {
    let prediction = on_host(prediction, config);
    let own = prediction.on_machine();
    let counted = own.saturating_add(own / GAP_DIVISOR);
    match config.memory().huge_pages {
        HugePages::Transparent | HugePages::Never => {
            ProcessBytes { ordinary: counted.saturating_add(PROCESS_BYTES), reserved: 0 }
        }
        // Memory outside the device counts in the pool as well, because its part of the peak is not known.
        HugePages::Reserved => ProcessBytes {
            ordinary: prediction.outside_arena.saturating_add(PROCESS_BYTES),
            reserved: counted,
        },
    }
}

/// Returns the memory that the first worker needs in addition while it writes a sample after the last step. Next to its state it holds all
/// parameters, and the unit that is being gathered from all ranks of the tensor axis.
fn sampling_bytes(plan: &Plan, config: &Config) -> ProcessBytes {
    if config.generate().num_tokens == 0 || plan.rank != 0 {
        return ProcessBytes::default();
    }
    let (prediction, part) = (on_host(&plan.prediction, config), plan.model.table());
    let whole = part.full();
    let largest = |table: &ParameterTable| table.units().iter().map(|unit| unit.num_elements).max();
    let mut num_elements = whole.num_elements().saturating_add(largest(part).unwrap_or(0));
    if part.tensor_rank().degree > 1 {
        // The largest unit is in memory twice: as the parts of all ranks in sequence, and as the full unit that is assembled from them.
        let largest = largest(&whole).unwrap_or(0).saturating_mul(2);
        num_elements = num_elements.saturating_add(largest);
    }
    let gathered = num_elements.saturating_mul(size_of::<f32>());
    match config.memory().huge_pages {
        // A device keeps the pool's pages that it has freed, so the gathered parameters count in full.
        HugePages::Reserved => ProcessBytes { ordinary: 0, reserved: gathered },
        HugePages::Transparent | HugePages::Never => {
            let state = prediction.own_between_steps.saturating_add(prediction.host);
            let more = state.saturating_add(gathered).saturating_sub(prediction.on_machine());
            ProcessBytes { ordinary: more, reserved: 0 }
        }
    }
}
