//! Speed of this machine's kernels, links and disks. Each is measured in isolation, never in a step of the planned run.

use super::kernel_timer::KernelTimer;
use super::planned_run::PlannedRun;
use crate::statistics::median;
use anyhow::{Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use trireme_base::{AsyncOperation, Bf16, Cost, JournalEntry, KernelCall, Rank, ReduceOp, StepEntries};
use trireme_comm::{Buffer, Element, Group};
use trireme_model::{Model, ModelProfile};
use trireme_parallel::RankGrid;
use trireme_planner::OperationTimes;
use trireme_swap::{SwapOptions, measure_bandwidth};
use trireme_tensor::{Device, DeviceOptions, RecordedCalls};
use trireme_train::config::DeviceName;
use trireme_train::{TrainError, device_options};

/// Number of measured rounds, after one round that is not measured.
pub(super) const NUM_ROUNDS: usize = 5;

/// Size of the blocks with which the bandwidth of a disk is measured. Offloaded state moves in blocks of the same size.
const DISK_BLOCK_BYTES: usize = 16 << 20;

pub(super) struct MeasuredRates {
    /// Numbers of workers that compute at the same time, ascending.
    loads: Vec<usize>,
    /// Seconds of each call under each of these loads.
    kernels: BTreeMap<KernelCall, Vec<f64>>,
    /// Seconds of each operation or message while all ranks issue it.
    comm_seconds: BTreeMap<CommKey, f64>,
    /// Seconds per byte, of reads from a disk and of writes.
    disk: [f64; 2],
    /// Number of workers that can compute with a core for each of their threads.
    num_with_own_cores: usize,
}

/// A step whose kernel calls and operations are measured.
pub(super) struct MeasuredStep<'a> {
    /// The entries of the stages, from dry runs.
    pub(super) stages: &'a [StepEntries],
    pub(super) model: &'a Model,
    pub(super) profile: &'a ModelProfile,
    /// The part of each unit that this worker updates.
    pub(super) parts: &'a [Range<usize>],
    /// The kernel calls that the dry runs recorded.
    pub(super) calls: &'a RecordedCalls,
}

/// An operation or message: its name, number of ranks, number of elements, and bytes of an element.
type CommKey = (&'static str, usize, usize, usize);

fn comm_key(issued: &AsyncOperation) -> Option<CommKey> {
    match issued {
        AsyncOperation::Collective { operation, len, element_bytes, members } => {
            Some((operation, members.len(), *len, *element_bytes))
        }
        AsyncOperation::Send { bytes, .. } | AsyncOperation::Receive { bytes, .. } => {
            Some(("message", 2, *bytes, 1))
        }
        AsyncOperation::DiskRead { .. } | AsyncOperation::DiskWrite { .. } => None,
    }
}

impl MeasuredRates {
    /// Measures the calls and operations of a job's `step`, in the world of its workers on this host. Each worker measures on its own
    /// device with at most `memory_max` bytes. Returns the result on the first rank, `None` on the others. Collective.
    pub(super) fn measure(
        job: PlannedRun<'_>,
        step: MeasuredStep<'_>,
        memory_max: usize,
        world: Group,
    ) -> Result<Option<Self>> {
        let PlannedRun { config, workers, .. } = job;
        let MeasuredStep { stages, model, profile, parts, calls } = step;
        if config.training().device == DeviceName::Cuda {
            bail!(
                "kernels of a GPU cannot be timed yet; leave out --time, or set [training] device = \"cpu\""
            );
        }
        let is_root = world.rank() == Rank::ROOT;
        let options = device_options(config, workers.num_threads);
        let (simd_level_max, budget) = (Some(workers.simd_level), Some(memory_max));
        let options = DeviceOptions { simd_level_max, ..options };
        let (device, others) = (Device::cpu(DeviceOptions { budget, ..options })?, Device::cpu(options)?);
        let num_cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let num_undisturbed = (num_cores / workers.num_threads).max(1);
        let doublings = std::iter::successors(Some(1), |load| Some(2 * load));
        let mut loads: Vec<usize> = doublings.take_while(|&load| load < workers.world_size).collect();
        loads.push(workers.world_size);
        let entries = || stages.iter().flat_map(|stage| stage.actions.iter().flatten());
        let mut kernels: BTreeMap<KernelCall, Vec<f64>> = BTreeMap::new();
        for &load in &loads {
            let timer = KernelTimer::new(&device, &others, &world, world.rank().0 < load)?;
            timer.time_units(job, model, profile)?;
            timer.time_updates(job, model, parts)?;
            timer.time_other_kernels(entries(), calls)?;
            for (call, seconds) in timer.seconds(load > num_undisturbed) {
                kernels.entry(call).or_default().push(seconds);
            }
        }
        let issued: BTreeSet<&AsyncOperation> = entries()
            .filter_map(|entry| match entry {
                JournalEntry::Issue(_, issued) => Some(issued),
                _ => None,
            })
            .collect();
        let uses_disk = issued.iter().any(|issued| comm_key(issued).is_none());
        let disk = if uses_disk { disk(&config.offload().folder)? } else { [0.0; 2] };
        let comm_seconds = measure_comm(job, issued.into_iter().filter_map(comm_key).collect(), world)?;
        let found = MeasuredRates { loads, kernels, comm_seconds, disk, num_with_own_cores: num_undisturbed };
        Ok(is_root.then_some(found))
    }

    pub(super) fn unmeasured(&self, stages: &[StepEntries]) -> Vec<&'static str> {
        let name = |entry: &JournalEntry| match entry {
            JournalEntry::Kernel(call) if self.nearest(call).is_none() => Some(call.kernel),
            JournalEntry::Issue(_, issued) => comm_key(issued)
                .filter(|link| !self.comm_seconds.contains_key(link))
                .map(|(operation, ..)| operation),
            _ => None,
        };
        let entries = stages.iter().flat_map(|stage| stage.actions.iter().flatten());
        entries.filter_map(name).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Returns the measured call of the same kernel that is nearest in size, and its seconds.
    fn nearest(&self, call: &KernelCall) -> Option<(&KernelCall, &Vec<f64>)> {
        let first = KernelCall { kernel: call.kernel, cost: Cost::ZERO };
        let same = self.kernels.range(first..).take_while(|(known, _)| known.kernel == call.kernel);
        let nearest = same.min_by(|(left, _), (right, _)| {
            let distance = |known: &KernelCall| (call_size(known) / call_size(call)).ln().abs();
            distance(left).total_cmp(&distance(right))
        });
        self.kernels.get_key_value(call).or(nearest)
    }

    /// Returns how much longer work takes under `load` than under the load `measured`, once workers share cores.
    fn slowdown(&self, load: usize, measured: usize) -> f64 {
        load.max(self.num_with_own_cores) as f64 / measured.max(self.num_with_own_cores) as f64
    }
}

impl OperationTimes for MeasuredRates {
    fn kernel(&self, call: &KernelCall, load: usize) -> f64 {
        let Some((known, seconds)) = self.nearest(call) else { return 0.0 };
        let scale = call_size(call) / call_size(known);
        let above = self.loads.partition_point(|&measured| measured < load);
        let Some(&high) = self.loads.get(above) else {
            let last = self.loads.len() - 1;
            return scale * seconds[last] * self.slowdown(load, self.loads[last]);
        };
        let Some(below) = above.checked_sub(1).filter(|_| high > load) else { return scale * seconds[above] };
        let low = self.loads[below];
        let share = (load - low) as f64 / (high - low) as f64;
        scale * (seconds[below] + share * (seconds[above] - seconds[below]))
    }

    fn operation(&self, issued: &AsyncOperation, load: usize) -> f64 {
        match issued {
            AsyncOperation::DiskRead { bytes } => *bytes as f64 * self.disk[0],
            AsyncOperation::DiskWrite { bytes } => *bytes as f64 * self.disk[1],
            _ => {
                let link = comm_key(issued).expect("what is not on a disk is on a link");
                let seconds = self.comm_seconds.get(&link).copied().unwrap_or_default();
                // All groups were busy at the same time when links were measured.
                seconds * self.slowdown(load, self.loads[self.loads.len() - 1]).max(1.0)
            }
        }
    }
}

/// Returns the size by which calls of one kernel are compared: operations plus bytes, at least 1.
pub(super) fn call_size(call: &KernelCall) -> f64 {
    (call.cost.operations() as f64 + call.cost.traffic.moved() as f64).max(1.0)
}

/// Measures operations and messages while all ranks issue them. Returns seconds. Collective.
fn measure_comm(
    job: PlannedRun<'_>,
    links: BTreeSet<CommKey>,
    world: Group,
) -> Result<BTreeMap<CommKey, f64>> {
    let ranks = RankGrid::new(world, job.config.degrees()).map_err(TrainError::from)?;
    let groups = [
        ranks.world(),
        ranks.data(),
        ranks.shards(),
        ranks.replicas(),
        ranks.ring(),
        ranks.heads(),
        ranks.tensor(),
        ranks.pipeline(),
    ];
    let message_group = if ranks.pipeline().world_size() > 1 { ranks.pipeline() } else { ranks.ring() };
    let mut found = BTreeMap::new();
    for link in links {
        let (operation, num_ranks, len, element_bytes) = link;
        let world = ranks.world();
        let own = groups.iter().find(|group| group.world_size() == num_ranks).map(|group| Arc::clone(group));
        let group = match own {
            Some(group) => group,
            None if world.world_size().is_multiple_of(num_ranks) => {
                Arc::new(world.split_by("measured", |rank| (rank.0 / num_ranks) as u64)?)
            }
            None => continue,
        };
        let samples = match (operation, element_bytes) {
            ("message", _) => samples::<u8>(world, message_group, operation, len)?,
            (_, 8) => samples::<f64>(world, &group, operation, len)?,
            (_, 4) => samples::<f32>(world, &group, operation, len)?,
            (_, 2) => samples::<Bf16>(world, &group, operation, len)?,
            _ => samples::<u8>(world, &group, operation, len)?,
        };
        if !samples.is_empty() {
            found.insert(link, median(samples));
        }
    }
    Ok(found)
}

/// Returns the seconds of an operation on vectors of `len` elements, which all ranks begin together. Empty for an unknown operation.
/// Collective.
fn samples<T: Element>(world: &Group, group: &Group, operation: &str, len: usize) -> Result<Vec<f64>> {
    // An all-to-all is measured with equal blocks.
    let len =
        if operation.starts_with("all_to_all") { len.next_multiple_of(group.world_size()) } else { len };
    let mut buffer = group.buffer::<T>(len)?;
    let mut samples = Vec::new();
    for round in 0..=NUM_ROUNDS {
        // As in a step, the data has just been written, so peers find it in the caches of other cores.
        buffer.fill(T::zeroed());
        world.barrier().wait()?;
        let began = Instant::now();
        buffer = match operation {
            "all_reduce" => group.all_reduce(buffer, ReduceOp::Sum).wait()?,
            "reduce_scatter" => group.reduce_scatter(buffer, ReduceOp::Sum).wait()?,
            "all_gather" => group.all_gather(buffer).wait()?,
            "reduce" => group.reduce(buffer, ReduceOp::Sum, Rank::ROOT).wait()?,
            "gather" => group.gather(buffer, Rank::ROOT).wait()?,
            "scatter" => group.scatter(buffer, Rank::ROOT).wait()?,
            "broadcast" => group.broadcast(buffer, Rank::ROOT).wait()?,
            "all_to_all" | "all_to_all_variable" | "all_to_all_variable_by_hosts" => {
                group.all_to_all(buffer).wait()?
            }
            "message" => round_trip(group, buffer)?,
            // A few bytes take as long as none.
            "barrier" | "all_gather_bytes" => {
                group.barrier().wait()?;
                buffer
            }
            _ => return Ok(Vec::new()),
        };
        // A message has gone both ways.
        let share = if operation == "message" { 0.5 } else { 1.0 };
        samples.push(share * began.elapsed().as_secs_f64());
        samples.truncate(if round == 0 { 0 } else { NUM_ROUNDS });
    }
    Ok(samples)
}

/// Sends a message there and back between the first two ranks of a group.
fn round_trip<T: Element>(group: &Group, mut buffer: Buffer<T>) -> Result<Buffer<T>> {
    for turn in 0..2 {
        buffer = match group.rank().0 {
            own if own == turn => group.send(buffer, Rank(1 - own)).wait()?,
            own @ (0 | 1) => group.receive(buffer, Rank(1 - own)).wait()?,
            _ => buffer,
        };
    }
    Ok(buffer)
}

fn disk(folder: &Path) -> Result<[f64; 2]> {
    // A run creates its folder when it begins.
    let folder = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let found = measure_bandwidth(folder, DISK_BLOCK_BYTES, &SwapOptions::default())?;
    Ok([found.read, found.write].map(|bytes_per_second| 1.0 / bytes_per_second))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kernel: &'static str, operations: usize) -> KernelCall {
        KernelCall { kernel, cost: Cost::others(&[operations]) }
    }

    fn probed() -> MeasuredRates {
        let kernels = [(call("add", 100), vec![1.0, 1.5, 4.0]), (call("add", 1000), vec![8.0, 9.0, 16.0])];
        let links = [(("all_reduce", 2, 10, 4), 3.0)];
        let (kernels, comm_seconds) = (kernels.into_iter().collect(), links.into_iter().collect());
        MeasuredRates { loads: vec![1, 2, 4], kernels, comm_seconds, disk: [2.0, 5.0], num_with_own_cores: 2 }
    }

    #[test]
    fn unmeasured_calls_are_estimated_from_the_nearest_measured_ones() {
        let probed = probed();
        let seconds = |operations, load| probed.kernel(&call("add", operations), load);
        assert_eq!([1, 2, 3, 4].map(|load| seconds(100, load)), [1.0, 1.5, 2.75, 4.0]);
        // Beyond the highest load, each worker gets less of the cores.
        assert_eq!(seconds(100, 8), 8.0);
        assert_eq!([seconds(200, 1), seconds(900, 1)], [2.0, 7.2]);
        let other = call("other", 100);
        let step = StepEntries { actions: vec![vec![JournalEntry::Kernel(other)]], issued_per_step: 0 };
        assert_eq!((probed.kernel(&other, 1), probed.unmeasured(&[step])), (0.0, vec!["other"]));
    }

    #[test]
    fn links_are_slower_under_load_and_disks_are_not() {
        let probed = probed();
        let members: Arc<[Rank]> = [Rank(4), Rank(5)].into();
        let reduction = |len| {
            let members = Arc::clone(&members);
            AsyncOperation::Collective { operation: "all_reduce", len, element_bytes: 4, members }
        };
        assert_eq!([1, 4, 8].map(|load| probed.operation(&reduction(10), load)), [3.0, 3.0, 6.0]);
        let step = |len| StepEntries {
            actions: vec![vec![JournalEntry::Issue(0, reduction(len))]],
            issued_per_step: 1,
        };
        assert_eq!(
            [probed.unmeasured(&[step(10)]), probed.unmeasured(&[step(11)])],
            [vec![], vec!["all_reduce"]]
        );
        assert_eq!(probed.operation(&AsyncOperation::DiskRead { bytes: 7 }, 4), 14.0);
        assert_eq!(probed.operation(&AsyncOperation::DiskWrite { bytes: 7 }, 1), 35.0);
    }
}
