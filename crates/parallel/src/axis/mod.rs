//! Exchanges between ranks within a unit, along the tensor, context and expert axes.

mod rows;

use crate::layout::RankGrid;
use crate::memory::{ExchangePool, Pool, WaitTracker, exchanged_in_place};
use rows::RowExchange;
use slab::Slab;
use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::{AxisRank, DType, ExchangeKind, Pending, Rank, ReduceOp};
use trireme_comm::{Buffer, Group, Untyped, Work};
use trireme_tensor::tape::{
    AxisOps, ContextAxis, ExchangedRuns, ExpertAxis, PassAxes, PendingExchange, ShadowedExperts, TensorAxis,
};
use trireme_tensor::{Category, Device, DeviceError, Shape, Tensor, View, ViewMut};

/// The result of an [`AxisOps`] method, whose error type is [`DeviceError`].
type Result<T> = std::result::Result<T, DeviceError>;

/// The tensor, context and expert axes along which a unit's operations exchange values. An axis of one rank is `None`.
pub(crate) struct UnitAxes {
    tensor: Option<Arc<GroupAxis>>,
    ring: Option<Arc<GroupAxis>>,
    heads: Option<Arc<GroupAxis>>,
    experts: Option<Arc<GroupAxis>>,
    shadowed: Arc<ShadowedExperts>,
}

impl UnitAxes {
    pub(crate) fn new(ranks: &RankGrid, device: &Device) -> Self {
        let axis =
            |group: &Arc<Group>| (group.world_size() > 1).then(|| Arc::new(GroupAxis::new(group, device)));
        UnitAxes {
            tensor: axis(ranks.tensor()),
            ring: axis(ranks.ring()),
            heads: axis(ranks.heads()),
            experts: ranks.experts().and_then(axis),
            shadowed: Arc::default(),
        }
    }

    /// Returns the axes of a pass. If the pass `continues` the sequence of a KV cache (generation), this rank has all positions, so there
    /// is no context axis and rows are not sharded.
    pub(crate) fn of_pass(&self, shards_rows: bool, continues: bool) -> PassAxes {
        let ops = |axis: &Option<Arc<GroupAxis>>| axis.clone().map(|axis| axis as Arc<dyn AxisOps>);
        let tensor = ops(&self.tensor).map(|ops| TensorAxis { ops, shards_rows: shards_rows && !continues });
        let context = ContextAxis { ring: ops(&self.ring), heads: ops(&self.heads) };
        let has_context = !continues && (context.ring.is_some() || context.heads.is_some());
        let shadowed = Arc::clone(&self.shadowed);
        PassAxes {
            tensor,
            context: has_context.then_some(context),
            experts: ops(&self.experts).map(|ops| ExpertAxis { ops, shadowed }),
        }
    }

    /// Selects the shadowed experts by the loads since the previous call. Must be called between runs of a program.
    pub(crate) fn choose_shadowed(&self) {
        self.shadowed.choose();
    }

    /// Returns the time that this rank has waited since the previous call, and the operations that its kernels wait for.
    pub(crate) fn take_waiting(&self) -> WaitTracker {
        let mut waiting = WaitTracker::default();
        [&self.tensor, &self.ring, &self.heads, &self.experts]
            .into_iter()
            .flatten()
            .for_each(|axis| waiting.add(std::mem::take(&mut axis.waiting())));
        waiting
    }
}

/// The dtypes of exchanged values.
const FLOATS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// The ranks of one axis, behind the interface that a unit's operations call ([`AxisOps`]).
pub(crate) struct GroupAxis {
    /// The exchanges of each dtype in [`FLOATS`], in the same order.
    by_dtype: [DtypeExchanges; FLOATS.len()],
    waiting: Mutex<WaitTracker>,
}

/// The exchanges of one dtype.
struct DtypeExchanges {
    memory: ExchangePool,
    pending: Mutex<Slab<StartedExchange>>,
    /// Pending exchanges of rows. A [`PendingExchange`] holds the key.
    rows: Mutex<Slab<RowExchange>>,
    /// Elements of a buffer for one piece of rows: enough for the largest piece so far. A smaller exchange reuses buffers of this size
    /// instead of allocating its own.
    row_buffer_len: AtomicUsize,
}

/// Locks a mutex, also after a panic of another thread: the guarded value is consistent between calls.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct StartedExchange {
    kind: ExchangeKind,
    len: usize,
    vector: Work<Buffer<Untyped>>,
    /// The send of a [`Shift`](ExchangeKind::Shift), which receives into another buffer.
    sent: Option<Work<Buffer<Untyped>>>,
}

impl fmt::Debug for GroupAxis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupAxis({:?})", self.axis_rank())
    }
}

impl GroupAxis {
    /// Creates the exchanges among the ranks of `group`. Their buffers are counted on `device`.
    fn new(group: &Arc<Group>, device: &Device) -> Self {
        GroupAxis {
            by_dtype: FLOATS.map(|dtype| DtypeExchanges::new(group, device, dtype)),
            waiting: Mutex::default(),
        }
    }

    fn exchanges_of(&self, dtype: DType) -> &DtypeExchanges {
        let index = FLOATS.iter().position(|float| *float == dtype);
        &self.by_dtype[index.unwrap_or_else(|| unreachable!("units exchange floats, not {dtype}"))]
    }

    fn waiting(&self) -> MutexGuard<'_, WaitTracker> {
        lock(&self.waiting)
    }
}

impl DtypeExchanges {
    fn new(group: &Arc<Group>, device: &Device, dtype: DType) -> Self {
        let pool = Pool::new(group, device, dtype, Category::Communication, true).in_huge_pages();
        DtypeExchanges {
            memory: ExchangePool::new(pool),
            pending: Mutex::default(),
            rows: Mutex::default(),
            row_buffer_len: AtomicUsize::new(0),
        }
    }

    fn pool(&self) -> &Pool {
        self.memory.pool()
    }

    fn dtype(&self) -> DType {
        self.pool().dtype()
    }

    fn axis_rank(&self) -> AxisRank {
        let group = self.pool().group();
        AxisRank::new(group.rank().0, group.world_size())
    }

    /// Starts an exchange of `own`, a buffer of the group.
    fn issue(&self, kind: ExchangeKind, own: Buffer<Untyped>) -> Result<PendingExchange> {
        let (group, AxisRank { rank, degree }) = (self.pool().group(), self.axis_rank());
        let len = own.len();
        let mut sent = None;
        let vector = match kind {
            ExchangeKind::AllReduce => group.all_reduce(own, ReduceOp::Sum),
            ExchangeKind::AllGather => group.all_gather(own),
            ExchangeKind::ReduceScatter => group.reduce_scatter(own, ReduceOp::Sum),
            ExchangeKind::AllToAll => group.all_to_all(own),
            ExchangeKind::Shift => {
                let received = self.pool().pass_on(self.pool().device(), self.pool().take_buffer(len)?, len);
                sent = Some(group.send(own, Rank((rank + 1) % degree)));
                group.receive(received, Rank((rank + degree - 1) % degree))
            }
        };
        Ok(PendingExchange(lock(&self.pending).insert(StartedExchange { kind, len, vector, sent })))
    }

    /// Returns the index in the exchanged vector at which this rank's result starts. `result` is the shape of the result.
    fn result_start(&self, kind: ExchangeKind, result: Shape) -> usize {
        match kind {
            ExchangeKind::ReduceScatter => self.axis_rank().rank * result.num_elements(),
            _ => 0,
        }
    }

    /// Waits for an exchange. Returns the buffer with its result, the length of the buffer in elements, and the kind of the exchange.
    fn finish_exchange(
        &self,
        device: &Device,
        PendingExchange(number): PendingExchange,
        waiting: &mut WaitTracker,
    ) -> Result<(Pending<Buffer<Untyped>>, usize, ExchangeKind)> {
        let StartedExchange { kind, len, vector, sent } = lock(&self.pending).remove(number);
        let vector = waiting.wait_on_device(vector, self.dtype(), len, device)?;
        if let Some(sent) = sent {
            let sent = waiting.wait_on_device(sent, self.dtype(), len, device)?;
            // The result may overwrite the memory that was sent.
            device.wait_for(&sent.event());
            self.pool().release_buffer(len, sent);
        }
        Ok((vector, len, kind))
    }
}

impl AxisOps for GroupAxis {
    fn axis_rank(&self) -> AxisRank {
        self.by_dtype[0].axis_rank()
    }

    fn gather_numbers(&self, own: &[u32]) -> Result<Vec<u32>> {
        let group = self.by_dtype[0].pool().group();
        let all = self.waiting().wait(group.all_gather_bytes(bytemuck::cast_slice(own)))?;
        Ok(all.iter().flat_map(|bytes| bytemuck::pod_collect_to_vec::<u8, u32>(bytes)).collect())
    }

    fn start_rows(&self, device: &Device, runs: ExchangedRuns, values: View<'_>) -> Result<PendingExchange> {
        self.exchanges_of(values.dtype()).start_rows(device, runs, values)
    }

    fn send_rest(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        values: View<'_>,
        result: ViewMut<'_>,
    ) -> Result<()> {
        self.exchanges_of(values.dtype()).send_rest(device, exchange, values, result, &mut self.waiting())
    }

    fn finish_rows(&self, device: &Device, exchange: PendingExchange, result: ViewMut<'_>) -> Result<()> {
        self.exchanges_of(result.dtype()).finish_rows(device, exchange, result, &mut self.waiting())
    }

    fn start(&self, device: &Device, kind: ExchangeKind, values: View<'_>) -> Result<PendingExchange> {
        let exchanges = self.exchanges_of(values.dtype());
        let (AxisRank { rank, degree }, own_len) = (exchanges.axis_rank(), values.shape().num_elements());
        let (len, start) = match kind {
            ExchangeKind::AllGather => (own_len * degree, rank * own_len),
            _ => (own_len, 0),
        };
        exchanges.issue(kind, exchanges.pool().copy_to_buffer(device, values, start, len)?)
    }

    fn finish(&self, device: &Device, exchange: PendingExchange, result: ViewMut<'_>) -> Result<()> {
        let exchanges = self.exchanges_of(result.dtype());
        let (vector, len, kind) = exchanges.finish_exchange(device, exchange, &mut self.waiting())?;
        exchanges.pool().copy_from_buffer(
            device,
            vector,
            len,
            exchanges.result_start(kind, result.shape()),
            result,
        );
        Ok(())
    }

    /// Returns memory that the group exchanges in place if kernels can access it, so that the sum needs no copy.
    fn empty_partial_sum(&self, device: &Device, shape: Shape, dtype: DType) -> Result<Tensor> {
        if self.exchanges_of(dtype).pool().is_on_device() {
            return device.exchange_tensor(shape, dtype, Category::Activations);
        }
        if !device.reaches_host() {
            return device.empty(shape, dtype, Category::Activations);
        }
        let (memory, len) = (&self.exchanges_of(dtype).memory, shape.num_elements());
        Ok(memory.lend(memory.pool().take_buffer(len)?.wait(), 0..len, shape))
    }

    fn start_sum(&self, device: &Device, kind: ExchangeKind, term: Tensor) -> Result<PendingExchange> {
        let exchanges = self.exchanges_of(term.dtype());
        if let Some(exchanged) = exchanged_in_place(&term, device) {
            return exchanges.issue(kind, exchanged);
        }
        // Only memory of this pool is exchanged in place. Other lent memory, such as files for activations that exceed the budget, is
        // copied.
        if !term.lent_memory().is_some_and(|memory| exchanges.memory.has_lent(memory)) {
            return self.start(device, kind, term.view());
        }
        let memory = term.into_lent().expect("it was seen to be lent");
        exchanges.issue(kind, exchanges.memory.reclaim(memory))
    }

    fn finish_temporary(
        &self,
        device: &Device,
        exchange: PendingExchange,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        let exchanges = self.exchanges_of(dtype);
        let (mut vector, len, kind) = exchanges.finish_exchange(device, exchange, &mut self.waiting())?;
        let start = exchanges.result_start(kind, shape);
        if len == shape.num_elements()
            && let Some(tensor) = exchanges.pool().on_device(&mut vector, dtype)
        {
            return Ok(tensor.reshaped(shape));
        }
        if !device.reaches_host() {
            let mut result = device.empty(shape, dtype, Category::Activations)?;
            exchanges.pool().copy_from_buffer(device, vector, len, start, result.view_mut());
            return Ok(result);
        }
        Ok(exchanges.memory.lend(vector.wait(), start..start + shape.num_elements(), shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;
    use trireme_testkit::run_ranks;

    #[test]
    fn partial_sums_and_temporary_results_are_not_copied() {
        run_ranks(2, |group| {
            let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
            let axis = GroupAxis::new(&Arc::new(group), &device);
            let shape = Shape::from([2, 3]);
            let mut term = axis.empty_partial_sum(&device, shape, DType::F32).unwrap();
            device.upload(&[1.0_f32; 6], term.view_mut());
            let memory = term.into_lent().expect("memory of the group");
            let address = memory.bytes().as_ptr();
            let term = Tensor::lent(memory, shape, DType::F32);
            let sum = axis.start_sum(&device, ExchangeKind::AllReduce, term).unwrap();
            let sum = axis.finish_temporary(&device, sum, shape, DType::F32).unwrap();
            assert_eq!(device.read::<f32>(sum.view()).unwrap(), [2.0; 6]);
            assert_eq!(sum.into_lent().unwrap().bytes().as_ptr(), address);
        });
    }
}
