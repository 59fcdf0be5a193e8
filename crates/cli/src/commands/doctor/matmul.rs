//! Speed of the matrix multiplication kernels.

use crate::console::{MeasurementStatus, Output};
use crate::simd::Simd;

use anyhow::{Context, Result};
use serde::Serialize;
use std::io::Write;
use std::time::Duration;
use trireme_tensor::probe::{MatmulSizes, Probe, Transposes};
use trireme_tensor::verification::MatmulKernel;
use trireme_tensor::{Device, DeviceOptions};

/// Speed of one kernel; its fields are keys of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct MatmulMeasurement {
    pub(super) precision: String,
    /// SIMD level of the kernel.
    pub(super) features: String,
    /// The processor unit that multiplies.
    pub(super) unit: String,
    /// Whether training of this precision uses this kernel.
    pub(super) is_used: bool,
    pub(super) threads: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) inner: usize,
    /// Peak of the unit with all operands in registers, in GFLOP/s.
    pub(super) peak_gflops: f64,
    /// Speed for each combination of transposed factors: NN, NT and TN.
    pub(super) transposes: Vec<TransposeMeasurement>,
}

#[derive(Debug, Serialize)]
pub(super) struct TransposeMeasurement {
    pub(super) transposes: String,
    pub(super) gflops_best: f64,
    pub(super) gflops_median: f64,
    /// `gflops_best` as a fraction of the unit's peak.
    pub(super) fraction_of_peak: f64,
}

/// Measures every kernel that may be used, for products of these sizes, on one thread and on `num_threads`.
pub(super) fn measure(
    sizes: &[MatmulSizes],
    num_threads: usize,
    duration: Duration,
    simd: &Simd,
    measuring: &MeasurementStatus,
) -> Result<Vec<MatmulMeasurement>> {
    let mut figures = Vec::new();
    let thread_counts = if num_threads == 1 { vec![1] } else { vec![1, num_threads] };
    for size in sizes {
        for kernel in MatmulKernel::up_to(simd.max_level) {
            if simd.excluded.iter().any(|excluded| excluded.kernel == kernel) {
                continue;
            }
            let MatmulKernel { precision, unit } = kernel;
            for &num_threads in &thread_counts {
                measuring.show(&format!("{precision} on {unit}, {num_threads} threads: {size}"));
                figures.push(measure_kernel(kernel, simd, *size, num_threads, duration)?);
            }
        }
    }
    Ok(figures)
}

fn measure_kernel(
    kernel: MatmulKernel,
    simd: &Simd,
    sizes: MatmulSizes,
    num_threads: usize,
    duration: Duration,
) -> Result<MatmulMeasurement> {
    let MatmulKernel { precision, unit } = kernel;
    let device = Device::cpu(DeviceOptions {
        num_threads,
        simd_level_max: Some(unit.min_simd_level()),
        ..DeviceOptions::default()
    })?;
    let probe = Probe::new(&device, duration);
    let peak = probe.peak(unit);
    let transposes = Transposes::ALL.into_iter().map(|transposes| {
        let timing = probe.matmul(precision, transposes, sizes)?;
        let speed = |seconds: f64| sizes.operations() / seconds;
        Ok(TransposeMeasurement {
            transposes: transposes.to_string(),
            gflops_best: speed(timing.best) / 1e9,
            gflops_median: speed(timing.median) / 1e9,
            fraction_of_peak: speed(timing.best) / peak,
        })
    });
    let transposes: Result<_> = transposes.collect();
    Ok(MatmulMeasurement {
        precision: precision.to_string(),
        features: unit.min_simd_level().to_string(),
        unit: unit.to_string(),
        is_used: kernel == MatmulKernel::of(simd.level, precision),
        threads: num_threads,
        rows: sizes.rows,
        cols: sizes.cols,
        inner: sizes.inner,
        peak_gflops: peak / 1e9,
        transposes: transposes.with_context(|| format!("matrix multiplication of {sizes}"))?,
    })
}

pub(super) fn print(figures: &[MatmulMeasurement]) -> Result<()> {
    let mut last = None;
    for figure in figures {
        let MatmulMeasurement { precision, unit, threads, peak_gflops, rows, cols, inner, .. } = figure;
        if last.replace((rows, cols, inner)) != Some((rows, cols, inner)) {
            writeln!(Output, "\nmatmul {rows}x{cols}x{inner}, in GFLOP/s and percent of the unit's peak")?;
            let heads = figure.transposes.iter().map(|figure| format!("{:>14}", figure.transposes));
            writeln!(Output, "  kernel               threads      peak{}", heads.collect::<String>())?;
        }
        let mark = if figure.is_used { '*' } else { ' ' };
        write!(Output, "{mark} {precision:<4} {unit:<11} {threads:>11} {peak_gflops:>9.1}")?;
        for TransposeMeasurement { gflops_best, fraction_of_peak, .. } in &figure.transposes {
            write!(Output, " {gflops_best:>7.1} {:>4.0}%", fraction_of_peak * 100.0)?;
        }
        writeln!(Output)?;
    }
    Ok(writeln!(Output, "* used for training")?)
}
