//! What ranks exchange while units run.

use crate::error::ParallelError;
use crate::exchange_memory::ExchangePool;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::stored::Stored;
use crate::waiting::Waiting;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisPlace, Bf16, DType, ExchangeKind, F16, Pending, Rank, ReduceOp};
use trireme_comm::{Buffer, Group, Work};
use trireme_tensor::tape::{AxisOps, ContextAxis, ExchangedLens, PendingExchange, TensorAxis};
use trireme_tensor::{Category, Device, DeviceError, Shape, Tape, Tensor, View, ViewMut};

/// The axes of units.
pub(crate) struct UnitAxes {
    tensor: Option<Arc<GroupAxis>>,
    ring: Option<Arc<GroupAxis>>,
    heads: Option<Arc<GroupAxis>>,
    experts: Option<Arc<GroupAxis>>,
}

impl UnitAxes {
    /// Memory of the groups is counted on `device`.
    pub(crate) fn new(ranks: &RankGrid, device: &Device) -> Self {
        let axis =
            |group: &Arc<Group>| (group.world_size() > 1).then(|| Arc::new(GroupAxis::new(group, device)));
        UnitAxes {
            tensor: axis(ranks.tensor()),
            ring: axis(ranks.ring()),
            heads: axis(ranks.heads()),
            experts: ranks.experts().and_then(axis),
        }
    }

    /// The tape of a unit that has all positions, if it `continues` a sequence, and may have any number of them; else those of this rank.
    pub(crate) fn give(&self, tape: Tape, shards_rows: bool, continues: bool) -> Tape {
        let ops = |axis: &Option<Arc<GroupAxis>>| axis.clone().map(|axis| axis as Arc<dyn AxisOps>);
        let tensor = ops(&self.tensor).map(|ops| TensorAxis { ops, shards_rows: shards_rows && !continues });
        let context = ContextAxis { ring: ops(&self.ring), heads: ops(&self.heads) };
        let has_context = !continues && (context.ring.is_some() || context.heads.is_some());
        let tape = tape.with_axis(tensor).with_context(has_context.then_some(context));
        tape.with_experts(ops(&self.experts))
    }

    /// Waits of this rank since the last call, and operations that its kernels wait for.
    pub(crate) fn take_waiting(&self) -> Waiting {
        let mut waiting = Waiting::default();
        [&self.tensor, &self.ring, &self.heads, &self.experts]
            .into_iter()
            .flatten()
            .for_each(|axis| waiting.add(axis.take_waiting()));
        waiting
    }
}

/// The ranks of an axis, as operations of units see them.
pub(crate) struct GroupAxis {
    f32s: Lane<f32>,
    bf16s: Lane<Bf16>,
    f16s: Lane<F16>,
    /// How long this rank has waited.
    waiting: Mutex<Waiting>,
}

/// Values of one type on their way.
struct Lane<T> {
    memory: ExchangePool<T>,
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

    /// Waits of this rank since the last call, and operations that its kernels wait for.
    fn take_waiting(&self) -> Waiting {
        std::mem::take(&mut self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Stored> Lane<T> {
    fn new(group: &Arc<Group>, device: &Device) -> Self {
        let pool = Pool::new(group, device, Category::Communication, true).in_huge_pages();
        Lane { memory: ExchangePool::new(pool), pending: Mutex::default() }
    }

    fn place(&self) -> AxisPlace {
        let group = self.memory.pool().group();
        AxisPlace::new(group.rank().0, group.world_size())
    }

    fn start(
        &self,
        device: &Device,
        kind: ExchangeKind,
        values: View<'_>,
    ) -> Result<PendingExchange, ParallelError> {
        let AxisPlace { rank, degree } = self.place();
        let own_len = values.shape().num_elements();
        let (len, start) = match kind {
            ExchangeKind::AllGather => (own_len * degree, rank * own_len),
            _ => (own_len, 0),
        };
        let own = self.memory.pool().send(device, (values, start), len)?;
        self.issue(kind, own)
    }

    /// Memory for a term of a sum: the group's, if kernels reach it.
    fn empty_term(&self, device: &Device, shape: Shape) -> Result<Tensor, ParallelError> {
        if !device.reaches_host() {
            return Ok(device.empty(shape, T::DTYPE, Category::Activations)?);
        }
        let len = shape.num_elements();
        Ok(self.memory.lend(self.memory.pool().take_buffer(len)?.wait(), 0..len, shape))
    }

    fn start_sum(
        &self,
        device: &Device,
        kind: ExchangeKind,
        term: Tensor,
    ) -> Result<PendingExchange, ParallelError> {
        // What others have lent, such as files of activations that a budget has no room for, is copied like a device's memory.
        if !term.lent_memory().is_some_and(|memory| self.memory.has_lent(memory)) {
            return self.start(device, kind, term.view());
        }
        let memory = term.into_lent().expect("it was seen to be lent");
        self.issue(kind, self.memory.take_back(memory))
    }

    /// Starts the exchange of what lies in memory of the group.
    fn issue(&self, kind: ExchangeKind, own: Buffer<T>) -> Result<PendingExchange, ParallelError> {
        let (group, AxisPlace { rank, degree }) = (self.memory.pool().group(), self.place());
        let len = own.len();
        let mut sent = None;
        let vector = match kind {
            ExchangeKind::AllReduce => group.all_reduce(own, ReduceOp::Sum),
            ExchangeKind::AllGather => group.all_gather(own),
            ExchangeKind::ReduceScatter => group.reduce_scatter(own, ReduceOp::Sum),
            ExchangeKind::AllToAll => group.all_to_all(own),
            ExchangeKind::Shift => {
                let received = Buffer::pending(self.memory.pool().take_buffer(len)?, len);
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
        let (vector, len, kind) = self.take(device, exchange, waiting)?;
        let start = self.first(kind, result.shape());
        self.memory.pool().receive(device, (vector, len), start, result);
        Ok(())
    }

    fn finish_temporary(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        shape: Shape,
        waiting: &mut Waiting,
    ) -> Result<Tensor, ParallelError> {
        if !device.reaches_host() {
            let mut result = device.empty(shape, T::DTYPE, Category::Activations)?;
            self.finish(device, exchange, result.view_mut(), waiting)?;
            return Ok(result);
        }
        let (vector, _, kind) = self.take(device, exchange, waiting)?;
        let start = self.first(kind, shape);
        Ok(self.memory.lend(vector.wait(), start..start + shape.num_elements(), shape))
    }

    /// As [`AxisOps::exchange_rows`]: piece by piece, a few at a time, so that what lies in memory of the group does not depend on how many rows there are.
    fn exchange_rows(
        &self,
        device: &Device,
        lens: &ExchangedLens,
        values: View<'_>,
        mut result: ViewMut<'_>,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let AxisPlace { rank, degree } = self.place();
        // On a device that only counts each rank has as much for every one.
        let even = |len: usize| (0..degree).map(|_| len / degree).collect();
        let [sent, received] = match lens.sent.is_empty() {
            true => [even(values.shape().num_elements()), even(result.shape().num_elements())],
            false => [lens.sent.clone(), lens.received.clone()],
        };
        let [sent, received] = [sent, received].map(consecutive);
        // Equal, unless the device only counts.
        let own = [sent[rank].len().min(received[rank].len())].into();
        device
            .copy(values.part(sent[rank].start, own), result.reborrow().into_part(received[rank].start, own));
        let room = Piece::<T>::room(lens.most);
        let rounds_under_way = ROUNDS_MAX.min((MESSAGES_MAX / (degree - 1)).max(1));
        let num_messages = 2 * (degree - 1) * rounds_under_way.min(Piece::<T>::num_rounds(lens.most));
        self.memory.pool().reserve(num_messages, room)?;
        let all = sent.iter().chain(&received).enumerate().filter(|(index, _)| index % degree != rank);
        let num_rounds = all.map(|(_, part)| Piece::<T>::num_rounds(part.len())).max().unwrap_or(0);
        let mut under_way: VecDeque<Piece<T>> = VecDeque::with_capacity(num_messages);
        for round in 0..num_rounds + rounds_under_way {
            // What was started so many rounds ago has had time to come.
            while under_way.front().is_some_and(|piece| piece.round + rounds_under_way <= round) {
                let piece = under_way.pop_front().expect("there is one");
                self.finish_piece(device, piece, result.reborrow(), waiting)?;
            }
            // Ranks send to different ones at a time.
            for distance in 1..degree {
                let (to, from) = ((rank + distance) % degree, (rank + degree - distance) % degree);
                let parts = [&sent[to], &received[from]].map(|part| Piece::<T>::range(part, round));
                under_way.extend(self.start_piece(device, (round, room), (values, to), from, parts)?);
            }
        }
        Ok(())
    }

    /// Starts to send a part of `values` to a rank, and to receive another one, as far as there are such parts in a round.
    fn start_piece(
        &self,
        device: &Device,
        (round, room): (usize, usize),
        (values, to): (View<'_>, usize),
        from: usize,
        [sent, received]: [Option<Range<usize>>; 2],
    ) -> Result<Option<Piece<T>>, ParallelError> {
        let pool = self.memory.pool();
        let send = |part: Range<usize>| {
            let room = room.max(Piece::<T>::room(part.len()));
            let buffer = pool.send(device, (values.part(part.start, [part.len()].into()), 0), room)?;
            Ok::<_, ParallelError>((pool.group().send_first(buffer, part.len(), Rank(to)), room))
        };
        let receive = |part: Range<usize>| {
            let room = room.max(Piece::<T>::room(part.len()));
            let buffer = Buffer::pending(pool.take_buffer(room)?, room);
            let work = pool.group().receive_first(buffer, part.len(), Rank(from));
            Ok::<_, ParallelError>((work, room, part))
        };
        let (sent, received) = (sent.map(send).transpose()?, received.map(receive).transpose()?);
        let is_any = sent.is_some() || received.is_some();
        Ok(is_any.then_some(Piece { round, sent, received }))
    }

    /// Waits for a piece, and brings it where it belongs.
    fn finish_piece(
        &self,
        device: &Device,
        piece: Piece<T>,
        result: ViewMut<'_>,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        let pool = self.memory.pool();
        if let Some((work, room, part)) = piece.received {
            let buffer = waiting.wait_on_device(work, room, device)?;
            let part = result.into_part(part.start, [part.len()].into());
            pool.receive(device, (buffer, room), 0, part);
        }
        if let Some((work, room)) = piece.sent {
            let buffer = waiting.wait_on_device(work, room, device)?;
            device.wait_for(&buffer.event());
            pool.give_buffer(room, buffer);
        }
        Ok(())
    }

    /// The first element that an exchange brings this rank for a result of this shape.
    fn first(&self, kind: ExchangeKind, result: Shape) -> usize {
        match kind {
            ExchangeKind::ReduceScatter => self.place().rank * result.num_elements(),
            _ => 0,
        }
    }

    /// What an exchange brings, in memory for so many elements.
    fn take(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        waiting: &mut Waiting,
    ) -> Result<(Pending<Buffer<T>>, usize, ExchangeKind), ParallelError> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner)[exchange.number()].take();
        let Started { kind, len, vector, sent } = pending.expect("an exchange is finished once");
        let vector = waiting.wait_on_device(vector, len, device)?;
        if let Some(sent) = sent {
            let sent = waiting.wait_on_device(sent, len, device)?;
            // The result may replace what was sent.
            device.wait_for(&sent.event());
            self.memory.pool().give_buffer(len, sent);
        }
        Ok((vector, len, kind))
    }
}

/// Rounds of pieces that are under way at a time, at most.
const ROUNDS_MAX: usize = 4;

/// Messages to other ranks that are under way at a time, unless a round has more.
const MESSAGES_MAX: usize = 8;

/// A part of the rows that a rank sends to another one, and one of those that it receives from one, in a round; with the elements of their memory.
struct Piece<T> {
    round: usize,
    sent: Option<(Work<Buffer<T>>, usize)>,
    /// With its place in the result.
    received: Option<(Work<Buffer<T>>, usize, Range<usize>)>,
}

impl<T> Piece<T> {
    /// Elements of a piece.
    const LEN_MAX: usize = (256 << 10) / size_of::<T>();

    /// Rounds in which so many elements travel.
    fn num_rounds(len: usize) -> usize {
        len.div_ceil(Self::LEN_MAX)
    }

    /// The elements of a part that travel in a round.
    fn range(part: &Range<usize>, round: usize) -> Option<Range<usize>> {
        let start = part.start + round * Self::LEN_MAX;
        (start < part.end).then(|| start..part.end.min(start + Self::LEN_MAX))
    }

    /// Elements of the memory of the first piece of so many: one of a few numbers, so that it is used again.
    fn room(len: usize) -> usize {
        len.next_power_of_two().clamp(256, Self::LEN_MAX)
    }
}

/// Parts of these lengths, one after the other.
fn consecutive(lens: SmallVec<[usize; 16]>) -> SmallVec<[Range<usize>; 16]> {
    let parts = lens.into_iter().scan(0, |end, len| {
        *end += len;
        Some(*end - len..*end)
    });
    parts.collect()
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

    fn gather_numbers(&self, own: &[u32]) -> Result<Vec<u32>, DeviceError> {
        let group = self.f32s.memory.pool().group();
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let all =
            waiting.wait(group.all_gather_bytes(bytemuck::cast_slice(own))).map_err(ParallelError::from)?;
        Ok(all.iter().flat_map(|bytes| bytemuck::pod_collect_to_vec::<u8, u32>(bytes)).collect())
    }

    fn exchange_rows(
        &self,
        device: &Device,
        lens: &ExchangedLens,
        values: View<'_>,
        result: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let exchange = with_lane!(self, values.dtype() => |lane| {
            lane.exchange_rows(device, lens, values, result, &mut waiting)
        });
        Ok(exchange?)
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

    fn empty_term(&self, device: &Device, shape: Shape, dtype: DType) -> Result<Tensor, DeviceError> {
        Ok(with_lane!(self, dtype => |lane| lane.empty_term(device, shape))?)
    }

    fn start_sum(
        &self,
        device: &Device,
        kind: ExchangeKind,
        term: Tensor,
    ) -> Result<PendingExchange, DeviceError> {
        Ok(with_lane!(self, term.dtype() => |lane| lane.start_sum(device, kind, term))?)
    }

    fn finish_temporary(
        &self,
        device: &Device,
        exchange: PendingExchange,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor, DeviceError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(with_lane!(self, dtype => |lane| lane.finish_temporary(device, &exchange, shape, &mut waiting))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;
    use trireme_testkit::run_ranks;

    #[test]
    fn terms_and_temporary_results_are_not_copied() {
        run_ranks(2, |group| {
            let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
            let axis = GroupAxis::new(&Arc::new(group), &device);
            let shape = Shape::from([2, 3]);
            let mut term = axis.empty_term(&device, shape, DType::F32).unwrap();
            device.upload(&[1.0_f32; 6], term.view_mut());
            let memory = term.into_lent().expect("memory of the group");
            let address = memory.bytes().as_ptr();
            let term = Tensor::lent(memory, shape, DType::F32);
            let sum = axis.start_sum(&device, ExchangeKind::AllReduce, term).unwrap();
            let sum = axis.finish_temporary(&device, sum, shape, DType::F32).unwrap();
            assert_eq!(device.read::<f32>(sum.view()), [2.0; 6]);
            assert_eq!(sum.into_lent().unwrap().bytes().as_ptr(), address);
        });
    }
}
