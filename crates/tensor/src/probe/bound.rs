//! Lower bounds of the time of a kernel.

use super::{Probe, Unit};
use crate::device::Result;
use crate::precision::Precision;
use trireme_base::Cost;

/// Floating-point operations a second of the units that a step runs on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Of the unit that makes products.
    pub products: f64,
    /// Of the unit for all other arithmetic, if that is fused multiply-adds.
    pub arithmetic: f64,
}

trireme_base::named! {
    /// The resource that limits a kernel.
    pub enum Limit {
        /// The unit that makes products.
        Products = "products",
        /// The unit that makes other f32 arithmetic.
        Arithmetic = "arithmetic",
        /// Memory, as far from the processor as the operands are.
        Memory = "memory",
    }
}

impl Probe {
    /// The peaks that bound kernels of a precision on this device.
    pub fn peaks(&self, precision: Precision) -> Peaks {
        let peak = |precision| self.peak(Unit::of(self.device.cpu_features(), precision));
        Peaks { products: peak(precision), arithmetic: peak(Precision::F32) }
    }

    /// Seconds that a kernel takes at least, on units that never wait or by the loops of [`stream`](Probe::stream) that move as many
    /// bytes, whichever is more; and which of them it is.
    ///
    /// # Errors
    /// If the device has not as much memory as the kernel goes through.
    pub fn bound(&self, peaks: Peaks, cost: &Cost) -> Result<(f64, Limit)> {
        let bounds = [
            (cost.product_operations as f64 / peaks.products, Limit::Products),
            (cost.other_operations as f64 / peaks.arithmetic, Limit::Arithmetic),
            (self.stream(cost.traffic)?.best, Limit::Memory),
        ];
        Ok(bounds.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are three"))
    }
}
