//! Kernels of a step, called by themselves to be timed.

use super::Job;
use super::probe::{NUM_ROUNDS, weight};
use crate::statistics::median;
use anyhow::Result;
use std::cell::RefCell;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;
use trireme_base::{Category, DType, Journal, JournalEntry, KernelCall, RandomKey, Rank, ReduceOp};
use trireme_comm::{Buffer, Group};
use trireme_model::{Model, Rehearsal};
use trireme_optim::{Optimizer, StepSettings, WholeUnits};
use trireme_tensor::{Device, ExactSum, IntegerFormat, Parameters, Tensor};
use trireme_train::{TrainError, executor_options, optimizer_options};

/// Bytes of other memory that are gone over before what is timed: more than most processors have caches. Between two uses of a parameter or
/// gradient a step goes over all others.
const SWEPT_BYTES: usize = 128 << 20;

/// Calls kernels, and notes how long each takes.
pub(super) struct Exerciser<'a> {
    device: &'a Device,
    journal: Journal,
    /// All ranks, and whether this one is among those that compute. The others wait for each round.
    world: &'a Group,
    is_active: bool,
    /// Memory of a device that keeps no journal, and the device.
    swept: Option<RefCell<(Device, Tensor)>>,
    samples: RefCell<BTreeMap<KernelCall, Vec<f64>>>,
}

impl<'a> Exerciser<'a> {
    /// Sweeps over `others`, which has as many threads as `device` and keeps no journal.
    pub(super) fn new(
        device: &'a Device,
        others: &Device,
        world: &'a Group,
        is_active: bool,
    ) -> Result<Self> {
        let journal = device.journal().cloned().unwrap_or_default();
        device.keep_journal(&journal);
        let swept = || {
            let shape = [SWEPT_BYTES / DType::F32.size()].into();
            Ok::<_, anyhow::Error>(RefCell::new((
                others.clone(),
                others.zeros(shape, DType::F32, Category::Activations)?,
            )))
        };
        let swept = is_active.then(swept).transpose()?;
        Ok(Exerciser { device, journal, world, is_active, swept, samples: RefCell::default() })
    }

    /// Goes over other memory, so that what is timed next is no more in the caches of its cores than in a step.
    fn sweep(&self) {
        if let Some(swept) = &self.swept {
            let (device, memory) = &mut *swept.borrow_mut();
            device.map_in_place(memory.view_mut(), 1, |x| x + 1.0);
        }
    }

    /// A kernel's time ends where the next entry begins, so it includes what the tape does in between.
    fn take_in(&self, noted: &[(JournalEntry, Instant)]) {
        let mut samples = self.samples.borrow_mut();
        for pair in noted.windows(2) {
            if let (JournalEntry::Kernel(call), began) = &pair[0] {
                samples.entry(*call).or_default().push((pair[1].1 - *began).as_secs_f64());
            }
        }
    }

    /// Runs something again and again, at the same time as the others do; each time after `prepare`, which all ranks do.
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
            self.journal.note(JournalEntry::Pause);
            let noted = self.journal.take();
            if round > 0 {
                self.take_in(&noted);
            }
        }
        Ok(())
    }

    /// As [`repeat_swept`](Exerciser::repeat_swept), of what cannot fail.
    fn repeat_call(&self, mut call: impl FnMut()) -> Result<()> {
        self.repeat_swept(|| {
            call();
            Ok(())
        })
    }

    /// As [`repeat`](Exerciser::repeat), of what finds nothing in caches.
    fn repeat_swept(&self, run: impl FnMut() -> Result<()>) -> Result<()> {
        let prepare = || {
            self.sweep();
            Ok(())
        };
        self.repeat(prepare, run)
    }

    /// The kernels of passes of each unit that is like no other one before.
    pub(super) fn units(&self, job: Job<'_>, model: &Model, rehearsal: &Rehearsal) -> Result<()> {
        let options = executor_options(job.config).passes(job.config.context_place(Rank(job.workers.rank)));
        for unit in distinct_units(model, rehearsal) {
            let exercise = model.exercise(unit, self.device, options, rehearsal).map_err(TrainError::from)?;
            self.repeat(|| Ok(()), || Ok(exercise.run(&|| self.sweep()).map_err(TrainError::from)?))?;
        }
        Ok(())
    }

    /// The kernels of an update, of the longest of these parts of units.
    pub(super) fn updates(&self, job: Job<'_>, model: &Model, parts: &[Range<usize>]) -> Result<()> {
        let table = model.table();
        let longest = (0..parts.len()).max_by_key(|&unit| parts[unit].len()).unwrap_or(0);
        let mut only = vec![0..0; parts.len()];
        only[longest] = parts[longest].clone();
        let options = optimizer_options(job.config, table)?;
        let mut optimizer = Optimizer::new(&options, table, &only, self.device)?;
        let mut parameters = Parameters::zeros_of(table, only, self.device, Category::Parameters)?;
        let grads = self.floats(parts[longest].len())?;
        let mut step = 0;
        self.repeat_swept(|| {
            step += 1;
            let settings = StepSettings { step, lr: 1e-6, grad_scale: 1.0 };
            let (values, grads) = (parameters.flat_mut(longest), grads.view());
            Ok(optimizer.step_unit(self.device, longest, values, grads, settings, &mut WholeUnits)?)
        })
    }

    /// Kernels of sums, copies and conversions, each at the largest size of a step.
    pub(super) fn others<'e>(&self, entries: impl Iterator<Item = &'e JournalEntry>) -> Result<()> {
        let mut largest: BTreeMap<&str, KernelCall> = BTreeMap::new();
        for entry in entries {
            if let JournalEntry::Kernel(call) = entry {
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
                    self.repeat_call(|| device.add_assign(sum.view_mut(), term.view()))?;
                }
                "add_squares" => {
                    let values = self.floats(float(traffic.read))?;
                    let mut sum = device.zeros([ExactSum::LEN].into(), DType::F64, Category::Activations)?;
                    self.repeat_call(|| device.add_squares(values.view(), sum.view_mut()))?;
                }
                "convert" => {
                    let types = match traffic.read.cmp(&traffic.written) {
                        Ordering::Greater => [DType::F32, DType::Bf16],
                        Ordering::Equal => [DType::F32, DType::F32],
                        Ordering::Less => [DType::Bf16, DType::F32],
                    };
                    let len = traffic.read / types[0].size();
                    let (floats, shape) = (self.floats(len)?, [len].into());
                    let mut pair = [
                        device.empty(shape, types[0], Category::Activations)?,
                        device.empty(shape, types[1], Category::Activations)?,
                    ];
                    device.convert(floats.view(), pair[0].view_mut());
                    let [from, to] = &mut pair;
                    self.repeat_call(|| device.convert(from.view(), to.view_mut()))?;
                }
                "copy" => {
                    let bytes = || device.zeros([traffic.read].into(), DType::U8, Category::Activations);
                    let (from, mut to) = (bytes()?, bytes()?);
                    self.repeat_call(|| device.copy(from.view(), to.view_mut()))?;
                }
                "upload" | "download" => {
                    let mut there = device.zeros([traffic.read].into(), DType::U8, Category::Activations)?;
                    let here = RefCell::new(self.world.buffer::<u8>(traffic.read)?);
                    let prepare = || {
                        self.sweep();
                        // Peers have read and written what copies go through.
                        let sent = std::mem::replace(&mut *here.borrow_mut(), Buffer::private(0)?);
                        *here.borrow_mut() = self.world.all_reduce(sent, ReduceOp::Max).wait()?;
                        Ok(())
                    };
                    self.repeat(prepare, || {
                        match call.kernel {
                            "upload" => device.upload(&here.borrow(), there.view_mut()),
                            _ => device.download(there.view(), &mut here.borrow_mut()),
                        }
                        Ok(())
                    })?;
                }
                "quantize" | "dequantize" | "add_dequantized" => {
                    let (packed, floats) = match call.kernel {
                        "quantize" => (traffic.written, float(traffic.read)),
                        "dequantize" => (traffic.read, float(traffic.written)),
                        _ => (traffic.read, float(traffic.updated)),
                    };
                    let is_int8 = IntegerFormat::Int8.num_bytes(floats) == packed;
                    let format = if is_int8 { IntegerFormat::Int8 } else { IntegerFormat::Int4 };
                    let mut values = self.floats(floats)?;
                    let shape = [format.num_bytes(floats)].into();
                    let mut message = device.zeros(shape, DType::U8, Category::Activations)?;
                    device.quantize(values.view(), format, message.view_mut());
                    self.repeat_call(|| match call.kernel {
                        "quantize" => device.quantize(values.view(), format, message.view_mut()),
                        "dequantize" => device.dequantize(message.view(), format, values.view_mut()),
                        _ => device.add_dequantized(message.view(), format, values.view_mut()),
                    })?;
                }
                "zero" => {
                    let mut values = self.floats(float(traffic.written))?;
                    self.repeat_call(|| device.zero(values.view_mut()))?;
                }
                _ => (),
            }
        }
        Ok(())
    }

    fn floats(&self, len: usize) -> Result<Tensor> {
        let mut tensor = self.device.empty([len].into(), DType::F32, Category::Activations)?;
        self.device.fill(tensor.view_mut(), |values| {
            RandomKey::new(0, "probe").fill_normal(values, 1.0);
            anyhow::Ok(())
        })?;
        Ok(tensor)
    }

    /// What each call took. Where workers share cores, a call is either interrupted or not, so the mean counts.
    pub(super) fn seconds(self, are_cores_shared: bool) -> impl Iterator<Item = (KernelCall, f64)> {
        let typical = move |samples: Vec<f64>| match are_cores_shared {
            true => samples.iter().sum::<f64>() / samples.len() as f64,
            false => median(samples),
        };
        self.samples.into_inner().into_iter().map(move |(call, samples)| (call, typical(samples)))
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
