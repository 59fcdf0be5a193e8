//! Communication between ranks during the pass of a unit.

use crate::device::{Device, Result};
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisExchange, AxisRank, DType, ExchangeKind, UnitAxis};

/// Identifies a pending exchange within an implementation of [`AxisOps`]. Must be finished.
#[derive(Debug)]
#[must_use = "what is started is to be finished"]
pub struct PendingExchange(pub usize);

/// One rank's communication along an axis. All ranks of the axis start the same exchanges in the same order; several may be pending.
/// After an error of a method, the axis must not be used again.
pub trait AxisOps: fmt::Debug + Send + Sync {
    /// Returns this rank's place on the axis.
    fn axis_rank(&self) -> AxisRank;

    /// Starts an exchange of `values`: the full vector, or this rank's part for an all-gather. No kernel may write to `values` until the
    /// exchange is [finished](AxisOps::finish). Their memory may be freed, because the device does not reuse memory that a copy is using.
    ///
    /// # Errors
    /// [`DeviceError::Exchange`](crate::DeviceError::Exchange) if a rank fails, or if there is no memory for messages.
    fn start(&self, device: &Device, kind: ExchangeKind, values: View<'_>) -> Result<PendingExchange>;

    /// Finishes an exchange: kernels issued later find its result in `result`, which has the dtype of the values. `result` may be the
    /// memory of the values.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn finish(&self, device: &Device, exchange: PendingExchange, result: ViewMut<'_>) -> Result<()>;

    /// Allocates memory for a partial sum to be passed to [`start_sum`](AxisOps::start_sum), with unspecified contents.
    ///
    /// # Errors
    /// If there is no memory for the partial sum.
    fn empty_partial_sum(&self, device: &Device, shape: Shape, dtype: DType) -> Result<Tensor> {
        device.activation_of(shape, dtype)
    }

    /// Like [`start`](AxisOps::start), for a reduction of a partial sum that has no other reader. The partial sum is not copied if
    /// [`empty_partial_sum`](AxisOps::empty_partial_sum) has allocated it in memory that other ranks can access.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn start_sum(&self, device: &Device, kind: ExchangeKind, term: Tensor) -> Result<PendingExchange> {
        self.start(device, kind, term.view())
    }

    /// Like [`finish`](AxisOps::finish), but returns a tensor that may borrow the exchange's own memory, to avoid a copy. Drop it soon:
    /// later exchanges need that memory.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start), and if there is no memory for the result.
    fn finish_temporary(
        &self,
        device: &Device,
        exchange: PendingExchange,
        shape: Shape,
        dtype: DType,
    ) -> Result<Tensor> {
        let mut result = device.activation_of(shape, dtype)?;
        self.finish(device, exchange, result.view_mut())?;
        Ok(result)
    }

    /// All-gathers numbers in host memory: returns the numbers `own` of every rank, in rank order. Blocks the host.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn gather_numbers(&self, own: &[u32]) -> Result<Vec<u32>>;

    /// Starts an all-to-all of rows: sends to every rank the elements of `values` that `runs` lists for it, and receives from every rank.
    /// Starts as many messages as fit into buffers whose size does not depend on the expert loads; [`send_rest`](AxisOps::send_rest) sends
    /// the others.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn start_rows(&self, device: &Device, runs: ExchangedRuns, values: View<'_>) -> Result<PendingExchange>;

    /// Sends the remaining messages of an exchange of rows, from the same `values`. Some of the received elements are written to `result`,
    /// which has the same dtype. Afterwards, `values` may be overwritten.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn send_rest(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        values: View<'_>,
        result: ViewMut<'_>,
    ) -> Result<()>;

    /// Finishes an exchange of rows after [`send_rest`](AxisOps::send_rest): kernels issued later find all received elements in `result`.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn finish_rows(&self, device: &Device, exchange: PendingExchange, result: ViewMut<'_>) -> Result<()>;

    /// Starts and finishes an exchange.
    ///
    /// # Errors
    /// As [`start`](AxisOps::start).
    fn exchange(
        &self,
        device: &Device,
        kind: ExchangeKind,
        values: View<'_>,
        result: ViewMut<'_>,
    ) -> Result<()> {
        let exchange = self.start(device, kind, values)?;
        self.finish(device, exchange, result)
    }
}

/// The elements of a message between two ranks, as ranges of the tensor that is sent or received. The message is their concatenation.
pub type Runs = SmallVec<[Range<usize>; 8]>;

/// The elements that a rank sends to and receives from each rank of an axis, itself included.
#[derive(Debug, Clone)]
pub struct ExchangedRuns {
    /// For each destination rank, the ranges in the sent tensor.
    pub sent: SmallVec<[Runs; 8]>,
    /// For each source rank, the ranges in the received tensor.
    pub received: SmallVec<[Runs; 8]>,
    /// Number of elements between each pair of ranks, indexed by source rank, then destination rank.
    pub lens: Vec<usize>,
    /// Number of elements from one rank to another if all experts have equal loads. Determines the size of message buffers.
    pub even_len: usize,
    /// Maximum number of elements from one rank to another, whatever the loads.
    pub len_max: usize,
}

impl ExchangedRuns {
    /// Returns the runs of the reverse exchange, which returns the rows.
    pub fn reversed(self) -> Self {
        let degree = self.sent.len();
        let transposed =
            (0..degree * degree).map(|index| self.lens[index % degree * degree + index / degree]);
        let lens = transposed.collect();
        ExchangedRuns { sent: self.received, received: self.sent, lens, ..self }
    }

    /// Selects the elements `range` of the concatenated elements of `runs`. Returns, for each run that has some of them, their start
    /// relative to `range` and their range in the tensor.
    pub fn within(runs: &[Range<usize>], range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut next = 0;
        runs.iter().filter_map(move |run| {
            let first = next;
            next += run.len();
            let (start, end) = (range.start.max(first), range.end.min(next));
            (start < end).then(|| (start - range.start, run.start + start - first..run.start + end - first))
        })
    }
}

/// A log of exchanges in a dry run, in order. Clones share the log.
#[derive(Debug, Clone, Default)]
pub struct ExchangeLog(Arc<Mutex<Vec<AxisExchange>>>);

impl ExchangeLog {
    /// Takes the exchanges logged since the last call.
    pub fn take(&self) -> Vec<AxisExchange> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A rank of an axis in a dry run without other ranks. It logs exchanges instead of communicating.
#[derive(Debug)]
pub struct DryRunAxis {
    axis: UnitAxis,
    axis_rank: AxisRank,
    log: ExchangeLog,
}

impl DryRunAxis {
    /// Creates the rank at `place` of `axis`.
    pub fn new(axis: UnitAxis, place: AxisRank, log: &ExchangeLog) -> Self {
        DryRunAxis { axis, axis_rank: place, log: log.clone() }
    }

    fn record(&self, kind: ExchangeKind, num_bytes: usize) {
        let mut noted = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.push(AxisExchange { axis: self.axis, kind, num_bytes });
    }
}

impl AxisOps for DryRunAxis {
    fn axis_rank(&self) -> AxisRank {
        self.axis_rank
    }

    fn start(&self, _: &Device, kind: ExchangeKind, values: View<'_>) -> Result<PendingExchange> {
        let num_parts = if kind == ExchangeKind::AllGather { self.axis_rank.degree } else { 1 };
        self.record(kind, num_parts * values.num_bytes());
        Ok(PendingExchange(0))
    }

    fn finish(&self, _: &Device, _: PendingExchange, _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }

    /// Returns numbers as if all ranks had the same ones.
    fn gather_numbers(&self, own: &[u32]) -> Result<Vec<u32>> {
        self.record(ExchangeKind::AllGather, self.axis_rank.degree * size_of_val(own));
        Ok(own.repeat(self.axis_rank.degree))
    }

    fn start_rows(&self, _: &Device, runs: ExchangedRuns, values: View<'_>) -> Result<PendingExchange> {
        let len: usize = runs.sent.iter().flatten().map(Range::len).sum();
        self.record(ExchangeKind::AllToAll, len * values.dtype().size());
        Ok(PendingExchange(0))
    }

    fn send_rest(&self, _: &Device, _: &PendingExchange, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }

    fn finish_rows(&self, _: &Device, _: PendingExchange, _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }
}
