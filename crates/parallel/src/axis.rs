//! What ranks exchange while units run.

use crate::error::ParallelError;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisPlace, Bf16, DType, F16, Pending, Rank, ReduceOp};
use trireme_comm::{Buffer, Group, Work};
use trireme_tensor::tape::{AxisOps, ContextAxis, TensorAxis};
use trireme_tensor::{Category, Device, DeviceError, Tape, View, ViewMut};

/// The axes of units.
pub(crate) struct UnitAxes {
    tensor: Option<Arc<GroupAxis>>,
    ring: Option<Arc<GroupAxis>>,
    heads: Option<Arc<GroupAxis>>,
}

impl UnitAxes {
    /// Memory of the groups is counted on `device`.
    pub(crate) fn new(ranks: &RankGrid, device: &Device) -> Self {
        let axis =
            |group: &Arc<Group>| (group.world_size() > 1).then(|| Arc::new(GroupAxis::new(group, device)));
        UnitAxes { tensor: axis(ranks.tensor()), ring: axis(ranks.ring()), heads: axis(ranks.heads()) }
    }

    /// The tape of a unit that has all positions, if it `continues` a sequence, and may have any number of them; else those of this rank.
    pub(crate) fn give(&self, tape: Tape, shards_rows: bool, continues: bool) -> Tape {
        let ops = |axis: &Option<Arc<GroupAxis>>| axis.clone().map(|axis| axis as Arc<dyn AxisOps>);
        let tensor = ops(&self.tensor).map(|ops| TensorAxis { ops, shards_rows: shards_rows && !continues });
        let context = ContextAxis { ring: ops(&self.ring), heads: ops(&self.heads) };
        let has_context = !continues && (context.ring.is_some() || context.heads.is_some());
        tape.with_axis(tensor).with_context(has_context.then_some(context))
    }

    /// How long this rank has waited since the last call.
    pub(crate) fn take_waiting(&self) -> Waiting {
        let mut waiting = Waiting::default();
        [&self.tensor, &self.ring, &self.heads]
            .into_iter()
            .flatten()
            .for_each(|axis| waiting.add(axis.take_waiting()));
        waiting
    }
}

/// The ranks of an axis, as operations of units see them. What travels passes through memory of their group.
pub(crate) struct GroupAxis {
    group: Arc<Group>,
    f32s: Pool<f32>,
    bf16s: Pool<Bf16>,
    f16s: Pool<F16>,
    shifts: Shifts,
    /// How long this rank has waited.
    waiting: Mutex<Waiting>,
}

/// Shifts under way, of each type in order.
#[derive(Default)]
struct Shifts {
    f32s: Mutex<VecDeque<Shift<f32>>>,
    bf16s: Mutex<VecDeque<Shift<Bf16>>>,
    f16s: Mutex<VecDeque<Shift<F16>>>,
}

struct Shift<T> {
    sent: Work<Buffer<T>>,
    received: Work<Buffer<T>>,
}

impl fmt::Debug for GroupAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupAxis({:?})", self.place())
    }
}

impl GroupAxis {
    /// Memory of the group is counted on `device`.
    fn new(group: &Arc<Group>, device: &Device) -> Self {
        GroupAxis {
            group: Arc::clone(group),
            f32s: Pool::new(group, device, Category::Communication, true),
            bf16s: Pool::new(group, device, Category::Communication, true),
            f16s: Pool::new(group, device, Category::Communication, true),
            shifts: Shifts::default(),
            waiting: Mutex::default(),
        }
    }

    /// How long this rank has waited since the last call.
    fn take_waiting(&self) -> Waiting {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// This rank's part of `len` elements.
    fn own_part(&self, len: usize) -> Range<usize> {
        let AxisPlace { rank, degree } = self.place();
        assert!(len.is_multiple_of(degree), "{degree} parts of {len} elements");
        rank * (len / degree)..(rank + 1) * (len / degree)
    }

    /// Copies `from` to the elements `leaving` of a buffer of `len` elements, and exchanges it.
    fn exchange<T: Stored>(
        &self,
        pool: &Pool<T>,
        device: &Device,
        len: usize,
        (from, leaving): (View<'_>, Range<usize>),
        exchange: impl FnOnce(Buffer<T>) -> Work<Buffer<T>>,
    ) -> Result<Buffer<T>, ParallelError> {
        let mut buffer = pool.take_buffer(len)?.wait();
        device.download(from, &mut buffer[leaving]);
        let work = exchange(buffer);
        Ok(self.waiting.lock().unwrap_or_else(PoisonError::into_inner).wait(work)?)
    }
}

/// Runs `$body` with `$pool` as the pool for elements of a type, and `$shifts` as the shifts of such under way.
macro_rules! with_pool {
    ($axis:expr, $dtype:expr => |$pool:ident, $shifts:pat_param| $body:expr) => {
        match $dtype {
            DType::F32 => {
                let ($pool, $shifts) = (&$axis.f32s, &$axis.shifts.f32s);
                $body
            }
            DType::Bf16 => {
                let ($pool, $shifts) = (&$axis.bf16s, &$axis.shifts.bf16s);
                $body
            }
            DType::F16 => {
                let ($pool, $shifts) = (&$axis.f16s, &$axis.shifts.f16s);
                $body
            }
            other => unreachable!("units exchange floats, not {other}"),
        }
    };
}

impl AxisOps for GroupAxis {
    fn place(&self) -> AxisPlace {
        AxisPlace::new(self.group.rank().0, self.group.world_size())
    }

    fn all_reduce(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = values.shape().num_elements();
        with_pool!(self, values.dtype() => |pool, _| {
            let sum = |buffer| self.group.all_reduce(buffer, ReduceOp::Sum);
            let buffer = self.exchange(pool, device, len, (values.as_view(), 0..len), sum)?;
            device.upload(&buffer[..], values);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }

    fn all_gather(&self, device: &Device, part: View<'_>, whole: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = whole.shape().num_elements();
        with_pool!(self, whole.dtype() => |pool, _| {
            let gather = |buffer| self.group.all_gather(buffer);
            let buffer = self.exchange(pool, device, len, (part, self.own_part(len)), gather)?;
            device.upload(&buffer[..], whole);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }

    fn reduce_scatter(&self, device: &Device, whole: View<'_>, part: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = whole.shape().num_elements();
        with_pool!(self, whole.dtype() => |pool, _| {
            let sum = |buffer| self.group.reduce_scatter(buffer, ReduceOp::Sum);
            let buffer = self.exchange(pool, device, len, (whole, 0..len), sum)?;
            device.upload(&buffer[self.own_part(len)], part);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }

    fn all_to_all(&self, device: &Device, from: View<'_>, to: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = from.shape().num_elements();
        with_pool!(self, from.dtype() => |pool, _| {
            let swap = |buffer| self.group.all_to_all(buffer);
            let buffer = self.exchange(pool, device, len, (from, 0..len), swap)?;
            device.upload(&buffer[..], to);
            pool.give_buffer(len, Pending::new(buffer));
        });
        Ok(())
    }

    fn start_shift(&self, device: &Device, values: View<'_>) -> Result<(), DeviceError> {
        let (len, AxisPlace { rank, degree }) = (values.shape().num_elements(), self.place());
        with_pool!(self, values.dtype() => |pool, shifts| {
            let [mut sent, received] = [pool.take_buffer(len)?.wait(), pool.take_buffer(len)?.wait()];
            device.download(values, &mut sent[..]);
            let shift = Shift {
                sent: self.group.send(sent, Rank((rank + 1) % degree)),
                received: self.group.receive(received, Rank((rank + degree - 1) % degree)),
            };
            shifts.lock().unwrap_or_else(PoisonError::into_inner).push_back(shift);
        });
        Ok(())
    }

    fn finish_shift(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
        let len = values.shape().num_elements();
        with_pool!(self, values.dtype() => |pool, shifts| {
            let shift = shifts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Shift { sent, received } = shift.expect("a shift was started");
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            let received = waiting.wait(received).map_err(ParallelError::from)?;
            device.upload(&received[..], values);
            let sent = waiting.wait(sent).map_err(ParallelError::from)?;
            pool.give_buffer(len, Pending::new(sent));
            pool.give_buffer(len, Pending::new(received));
        });
        Ok(())
    }
}
