//! `trireme bench kernels`.

use super::seconds;
use super::step::{parse_precision, read_model};
use crate::console::{Measuring, Output};
use crate::simd::{Proof, Simd};
use anyhow::{Result, bail};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use trireme_model::{Family, ModelConfig};
use trireme_tensor::probe::{KernelFigure, Probe, StepSizes, Traffic, Unit};
use trireme_tensor::{AttentionShape, Device, DeviceOptions, Precision};

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

/// As much is copied to find out how fast memory is: no cache holds it.
const COPY_BYTES: usize = 128 << 20;

const HELP: &str = "\
How to read it:
  GFLOP and MB are the minimum that the kernel needs: operations, and bytes of
  operands and results. The bound is the time for that minimum: operations at the
  peak rate of the unit (measured in this run with a loop on registers alone), or
  bytes at the rate of plain loops that compute nothing (measured next to each
  kernel, on the same amount of memory). Kernels that stream several arrays at
  once may beat the plain loops by a few percent. The measured time is the median
  of several runs on the same operands, so operands stay in whatever caches they
  fit into. Calls are counted per step; a fraction means that the last call has
  less work. Conversions have no calls: they serve gradients that are reduced in
  16 bits (reduce_dtype). Optimizers other than adamw have none either.

Examples:
  trireme bench kernels > kernels.md
      The tables of docs/performance.md: gpt2-11m with 2048 tokens and
      gpt2-124m with 1024, in f32 and bf16.
  trireme bench kernels --model configs/models/llama-12m --batch 4 --seq 512
      The kernels of your model.
  trireme bench kernels --only gelu --seconds 1
      One kernel, measured longer.";

/// Time each kernel of a training step and compare it with its bound.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct KernelsArgs {
    /// Folder with the config.json of a gpt2 or llama model. By default, gpt2-11m and gpt2-124m.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Sequences per batch.
    #[arg(long, value_name = "B", default_value_t = 8, requires = "model")]
    batch: usize,
    /// Tokens per sequence.
    #[arg(long, value_name = "T", default_value_t = 256, requires = "model")]
    seq: usize,
    /// Data type of activations and matrix multiplications: f32, bf16 or f16; separate several with commas.
    #[arg(long, value_delimiter = ',', default_value = "f32,bf16", value_parser = parse_precision)]
    dtype: Vec<Precision>,
    /// Number of threads; 0 uses one per available core.
    #[arg(long, value_name = "K", default_value_t = 0)]
    threads: usize,
    /// Measure only kernels whose name contains this text, such as gelu or "qkv: ".
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// How long to measure each figure.
    #[arg(long, value_name = "SECONDS", default_value = "0.1", value_parser = seconds)]
    seconds: Duration,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What is printed; the fields are the keys of `--json`.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    features: String,
    threads: usize,
    /// Bytes read and bytes written, of a copy that no cache holds.
    copy_bytes_per_second: f64,
    steps: Vec<StepReport>,
}

#[derive(Debug, Serialize)]
struct StepReport {
    model: String,
    dtype: String,
    batch: usize,
    seq: usize,
    /// What multiplies matrices.
    product_unit: String,
    product_peak_gflops: f64,
    arithmetic_unit: String,
    arithmetic_peak_gflops: f64,
    /// All calls in a step of all kernels that were measured.
    bound_ms: f64,
    measured_ms: f64,
    kernels: Vec<KernelReport>,
}

#[derive(Debug, Serialize)]
struct KernelReport {
    name: String,
    shape: String,
    calls: f64,
    operations: u64,
    moved_bytes: usize,
    limit: String,
    bound_us: f64,
    median_us: f64,
    best_us: f64,
    /// Bound by median.
    fraction_of_bound: f64,
}

impl KernelReport {
    fn new(figure: KernelFigure) -> Self {
        let KernelFigure { name, shape, num_calls, cost, bound, limit, timing } = figure;
        KernelReport {
            name,
            shape,
            calls: num_calls,
            operations: cost.operations(),
            moved_bytes: cost.traffic.moved(),
            limit: limit.to_string(),
            bound_us: bound * 1e6,
            median_us: timing.median * 1e6,
            best_us: timing.best * 1e6,
            fraction_of_bound: bound / timing.median,
        }
    }
}

/// A step to measure.
struct Step {
    model: String,
    config: ModelConfig,
    batch: usize,
    seq: usize,
}

/// Runs `trireme bench kernels`.
pub(crate) fn run(args: &KernelsArgs) -> Result<()> {
    let steps = steps(args)?;
    let num_threads = match args.threads {
        0 => trireme_train::share_of_cores(1),
        threads => threads,
    };
    let simd = Simd::choose(Proof::Cached)?;
    simd.warn();
    let features_max = Some(simd.level);
    let device = Device::cpu(DeviceOptions { num_threads, features_max, ..DeviceOptions::default() })?;
    let probe = Probe::new(&device, args.seconds);
    let measuring = Measuring::new();
    measuring.tell("memory");
    let copy = Traffic { read: COPY_BYTES, updated: 0, written: COPY_BYTES };
    let mut report = Report {
        version: env!("CARGO_PKG_VERSION"),
        features: device.cpu_features().to_string(),
        threads: num_threads,
        copy_bytes_per_second: copy.moved() as f64 / probe.stream(copy)?.best,
        steps: Vec::new(),
    };
    for step in &steps {
        for precision in &args.dtype {
            report.steps.push(measure(&probe, &device, step, *precision, &args.only, &measuring)?);
        }
    }
    drop(measuring);
    if report.steps.iter().any(|step| step.kernels.is_empty()) {
        bail!(
            "no kernel of the step has '{}' in its name; run without --only to list all kernels",
            args.only
        );
    }
    if args.json {
        writeln!(Output, "{}", serde_json::to_string_pretty(&report)?)?;
        return Ok(());
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
        if ![Family::GPT2, Family::LLAMA].contains(&config.family) {
            bail!(
                "bench kernels lists the kernels of gpt2 and llama, and {model} is of the family {}; `trireme bench step` measures any model",
                config.family.name()
            );
        }
        let positions = config.max_position_embeddings;
        if *batch == 0 || *seq == 0 {
            bail!("--batch and --seq must be at least 1");
        }
        if *seq > positions {
            bail!("--seq {seq} exceeds the {positions} positions of {model}");
        }
    }
    Ok(steps)
}

fn step_sizes(step: &Step) -> StepSizes {
    let Step { config, batch, seq, .. } = step;
    StepSizes {
        attention: AttentionShape {
            batch: *batch,
            seq_len: *seq,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            value_dim: config.head_dim,
            num_keys: *seq,
        },
        hidden: config.hidden_size,
        num_layers: config.num_layers,
        intermediate: config.intermediate_size,
        vocabulary: config.vocab_size,
        is_llama: config.rope.is_some(),
        attention_bias: config.qkv_bias,
        mlp_bias: config.mlp_bias,
        is_tied: config.tie_word_embeddings,
    }
}

fn measure(
    probe: &Probe,
    device: &Device,
    step: &Step,
    precision: Precision,
    only: &str,
    measuring: &Measuring,
) -> Result<StepReport> {
    let mut kernels = Vec::new();
    let peaks = probe.peaks(precision);
    measuring.tell(&format!("{}, {precision}", step.model));
    probe.step(precision, peaks, &step_sizes(step), only, &mut |figure| {
        measuring.tell(&format!("{}, {precision}: after {}", step.model, figure.name));
        kernels.push(KernelReport::new(figure));
    })?;
    let total = |time: fn(&KernelReport) -> f64| {
        kernels.iter().map(|kernel| kernel.calls * time(kernel)).sum::<f64>() / 1e3
    };
    let unit = |precision| Unit::of(device.cpu_features(), precision).to_string();
    Ok(StepReport {
        model: step.model.clone(),
        dtype: precision.to_string(),
        batch: step.batch,
        seq: step.seq,
        product_unit: unit(precision),
        product_peak_gflops: peaks.products / 1e9,
        arithmetic_unit: unit(Precision::F32),
        arithmetic_peak_gflops: peaks.arithmetic / 1e9,
        bound_ms: total(|kernel| kernel.bound_us),
        measured_ms: total(|kernel| kernel.median_us),
        kernels,
    })
}

/// Prints Markdown.
fn print(report: &Report) -> Result<()> {
    let Report { features, threads, copy_bytes_per_second, .. } = report;
    writeln!(
        Output,
        "SIMD level {features}, {threads} threads; a copy larger than all caches moves {:.1} GB/s.",
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
        writeln!(
            Output,
            "| {:<33} | {:<18} | {:>5} | {:>7} | {:>7} | {:>9} | {:<10} | {:>9} | {:>5} | {:>9} |",
            "kernel",
            "shape",
            "calls",
            "GFLOP",
            "MB",
            "bound, us",
            "by",
            "measured",
            "% of bound",
            "ms per step"
        )?;
        writeln!(Output, "|---|---|---:|---:|---:|---:|---|---:|---:|---:|")?;
        for kernel in &step.kernels {
            writeln!(
                Output,
                "| {:<33} | {:<18} | {:>5} | {:>7.3} | {:>7.2} | {:>9.1} | {:<10} | {:>9.1} | {:>4.0}% | {:>9.2} |",
                kernel.name,
                kernel.shape,
                calls(kernel.calls),
                kernel.operations as f64 / 1e9,
                kernel.moved_bytes as f64 / 1e6,
                kernel.bound_us,
                kernel.limit,
                kernel.median_us,
                kernel.fraction_of_bound * 100.0,
                kernel.calls * kernel.median_us / 1e3,
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

/// A whole number without a fraction.
fn calls(calls: f64) -> String {
    if calls.fract() == 0.0 { format!("{calls:.0}") } else { format!("{calls:.2}") }
}
