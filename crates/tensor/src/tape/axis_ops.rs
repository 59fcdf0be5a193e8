//! How values travel between ranks while a unit runs.

use crate::device::{Device, Result};
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use smallvec::SmallVec;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisExchange, AxisPlace, DType, ExchangeKind, UnitAxis};

/// An exchange that a rank has started, and is to finish, by the number that the implementation of [`AxisOps`] knows it by.
#[derive(Debug)]
#[must_use = "what is started is to be finished"]
pub struct PendingExchange(pub usize);

/// One rank of an axis, and how values travel along it. All ranks of the axis start the same exchanges in the same order; several may be
/// pending. Methods fail with [`DeviceError::Exchange`](crate::DeviceError::Exchange) if a rank fails, and if there is no memory for what
/// travels; after an error the axis is not used again.
pub trait AxisOps: fmt::Debug + Send + Sync {
    /// Which rank this is.
    fn place(&self) -> AxisPlace;

    /// Starts an exchange of `values`: all of them, or this rank's part if the parts of all ranks are gathered. No kernel
    /// writes to them until it [ends](AxisOps::finish); their memory may be given back, for the device reuses none that a copy works with.
    fn start(&self, device: &Device, kind: ExchangeKind, values: View<'_>) -> Result<PendingExchange>;

    /// Ends an exchange: kernels that are issued later find in `result`, of the type of the values, what this rank gets by it. It may be
    /// the memory of the values.
    fn finish(&self, device: &Device, exchange: PendingExchange, result: ViewMut<'_>) -> Result<()>;

    /// Memory for a term of a sum that [`start_sum`](AxisOps::start_sum) starts, with unspecified contents.
    fn empty_term(&self, device: &Device, shape: Shape, dtype: DType) -> Result<Tensor> {
        device.activation_of(shape, dtype)
    }

    /// As [`start`](AxisOps::start), of a sum, with a term that nobody else reads. A term in [memory for it](AxisOps::empty_term) that other
    /// ranks reach is not copied.
    fn start_sum(&self, device: &Device, kind: ExchangeKind, term: Tensor) -> Result<PendingExchange> {
        self.start(device, kind, term.view())
    }

    /// As [`finish`](AxisOps::finish), into a tensor of this shape that may lie in the exchange's own memory, without a copy. Drop it soon:
    /// later exchanges use that memory again.
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

    /// What every rank has of numbers, `own` of this one: one rank's after the other. The host waits for it.
    fn gather_numbers(&self, own: &[u32]) -> Result<Vec<u32>>;

    /// Starts to send rows to every rank, and to receive rows from every one: the elements that `runs` lists, of `values` on each rank. As many are under way
    /// as there is memory for, whatever loads are; [`send_rest`](AxisOps::send_rest) sends the others.
    fn start_rows(&self, device: &Device, runs: ExchangedRuns, values: View<'_>) -> Result<PendingExchange>;

    /// Sends the rest of an exchange of rows, of the same `values`. Part of what arrives is written to `result`, of the same type. Afterwards `values` may be overwritten.
    fn send_rest(
        &self,
        device: &Device,
        exchange: &PendingExchange,
        values: View<'_>,
        result: ViewMut<'_>,
    ) -> Result<()>;

    /// Ends an exchange of rows that has [sent all](AxisOps::send_rest): kernels that are issued later find what comes in `result`.
    fn finish_rows(&self, device: &Device, exchange: PendingExchange, result: ViewMut<'_>) -> Result<()>;

    /// An exchange from its start to its end.
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

/// Runs of elements that follow each other on their way from one rank to another.
pub type Runs = SmallVec<[Range<usize>; 8]>;

/// Elements that a rank sends to each rank of an axis, and receives from each, itself among them.
#[derive(Debug, Clone)]
pub struct ExchangedRuns {
    /// To each, where they lie.
    pub sent: SmallVec<[Runs; 8]>,
    /// From each, where they go.
    pub received: SmallVec<[Runs; 8]>,
    /// Elements from each rank to each other one, first by who sends and then by who receives.
    pub lens: Vec<usize>,
    /// Elements from one rank to another with even loads: memory for messages is sized by it.
    pub even_len: usize,
    /// The most elements from one rank to another with any loads.
    pub len_max: usize,
}

impl ExchangedRuns {
    /// Those of what is sent back.
    pub fn reversed(self) -> Self {
        let degree = self.sent.len();
        let transposed =
            (0..degree * degree).map(|index| self.lens[index % degree * degree + index / degree]);
        let lens = transposed.collect();
        ExchangedRuns { sent: self.received, received: self.sent, lens, ..self }
    }

    /// Of runs that follow each other, the parts of those in `range` of all their elements: where each begins in the range, and where it lies.
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

/// What would travel along axes whose other ranks are not there, in order. Clones are the same list.
#[derive(Debug, Clone, Default)]
pub struct NotedExchanges(Arc<Mutex<Vec<AxisExchange>>>);

impl NotedExchanges {
    /// What was noted since the last call.
    pub fn take(&self) -> Vec<AxisExchange> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A rank of an axis whose other ranks are not there: what would travel is noted.
#[derive(Debug)]
pub struct AloneOnAxis {
    axis: UnitAxis,
    place: AxisPlace,
    noted: NotedExchanges,
}

impl AloneOnAxis {
    /// This rank of an axis.
    pub fn new(axis: UnitAxis, place: AxisPlace, noted: &NotedExchanges) -> Self {
        AloneOnAxis { axis, place, noted: noted.clone() }
    }

    fn note(&self, kind: ExchangeKind, num_bytes: usize) {
        let mut noted = self.noted.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.push(AxisExchange { axis: self.axis, kind, num_bytes });
    }
}

impl AxisOps for AloneOnAxis {
    fn place(&self) -> AxisPlace {
        self.place
    }

    fn start(&self, _: &Device, kind: ExchangeKind, values: View<'_>) -> Result<PendingExchange> {
        let num_parts = if kind == ExchangeKind::AllGather { self.place.degree } else { 1 };
        self.note(kind, num_parts * values.num_bytes());
        Ok(PendingExchange(0))
    }

    fn finish(&self, _: &Device, _: PendingExchange, _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }

    /// As if all ranks had the same numbers.
    fn gather_numbers(&self, own: &[u32]) -> Result<Vec<u32>> {
        self.note(ExchangeKind::AllGather, self.place.degree * size_of_val(own));
        Ok(own.repeat(self.place.degree))
    }

    fn start_rows(&self, _: &Device, runs: ExchangedRuns, values: View<'_>) -> Result<PendingExchange> {
        let len: usize = runs.sent.iter().flatten().map(Range::len).sum();
        self.note(ExchangeKind::AllToAll, len * values.dtype().size());
        Ok(PendingExchange(0))
    }

    fn send_rest(&self, _: &Device, _: &PendingExchange, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }

    fn finish_rows(&self, _: &Device, _: PendingExchange, _: ViewMut<'_>) -> Result<()> {
        Ok(())
    }
}
