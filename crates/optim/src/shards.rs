//! The exchange between ranks that update parts of the same units.

use std::ops::Range;
use trireme_tensor::{DeviceError, ParameterInfo, View, ViewMut};

/// Exchange between the ranks that each update one part of a unit: the ranks with the other shards, and the ranks of the tensor axis with
/// the other parts of split parameters. All these ranks make the same calls in the same order.
///
/// The caller implements this trait, because this crate does not communicate with other ranks itself.
pub trait ShardOps {
    /// Error of an exchange or of a step.
    type Error: From<DeviceError>;

    /// Replaces each of the f64 `values`, which are on the optimizer's device, by its sum over the ranks: over shards, and then over the
    /// tensor axis. The values are added in the same binary tree as in every reduction, neighboring ranks first. Kernels that are issued
    /// later read the sums.
    ///
    /// # Errors
    /// If the exchange with the other ranks fails.
    fn sum(&mut self, values: ViewMut<'_>) -> Result<(), Self::Error>;

    /// Gathers a unit's flat buffer `whole`. This rank has written the elements `part`; the other ranks provide the rest.
    ///
    /// # Errors
    /// If the exchange with the other ranks fails.
    fn gather(&mut self, whole: ViewMut<'_>, part: Range<usize>) -> Result<(), Self::Error>;

    /// Gathers a matrix that is split on the tensor axis: writes the full matrix, of shape `info.full_shape`, to `whole`. `part` is this
    /// rank's part.
    ///
    /// # Errors
    /// If the exchange with the other ranks fails.
    fn gather_matrix(
        &mut self,
        info: &ParameterInfo,
        part: View<'_>,
        whole: ViewMut<'_>,
    ) -> Result<(), Self::Error>;
}

/// The exchange of a single rank, which has full units: it does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unsharded;

impl ShardOps for Unsharded {
    type Error = DeviceError;

    fn sum(&mut self, _: ViewMut<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn gather(&mut self, _: ViewMut<'_>, _: Range<usize>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn gather_matrix(
        &mut self,
        info: &ParameterInfo,
        _: View<'_>,
        _: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        unreachable!("{} is whole", info.name)
    }
}
