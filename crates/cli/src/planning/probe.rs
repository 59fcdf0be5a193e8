//! What kernels, links and disks of this machine take, each measured alone: never a step of the run that is planned.

use super::Job;
use anyhow::Result;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;
use trireme_base::{Bf16, Category, DType, Event, Issued, Journal, KernelCall, RandomKey, Rank, ReduceOp};
use trireme_comm::{Buffer, Element, Group};
use trireme_model::{Model, Rehearsal};
use trireme_optim::{Optimizer, StepSettings, WholeUnits};
use trireme_parallel::{RankGrid, StepEvents};
use trireme_planner::Rates;
use trireme_swap::{SwapOptions, measure_bandwidth};
use trireme_tensor::{Device, DeviceOptions, Parameters};
use trireme_train::{TrainError, device_options, executor_options, optimizer_options};

/// Rounds that are measured, after one that is not: the median counts.
const NUM_ROUNDS: usize = 5;

/// Blocks by which the bandwidth of a disk is measured.
const DISK_BLOCK_BYTES: usize = 1 << 20;

/// What things take on this machine.
pub(super) struct Probed {
    /// Workers that computed at a time, rising.
    loads: Vec<usize>,
    /// Seconds under each of these loads.
    kernels: BTreeMap<KernelCall, Vec<f64>>,
    /// Seconds while all ranks do it.
    links: BTreeMap<Link, f64>,
    /// Seconds a byte that is read from a disk and written there.
    disk: [f64; 2],
    /// Workers that have a core for each of their threads.
    num_undisturbed: usize,
}

/// An operation of a group of so many ranks, with so many elements of so many bytes; or a message.
type Link = (&'static str, usize, usize, usize);

fn link(issued: &Issued) -> Option<Link> {
    match issued {
        Issued::Collective { operation, len, element_bytes, members } => {
            Some((operation, members.len(), *len, *element_bytes))
        }
        Issued::Send { bytes, .. } | Issued::Receive { bytes, .. } => Some(("message", 2, *bytes, 1)),
        Issued::DiskRead { .. } | Issued::DiskWrite { .. } => None,
    }
}

impl Probed {
    /// Measures what steps of a job call and issue, in the world of its workers on this host, each on a device of its own. The first
    /// rank gets what it has found, the others `None`. Collective.
    pub(super) fn measure(
        job: Job<'_>,
        stages: &[StepEvents],
        (model, rehearsal): (&Model, &Rehearsal),
        world: Group,
    ) -> Result<Option<Self>> {
        let Job { config, workers, .. } = job;
        let is_root = world.rank() == Rank::ROOT;
        let options = device_options(config, workers.num_threads);
        let device =
            Device::cpu(DeviceOptions { features_max: Some(workers.features), budget: None, ..options })?;
        let doublings = std::iter::successors(Some(1), |load| Some(2 * load));
        let mut loads: Vec<usize> = doublings.take_while(|&load| load < workers.world_size).collect();
        loads.push(workers.world_size);
        let events = || stages.iter().flat_map(|stage| stage.actions.iter().flatten());
        let mut kernels: BTreeMap<KernelCall, Vec<f64>> = BTreeMap::new();
        for &load in &loads {
            let active = world.split_by(&format!("load {load}"), |rank| u64::from(rank.0 < load))?;
            if world.rank().0 < load {
                let exerciser = Exerciser::new(&device, &active);
                exerciser.units(job, model, rehearsal)?;
                exerciser.updates(job, model)?;
                exerciser.others(events())?;
                for (call, seconds) in exerciser.medians() {
                    kernels.entry(call).or_default().push(seconds);
                }
            }
            world.barrier().wait()?;
        }
        let issued: BTreeSet<&Issued> = events()
            .filter_map(|event| match event {
                Event::Issue(_, issued) => Some(issued),
                _ => None,
            })
            .collect();
        let is_disk = |issued: &&&Issued| link(issued).is_none();
        let disk = match issued.iter().find(is_disk) {
            Some(_) => disk(&config.offload().folder)?,
            None => [0.0; 2],
        };
        let links = measure_links(job, issued.into_iter().filter_map(link).collect(), world)?;
        let num_cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let num_undisturbed = (num_cores / workers.num_threads).max(1);
        let found = Probed { loads, kernels, links, disk, num_undisturbed };
        Ok(is_root.then_some(found))
    }

    /// How much longer something takes under a load than it took under another one, beyond those that were measured.
    fn slowdown(&self, load: usize, measured: usize) -> f64 {
        load.max(self.num_undisturbed) as f64 / measured.max(self.num_undisturbed) as f64
    }
}

impl Rates for Probed {
    fn kernel(&self, call: &KernelCall, load: usize) -> f64 {
        let nearest = || {
            let same =
                self.kernels.range(first(call.kernel)..).take_while(|(known, _)| known.kernel == call.kernel);
            same.min_by(|(left, _), (right, _)| {
                let distance = |known: &KernelCall| (weight(known) / weight(call)).ln().abs();
                distance(left).total_cmp(&distance(right))
            })
        };
        let (scale, seconds) = match self.kernels.get_key_value(call).or_else(nearest) {
            Some((known, seconds)) => (weight(call) / weight(known), seconds),
            None => return 0.0,
        };
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

    fn issued(&self, issued: &Issued, load: usize) -> f64 {
        match issued {
            Issued::DiskRead { bytes } => *bytes as f64 * self.disk[0],
            Issued::DiskWrite { bytes } => *bytes as f64 * self.disk[1],
            _ => {
                let link = link(issued).expect("what is not on a disk is on a link");
                let seconds = self.links.get(&link).copied().unwrap_or_default();
                seconds * self.slowdown(load, link.1).max(1.0)
            }
        }
    }
}

/// The least call of a kernel.
fn first(kernel: &'static str) -> KernelCall {
    KernelCall { kernel, cost: trireme_base::Cost::ZERO }
}

/// By which calls of one kernel are compared: operations and bytes.
fn weight(call: &KernelCall) -> f64 {
    (call.cost.operations() as f64 + call.cost.traffic.moved() as f64).max(1.0)
}

/// Calls kernels, and notes how long each takes.
struct Exerciser<'a> {
    device: &'a Device,
    journal: Journal,
    /// The ranks that compute at the same time.
    active: &'a Group,
    samples: RefCell<BTreeMap<KernelCall, Vec<f64>>>,
}

impl<'a> Exerciser<'a> {
    fn new(device: &'a Device, active: &'a Group) -> Self {
        let journal = device.journal().cloned().unwrap_or_default();
        device.keep_journal(&journal);
        Exerciser { device, journal, active, samples: RefCell::default() }
    }

    /// Takes in what was noted since the last time, unless that was to warm up.
    fn take_in(&self, is_warm: bool) {
        let noted = self.journal.take();
        if !is_warm {
            return;
        }
        let mut samples = self.samples.borrow_mut();
        for pair in noted.windows(2) {
            if let (Event::Kernel(call), began) = &pair[0] {
                samples.entry(*call).or_default().push((pair[1].1 - *began).as_secs_f64());
            }
        }
    }

    /// Runs something again and again, at the same time as the others do.
    fn repeat(&self, mut run: impl FnMut() -> Result<()>) -> Result<()> {
        for round in 0..=NUM_ROUNDS {
            self.journal.take();
            self.active.barrier().wait()?;
            run()?;
            self.journal.note(Event::Pause);
            self.take_in(round > 0);
        }
        Ok(())
    }

    /// The kernels of passes of each unit that is like no other one before.
    fn units(&self, job: Job<'_>, model: &Model, rehearsal: &Rehearsal) -> Result<()> {
        let options = executor_options(job.config);
        let precision = (options.precision, options.fp8);
        for unit in distinct_units(model, rehearsal) {
            let round = std::cell::Cell::new(0);
            let begin = || {
                self.take_in(round.get() > 1);
                round.set(round.get() + 1);
                // A rank that is gone is noticed by the next operation that tells.
                let _ = self.active.barrier().wait();
            };
            model
                .exercise(unit, self.device, precision, rehearsal, NUM_ROUNDS + 1, &begin)
                .map_err(TrainError::from)?;
            self.take_in(true);
        }
        Ok(())
    }

    /// The kernels of an update, of the longest unit.
    fn updates(&self, job: Job<'_>, model: &Model) -> Result<()> {
        let table = model.table();
        let units = table.units().iter().enumerate();
        let Some((longest, info)) = units.max_by_key(|(_, unit)| unit.num_elements) else { return Ok(()) };
        let mut parts = vec![0..0; table.units().len()];
        parts[longest] = 0..info.num_elements;
        let options = optimizer_options(job.config, table)?;
        let mut optimizer = Optimizer::new(&options, table, &parts, self.device)?;
        let mut parameters = Parameters::zeros_of(table, parts, self.device, Category::Parameters)?;
        let grads = self.floats(info.num_elements)?;
        let mut step = 0;
        self.repeat(|| {
            step += 1;
            let settings = StepSettings { step, lr: 1e-6, grad_scale: 1.0 };
            let (values, grads) = (parameters.flat_mut(longest), grads.view());
            Ok(optimizer.step_unit(self.device, longest, values, grads, settings, &mut WholeUnits)?)
        })
    }

    /// Kernels of sums, copies and conversions, each at the largest size of a step.
    fn others<'e>(&self, events: impl Iterator<Item = &'e Event>) -> Result<()> {
        let mut largest: BTreeMap<&str, KernelCall> = BTreeMap::new();
        for event in events {
            if let Event::Kernel(call) = event {
                let most = largest.entry(call.kernel).or_insert(*call);
                *most = if weight(call) > weight(most) { *call } else { *most };
            }
        }
        let device = self.device;
        for call in largest.into_values() {
            let traffic = call.cost.traffic;
            let float = |bytes: usize| bytes / DType::F32.size();
            match call.kernel {
                "add_assign" => {
                    let (mut sum, term) =
                        (self.floats(float(traffic.updated))?, self.floats(float(traffic.updated))?);
                    self.repeat(|| Ok(device.add_assign(sum.view_mut(), term.view())))?;
                }
                "sum_of_squares" => {
                    let values = self.floats(float(traffic.read))?;
                    let leaf_len = values.shape().num_elements().div_ceil(trireme_tensor::LEAVES).max(1);
                    self.repeat(|| {
                        device.sum_of_squares(values.view(), leaf_len);
                        Ok(())
                    })?;
                }
                "convert" => {
                    let types = match traffic.read.cmp(&traffic.written) {
                        std::cmp::Ordering::Greater => [DType::F32, DType::Bf16],
                        std::cmp::Ordering::Equal => [DType::F32, DType::F32],
                        std::cmp::Ordering::Less => [DType::Bf16, DType::F32],
                    };
                    let len = traffic.read / types[0].size();
                    let (floats, shape) = (self.floats(len)?, [len].into());
                    let mut pair = [
                        device.empty(shape, types[0], Category::Activations)?,
                        device.empty(shape, types[1], Category::Activations)?,
                    ];
                    device.convert(floats.view(), pair[0].view_mut());
                    let [from, to] = &mut pair;
                    self.repeat(|| Ok(device.convert(from.view(), to.view_mut())))?;
                }
                "copy_bytes" => {
                    let (from, mut to) = (vec![1; traffic.read], vec![0; traffic.read]);
                    self.repeat(|| Ok(device.copy_bytes(&from, &mut to)))?;
                }
                "zero" => {
                    let mut values = self.floats(float(traffic.written))?;
                    self.repeat(|| Ok(device.zero(values.view_mut())))?;
                }
                _ => (),
            }
        }
        Ok(())
    }

    fn floats(&self, len: usize) -> Result<trireme_tensor::Tensor> {
        let mut tensor = self.device.empty([len].into(), DType::F32, Category::Activations)?;
        RandomKey::new(0, "probe").fill_normal(tensor.view_mut().f32s(), 1.0);
        Ok(tensor)
    }

    fn medians(self) -> impl Iterator<Item = (KernelCall, f64)> {
        self.samples.into_inner().into_iter().map(|(call, samples)| (call, median(samples)))
    }
}

/// Of units that are alike in all that their passes do, the first.
fn distinct_units(model: &Model, rehearsal: &Rehearsal) -> Vec<usize> {
    let shapes = |unit: usize| {
        let parameters = model.table().units()[unit].parameters.clone();
        model.table().parameters()[parameters].iter().map(|info| info.shape).collect::<Vec<_>>()
    };
    let inputs = |unit: usize| unit.checked_sub(1).map(|below| &rehearsal.units[below].outputs);
    let is_alike = |left: usize, right: usize| {
        rehearsal.units[left] == rehearsal.units[right]
            && (shapes(left), inputs(left)) == (shapes(right), inputs(right))
    };
    let mut distinct: Vec<usize> = Vec::new();
    for unit in 0..rehearsal.units.len() {
        if !distinct.iter().any(|&known| is_alike(known, unit)) {
            distinct.push(unit);
        }
    }
    distinct
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or_default()
}

/// What operations and messages take while all ranks do them.
fn measure_links(job: Job<'_>, links: BTreeSet<Link>, world: Group) -> Result<BTreeMap<Link, f64>> {
    let pipeline_degree = job.config.parallelism().pipeline_parallel_degree;
    let ranks =
        RankGrid::with_pipeline(world, pipeline_degree, job.config.num_shards()).map_err(TrainError::from)?;
    let groups = [ranks.world(), ranks.data(), ranks.shards(), ranks.replicas(), ranks.pipeline()];
    let mut found = BTreeMap::new();
    for link in links {
        let (operation, num_ranks, len, element_bytes) = link;
        let Some(group) = groups.iter().find(|group| group.world_size() >= num_ranks) else { continue };
        let samples = match (operation, element_bytes) {
            ("message", _) => samples::<u8>(ranks.world(), ranks.pipeline(), operation, len)?,
            (_, 8) => samples::<f64>(ranks.world(), group, operation, len)?,
            (_, 4) => samples::<f32>(ranks.world(), group, operation, len)?,
            (_, 2) => samples::<Bf16>(ranks.world(), group, operation, len)?,
            _ => samples::<u8>(ranks.world(), group, operation, len)?,
        };
        found.insert(link, median(samples));
    }
    Ok(found)
}

/// Seconds of an operation on vectors of `len` elements, which all ranks begin together.
fn samples<T: Element>(world: &Group, group: &Group, operation: &str, len: usize) -> Result<Vec<f64>> {
    let mut buffer = group.buffer::<T>(len)?;
    let mut samples = Vec::new();
    for round in 0..=NUM_ROUNDS {
        world.barrier().wait()?;
        let began = Instant::now();
        buffer = match operation {
            "all_reduce" => group.all_reduce(buffer, ReduceOp::Sum).wait()?,
            "reduce_scatter" => group.reduce_scatter(buffer, ReduceOp::Sum).wait()?,
            "all_gather" => group.all_gather(buffer).wait()?,
            "broadcast" => group.broadcast(buffer, Rank::ROOT).wait()?,
            "all_to_all" | "all_to_all_variable" => group.all_to_all(buffer).wait()?,
            "message" => there_and_back(group, buffer)?,
            _ => {
                group.barrier().wait()?;
                buffer
            }
        };
        // A message has gone two ways.
        let share = if operation == "message" { 0.5 } else { 1.0 };
        samples.push(share * began.elapsed().as_secs_f64());
        samples.truncate(if round == 0 { 0 } else { NUM_ROUNDS });
    }
    Ok(samples)
}

/// A message between the first two ranks of a group.
fn there_and_back<T: Element>(group: &Group, mut buffer: Buffer<T>) -> Result<Buffer<T>> {
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
    let found = measure_bandwidth(folder, DISK_BLOCK_BYTES, &SwapOptions::default())?;
    Ok([found.read, found.write].map(|bytes_per_second| 1.0 / bytes_per_second))
}
