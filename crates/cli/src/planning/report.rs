//! A plan as data, for other programs.

use super::plan::{Plan, dry_executor, model_and_profile};
use super::planned_run::{PlannedRun, Workers};
use super::planned_schedule::PlannedSchedule;
use anyhow::Result;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use trireme_base::{AsyncOperation, JournalEntry, Rank, StepEntries};
use trireme_schedule::{Action, Program};
use trireme_train::TrainError;
use trireme_train::metrics::MemoryPeakBytes;

/// The object that `trireme plan --json` prints: the step of the worker that needs the most memory.
#[derive(Debug, Serialize)]
pub(crate) struct PlanReport {
    /// Parameters of the model, on all workers together.
    num_parameters: usize,
    num_workers: usize,
    /// The worker that the other fields describe.
    rank: usize,
    memory_peak_bytes: MemoryPeakBytes,
    /// Host memory for state outside of the device.
    host_bytes: u64,
    /// Whether all workers stay within the config's budgets and the limits of this machine.
    fits: bool,
    product_operations: ProductOperations,
    /// Exchanges with other workers and disks; exchanges of the same kind are summed.
    exchanges: Vec<Exchange>,
    /// Idle share of the time of all ranks of a pipeline, with floating-point operations as time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pipeline_bubble: Option<f64>,
}

/// Floating-point operations of matrix products, attention included, by the pass that computes them.
#[derive(Debug, Default, Serialize)]
struct ProductOperations {
    forward: u64,
    recomputation: u64,
    backward: u64,
    /// Optimizer updates. Only Muon has matrix products.
    update: u64,
}

/// Operations of one kind and length.
#[derive(Debug, Serialize)]
struct Exchange {
    /// `all_reduce`, `send`, `disk_read` and so on.
    operation: &'static str,
    num_ranks: usize,
    num_hosts: usize,
    /// Bytes of the vector or message of one operation.
    bytes: usize,
    count: usize,
}

impl Plan {
    /// Returns the plan of `job` as data. Dry-runs a step once more.
    pub(crate) fn report(&self, job: PlannedRun<'_>) -> Result<PlanReport> {
        let job = PlannedRun { workers: Workers { rank: self.rank, ..job.workers }, ..job };
        let (_, profile) = model_and_profile(job)?;
        let executor = dry_executor(job, &profile, self.program.clone())?;
        let entries = executor.dry_run_entries().map_err(TrainError::from)?;
        let has_pipeline = job.config.parallelism().pipeline_parallel_degree > 1;
        let drawing = has_pipeline.then(|| PlannedSchedule::new(job.config, self)).transpose()?;
        Ok(PlanReport {
            num_parameters: self.model.table().full().num_elements(),
            num_workers: job.workers.world_size,
            rank: self.rank,
            memory_peak_bytes: self.memory_peak_bytes(),
            host_bytes: self.prediction.host as u64,
            fits: self.exceeded_limit().is_none(),
            product_operations: product_operations(&self.program, &entries),
            exchanges: exchanges(&entries, job.workers),
            pipeline_bubble: drawing.map(|drawing| drawing.timeline.bubble()),
        })
    }
}

fn product_operations(program: &Program, entries: &StepEntries) -> ProductOperations {
    let mut found = ProductOperations::default();
    // The entries after the last action belong to the end of the step.
    for (action, entries) in program.actions.iter().zip(&entries.actions) {
        let pass = match action {
            Action::Forward { .. } => &mut found.forward,
            Action::Recompute { .. } => &mut found.recomputation,
            Action::Step { .. } => &mut found.update,
            _ => &mut found.backward,
        };
        let kernels = entries.iter().filter_map(|entry| match entry {
            JournalEntry::Kernel(call) => Some(call.cost.product_operations),
            _ => None,
        });
        *pass = kernels.fold(*pass, u64::saturating_add);
    }
    found
}

fn exchanges(entries: &StepEntries, workers: Workers<'_>) -> Vec<Exchange> {
    let host = |rank: &Rank| rank.0 / workers.local_world_size;
    let num_hosts = |ranks: &[Rank]| ranks.iter().map(host).collect::<BTreeSet<_>>().len();
    let mut counts = BTreeMap::new();
    for entry in entries.actions.iter().flatten() {
        let JournalEntry::Issue(_, issued) = entry else { continue };
        let with_peer = |peer: Rank| num_hosts(&[Rank(workers.rank), peer]);
        let kind = match issued {
            AsyncOperation::Collective { operation, len, element_bytes, members } => {
                (*operation, members.len(), num_hosts(members), len.saturating_mul(*element_bytes))
            }
            AsyncOperation::Send { to, bytes } => ("send", 2, with_peer(*to), *bytes),
            AsyncOperation::Receive { from, bytes } => ("receive", 2, with_peer(*from), *bytes),
            AsyncOperation::DiskRead { bytes } => ("disk_read", 1, 1, *bytes),
            AsyncOperation::DiskWrite { bytes } => ("disk_write", 1, 1, *bytes),
        };
        *counts.entry(kind).or_insert(0) += 1;
    }
    let exchange = |(kind, count)| {
        let (operation, num_ranks, num_hosts, bytes) = kind;
        Exchange { operation, num_ranks, num_hosts, bytes, count }
    };
    counts.into_iter().map(exchange).collect()
}
