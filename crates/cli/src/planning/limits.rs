//! What workers have to stay within, and whether they do.

use super::{Job, Plan, Workers, advice};
use crate::memory_limit::{MemoryLimit, Pages, SharedLimit};
use anyhow::{Result, bail};
use trireme_base::{Bytes, Category};
use trireme_planner::MemoryBounds;
use trireme_tensor::ParameterTable;
use trireme_train::config::{ActivationCheckpointMode, ByteLimit, Config, HugePages};

/// What a process takes that is not counted: its heap, its threads, what the kernel holds for it, a checkpoint's writer.
const PROCESS_BYTES: usize = 16 << 20;

/// The part of what is counted that gaps between blocks and page tables take beside it.
const GAPS: usize = 32;

/// Memory that has a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The device's, by the config.
    Device,
    /// The host's for state that is not on the device, by the config.
    Offload,
    /// All that the workers of a host take, by the machine or a control group.
    Host,
}

impl Limit {
    const ALL: [Limit; 3] = [Limit::Device, Limit::Offload, Limit::Host];
}

impl Plan {
    /// What the plan takes of what is limited, and the limit.
    pub(super) fn taken(&self, limit: Limit) -> (usize, usize) {
        match limit {
            Limit::Device => (self.prediction.total(), self.bounds.device),
            Limit::Offload => (self.prediction.host, self.bounds.host),
            Limit::Host => {
                let (taken, limit) = self.on_host.nearest();
                (taken, usize::try_from(limit.bytes).unwrap_or(usize::MAX))
            }
        }
    }

    /// The limit that it passes, if any.
    pub(crate) fn passed(&self) -> Option<Limit> {
        Limit::ALL.into_iter().find(|&limit| {
            let (taken, bound) = self.taken(limit);
            taken > bound
        })
    }

    /// Refuses the plan of `job` if it exceeds a limit, and suggests what would fit.
    pub(crate) fn check(&self, job: Job<'_>) -> Result<()> {
        if let Some(limit) = self.passed() {
            bail!(advice(job, self, limit));
        }
        Ok(())
    }

    /// What a process like this one takes of its host, uncounted memory included.
    fn process_bytes(&self, config: &Config) -> ProcessBytes {
        let own = self.prediction.on_machine();
        let counted = own.saturating_add(own / GAPS);
        match config.memory().huge_pages {
            HugePages::Transparent | HugePages::Never => {
                ProcessBytes { ordinary: counted.saturating_add(PROCESS_BYTES), reserved: 0 }
            }
            // What is exchanged never lies in the pool. It counts there as well, because its part of the peak is not known.
            HugePages::Reserved => {
                let exchanged = self.prediction.at_peak.get(Category::Communication);
                ProcessBytes { ordinary: exchanged.saturating_add(PROCESS_BYTES), reserved: counted }
            }
        }
    }

    /// What the first worker takes beyond that while it writes a sample after the last step: with its state it holds all parameters, and the unit
    /// that is being gathered, from all ranks of the tensor axis.
    fn sampling_bytes(&self, config: &Config) -> ProcessBytes {
        if config.generate().num_tokens == 0 || self.rank != 0 {
            return ProcessBytes::default();
        }
        let (part, whole) = (self.model.table(), self.model.table().whole());
        let largest = |table: &ParameterTable| table.units().iter().map(|unit| unit.num_elements).max();
        let mut num_elements = whole.num_elements().saturating_add(largest(part).unwrap_or(0));
        if part.place().degree > 1 {
            // Its parts one after the other, and joined.
            let largest = largest(&whole).unwrap_or(0).saturating_mul(2);
            num_elements = num_elements.saturating_add(largest);
        }
        let gathered = num_elements.saturating_mul(size_of::<f32>());
        match config.memory().huge_pages {
            // A device gives nothing back to the pool.
            HugePages::Reserved => ProcessBytes { ordinary: 0, reserved: gathered },
            HugePages::Transparent | HugePages::Never => {
                let state = self.prediction.own_between_steps.saturating_add(self.prediction.host);
                let more = state.saturating_add(gathered).saturating_sub(self.prediction.on_machine());
                ProcessBytes { ordinary: more, reserved: 0 }
            }
        }
    }
}

/// What a process takes of memory outside of the host's pool of huge pages, and inside.
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

    fn times(self, number: usize) -> Self {
        // Sizes that no machine has are still compared with its limit.
        ProcessBytes {
            ordinary: self.ordinary.saturating_mul(number),
            reserved: self.reserved.saturating_mul(number),
        }
    }

    fn plus(self, other: Self) -> Self {
        ProcessBytes {
            ordinary: self.ordinary.saturating_add(other.ordinary),
            reserved: self.reserved.saturating_add(other.reserved),
        }
    }
}

/// What the workers of a host take, and the limits on it.
#[derive(Debug)]
pub(super) struct HostBytes {
    /// All of this host, and who starts them.
    sum: ProcessBytes,
    /// The largest of them.
    largest: ProcessBytes,
    num_workers: usize,
    limits: Vec<SharedLimit>,
}

impl HostBytes {
    /// Of the process that starts the workers.
    pub(super) fn of_launcher(workers: Workers<'_>) -> Self {
        HostBytes {
            sum: ProcessBytes { ordinary: launcher_bytes(workers), reserved: 0 },
            largest: ProcessBytes::default(),
            num_workers: workers.local_world_size,
            limits: workers.limits.to_vec(),
        }
    }

    /// Adds `num_workers` of a plan.
    pub(super) fn add(&mut self, plan: &Plan, config: &Config, num_workers: usize) {
        let (process, sampling) = (plan.process_bytes(config), plan.sampling_bytes(config));
        self.sum = self.sum.plus(process.times(num_workers)).plus(sampling);
        let with_sample = process.plus(sampling);
        self.largest = ProcessBytes {
            ordinary: self.largest.ordinary.max(with_sample.ordinary),
            reserved: self.largest.reserved.max(with_sample.reserved),
        };
    }

    /// The limit that is nearest to being passed, or is passed the most, and what is taken of it.
    pub(super) fn nearest(&self) -> (usize, &MemoryLimit) {
        let taken = |shared: &SharedLimit| match shared.num_sharing {
            Some(number) if number != self.num_workers => self.largest.times(number).of(shared.limit.pages),
            _ => self.sum.of(shared.limit.pages),
        };
        let part = |(taken, limit): &(usize, &MemoryLimit)| *taken as f64 / limit.bytes.max(1) as f64;
        let all = self.limits.iter().map(|shared| (taken(shared), &shared.limit));
        all.max_by(|a, b| part(a).total_cmp(&part(b))).expect("the machine is always a limit")
    }
}

/// What the process takes that starts the workers of this host.
fn launcher_bytes(workers: Workers<'_>) -> usize {
    if workers.local_world_size > 1 { PROCESS_BYTES } else { 0 }
}

/// What one worker has to stay within: the config's budgets, and its share of the host's limit.
pub(super) fn bounds(config: &Config, workers: Workers<'_>) -> MemoryBounds {
    let bytes = |limit: ByteLimit| limit.0.map_or(usize::MAX, |bytes| bytes.0 as usize);
    let budget = bytes(config.memory().device_budget);
    let checkpoint = config.activation_checkpoint();
    let device = match checkpoint.mode {
        ActivationCheckpointMode::Auto => budget.min(bytes(checkpoint.memory)),
        _ => budget,
    };
    MemoryBounds { device, host: bytes(config.memory().host_budget), machine: tightest(workers).0 }
}

/// What each worker of this host may take of what is counted, so that all stay within the limits; and the limit that leaves the least.
fn tightest(workers: Workers<'_>) -> (usize, &MemoryLimit) {
    let has_pool = workers.limits.iter().any(|shared| shared.limit.pages == Pages::Reserved);
    let pages = if has_pool { Pages::Reserved } else { Pages::Ordinary };
    let limits = workers.limits.iter().filter(|shared| shared.limit.pages == pages).map(|shared| {
        let limit = usize::try_from(shared.limit.bytes).unwrap_or(usize::MAX);
        let num_sharing = shared.num_sharing.unwrap_or(workers.local_world_size);
        let counted = match pages {
            Pages::Reserved => limit / num_sharing,
            Pages::Ordinary => {
                let process = limit.saturating_sub(launcher_bytes(workers)) / num_sharing;
                process.saturating_sub(PROCESS_BYTES)
            }
        };
        (counted / (GAPS + 1) * GAPS, &shared.limit)
    });
    // Of equal ones the outermost, which more processes share.
    limits.rev().min_by_key(|(share, _)| *share).expect("the machine is always a limit")
}

/// Says that a budget promises more than there is.
pub(super) fn budget_notice(config: &Config, workers: Workers<'_>, bounds: MemoryBounds) -> Option<String> {
    let budget = config.memory().device_budget.0.filter(|budget| budget.0 > bounds.machine as u64)?;
    Some(format!(
        "memory: [memory] device_budget = {budget} exceeds the {} available to a worker of this host out of {}",
        Bytes(bounds.machine as u64),
        tightest(workers).1
    ))
}
