//! `trireme bench step`.

use super::devices::{BenchDevice, open_gpu};
use crate::commands::read_file;
use crate::console::Output;
use crate::host::HostShare;
use crate::launch::{WorkerEnvironment, join_options, launch_workers, recorder_folder, work_in_world};
use crate::simd::{Simd, Verification};
use crate::statistics::median;
use anyhow::{Context, Result, bail};
use clap::{Args, FromArgMatches};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trireme_base::{Random, RandomKey, Rank};
use trireme_codec::Compression;
use trireme_comm::{Group, JoinOptions, TransportChoice, single};
use trireme_data::{Sampler, TokenFile};
use trireme_model::{
    Batch, HostBatch, Model, ModelConfig, ModelProfile, PassOptions, set_window, token_specs,
};
use trireme_optim::{LossScaling, OptimizerName, OptimizerOptions, OptimizerSettings};
use trireme_parallel::{
    Degrees, Determinism, Executor, ExecutorOptions, ExecutorSetup, GradNorm, OffloadOptions, RankGrid,
    StepPlan, ZeroPlusPlus, chain,
};
use trireme_schedule::lowering::{apply_layout, recompute};
use trireme_schedule::{Keep, StateClass, StateLayout, Tier, single as single_stage};
use trireme_tensor::{Device, DeviceOptions, Fp8Formats, Fp8Recipe, Precision, SimdLevel};
use trireme_train::config::{Bind, HugePages};
use trireme_train::{FP8_NOTICE, staging_notice};

/// Time training steps of a model with random weights.
///
/// Each step reads its batch and runs forward, loss, backward and AdamW on every parameter (lr 3e-4, betas 0.9 and
/// 0.95, eps 1e-8, weight decay 0.1), without clipping. The workers take consecutive sequences of the file in turn.
#[derive(Debug, clap::Args)]
pub(crate) struct StepArgs {
    /// Folder with the config.json of a model.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Where workers compute: cpu, or cuda for an NVIDIA GPU each.
    #[arg(long, value_name = "DEVICE", default_value_t = BenchDevice::Cpu)]
    device: BenchDevice,
    /// Data type of activations and matrix multiplications: f32, bf16 or f16.
    #[arg(long, default_value = "f32")]
    dtype: Precision,
    /// Round the inputs of matrix multiplications in the blocks' linear layers to fp8: e4m3, or hybrid, which uses E5M2 for
    /// gradients. Requires --dtype bf16. Faster only on GPUs of compute capability 8.9 or later.
    #[arg(long, value_name = "FORMATS")]
    fp8: Option<Fp8Formats>,
    /// Data type to which gradients are rounded before they are summed over the workers: f32, bf16 or, with --dtype f16, f16.
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    reduce_dtype: Precision,
    /// Sequences per batch of one worker.
    #[arg(long, value_name = "B", default_value_t = 8)]
    batch: usize,
    /// Tokens per sequence.
    #[arg(long, value_name = "T", default_value_t = 256)]
    seq: usize,
    /// Threads per worker; 0 divides the cores among the workers.
    #[arg(long, value_name = "K", default_value_t = 0)]
    threads: usize,
    /// Number of worker processes.
    #[arg(long, value_name = "W", default_value_t = 1)]
    workers: usize,
    /// Transport for messages between workers.
    #[arg(long, default_value = "auto")]
    transport: TransportChoice,
    /// Run the workers side by side without communication: the upper bound for data parallelism on this machine.
    #[arg(long)]
    independent: bool,
    /// State that the workers shard: 0 nothing, 1 optimizer state, 2 gradients as well, 3 parameters as well.
    #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: u8,
    /// Workers that divide the layers among them, and see the same data (tensor and sequence parallelism).
    #[arg(long, value_name = "N", default_value_t = 1)]
    tensor: usize,
    /// Workers that divide the positions of each sequence among them (context parallelism).
    #[arg(long, value_name = "N", default_value_t = 1)]
    context: usize,
    /// With --context: neighbors per group that exchanges positions for heads. Keys and values go around a ring of the groups.
    #[arg(long, value_name = "N", default_value_t = 1)]
    heads: usize,
    /// Neighbors that hold different experts, for a model with experts.
    #[arg(long, value_name = "N", default_value_t = 1)]
    experts: usize,
    /// With --zero-stage 3: how many blocks ahead of their use parameters are gathered.
    #[arg(long, value_name = "N", default_value_t = 1)]
    prefetch: usize,
    /// Update each unit as soon as its gradient is reduced, and free the gradient. Requires --zero-stage 0 or 1, and --dtype f32 or bf16.
    #[arg(long)]
    free_gradients: bool,
    /// Store parameters in bf16 and round their updates stochastically. Requires --dtype bf16, without --fp8.
    #[arg(long, conflicts_with = "fp8")]
    bf16_parameters: bool,
    /// Where a class of state is kept between its uses, as CLASS=TIER: optimizer, parameters, gradients or
    /// activations; device, host or disk. May be repeated.
    #[arg(long, value_name = "CLASS=TIER", value_parser = parse_offload)]
    offload: Vec<(StateClass, Tier)>,
    /// How many uses ahead offloaded state is fetched.
    #[arg(long, value_name = "N", default_value_t = 1)]
    offload_prefetch: usize,
    /// Folder for files on disk.
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    offload_folder: PathBuf,
    /// Activations that blocks keep for the backward pass: all, products or input.
    #[arg(long, value_name = "WHAT", default_value = "all", value_parser = parse_keep)]
    keep: Keep,
    /// Number of timed steps.
    #[arg(long, value_name = "N", default_value_t = 20)]
    steps: usize,
    /// Number of untimed steps before them.
    #[arg(long, value_name = "N", default_value_t = 3)]
    warmup: usize,
    /// Flat file of little-endian u16 token ids. By default, tokens are random.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Seed of the weights and of random tokens.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

fn parse_offload(text: &str) -> Result<(StateClass, Tier), &'static str> {
    let parse = |(class, name): (&str, &str)| Some((StateClass::named(class)?, Tier::named(name)?));
    let parsed = text.split_once('=').and_then(parse);
    parsed.ok_or("expected a class of state and its tier, such as optimizer=disk")
}

fn parse_keep(text: &str) -> Result<Keep, &'static str> {
    let keep = Keep::named(text).filter(|keep| *keep != Keep::Nothing);
    keep.ok_or("expected all, products or input")
}

/// The output. It has the keys of `peers/torch_train.py`, and more. `peer` names the system that was timed.
#[derive(Debug, Serialize)]
struct Measurement {
    peer: &'static str,
    version: &'static str,
    model: String,
    params: usize,
    dtype: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fp8: Option<String>,
    reduce_dtype: String,
    strategy: &'static str,
    compile: bool,
    device: &'static str,
    world_size: usize,
    threads: usize,
    batch_per_rank: usize,
    seq: usize,
    steps: usize,
    tokens_per_second_median: f64,
    tokens_per_second_best: f64,
    step_ms_median: f64,
    seconds_to_first_step: f64,
    peak_rss_bytes: u64,
    final_loss: f64,
    /// Timed steps whose gradients overflowed in f16, so that they skipped the optimizer.
    skipped_steps: usize,
    memory_counted_bytes: u64,
    comm_exposed_ms_median: f64,
    /// Bytes that rank 0 read in the last step.
    disk_bytes_read: u64,
    /// Bytes that rank 0 wrote in the last step.
    disk_bytes_written: u64,
}

pub(crate) fn run(args: &StepArgs, started: Instant) -> Result<()> {
    if args.batch == 0 || args.seq == 0 || args.workers == 0 || args.steps == 0 {
        bail!("--batch, --seq, --workers and --steps must be at least 1");
    }
    if let Some(formats) = args.fp8
        && args.dtype != Precision::Bf16
    {
        bail!("--fp8 {formats} requires bf16; add --dtype bf16");
    }
    if args.reduce_dtype == Precision::F16 && args.dtype != Precision::F16 {
        bail!("--reduce-dtype f16 needs loss scaling; add --dtype f16, or use bf16");
    }
    let environment = WorkerEnvironment::of_this_process()?;
    let simd = Simd::choose(Verification::Cached)?;
    if environment.as_ref().is_none_or(|environment| environment.local_rank == 0) {
        simd.warn();
    }
    match environment {
        Some(environment) => {
            let options = JoinOptions {
                transport: args.transport,
                job: "bench".to_owned(),
                ..join_options(&environment, None)?
            };
            let local_rank = environment.local_rank;
            work_in_world(options, recorder_folder(), |group| {
                measure(args, group, local_rank, started, simd.level)
            })
        }
        None if args.workers > 1 => {
            // Checked before workers start, because each of them would report the same mistake.
            read_model(&args.model)?;
            launch_workers(args.workers, started, Some(&simd))
        }
        None => measure(args, single(), 0, started, simd.level),
    }
}

enum Tokens {
    File { file: TokenFile, sampler: Sampler },
    Random { vocab_size: u64, seed: u64 },
}

impl Tokens {
    fn open(args: &StepArgs, vocab_size: usize) -> Result<Self> {
        let Some(path) = &args.data else {
            return Ok(Tokens::Random { vocab_size: vocab_size as u64, seed: args.seed });
        };
        let file = TokenFile::open_flat_u16(path, vocab_size)?;
        let sampler = Sampler::stream(file.num_tokens(), args.seq, None)?;
        Ok(Tokens::File { file, sampler })
    }

    fn read(&self, sample: u64, window: &mut [u32]) -> Result<()> {
        match self {
            Tokens::File { file, sampler } => file.read_window(sampler.window(sample).start, window)?,
            Tokens::Random { vocab_size, seed } => {
                let key = RandomKey::new(*seed, "bench tokens");
                let mut random = Random::new(key, sample * 3 * window.len() as u64);
                window.iter_mut().for_each(|token| *token = random.below(*vocab_size) as u32);
            }
        }
        Ok(())
    }
}

pub(super) struct Batches {
    tokens: Tokens,
    samples: HostBatch,
    window: Vec<u32>,
    batch_size: usize,
}

impl Batches {
    pub(super) fn open(args: &StepArgs, vocab_size: usize) -> Result<Self> {
        Ok(Batches {
            tokens: Tokens::open(args, vocab_size)?,
            samples: HostBatch::new(&token_specs(args.batch, args.seq)),
            window: vec![0; args.seq + 1],
            batch_size: args.batch,
        })
    }

    /// Reads the batch of a step, counted from 0.
    pub(super) fn read(&mut self, step: usize, executor: &Executor) -> Result<Batch> {
        let (place, batch_size) = (executor.ranks().sample_rank(), self.batch_size);
        for row in 0..batch_size {
            let sample = (step * place.degree + place.rank) * batch_size + row;
            self.tokens.read(sample as u64, &mut self.window)?;
            set_window(&mut self.samples, row, &self.window);
        }
        Ok(self.samples.upload_positions(executor.device(), executor.ranks().context_rank())?)
    }
}

pub(super) fn read_model(folder: &Path) -> Result<ModelConfig> {
    let path = folder.join("config.json");
    ModelConfig::from_json(&read_file(&path)?).with_context(|| path.display().to_string())
}

impl StepArgs {
    /// Returns arguments for steps of one worker. All other arguments have the defaults of the command line.
    pub(super) fn of_one_worker(dtype: Precision, batch: usize, seq: usize) -> Self {
        let command = StepArgs::augment_args(clap::Command::new("step"));
        let matches = command.try_get_matches_from(["step", "--model", "."]);
        let defaults = matches.and_then(|matches| StepArgs::from_arg_matches(&matches));
        StepArgs { dtype, batch, seq, ..defaults.expect("all arguments but the model have defaults") }
    }
}

/// Creates the executor of a model with random weights.
pub(super) fn build(
    args: &StepArgs,
    config: &ModelConfig,
    optimizer: OptimizerName,
    group: Group,
    device: &Device,
) -> Result<Executor> {
    if args.seq > config.max_positions() {
        bail!("--seq {} exceeds the model's {} positions", args.seq, config.max_positions());
    }
    let state = state_layout(args);
    let num_workers = group.world_size();
    let (tensor, context) = (args.tensor, args.context);
    if tensor * context == 0 || !num_workers.is_multiple_of(tensor * context) {
        bail!("--tensor {tensor} times --context {context} does not divide {num_workers} workers");
    }
    if context > 1 && !args.seq.is_multiple_of(2 * context) {
        bail!(
            "--seq {} is not a multiple of {}, two parts for each worker of --context",
            args.seq,
            2 * context
        );
    }
    if args.heads == 0 || !context.is_multiple_of(args.heads) {
        bail!("--heads {} does not divide --context {context}", args.heads);
    }
    let shards = if state.has_shards() { num_workers / tensor } else { 1 };
    if args.experts == 0 || !(num_workers / tensor).is_multiple_of(args.experts) {
        bail!("--experts {} does not divide the workers with different data or positions", args.experts);
    }
    let degrees = Degrees { pipeline: 1, shards, context, heads: args.heads, tensor, experts: args.experts };
    let ranks = RankGrid::new(group, degrees)?;
    let build = |device: &Device| {
        let place = ranks.model_rank();
        Model::build_at(place, device, |device, table| config.build_into(table, args.seq, device))
    };
    let fp8 = args.fp8.map(Fp8Recipe::new);
    let context = ranks.context_rank();
    let passes = PassOptions { precision: args.dtype, fp8, sequence_parallel: true, context };
    let batch: Vec<_> =
        token_specs(args.batch, args.seq).iter().map(|spec| spec.for_context_rank(context)).collect();
    let profile_options = DeviceOptions {
        num_threads: device.num_threads(),
        simd_level_max: Some(device.simd_level()),
        ..DeviceOptions::default()
    };
    let profile = ModelProfile::of(build, profile_options, passes, &batch)?;
    let model = build(device)?;
    let optimizer = &OptimizerOptions {
        weight_decay: 0.1,
        decay_norms_and_biases: true,
        precision: args.dtype,
        // 1-bit Adam needs at least one step that updates the second moment. The other optimizers ignore `freeze_step`.
        settings: OptimizerSettings { freeze_step: 1, ..OptimizerSettings::DEFAULT },
        ..OptimizerOptions::new(optimizer)
    };
    let mut offload_options = OffloadOptions::none(device);
    if !args.offload.is_empty() {
        offload_options.host = device.host()?;
        offload_options.folder = args.offload_folder.clone();
    }
    let chain = chain(model.table(), &profile, Determinism::Layout);
    let keep = |unit| if chain.keeps(unit) { args.keep } else { Keep::All };
    let keeps: Vec<Keep> = (0..chain.num_units).map(keep).collect();
    let program = recompute(single_stage::program(&chain, 1), &keeps);
    if args.free_gradients && (args.zero_stage > 1 || args.dtype == Precision::F16) {
        bail!("--free-gradients requires --zero-stage 0 or 1, and --dtype f32 or bf16");
    }
    if args.bf16_parameters && args.dtype != Precision::Bf16 {
        bail!("--bf16-parameters requires --dtype bf16");
    }
    if !state.is_possible(program.header.num_microbatches) {
        bail!(
            "--offload: only what --zero-stage {} shards, and activations, can leave the device",
            args.zero_stage
        );
    }
    let program = apply_layout(program, state);
    let options = ExecutorOptions {
        precision: passes.precision,
        bf16_parameters: args.bf16_parameters,
        fp8: passes.fp8,
        shards_rows: passes.sequence_parallel,
        reduce_dtype: args.reduce_dtype,
        fusion_bytes: ExecutorOptions::FUSION_BYTES,
        zero_plus_plus: ZeroPlusPlus::NONE,
        compression: Compression::none(),
        seed: args.seed,
        loss_scaling: if args.dtype == Precision::F16 { LossScaling::DYNAMIC } else { LossScaling::Off },
        determinism: Determinism::Layout,
    };
    let offload = &offload_options;
    let setup = ExecutorSetup { model, profile, optimizer, ranks, device, program, options, offload };
    let mut executor = Executor::new(setup)?;
    executor.initialize(args.seed)?;
    Ok(executor)
}

fn state_layout(args: &StepArgs) -> StateLayout {
    let state = StateLayout {
        gather_ahead: args.prefetch,
        fetch_ahead: args.offload_prefetch,
        updates_early: args.free_gradients,
        ..StateLayout::zero(args.zero_stage.into())
    };
    args.offload.iter().fold(state, |state, &(class, tier)| state.with_tier(class, tier))
}

fn measure(
    args: &StepArgs,
    world: Group,
    local_rank: usize,
    started: Instant,
    simd_level: SimdLevel,
) -> Result<()> {
    let (rank, world_size) = (world.rank(), world.world_size());
    let num_threads = match args.threads {
        0 => HostShare::of_world(&world, HugePages::Transparent, Bind::None)?.num_threads,
        threads => threads,
    };
    let simd_level_max = Some(simd_level);
    let options = DeviceOptions { num_threads, simd_level_max, ..DeviceOptions::default() };
    // Independent workers communicate again only to gather their results.
    let (group, results_group) = if args.independent { (single(), Some(world)) } else { (world, None) };
    let device = match args.device {
        BenchDevice::Cpu => Device::cpu(options)?,
        BenchDevice::Cuda => {
            let (device, obstacle) = open_gpu(&group, local_rank, options)?;
            if let Some(reason) = obstacle.filter(|_| rank == Rank::ROOT) {
                eprintln!("note: {}", staging_notice(&reason));
            }
            device
        }
    };
    let config = read_model(&args.model)?;
    let mut executor = build(args, &config, OptimizerName::AdamW, group, &device)?;
    let mut batches = Batches::open(args, config.vocab_size)?;
    let (mut seconds, mut exposed) = (Vec::new(), Vec::new());
    let (mut first, mut loss, mut skipped_steps) = (None, f64::NAN, 0);
    let mut disk_bytes = [0, 0];
    for step in 0..args.warmup + args.steps {
        let began = Instant::now();
        let batch = batches.read(step, &executor)?;
        let disk_before = executor.disk_bytes();
        let plan = StepPlan { step: step as u64 + 1, lr: 3e-4, grad_norm: GradNorm::Off, has_loss: true };
        let outcome = executor.run(plan, &mut std::iter::once(batch))?;
        if step >= args.warmup {
            seconds.push(began.elapsed().as_secs_f64());
            exposed.push(outcome.comm_exposed.as_secs_f64());
            skipped_steps += usize::from(outcome.skipped.is_some());
        }
        loss = outcome.loss;
        let disk_after = executor.disk_bytes();
        disk_bytes = [disk_after[0] - disk_before[0], disk_after[1] - disk_before[1]];
        first.get_or_insert_with(|| started.elapsed().as_secs_f64());
    }
    let facts = [
        first.unwrap_or_default(),
        peak_rss_bytes()? as f64,
        median(seconds.iter().copied()),
        median(exposed),
    ];
    let all = gather(results_group.as_ref().unwrap_or(executor.group()), &facts)?;
    if rank != Rank::ROOT {
        return Ok(());
    }
    let worst = |index: usize| all.iter().map(|facts| facts[index]).fold(0.0, f64::max);
    let num_batches = if args.independent { world_size } else { executor.ranks().sample_rank().degree };
    let tokens_per_step = (args.batch * args.seq * num_batches) as f64;
    seconds.sort_by(f64::total_cmp);
    print(
        args,
        &Measurement {
            peer: "trireme",
            version: env!("CARGO_PKG_VERSION"),
            model: args.model.file_name().unwrap_or(args.model.as_os_str()).to_string_lossy().into_owned(),
            params: executor.model().table().full().num_elements(),
            dtype: args.dtype.to_string(),
            fp8: args.fp8.map(|formats| formats.to_string()),
            reduce_dtype: args.reduce_dtype.to_string(),
            strategy: match (world_size, args.independent) {
                (1, _) => "none",
                (_, true) => "independent",
                _ if args.experts > 1 => "experts",
                _ if args.context > 1 => "context",
                _ if args.tensor > 1 => "tensor",
                (_, false) => ["ddp", "zero1", "zero2", "zero3"][usize::from(args.zero_stage)],
            },
            compile: false,
            device: args.device.name(),
            world_size,
            threads: num_threads,
            batch_per_rank: args.batch,
            seq: args.seq,
            steps: args.steps,
            tokens_per_second_median: tokens_per_step / worst(2),
            tokens_per_second_best: tokens_per_step / seconds[0],
            step_ms_median: worst(2) * 1e3,
            seconds_to_first_step: worst(0),
            peak_rss_bytes: worst(1) as u64,
            final_loss: loss,
            skipped_steps,
            memory_counted_bytes: device.memory().total().peak as u64,
            comm_exposed_ms_median: worst(3) * 1e3,
            disk_bytes_read: disk_bytes[0],
            disk_bytes_written: disk_bytes[1],
        },
    )
}

fn gather(world: &Group, facts: &[f64; 4]) -> Result<Vec<[f64; 4]>> {
    let mine: Vec<u8> = facts.iter().flat_map(|fact| fact.to_le_bytes()).collect();
    let number = |bytes: &[u8]| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes);
    let all = world.all_gather_bytes(&mine).wait()?;
    Ok(all.iter().map(|bytes| std::array::from_fn(|index| number(&bytes[index * 8..][..8]))).collect())
}

/// Returns the peak resident set size of this process.
fn peak_rss_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("cannot read /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kibibytes.context("/proc/self/status has no VmHWM")? * 1024)
}

fn print(args: &StepArgs, measurement: &Measurement) -> Result<()> {
    if args.json {
        return Ok(writeln!(Output, "{}", serde_json::to_string(measurement)?)?);
    }
    let Measurement { model, params, world_size, threads, batch_per_rank, seq, .. } = measurement;
    writeln!(
        Output,
        "{model}: {params} parameters, {world_size} workers x {threads} threads, {batch_per_rank} x {seq} tokens each"
    )?;
    writeln!(
        Output,
        "  {:.0} tokens/s (median), {:.0} (best); {:.1} ms per step, {:.1} ms of it waiting for communication",
        measurement.tokens_per_second_median,
        measurement.tokens_per_second_best,
        measurement.step_ms_median,
        measurement.comm_exposed_ms_median,
    )?;
    let [host, counted] =
        [measurement.peak_rss_bytes, measurement.memory_counted_bytes].map(trireme_base::Bytes);
    let memory = match args.device {
        BenchDevice::Cpu => format!("peak memory {host} per worker, {counted} of it tracked"),
        BenchDevice::Cuda => format!("peak memory per worker: {host} of the host, {counted} of its GPU"),
    };
    writeln!(
        Output,
        "  first step after {:.3} s; {}; loss {:.4}",
        measurement.seconds_to_first_step, memory, measurement.final_loss,
    )?;
    if measurement.skipped_steps > 0 {
        writeln!(
            Output,
            "  {} steps overflowed in f16 and skipped the optimizer; increase --warmup to let the loss scale settle",
            measurement.skipped_steps
        )?;
    }
    if measurement.fp8.is_some() {
        writeln!(Output, "  {FP8_NOTICE}")?;
    }
    Ok(())
}
