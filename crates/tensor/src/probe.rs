//! Measures the kernels of a device, and the peak throughput of its execution units and its memory.
//!
//! The best of several runs shows what the machine can do, because other programs can only slow a run down. The median shows what to
//! expect.
//!
//! A kernel's time is compared with its [lower bound](Probe::bound): the time of its operations at the peak of an execution unit with all
//! operands in registers ([`Probe::peak`]; on a GPU, of a large matmul by its library), or the time of a plain loop over the same amount of
//! memory ([`Probe::stream`]).
//! `trireme doctor` does so for matmul kernels of every SIMD level, and `trireme bench kernels` for each kernel of a step, timed within the
//! step ([`CallTimer`](crate::CallTimer)). `docs/performance.md` has the results.

mod bound;

pub use crate::kernels::{ExecutionUnit, MatmulSizes};
pub use crate::timing::Timing;
pub use bound::{Limit, Peaks};
pub use trireme_base::{Cost, Traffic};

use crate::device::{Device, DeviceError, MatmulEpilogue, Result, Transposition};
use crate::kernels::SimdLevel;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::timing::time_runs;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use trireme_base::{Category, DType, RandomKey};

/// Minimum duration of a timed run, so that the time to wake up threads, or to launch a kernel, is negligible.
const PEAK_RUN_DURATION_MIN: Duration = Duration::from_millis(1);

/// Rows, columns and inner dim of the first matmul that measures a GPU.
const PEAK_SIDE_MIN: usize = 256;

trireme_base::named! {
    /// The transposes of matmul operands that occur in training.
    pub enum Transposes {
        /// None: `y = x W`, the forward pass.
        NN = "NN",
        /// The right operand: `dx = dy W^T`, the gradient of the input.
        NT = "NT",
        /// The left operand: `dW += x^T dy`, the gradient of the weight.
        TN = "TN",
    }
}

impl Transposes {
    fn split(self) -> (Transposition, Transposition) {
        match self {
            Transposes::NN => (Transposition::No, Transposition::No),
            Transposes::NT => (Transposition::No, Transposition::Yes),
            Transposes::TN => (Transposition::Yes, Transposition::No),
        }
    }
}

/// Returns the reason why this machine lacks a SIMD level; `None` if it has the level.
pub fn reason_unsupported(simd_level: SimdLevel) -> Option<&'static str> {
    if simd_level <= SimdLevel::detect() {
        return None;
    }
    #[cfg(target_arch = "x86_64")]
    if simd_level == SimdLevel::AmxBf16 && crate::kernels::cpu::matmul::amx::machine_has_tiles() {
        return Some("the system denies permission to use AMX (arch_prctl ARCH_REQ_XCOMP_PERM)");
    }
    Some(match simd_level {
        SimdLevel::Portable => unreachable!("every machine has the lowest level"),
        SimdLevel::Avx2 => "this processor has no AVX2 with FMA",
        SimdLevel::Avx512 => "this processor has no AVX-512 (F, VL, BW and DQ)",
        SimdLevel::Avx512Bf16 => "this processor has no AVX512-BF16",
        SimdLevel::AmxBf16 => "this processor has no AMX for bf16, or the system does not enable it",
    })
}

/// Measures the kernels of a device. Each measurement takes about the same time.
#[derive(Debug, Clone)]
pub struct Probe {
    device: Device,
    duration: Duration,
}

impl Probe {
    /// Creates a probe that runs each function once to warm up and then repeatedly for `duration`, at least three times unless that takes
    /// over a second.
    pub fn new(device: &Device, duration: Duration) -> Self {
        Probe { device: device.clone(), duration }
    }

    /// Measures the floating-point operations per second of `unit`, with all operands in registers, on all threads of the host.
    ///
    /// # Panics
    /// If the device's SIMD level does not have the unit.
    pub fn peak(&self, unit: ExecutionUnit) -> f64 {
        let mut rounds = 1024;
        loop {
            let start = Instant::now();
            self.device.run_execution_unit(unit, rounds);
            if start.elapsed() >= PEAK_RUN_DURATION_MIN {
                break;
            }
            rounds *= 2;
        }
        let mut operations = 0;
        let Ok(timing) = time_runs(self.duration, || {
            let start = Instant::now();
            operations = self.device.run_execution_unit(unit, rounds);
            Ok::<_, Infallible>(start.elapsed().as_secs_f64())
        });
        operations as f64 / timing.best
    }

    /// Measures the floating-point operations per second of the smallest square matmul, with a power of two as side, that takes at least a
    /// millisecond. Its operands have the dtype of the precision.
    pub(crate) fn matmul_peak(&self, precision: Precision) -> Result<f64> {
        let mut side = PEAK_SIDE_MIN;
        loop {
            let sizes = MatmulSizes { rows: side, cols: side, inner: side };
            let timing = self.time_matmul(precision, Transposes::NN, sizes, precision.dtype())?;
            if timing.best >= PEAK_RUN_DURATION_MIN.as_secs_f64() {
                return Ok(sizes.operations() / timing.best);
            }
            side *= 2;
        }
    }

    /// Times plain loops that stream through memory with almost no arithmetic.
    ///
    /// # Errors
    /// If the device does not have enough memory.
    pub fn stream(&self, traffic: Traffic) -> Result<Timing> {
        let shape = [traffic.extent().div_ceil(size_of::<u32>())].into();
        let mut memory = self.device.empty(shape, DType::U32, Category::Activations)?;
        time_runs(self.duration, || {
            self.device.time(|| {
                self.device.stream(memory.view_mut(), traffic);
                Ok(())
            })
        })
    }

    /// Times a matmul with the dtypes of training: activations in `precision`, weights in f32. NN and NT write activations; TN adds to an
    /// f32 gradient.
    ///
    /// # Errors
    /// If the device has no memory for the operands.
    pub fn matmul(&self, precision: Precision, transposes: Transposes, sizes: MatmulSizes) -> Result<Timing> {
        self.time_matmul(precision, transposes, sizes, DType::F32)
    }

    /// As [`matmul`](Probe::matmul), with weights of a dtype.
    fn time_matmul(
        &self,
        precision: Precision,
        transposes: Transposes,
        sizes: MatmulSizes,
        weight: DType,
    ) -> Result<Timing> {
        let MatmulSizes { rows, cols, inner } = sizes;
        let activation = precision.dtype();
        let (left_shape, right_shape) = match transposes {
            Transposes::NN => ([rows, inner], [inner, cols]),
            Transposes::NT => ([rows, inner], [cols, inner]),
            Transposes::TN => ([inner, rows], [inner, cols]),
        };
        let (right_dtype, out_dtype, epilogue) = match transposes {
            Transposes::NN | Transposes::NT => (weight, activation, MatmulEpilogue::Overwrite),
            Transposes::TN => (activation, DType::F32, MatmulEpilogue::Accumulate),
        };
        let left = self.random(left_shape, activation)?;
        let right = self.random(right_shape, right_dtype)?;
        let mut out = self.random([rows, cols], out_dtype)?;
        let (left_transpose, right_transpose) = transposes.split();
        time_runs(self.duration, || {
            let (left, right) = ((left.view(), left_transpose), (right.view(), right_transpose));
            self.device.time(|| self.device.matmul(precision, left, right, out.view_mut(), epilogue))
        })
    }

    /// Returns a tensor of random normal values with standard deviation 0.5.
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
