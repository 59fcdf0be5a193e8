//! `trireme bench kernels`.

use super::devices::{BenchDevice, gpu_backend};
use super::seconds;
use super::step::{Batches, StepArgs, build, read_model};
use crate::console::{MeasurementStatus, Output};
use crate::simd::device_options;
use anyhow::{Result, bail};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trireme_comm::single;
use trireme_model::ModelConfig;
use trireme_optim::OptimizerName;
use trireme_parallel::{GradNorm, StepPlan};
use trireme_tensor::probe::{ExecutionUnit, Probe, Traffic};
use trireme_tensor::{CallTimer, Device, Precision, TimedCall};
use trireme_train::gpu_of_worker;

/// Name, config.json and batch of the steps in docs/performance.md.
const STEPS: [(&str, &str, [usize; 2]); 2] = [
    (
        "gpt2-11m",
        r#"{"model_type": "gpt2", "vocab_size": 512, "n_positions": 256, "n_embd": 384, "n_layer": 6, "n_head": 6}"#,
        [8, 256],
    ),
    (
        "gpt2-124m",
        r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}"#,
        [2, 512],
    ),
];

/// Bytes of the copy that measures memory bandwidth. No cache holds them.
const COPY_BYTES: usize = 128 << 20;

/// Steps that may be skipped before the measured one.
const SKIPPED_MAX: usize = 40;

const HELP: &str = "\
How to read it:
  Each kernel of a training step is run again and again where the step calls it,
  on the step's own operands, which stay in whatever caches they fit into. Shapes
  are those of the operands that it reads -> the first one that it writes. Calls
  are counted per step. GFLOP and MB are the minimum that a call needs: operations,
  and bytes of operands and results. The bound is the time for that minimum:
  operations at the peak rate of the unit (measured in this run with a loop on
  registers alone), or bytes at the rate of plain loops that compute nothing (on
  the same amount of memory). Kernels that stream several arrays at once may beat
  the plain loops by a few percent. The measured time is the median of the runs.
  On a GPU, the peak rates are those of large matrix multiplications by cuBLASLt,
  and the GPU's clock measures the times.

Examples:
  trireme bench kernels > kernels.md
      gpt2-11m with 2048 tokens and gpt2-124m with 1024, in f32 and bf16.
  trireme bench kernels --model configs/models/llama-12m --batch 4 --seq 512
      The kernels of your model.
  trireme bench kernels --only attention --seconds 1
      Some kernels, measured longer.
  trireme bench kernels --only update --optimizer muon
      The updates of another optimizer.";

/// Time each kernel of a training step and compare it with its bound.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct KernelsArgs {
    /// Folder with the config.json of a model. By default, gpt2-11m and gpt2-124m.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Sequences per batch.
    #[arg(long, value_name = "B", default_value_t = 8, requires = "model")]
    batch: usize,
    /// Tokens per sequence.
    #[arg(long, value_name = "T", default_value_t = 256, requires = "model")]
    seq: usize,
    /// Data type of activations and matrix multiplications: f32, bf16 or f16; separate several with commas.
    #[arg(long, value_delimiter = ',', default_value = "f32,bf16")]
    dtype: Vec<Precision>,
    /// Optimizer of the step, as in [optimizer] name.
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    optimizer: OptimizerName,
    /// Where kernels run: cpu, or cuda for the first NVIDIA GPU.
    #[arg(long, value_name = "DEVICE", default_value_t = BenchDevice::Cpu)]
    device: BenchDevice,
    /// Number of threads of the CPU; 0 uses one per available core.
    #[arg(long, value_name = "K", default_value_t = 0)]
    threads: usize,
    /// Measure only kernels with this text in their names or shapes, such as attention or 384x1152.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// How long to measure each figure.
    #[arg(long, value_name = "SECONDS", default_value = "0.1", value_parser = seconds)]
    seconds: Duration,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The output; the fields are the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// The SIMD level of the CPU, which runs the kernels if there is no GPU.
    features: String,
    /// The name of the GPU that runs the kernels.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<String>,
    threads: usize,
    /// Bytes read plus bytes written per second, by a copy that no cache holds.
    copy_bytes_per_second: f64,
    steps: Vec<StepReport>,
}

#[derive(Debug, Serialize)]
struct StepReport {
    model: String,
    dtype: String,
    batch: usize,
    seq: usize,
    /// The processor unit that multiplies matrices.
    product_unit: String,
    product_peak_gflops: f64,
    arithmetic_unit: String,
    arithmetic_peak_gflops: f64,
    /// Sum over all calls of the measured kernels in a step.
    bound_ms: f64,
    measured_ms: f64,
    kernels: Vec<KernelReport>,
}

#[derive(Debug, Serialize)]
struct KernelReport {
    name: &'static str,
    shape: String,
    calls: usize,
    operations: u64,
    moved_bytes: usize,
    limit: String,
    bound_us: f64,
    median_us: f64,
    best_us: f64,
    /// `bound_us` divided by `median_us`.
    fraction_of_bound: f64,
}

struct Step {
    model: String,
    config: ModelConfig,
    batch: usize,
    seq: usize,
}

pub(crate) fn run(args: &KernelsArgs) -> Result<()> {
    let steps = steps(args)?;
    let num_threads = match args.threads {
        0 => trireme_train::share_of_cores(1),
        threads => threads,
    };
    let mut options = device_options(num_threads)?;
    let gpu = match args.device {
        BenchDevice::Cpu => None,
        BenchDevice::Cuda => Some(gpu_of_worker(0)?),
    };
    if let Some(gpu) = &gpu {
        options.backend = gpu_backend(gpu.ordinal);
    }
    let (device, timer) = Device::timed(options)?;
    let probe = Probe::new(&device, args.seconds);
    let measuring = Arc::new(MeasurementStatus::new());
    measuring.show("memory");
    let copy = Traffic { read: COPY_BYTES, updated: 0, written: COPY_BYTES };
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        features: device.simd_level().to_string(),
        gpu: gpu.map(|gpu| gpu.gpu.name),
        threads: num_threads,
        copy_bytes_per_second: copy.moved() as f64 / probe.stream(copy)?.best,
        steps: Vec::new(),
    };
    for step in &steps {
        for precision in &args.dtype {
            report.steps.push(measure(args, step, *precision, &probe, &device, &timer, &measuring)?);
        }
    }
    drop(measuring);
    if report.steps.iter().any(|step| step.kernels.is_empty()) {
        bail!(
            "no kernel of the step has '{}' in its name or shapes; run without --only to list all kernels",
            args.only
        );
    }
    if args.json {
        return Ok(writeln!(Output, "{}", serde_json::to_string_pretty(&report)?)?);
    }
    print(&report)
}

fn steps(args: &KernelsArgs) -> Result<Vec<Step>> {
    let steps: Vec<Step> = match &args.model {
        Some(folder) => {
            let model = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
            Vec::from([Step { model, config: read_model(folder)?, batch: args.batch, seq: args.seq }])
        }
        None => STEPS
            .into_iter()
            .map(|(model, config, [batch, seq])| {
                Ok(Step { model: model.to_owned(), config: ModelConfig::from_json(config)?, batch, seq })
            })
            .collect::<Result<_>>()?,
    };
    for Step { model, config, batch, seq } in &steps {
        let positions = config.max_positions();
        if *batch == 0 || *seq == 0 {
            bail!("--batch and --seq must be at least 1");
        }
        if *seq > positions {
            bail!("--seq {seq} exceeds the {positions} positions of {model}");
        }
    }
    Ok(steps)
}

/// Times the kernels of one step, after warm-up steps that allocate its memory.
fn measure(
    args: &KernelsArgs,
    step: &Step,
    precision: Precision,
    probe: &Probe,
    device: &Device,
    timer: &CallTimer,
    measuring: &Arc<MeasurementStatus>,
) -> Result<StepReport> {
    let title = format!("{}, {precision}", step.model);
    measuring.show(&title);
    let peaks = probe.peaks(precision)?;
    let step_args = StepArgs::of_one_worker(precision, step.batch, step.seq);
    let mut executor = build(&step_args, &step.config, args.optimizer, single(), device)?;
    let mut batches = Batches::open(&step_args, step.config.vocab_size)?;
    let mut run = |number: usize| {
        let batch = batches.read(number, &executor)?;
        let plan = StepPlan { step: number as u64 + 1, lr: 3e-4, grad_norm: GradNorm::Off, has_loss: true };
        let outcome = executor.run(plan, &mut std::iter::once(batch))?;
        anyhow::Ok(outcome.skipped.is_none())
    };
    // In f16, steps that overflow skip the optimizer until the loss scale fits.
    let mut number = 0;
    while !run(number)? {
        number += 1;
        if number > SKIPPED_MAX {
            bail!("{}: all of the first {number} steps overflowed in {precision}", step.model);
        }
    }
    let shown = Arc::clone(measuring);
    timer.start(args.seconds, &args.only, move |call| {
        shown.show(&format!("{title}: after {} {}", call.kernel, call.shapes));
    });
    let outcome = run(number + 1);
    let timed = timer.finish();
    outcome?;
    let kernel = |call: TimedCall| {
        let TimedCall { kernel, shapes, cost, num_calls, timing } = call;
        let (bound, limit) = probe.bound(peaks, &cost)?;
        anyhow::Ok(KernelReport {
            name: kernel,
            shape: shapes,
            calls: num_calls,
            operations: cost.operations(),
            moved_bytes: cost.traffic.moved(),
            limit: limit.to_string(),
            bound_us: bound * 1e6,
            median_us: timing.median * 1e6,
            best_us: timing.best * 1e6,
            fraction_of_bound: bound / timing.median,
        })
    };
    let kernels: Vec<KernelReport> = timed.into_iter().map(kernel).collect::<Result<_>>()?;
    let total = |time: fn(&KernelReport) -> f64| {
        kernels.iter().map(|kernel| kernel.calls as f64 * time(kernel)).sum::<f64>() / 1e3
    };
    let unit = |precision| {
        if device.is_gpu() {
            format!("cuBLASLt in {precision}")
        } else {
            ExecutionUnit::of(device.simd_level(), precision).to_string()
        }
    };
    Ok(StepReport {
        model: step.model.clone(),
        dtype: precision.to_string(),
        batch: step.batch,
        seq: step.seq,
        product_unit: unit(precision),
        product_peak_gflops: peaks.matmul / 1e9,
        arithmetic_unit: unit(Precision::F32),
        arithmetic_peak_gflops: peaks.arithmetic / 1e9,
        bound_ms: total(|kernel| kernel.bound_us),
        measured_ms: total(|kernel| kernel.median_us),
        kernels,
    })
}

fn print(report: &Report) -> Result<()> {
    let Report { features, gpu, threads, copy_bytes_per_second, .. } = report;
    let device = gpu.clone().unwrap_or_else(|| format!("SIMD level {features}, {threads} threads"));
    writeln!(
        Output,
        "{device}; a copy larger than all caches moves {:.1} GB/s.",
        copy_bytes_per_second / 1e9
    )?;
    for step in &report.steps {
        let StepReport { model, dtype, batch, seq, bound_ms, measured_ms, .. } = step;
        writeln!(Output, "\n### {model}, {dtype}, {batch} x {seq} tokens\n")?;
        writeln!(
            Output,
            "Peaks: {} {:.0} GFLOP/s for matrix multiplications, {} {:.0} GFLOP/s for the rest.\n",
            step.product_unit, step.product_peak_gflops, step.arithmetic_unit, step.arithmetic_peak_gflops
        )?;
        let width = |text: fn(&KernelReport) -> &str| {
            step.kernels.iter().map(|kernel| text(kernel).len()).max().unwrap_or(0)
        };
        let (names, shapes) = (width(|kernel| kernel.name), width(|kernel| &kernel.shape));
        writeln!(
            Output,
            "| {:<names$} | {:<shapes$} | calls |   GFLOP |      MB | bound, us | by         |  measured | % of bound | ms per step |\n\
             |---|---|---:|---:|---:|---:|---|---:|---:|---:|",
            "kernel", "shapes"
        )?;
        for kernel in &step.kernels {
            writeln!(
                Output,
                "| {:<names$} | {:<shapes$} | {:>5} | {:>7.3} | {:>7.2} | {:>9.1} | {:<10} | {:>9.1} | {:>4.0}% | {:>9.2} |",
                kernel.name,
                kernel.shape,
                kernel.calls,
                kernel.operations as f64 / 1e9,
                kernel.moved_bytes as f64 / 1e6,
                kernel.bound_us,
                kernel.limit,
                kernel.median_us,
                kernel.fraction_of_bound * 100.0,
                kernel.calls as f64 * kernel.median_us / 1e3,
            )?;
        }
        writeln!(
            Output,
            "\nAll calls of these kernels in a step: bound {bound_ms:.1} ms, measured {measured_ms:.1} ms ({:.0}%).",
            bound_ms / measured_ms * 100.0
        )?;
    }
    Ok(())
}
