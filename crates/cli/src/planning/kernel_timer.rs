//! Kernels of a step, called in isolation to be timed.

use super::planned_run::PlannedRun;
use super::probe::{NUM_ROUNDS, call_size};
use crate::statistics::median;
use anyhow::Result;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;
use trireme_base::{Category, DType, Journal, JournalEntry, KernelCall, RandomKey, Rank, ReduceOp};
use trireme_comm::{Buffer, Group};
use trireme_model::{Model, ModelProfile};
use trireme_optim::{Optimizer, StepSettings, Unsharded};
use trireme_tensor::{Device, Parameters, RecordedCalls, Tensor};
use trireme_train::{TrainError, executor_options, optimizer_options};

/// Bytes that are read before each timed call to evict its operands from the caches, as happens between two uses of a parameter in a step.
/// Most caches are smaller.
const CACHE_FLUSH_BYTES: usize = 128 << 20;

/// Calls kernels and records how long each takes.
pub(super) struct KernelTimer<'a> {
    device: &'a Device,
    journal: Journal,
    /// All ranks. Ranks that do not compute (without `is_active`) wait for each round.
    world: &'a Group,
    is_active: bool,
    /// The memory that [`flush_caches`](KernelTimer::flush_caches) reads: two vectors, and their device, which keeps no journal. `None` on
    /// ranks that do not compute.
    flush_buffers: Option<RefCell<(Device, [Tensor; 2])>>,
    samples: RefCell<BTreeMap<KernelCall, Vec<f64>>>,
}

impl<'a> KernelTimer<'a> {
    /// Creates a kernel timer. `flush_device`, which evicts the caches, has as many threads as `device` and keeps no journal.
    pub(super) fn new(
        device: &'a Device,
        flush_device: &Device,
        world: &'a Group,
        is_active: bool,
    ) -> Result<Self> {
        let journal = device.journal().cloned().unwrap_or_default();
        device.keep_journal(&journal);
        let swept = || {
            let half = || {
                flush_device.zeros(
                    [CACHE_FLUSH_BYTES / 2 / DType::F32.size()].into(),
                    DType::F32,
                    Category::Activations,
                )
            };
            anyhow::Ok(RefCell::new((flush_device.clone(), [half()?, half()?])))
        };
        let flush_buffers = is_active.then(swept).transpose()?;
        Ok(KernelTimer { device, journal, world, is_active, flush_buffers, samples: RefCell::default() })
    }

    /// Evicts the operands of the next call from the caches by reading other memory.
    fn flush_caches(&self) {
        if let Some(swept) = &self.flush_buffers {
            let (device, [sum, term]) = &mut *swept.borrow_mut();
            device.add_assign(sum.view_mut(), term.view());
        }
    }

    /// Records the kernels' times. A kernel's time ends where the next entry begins, so it includes the tape's work in between.
    fn record(&self, entries: &[(JournalEntry, Instant)]) {
        let mut samples = self.samples.borrow_mut();
        for pair in entries.windows(2) {
            if let (JournalEntry::Kernel(call), began) = &pair[0] {
                samples.entry(*call).or_default().push((pair[1].1 - *began).as_secs_f64());
            }
        }
    }

    /// Repeats `run` on all computing ranks at the same time. All ranks call `prepare` before each round. The first round is not recorded.
    /// Collective.
    fn repeat(
        &self,
        mut prepare: impl FnMut() -> Result<()>,
        mut run: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        for round in 0..=NUM_ROUNDS {
            prepare()?;
            self.world.barrier().wait()?;
            if !self.is_active {
                continue;
            }
            self.journal.take();
            run()?;
            self.journal.record(JournalEntry::Pause);
            let noted = self.journal.take();
            if round > 0 {
                self.record(&noted);
            }
        }
        Ok(())
    }

    /// Like [`repeat`](KernelTimer::repeat), but flushes the caches before each round, so that `run` finds nothing in them.
    fn repeat_with_cold_caches(&self, run: impl FnMut() -> Result<()>) -> Result<()> {
        let prepare = || {
            self.flush_caches();
            Ok(())
        };
        self.repeat(prepare, run)
    }

    /// Times the kernels of the passes of each distinct unit. Collective.
    pub(super) fn time_units(
        &self,
        job: PlannedRun<'_>,
        model: &Model,
        profile: &ModelProfile,
    ) -> Result<()> {
        let options =
            executor_options(job.config).pass_options(job.config.context_rank(Rank(job.workers.rank)));
        for unit in distinct_units(model, profile) {
            let benchmark =
                model.unit_benchmark(unit, self.device, options, profile).map_err(TrainError::from)?;
            self.repeat(|| Ok(()), || Ok(benchmark.run(&|| self.flush_caches()).map_err(TrainError::from)?))?;
        }
        Ok(())
    }

    /// Times the kernels of an update, for the longest of these parts of units. Collective.
    pub(super) fn time_updates(
        &self,
        job: PlannedRun<'_>,
        model: &Model,
        parts: &[Range<usize>],
    ) -> Result<()> {
        let table = model.table();
        let longest = (0..parts.len()).max_by_key(|&unit| parts[unit].len()).unwrap_or(0);
        let mut only = vec![0..0; parts.len()];
        only[longest] = parts[longest].clone();
        let options = optimizer_options(job.config, table)?;
        let mut optimizer = Optimizer::new(&options, table, &only, self.device)?;
        let mut parameters =
            Parameters::zeros_of(table, only, DType::F32, self.device, Category::Parameters)?;
        let shape = [parts[longest].len()].into();
        let mut grads = self.device.empty(shape, DType::F32, Category::Activations)?;
        self.device.fill(grads.view_mut(), |values| {
            RandomKey::new(0, "probe").fill_normal(values, 1.0);
            anyhow::Ok(())
        })?;
        let mut step = 0;
        self.repeat_with_cold_caches(|| {
            step += 1;
            let settings = StepSettings { step, lr: 1e-6, grad_scale: 1.0 };
            let (values, grads) = (parameters.flat_mut(longest), grads.view());
            Ok(optimizer.step_unit(self.device, longest, values, grads, settings, &mut Unsharded)?)
        })
    }

    /// Times kernels outside of passes and updates, such as sums, copies and conversions, each at its largest size among `entries`. They
    /// are replayed from the `calls` that a dry run recorded. Collective.
    pub(super) fn time_other_kernels<'e>(
        &self,
        entries: impl Iterator<Item = &'e JournalEntry>,
        calls: &RecordedCalls,
    ) -> Result<()> {
        let mut largest: BTreeMap<&str, KernelCall> = BTreeMap::new();
        for entry in entries {
            if let JournalEntry::Kernel(call) = entry {
                let most = largest.entry(call.kernel).or_insert(*call);
                *most = if call_size(call) > call_size(most) { *call } else { *most };
            }
        }
        let largest: Vec<KernelCall> = largest.into_values().collect();
        for (call, is_timed) in largest.iter().zip(self.timed_by_first_rank(&largest)?) {
            match call.kernel {
                "upload" | "download" => self.time_copies(call)?,
                _ if is_timed => {}
                _ => {
                    if let Some(mut replay) = calls.replay(call, self.device)? {
                        self.repeat_with_cold_caches(|| {
                            replay.issue();
                            Ok(())
                        })?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns for each call whether the first rank has timed it. All ranks run the other calls together. Collective.
    fn timed_by_first_rank(&self, calls: &[KernelCall]) -> Result<Vec<bool>> {
        let samples = self.samples.borrow();
        let own: Vec<u8> = calls.iter().map(|call| samples.contains_key(call).into()).collect();
        let all = self.world.all_gather_bytes(&own).wait()?;
        Ok(all[0].iter().map(|&is_timed| is_timed != 0).collect())
    }

    /// Times copies between the device and memory that peers have read and written. Collective.
    fn time_copies(&self, call: &KernelCall) -> Result<()> {
        let (device, num_bytes) = (self.device, call.cost.traffic.read);
        let mut there = device.zeros([num_bytes].into(), DType::U8, Category::Activations)?;
        let here = RefCell::new(self.world.buffer::<u8>(num_bytes)?);
        let prepare = || {
            self.flush_caches();
            let sent = std::mem::replace(&mut *here.borrow_mut(), Buffer::private(0)?);
            *here.borrow_mut() = self.world.all_reduce(sent, ReduceOp::Max).wait()?;
            Ok(())
        };
        self.repeat(prepare, || {
            match call.kernel {
                "upload" => device.upload(&here.borrow(), there.view_mut()),
                _ => device.download(there.view(), &mut here.borrow_mut())?,
            }
            Ok(())
        })
    }

    /// Returns the typical seconds of each call: the median, or the mean where workers share cores: there some calls are interrupted, which
    /// a median could hide.
    pub(super) fn seconds(self, are_cores_shared: bool) -> impl Iterator<Item = (KernelCall, f64)> {
        let typical = move |samples: Vec<f64>| {
            if are_cores_shared {
                samples.iter().sum::<f64>() / samples.len() as f64
            } else {
                median(samples)
            }
        };
        self.samples.into_inner().into_iter().map(move |(call, samples)| (call, typical(samples)))
    }
}

/// Returns the first unit of each set of units whose passes are alike.
fn distinct_units(model: &Model, profile: &ModelProfile) -> Vec<usize> {
    let shapes = |unit: usize| {
        let parameters = model.table().units()[unit].parameters.clone();
        model.table().parameters()[parameters].iter().map(|info| info.shape).collect::<Vec<_>>()
    };
    let inputs = |unit: usize| unit.checked_sub(1).map(|below| &profile.units[below].outputs);
    let is_alike = |left: usize, right: usize| {
        profile.units[left] == profile.units[right]
            && (shapes(left), inputs(left)) == (shapes(right), inputs(right))
    };
    let mut distinct: Vec<usize> = Vec::new();
    for unit in 0..profile.units.len() {
        if !distinct.iter().any(|&known| is_alike(known, unit)) {
            distinct.push(unit);
        }
    }
    distinct
}
