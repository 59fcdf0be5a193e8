//! Lower bounds on the time of a kernel (roofline model).

use super::{ExecutionUnit, Probe};
use crate::device::Result;
use crate::precision::Precision;
use trireme_base::Cost;

/// Peak throughputs in floating-point operations per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Peak of matmuls.
    pub matmul: f64,
    /// Peak of all other arithmetic, if it consists of fused multiply-adds.
    pub arithmetic: f64,
}

trireme_base::named! {
    /// The resource that limits a kernel.
    pub enum Limit {
        /// Matmul throughput.
        Products = "products",
        /// Throughput of other f32 arithmetic.
        Arithmetic = "arithmetic",
        /// Bandwidth of the memory level that the operands fit into.
        Memory = "memory",
    }
}

impl Probe {
    /// Measures the peaks that bound kernels of a precision on this device: of execution units on a CPU, of large matmuls on a GPU.
    ///
    /// # Errors
    /// If the device has failed, or does not have enough memory.
    pub fn peaks(&self, precision: Precision) -> Result<Peaks> {
        let peak = |precision| {
            if self.device.is_gpu() {
                self.matmul_peak(precision)
            } else {
                Ok(self.peak(ExecutionUnit::of(self.device.simd_level(), precision)))
            }
        };
        Ok(Peaks { matmul: peak(precision)?, arithmetic: peak(Precision::F32)? })
    }

    /// Returns a lower bound on the seconds that a kernel takes, and the resource that causes it: the maximum of the time of its operations
    /// at `peaks` and of the time to [`stream`](Probe::stream) its traffic.
    ///
    /// # Errors
    /// If the device does not have enough memory for the kernel's traffic.
    #[expect(clippy::missing_panics_doc, reason = "there is always a maximum of three bounds")]
    pub fn bound(&self, peaks: Peaks, cost: &Cost) -> Result<(f64, Limit)> {
        let bounds = [
            (cost.product_operations as f64 / peaks.matmul, Limit::Products),
            (cost.other_operations as f64 / peaks.arithmetic, Limit::Arithmetic),
            (self.stream(cost.traffic)?.best, Limit::Memory),
        ];
        Ok(bounds.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are three"))
    }
}
