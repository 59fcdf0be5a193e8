//! Measures the kernels of a device, beside what its units and its memory do with no kernel around them.
//!
//! Other programs slow every figure down and nothing speeds one up, so that the best of several runs tells what the
//! machine can do, and the median what to expect of it.

mod bound;

pub use crate::kernels::{ProductSizes, Unit};
pub use crate::timing::Timing;
pub use bound::{Limit, Peaks};
pub use trireme_base::{Cost, Traffic};

use crate::device::{Device, DeviceError, MatmulEpilogue, Result, Transpose};
use crate::kernels::CpuFeatures;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::timing::time_runs;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use trireme_base::{Category, DType, RandomKey};

/// A unit runs this long at least before it is timed, so that to wake threads up takes no share of it.
const UNIT_DURATION_MIN: Duration = Duration::from_millis(1);

trireme_base::named! {
    /// Which factors of a product are read transposed, of those that training needs.
    pub enum Transposes {
        /// None: `y = x W`, as forward has it.
        NN = "NN",
        /// The right one: `dx = dy W^T`, the gradient of the input.
        NT = "NT",
        /// The left one: `dW += x^T dy`, the gradient of the weight.
        TN = "TN",
    }
}

impl Transposes {
    fn split(self) -> (Transpose, Transpose) {
        match self {
            Transposes::NN => (Transpose::No, Transpose::No),
            Transposes::NT => (Transpose::No, Transpose::Yes),
            Transposes::TN => (Transpose::Yes, Transpose::No),
        }
    }
}

/// Why this machine has no such SIMD level; `None` if it has.
pub fn why_absent(features: CpuFeatures) -> Option<&'static str> {
    if features <= CpuFeatures::detect() {
        return None;
    }
    #[cfg(target_arch = "x86_64")]
    if features == CpuFeatures::AmxBf16 && crate::kernels::cpu::matmul::amx::machine_has_tiles() {
        return Some("the system denies permission to use AMX (arch_prctl ARCH_REQ_XCOMP_PERM)");
    }
    Some(match features {
        CpuFeatures::Portable => unreachable!("every machine has the lowest level"),
        CpuFeatures::Avx2 => "this processor has no AVX2 with FMA",
        CpuFeatures::Avx512 => "this processor has no AVX-512 (F, VL, BW and DQ)",
        CpuFeatures::Avx512Bf16 => "this processor has no AVX512-BF16",
        CpuFeatures::AmxBf16 => "this processor has no AMX for bf16, or the system does not enable it",
    })
}

/// Measures a device for about the same time a figure.
#[derive(Debug, Clone)]
pub struct Probe {
    device: Device,
    duration: Duration,
}

impl Probe {
    /// A probe that runs what it measures once to warm up, then again and again for `duration`: at least three times,
    /// but once is enough for what takes seconds.
    pub fn new(device: &Device, duration: Duration) -> Self {
        Probe { device: device.clone(), duration }
    }

    /// Floating-point operations a second of a unit that finds all it needs in registers, on all threads of the
    /// device.
    ///
    /// # Panics
    /// If the device's SIMD level has no such unit.
    pub fn peak(&self, unit: Unit) -> f64 {
        let mut rounds = 1024;
        loop {
            let start = Instant::now();
            self.device.run_unit(unit, rounds);
            if start.elapsed() >= UNIT_DURATION_MIN {
                break;
            }
            rounds *= 2;
        }
        let mut operations = 0;
        let Ok(timing) = time_runs(self.duration, |_| {
            operations = self.device.run_unit(unit, rounds);
            Ok::<_, Infallible>(())
        });
        operations as f64 / timing.best
    }

    /// Times plain loops that go through memory and compute next to nothing.
    ///
    /// # Errors
    /// If the device has not as much memory.
    pub fn stream(&self, traffic: Traffic) -> Result<Timing> {
        let shape = [traffic.extent().div_ceil(size_of::<u32>())].into();
        let mut memory = self.device.empty(shape, DType::U32, Category::Activations)?;
        time_runs(self.duration, |_| {
            self.device.stream(traffic, memory.view_mut());
            Ok(())
        })
    }

    /// Times a product of factors that lie in memory as those of training do: activations in `precision`, weights in
    /// f32; NN and NT make activations, TN adds to an f32 gradient.
    ///
    /// # Errors
    /// If the device has no memory for the factors.
    pub fn product(
        &self,
        precision: Precision,
        transposes: Transposes,
        sizes: ProductSizes,
    ) -> Result<Timing> {
        let ProductSizes { rows, cols, inner } = sizes;
        let activation = precision.dtype();
        let (left_shape, right_shape) = match transposes {
            Transposes::NN => ([rows, inner], [inner, cols]),
            Transposes::NT => ([rows, inner], [cols, inner]),
            Transposes::TN => ([inner, rows], [inner, cols]),
        };
        let (right_dtype, out_dtype, epilogue) = match transposes {
            Transposes::NN | Transposes::NT => (DType::F32, activation, MatmulEpilogue::Overwrite),
            Transposes::TN => (activation, DType::F32, MatmulEpilogue::Accumulate),
        };
        let left = self.random(left_shape, activation)?;
        let right = self.random(right_shape, right_dtype)?;
        let mut out = self.random([rows, cols], out_dtype)?;
        let (left_transpose, right_transpose) = transposes.split();
        time_runs(self.duration, |_| {
            let (left, right) = ((left.view(), left_transpose), (right.view(), right_transpose));
            self.device.matmul(precision, left, right, out.view_mut(), epilogue)
        })
    }

    /// A tensor of normal values of standard deviation 0.5.
    fn random(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let mut values = self.device.empty(shape, DType::F32, Category::Activations)?;
        self.device.fill(values.view_mut(), |values| {
            RandomKey::new(0, "probe").fill_normal(values, 0.5);
            Ok::<_, DeviceError>(())
        })?;
        if dtype == DType::F32 {
            return Ok(values);
        }
        let mut rounded = self.device.empty(shape, dtype, Category::Activations)?;
        self.device.convert(values.view(), rounded.view_mut());
        Ok(rounded)
    }
}

#[cfg(test)]
mod tests;
