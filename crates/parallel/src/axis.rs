//! What ranks exchange while units run.

use crate::error::ParallelError;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisPlace, Bf16, DType, ExchangeKind, F16, Rank, ReduceOp};
use trireme_comm::{Buffer, Group, Work};
use trireme_tensor::tape::{AxisOps, ContextAxis, PendingExchange, TensorAxis};
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

    /// What this rank has waited since the last call.
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
    f32s: Lane<f32>,
    bf16s: Lane<Bf16>,
    f16s: Lane<F16>,
    /// How long this rank has waited.
    waiting: Mutex<Waiting>,
}

/// Values of one type on their way.
struct Lane<T> {
    pool: Pool<T>,
    /// Those pending, by the number of the exchange.
    pending: Mutex<Vec<Option<Started<T>>>>,
}

/// An exchange that was started.
struct Started<T> {
    kind: ExchangeKind,
    /// Elements of the vector.
    len: usize,
    vector: Work<Buffer<T>>,
    /// What this rank sends of its own, where it receives another vector.
    sent: Option<Work<Buffer<T>>>,
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
            f32s: Lane::new(group, device),
            bf16s: Lane::new(group, device),
            f16s: Lane::new(group, device),
            waiting: Mutex::default(),
        }
    }

    /// How long this rank has waited since the last call.
    fn take_waiting(&self) -> Waiting {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Stored> Lane<T> {
    fn new(group: &Arc<Group>, device: &Device) -> Self {
        Lane { pool: Pool::new(group, device, Category::Communication, true), pending: Mutex::default() }
    }

    fn place(&self) -> AxisPlace {
        let group = self.pool.group();
        AxisPlace::new(group.rank().0, group.world_size())
    }

    fn start(
        &self,
        device: &Device,
        kind: ExchangeKind,
        values: View<'_>,
    ) -> Result<PendingExchange, ParallelError> {
        let (group, AxisPlace { rank, degree }) = (self.pool.group(), self.place());
        let own_len = values.shape().num_elements();
        let (len, start) = match kind {
            ExchangeKind::AllGather => (own_len * degree, rank * own_len),
            _ => (own_len, 0),
        };
        let own = self.pool.send(device, (values, start), len)?;
        let mut sent = None;
        let vector = match kind {
            ExchangeKind::AllReduce => group.all_reduce(own, ReduceOp::Sum),
            ExchangeKind::AllGather => group.all_gather(own),
            ExchangeKind::ReduceScatter => group.reduce_scatter(own, ReduceOp::Sum),
            ExchangeKind::AllToAll => group.all_to_all(own),
            ExchangeKind::Shift => {
                let received = Buffer::pending(self.pool.take_buffer(len)?, len);
                sent = Some(group.send(own, Rank((rank + 1) % degree)));
                group.receive(received, Rank((rank + degree - 1) % degree))
            }
        };
        let mut all = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let number = all.iter().position(Option::is_none).unwrap_or_else(|| {
            all.push(None);
            all.len() - 1
        });
        all[number] = Some(Started { kind, len, vector, sent });
        Ok(PendingExchange::new(number))
    }

    fn finish(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        result: ViewMut<'_>,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner)[exchange.number()].take();
        let Started { kind, len, vector, sent } = pending.expect("an exchange is finished once");
        let vector = waiting.pass_on(vector, len, device)?;
        if let Some(sent) = sent {
            let sent = waiting.pass_on(sent, len, device)?;
            // The result may replace what was sent.
            device.wait_for(&sent.event());
            self.pool.give_buffer(len, sent);
        }
        let start = match kind {
            ExchangeKind::ReduceScatter => self.place().rank * result.shape().num_elements(),
            _ => 0,
        };
        self.pool.receive(device, (vector, len), start, result);
        Ok(())
    }
}

/// Runs `$body` with `$lane` as the lane of a type.
macro_rules! with_lane {
    ($axis:expr, $dtype:expr => |$lane:ident| $body:expr) => {
        match $dtype {
            DType::F32 => {
                let $lane = &$axis.f32s;
                $body
            }
            DType::Bf16 => {
                let $lane = &$axis.bf16s;
                $body
            }
            DType::F16 => {
                let $lane = &$axis.f16s;
                $body
            }
            other => unreachable!("units exchange floats, not {other}"),
        }
    };
}

impl AxisOps for GroupAxis {
    fn place(&self) -> AxisPlace {
        self.f32s.place()
    }

    fn start(
        &self,
        device: &Device,
        kind: ExchangeKind,
        values: View<'_>,
    ) -> Result<PendingExchange, DeviceError> {
        Ok(with_lane!(self, values.dtype() => |lane| lane.start(device, kind, values))?)
    }

    fn finish(
        &self,
        device: &Device,
        exchange: PendingExchange,
        result: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(with_lane!(self, result.dtype() => |lane| lane.finish(device, &exchange, result, &mut waiting))?)
    }
}
