//! How values travel between ranks while a unit runs.

use crate::device::{Device, DeviceError};
use crate::tensor::{View, ViewMut};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{AxisExchange, AxisPlace, ExchangeKind, UnitAxis};

/// One rank of an axis, and how values travel along it. All ranks of the axis make the same calls in the same order.
///
/// Each call ends when kernels that are issued later find the result. After an error the axis is not used again.
pub trait AxisOps: fmt::Debug + Send + Sync {
    /// Which rank this is.
    fn place(&self) -> AxisPlace;

    /// `values` become their sums over the ranks.
    ///
    /// # Errors
    /// [`DeviceError::Exchange`] if a rank fails, and if there is no memory for what travels.
    fn all_reduce(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError>;

    /// `whole` becomes the parts of all ranks, one after the other.
    ///
    /// # Errors
    /// As [`all_reduce`](AxisOps::all_reduce).
    fn all_gather(&self, device: &Device, part: View<'_>, whole: ViewMut<'_>) -> Result<(), DeviceError>;

    /// `part` becomes this rank's part of the sums of `whole` over the ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](AxisOps::all_reduce).
    fn reduce_scatter(&self, device: &Device, whole: View<'_>, part: ViewMut<'_>) -> Result<(), DeviceError>;

    /// The part for each rank of `from` goes there; `to` becomes the parts for this rank, in the order of the ranks. Both are as many equal
    /// parts, one after the other, as there are ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](AxisOps::all_reduce).
    fn all_to_all(&self, device: &Device, from: View<'_>, to: ViewMut<'_>) -> Result<(), DeviceError>;

    /// Sends `values` to the next rank, and from the last to the first. [`finish_shift`](AxisOps::finish_shift) ends it; several may be under
    /// way.
    ///
    /// # Errors
    /// As [`all_reduce`](AxisOps::all_reduce).
    fn start_shift(&self, device: &Device, values: View<'_>) -> Result<(), DeviceError>;

    /// `values` become what the rank before has sent in the earliest shift of their type that is under way.
    ///
    /// # Errors
    /// As [`all_reduce`](AxisOps::all_reduce).
    fn finish_shift(&self, device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError>;
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

    fn note(&self, kind: ExchangeKind, values: View<'_>) -> Result<(), DeviceError> {
        let exchange = AxisExchange { axis: self.axis, kind, num_bytes: values.num_bytes() };
        self.noted.0.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
        Ok(())
    }
}

impl AxisOps for AloneOnAxis {
    fn place(&self) -> AxisPlace {
        self.place
    }

    fn all_reduce(&self, _: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
        self.note(ExchangeKind::AllReduce, values.as_view())
    }

    fn all_gather(&self, _: &Device, _: View<'_>, whole: ViewMut<'_>) -> Result<(), DeviceError> {
        self.note(ExchangeKind::AllGather, whole.as_view())
    }

    fn reduce_scatter(&self, _: &Device, whole: View<'_>, _: ViewMut<'_>) -> Result<(), DeviceError> {
        self.note(ExchangeKind::ReduceScatter, whole)
    }

    fn all_to_all(&self, _: &Device, from: View<'_>, _: ViewMut<'_>) -> Result<(), DeviceError> {
        self.note(ExchangeKind::AllToAll, from)
    }

    fn start_shift(&self, _: &Device, values: View<'_>) -> Result<(), DeviceError> {
        self.note(ExchangeKind::Shift, values)
    }

    fn finish_shift(&self, _: &Device, _: ViewMut<'_>) -> Result<(), DeviceError> {
        Ok(())
    }
}
