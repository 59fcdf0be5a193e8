//! What an optimizer of a part needs of those of the others.

use std::ops::Range;
use trireme_tensor::{DeviceError, ParameterInfo, View, ViewMut};

/// Exchange among the ranks that each update one part of a unit; they make the same calls in the same order. Beside those of the other
/// shards these are the ranks of the tensor axis, which have other parts of parameters that are cut.
///
/// It is the caller's, for an optimizer knows no groups of ranks.
pub trait ShardOps {
    /// Why an exchange failed, or a step.
    type Error: From<DeviceError>;

    /// Each of the f64 `values`, which lie on the optimizer's device, becomes its sum over the ranks, of neighbours first (the canonical
    /// tree of all reductions): over shards, and then over the tensor axis. Kernels that are issued later read the sums.
    fn sum(&mut self, values: ViewMut<'_>) -> Result<(), Self::Error>;

    /// Completes a unit's flat buffer `whole`, of which this rank has the elements `part`, and the others theirs.
    fn gather(&mut self, whole: ViewMut<'_>, part: Range<usize>) -> Result<(), Self::Error>;

    /// Writes all of a matrix that ranks of the tensor axis cut, of which this rank has `part`.
    fn join(&mut self, info: &ParameterInfo, part: View<'_>, whole: ViewMut<'_>) -> Result<(), Self::Error>;
}

/// Of one rank that has whole units: there is nothing to exchange.
#[derive(Debug, Clone, Copy, Default)]
pub struct WholeUnits;

impl ShardOps for WholeUnits {
    type Error = DeviceError;

    fn sum(&mut self, _: ViewMut<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn gather(&mut self, _: ViewMut<'_>, _: Range<usize>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn join(&mut self, info: &ParameterInfo, _: View<'_>, _: ViewMut<'_>) -> Result<(), DeviceError> {
        unreachable!("{} is whole", info.name)
    }
}
