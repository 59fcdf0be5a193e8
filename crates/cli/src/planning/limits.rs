//! What workers have to stay within, and whether they do.

use super::{Job, Plan, Workers, advice};
use anyhow::{Result, bail};
use trireme_base::Bytes;
use trireme_planner::MemoryBounds;
use trireme_tensor::ParameterTable;
use trireme_train::config::{ActivationCheckpointMode, ByteLimit, Config};

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
            Limit::Host => (self.on_host, usize::try_from(self.limit.bytes).unwrap_or(usize::MAX)),
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

    /// What `num_workers` processes like this one take of their host's memory, uncounted memory included.
    pub(super) fn host_bytes(&self, config: &Config, num_workers: usize) -> usize {
        let own = self.prediction.on_machine();
        let sampling = if self.rank == 0 { self.sampling_bytes(config).saturating_sub(own) } else { 0 };
        // Sizes that no machine has are still compared with its limit.
        num_workers
            .saturating_mul(own.saturating_add(own / GAPS).saturating_add(PROCESS_BYTES))
            .saturating_add(sampling)
    }

    /// What the first worker holds while it writes a sample after the last step: its state, all parameters, and the unit that
    /// is being gathered, from all ranks of the tensor axis.
    fn sampling_bytes(&self, config: &Config) -> usize {
        if config.generate().num_tokens == 0 {
            return 0;
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
        let state = self.prediction.own_between_steps.saturating_add(self.prediction.host);
        state.saturating_add(gathered)
    }
}

/// What the process takes that starts the workers of this host.
pub(super) fn launcher_bytes(workers: Workers<'_>) -> usize {
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
    MemoryBounds { device, host: bytes(config.memory().host_budget), machine: share(workers) }
}

/// What each worker of this host may take of what is counted, so that all fit the limit.
fn share(workers: Workers<'_>) -> usize {
    let limit = usize::try_from(workers.limit.bytes).unwrap_or(usize::MAX);
    let process = limit.saturating_sub(launcher_bytes(workers)) / workers.num_sharing_limit;
    process.saturating_sub(PROCESS_BYTES) / (GAPS + 1) * GAPS
}

/// Says that a budget promises more than there is.
pub(super) fn budget_notice(config: &Config, workers: Workers<'_>, bounds: MemoryBounds) -> Option<String> {
    let budget = config.memory().device_budget.0.filter(|budget| budget.0 > bounds.machine as u64)?;
    Some(format!(
        "memory: [memory] device_budget = {budget} exceeds the {} available to a worker of this host out of {}",
        Bytes(bounds.machine as u64),
        workers.limit
    ))
}
