//! Memory limits of a worker.

use super::planned_run::Workers;
use crate::host::{MemoryLimit, Pages};
use crate::launch::{WorkerEnvironment, is_under_launcher};
use trireme_base::Bytes;
use trireme_planner::MemoryBounds;
use trireme_tensor::{CudaError, CudaInstallation};
use trireme_train::config::{ActivationCheckpointMode, ByteLimit, Config, DeviceName, NcclUse};
use trireme_train::{LocalGpu, local_gpus};

/// Gaps between blocks, and page tables, take this fraction (1/32) of the counted memory in addition.
pub(super) const GAP_DIVISOR: usize = 32;

/// Bytes of a process that are not counted: its heap, its threads, kernel memory, the writer of a checkpoint.
pub(super) const PROCESS_BYTES: usize = 16 << 20;

/// Bytes of a GPU that a plan leaves for CUDA's context and the code of kernels, for each worker. A run measures the real use.
const CONTEXT_BYTES: usize = 512 << 20;

/// Bytes of a GPU that a plan leaves for the buffers of NCCL, for each worker that uses it.
const NCCL_BYTES: usize = 256 << 20;

pub(super) fn launcher_bytes(workers: Workers<'_>) -> usize {
    if workers.local_world_size > 1 { PROCESS_BYTES } else { 0 }
}

/// Returns the memory bounds of one worker: the config's budgets, and its share of the host's limits.
pub(super) fn bounds(config: &Config, workers: Workers<'_>) -> MemoryBounds {
    let bytes = |limit: ByteLimit| limit.0.map_or(usize::MAX, |bytes| bytes.0 as usize);
    let budget = bytes(config.memory().device_budget).min(gpu_bytes(config, workers));
    let checkpoint = config.activation_checkpoint();
    let device = match checkpoint.mode {
        ActivationCheckpointMode::Auto => budget.min(bytes(checkpoint.memory)),
        _ => budget,
    };
    let (host, machine) = (bytes(config.memory().host_budget), tightest(workers).0);
    match config.training().device {
        // The device's memory is not the machine's.
        DeviceName::Cuda => MemoryBounds { device, host: host.min(machine), machine: usize::MAX / 2 },
        DeviceName::Auto | DeviceName::Cpu | DeviceName::Detached => MemoryBounds { device, host, machine },
    }
}

/// Returns whether the plan assumes that GPUs exchange data by NCCL: the config allows it, NCCL is installed and no two workers of this
/// host share a GPU. Without a usable GPU here, assumes a machine with GPUs and NCCL.
pub(super) fn uses_nccl(config: &Config, workers: Workers<'_>) -> bool {
    if config.training().device != DeviceName::Cuda || workers.world_size == 1 {
        return false;
    }
    // The transport between hosts encrypts, and NCCL does not.
    let needs_encryption =
        config.comm().tls_certificate.is_some() && workers.local_world_size < workers.world_size;
    let can_use = || {
        let has_nccl = || CudaInstallation::from_environment().is_ok_and(|cuda| cuda.nccl_version().is_ok());
        local_gpus(config, workers.local_world_size)
            .map_or(true, |gpus| has_nccl() && (0..gpus.len()).all(|worker| num_sharing(&gpus, worker) == 1))
    };
    match config.comm().nccl {
        NcclUse::Always => true,
        NcclUse::Never => false,
        NcclUse::Auto => !needs_encryption && can_use(),
    }
}

/// Returns the number of workers of this host that share the GPU of a worker. Another launcher may show each worker a GPU of its own, so
/// its workers are assumed not to share.
fn num_sharing(gpus: &[LocalGpu], worker: usize) -> usize {
    let is_of_other_launcher =
        matches!(WorkerEnvironment::of_this_process(), Ok(Some(_))) && !is_under_launcher();
    if is_of_other_launcher {
        return 1;
    }
    gpus.iter().filter(|other| other.ordinal == gpus[worker].ordinal).count()
}

/// Returns the memory that the GPU of a worker has for a step, without the memory that is left for CUDA and NCCL: a part of it if workers
/// of the host [share](num_sharing) it. Unlimited if workers have no GPUs, or if this machine is not the one that trains; 0 if there are
/// fewer GPUs than workers.
fn gpu_bytes(config: &Config, workers: Workers<'_>) -> usize {
    let gpus = match local_gpus(config, workers.local_world_size) {
        Ok(gpus) => gpus,
        Err(CudaError::NoSuchGpu { .. }) => return 0,
        Err(_) => Vec::new(),
    };
    let libraries = CONTEXT_BYTES + if uses_nccl(config, workers) { NCCL_BYTES } else { 0 };
    let counted = |worker: usize| {
        let share = gpus[worker].gpu.memory_bytes / num_sharing(&gpus, worker);
        share.saturating_sub(libraries) / (GAP_DIVISOR + 1) * GAP_DIVISOR
    };
    (0..gpus.len()).map(counted).min().unwrap_or(usize::MAX)
}

/// Returns the counted bytes that each worker of this host may take so that all stay within the limits, and the limit that leaves the
/// least.
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
        (counted / (GAP_DIVISOR + 1) * GAP_DIVISOR, &shared.limit)
    });
    // The outermost of equal limits, because more processes share it.
    limits.rev().min_by_key(|(share, _)| *share).expect("the machine is always a limit")
}

pub(super) fn budget_notice(config: &Config, workers: Workers<'_>, bounds: MemoryBounds) -> Option<String> {
    let budget = config.memory().device_budget.0.filter(|budget| budget.0 > bounds.machine as u64)?;
    Some(format!(
        "memory: [memory] device_budget = {budget} exceeds the {} available to a worker of this host out of {}",
        Bytes(bounds.machine as u64),
        tightest(workers).1
    ))
}
