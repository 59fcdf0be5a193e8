//! `trireme train`.

use super::prepare::Display;
use crate::console::{Console, remark};
use crate::launch::{
    LocalWorld, WorkerEnvironment, error_log, join_options, run_local_workers, this_command, work_in_world,
};
use crate::memory_limit::MemoryLimit;
use crate::planning::{Limit, Plan, Source, Workers, advice, changes, measured, open_classes};
use crate::simd::{Proof, Simd};
use crate::started::{STARTED_VARIABLE, to_variable};
use anyhow::{Result, anyhow, bail};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use trireme_base::{Bytes, Category, Rank};
use trireme_checkpoint::ModelSource;
use trireme_comm::{Group, GroupOptions, JoinOptions, TlsOptions, TransportChoice, single};
use trireme_data::{Corpus, Sampler, bigram_baseline};
use trireme_model::Sampling;
use trireme_planner::{CategoryBytes, table};
use trireme_tensor::{CpuFeatures, OverBudget, Parameters};
use trireme_train::config::{ActivationCheckpointMode, Comm, Config, Determinism, Transport};
use trireme_train::{
    CorpusState, FLIGHT_RECORDER_FOLDER, Observer, RunCorpus, RunLock, RunSummary, SampleSettings,
    StepChoices, TrainError, Trainer, TrainerOptions, agree_on_config, corpus_folder, ensure_corpus,
    local_threads, model_config, sample,
};

const EXAMPLES: &str = "\
Examples:
  trireme train configs/quickstart.toml
      Trains a small model on this repository's own text with two workers.
  trireme train my.toml --workers 4 --set training.steps=2000 --set optimizer.lr=1e-3
      Four local workers, with two keys of the file overridden.
  torchrun --nproc-per-node 8 --no-python trireme train my.toml
      Workers started by another launcher: torchrun, srun and mpirun are supported.

A run writes everything to its folder, runs/<name>: config.toml, metrics.jsonl, logs,
events.out.tfevents.* for TensorBoard, and checkpoints/step-N. Run the command again to resume from
the newest checkpoint; Ctrl-C ends a run. `trireme config --explain` describes every key.";

/// Train a model described by a config file.
///
/// Starts the workers of this host itself, unless another launcher has set RANK and WORLD_SIZE (torchrun),
/// SLURM_PROCID or OMPI_COMM_WORLD_RANK. Under such a launcher, each process becomes one rank.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TrainArgs {
    /// Config file.
    config: PathBuf,
    /// Number of local workers; same as `--set launch.workers=N`.
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Override a key of the file; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Runs `trireme train`.
pub(crate) fn run(args: &TrainArgs, started: Instant) -> Result<()> {
    let environment = WorkerEnvironment::of_this_process()?;
    let mut overrides = args.overrides.clone();
    overrides.extend(args.workers.map(|workers| format!("launch.workers={workers}")));
    let world_size = environment.as_ref().map(|environment| environment.world_size);
    let source = Source { path: &args.config, overrides: &overrides, world_size };
    let config = Config::load(source.path, source.overrides, source.world_size)?;
    let simd = Simd::choose(Proof::Cached)?;
    match environment {
        Some(environment) => {
            if environment.local_rank == 0 {
                simd.warn();
            }
            work(config, source, &environment, started, simd.level)
        }
        None => {
            simd.warn();
            let limit = MemoryLimit::of_this_process();
            let workers = Workers::local(&config, &limit, simd.level);
            let version = prepare_run(&config, source, workers)?;
            let config = with_corpus(config, version);
            match config.world_size() {
                1 => train(&config, source, single(), 1, started, simd.level),
                _ => launch(&config, started, &simd),
            }
        }
    }
}

/// The plan of a run, which is refused if it would not fit.
fn fitting_plan(
    config: &Config,
    source: Source<'_>,
    vocabulary_size: usize,
    workers: Workers<'_>,
    chosen: Option<StepChoices>,
) -> Result<Plan> {
    let plan = Plan::new(config, vocabulary_size, workers, chosen)?;
    refuse_excess(plan, config, source, vocabulary_size, workers)
}

fn refuse_excess(
    plan: Plan,
    config: &Config,
    source: Source<'_>,
    vocabulary_size: usize,
    workers: Workers<'_>,
) -> Result<Plan> {
    if let Some(limit) = plan.passed() {
        bail!(advice(source, config, (&plan, limit), vocabulary_size, workers));
    }
    Ok(plan)
}

/// Locks the run's folder, finds or prepares the corpus, and refuses what does not fit it or the machine, all of it before
/// a file of the run is written or a worker is started; the version of the corpus.
fn prepare_run(config: &Config, source: Source<'_>, workers: Workers) -> Result<u64> {
    let _lock = RunLock::of_run(config)?;
    let display = Display::new();
    let corpus = ensure_corpus(config, &display, |corpus| check(config, corpus, source, workers));
    display.clear();
    let RunCorpus { version, state } = corpus?;
    // Under a launcher of ours, the launcher has said so.
    if error_log().is_none() {
        match state {
            CorpusState::Kept => remark(
                "note: the inputs have changed, but the run resumes with its original corpus ([checkpoint] resume = \
                 \"never\" starts again with the new one)",
            ),
            CorpusState::Made if version > 1 => remark(&format!(
                "note: the corpus is in {}, next to the one that an earlier run used",
                corpus_folder(&config.data().folder, version).display()
            )),
            CorpusState::Made | CorpusState::Current => {}
        }
    }
    Ok(version)
}

fn with_corpus(config: Config, version: u64) -> Config {
    let folder = corpus_folder(&config.data().folder, version);
    config.with_data_folder(folder)
}

/// Refuses a model, a plan or settings that do not fit the corpus.
fn check(config: &Config, corpus: &Corpus, source: Source<'_>, workers: Workers) -> Result<()> {
    let vocabulary_size = corpus.train.vocabulary_size();
    model_config(config, vocabulary_size)?;
    let training = config.training();
    Sampler::shuffled(corpus.train.num_tokens(), training.seq_len, training.seed)
        .map_err(TrainError::from)?;
    if let Some(num_tokens) = corpus.validation.as_ref().map(|tokens| tokens.num_tokens())
        && num_tokens <= training.seq_len as u64
    {
        return Err(TrainError::ValidationTooShort { num_tokens, seq_len: training.seq_len }.into());
    }
    if let Some(folder) = &config.model().init_from {
        ModelSource::open(folder).map_err(TrainError::from)?;
    }
    // Under a launcher of ours, the launcher has planned.
    if error_log().is_none() {
        let plan = Plan::largest(config, vocabulary_size, workers)?;
        refuse_excess(plan, config, source, vocabulary_size, workers)?;
    }
    Ok(())
}

fn log_folder(config: &Config) -> PathBuf {
    config.run_folder().join("logs")
}

/// Starts the workers of this host and waits for them.
fn launch(config: &Config, started: Instant, simd: &Simd) -> Result<()> {
    let log_folder = log_folder(config);
    std::fs::create_dir_all(&log_folder)
        .map_err(|source| TrainError::RunFolder { path: log_folder.clone(), source })?;
    let world = LocalWorld {
        num_workers: config.world_size(),
        master_port: config.launch().master_port,
        log_folder: &log_folder,
        recorder_folder: &config.run_folder().join(FLIGHT_RECORDER_FOLDER),
    };
    let command = this_command()?;
    run_local_workers(world, |_| {
        let mut worker = std::process::Command::new(command.get_program());
        worker.args(command.get_args()).env(STARTED_VARIABLE, to_variable(started)).envs([simd.variable()]);
        worker
    })?;
    Ok(())
}

/// One worker of a world that a launcher has started.
fn work(
    config: Config,
    source: Source<'_>,
    environment: &WorkerEnvironment,
    started: Instant,
    features: CpuFeatures,
) -> Result<()> {
    let comm = config.comm();
    let timeout = Duration::from_secs_f64(comm.timeout_seconds);
    let options = JoinOptions {
        transport: match comm.transport {
            Transport::Auto => TransportChoice::Auto,
            Transport::Shm => TransportChoice::Shm,
            Transport::Tcp => TransportChoice::Tcp,
            Transport::Mpi => TransportChoice::Mpi,
        },
        job: config.run().name.clone(),
        requires_secret: comm.require_secret,
        interface: comm.interface.clone(),
        tls: tls_options(comm),
        group: GroupOptions {
            timeout,
            keeps_order: config.training().determinism == Determinism::Layout,
            algorithm: comm.algorithm,
            costs: config.costs(),
            sockets_per_peer: comm.sockets_per_peer,
            zero_copy: comm.zero_copy,
            checksums: comm.checksums,
            ..GroupOptions::default()
        },
        ..join_options(environment, comm.secret_file.as_deref())?
    };
    let recorder_folder = config.run_folder().join(FLIGHT_RECORDER_FOLDER);
    work_in_world(options, Some(recorder_folder), |group| {
        prepare_and_train(config, source, group, environment.local_world_size, started, features)
    })
}

fn prepare_and_train(
    config: Config,
    source: Source<'_>,
    group: Group,
    local_world_size: usize,
    started: Instant,
    features: CpuFeatures,
) -> Result<()> {
    agree_on_config(&config, Some(features), &group)?;
    let own = match group.rank() {
        Rank::ROOT => {
            let limit = MemoryLimit::of_this_process();
            prepare_run(&config, source, Workers::of(&config, &group, local_world_size, &limit, features))?
        }
        _ => 0,
    };
    let versions = group.all_gather_bytes(&own.to_le_bytes()).wait()?;
    let version = versions[0].as_slice().try_into().map_or(1, u64::from_le_bytes);
    let config = with_corpus(config, version);
    train(&config, source, group, local_world_size, started, features)
}

/// The files for TLS; the config has all of them or none.
fn tls_options(comm: &Comm) -> Option<TlsOptions> {
    Some(TlsOptions {
        certificate: comm.tls_certificate.clone()?,
        key: comm.tls_key.clone()?,
        authority: comm.tls_ca.clone()?,
        name: comm.tls_name.clone(),
    })
}

/// Trains on one rank of `group`; rank 0 shows the run and what came of it.
fn train(
    config: &Config,
    source: Source<'_>,
    group: Group,
    local_world_size: usize,
    started: Instant,
    features: CpuFeatures,
) -> Result<()> {
    let is_root = group.rank() == Rank::ROOT;
    let mut console = Console::new(is_root, config.metrics().log_interval, &log_folder(config))?;
    let limit = MemoryLimit::of_this_process();
    let workers = Workers::of(config, &group, local_world_size, &limit, features);
    let vocabulary_size =
        Corpus::open(&config.data().folder).map_err(TrainError::from)?.train.vocabulary_size();
    let plan = common_plan(config, source, vocabulary_size, workers, &group)?;
    plan.reasons.iter().for_each(|reason| console.notice(reason));
    let memory_plan = Some(plan.memory_plan());
    let num_threads = local_threads(config, local_world_size);
    let options = TrainerOptions { num_threads, features_max: Some(features), started, memory_plan };
    let over_budget = |error: TrainError| match error.over_budget() {
        Some(OverBudget { budget, .. }) => {
            let now = plan.prediction.total().max(*budget);
            let changes = changes(source, config, (now, Limit::Device), vocabulary_size, workers);
            anyhow!("{error}\n{changes}")
        }
        None => error.into(),
    };
    let mut trainer = Trainer::new(config, group, options, &mut console).map_err(over_budget)?;
    let summary = trainer.run().map_err(over_budget)?;
    // What was predicted before units moved was of other stages.
    let plan = match trainer.moved_after() {
        Some(_) => Plan::new(config, vocabulary_size, workers, Some(trainer.choices().clone()))?,
        None => plan,
    };
    let memory = memory_table(&trainer, &plan)?;
    let weights = match config.generate().num_tokens {
        0 => Ok(None),
        _ => {
            // Activations are no longer needed; the copy of the parameters takes their place.
            trainer.executor().device().trim();
            trainer.gather_parameters()
        }
    };
    let weights = match weights {
        Err(error) if error.comm().is_some() => return Err(error.into()),
        weights => weights.transpose(),
    };
    // The others must not outrun rank 0's last words: their exit would look like a loss.
    trainer.executor().group().barrier().wait()?;
    if is_root {
        let verdict = verdict(&trainer, &summary)?;
        let text = weights.map(|weights| sample_text(config, &trainer, &weights?));
        drop(trainer);
        console.finish();
        console.line(&memory);
        if let Some(verdict) = verdict {
            console.line(&verdict);
        }
        match text {
            Some(Ok(text)) => console.line(&format!("\n--- sample ---\n{text}\n--------------\n")),
            // What was trained is saved, and a sample can be made from it at any time.
            Some(Err(error)) => console.line(&format!("\ncannot generate a sample: {error:#}\n")),
            None => {}
        }
        whereabouts(config, &summary).iter().for_each(|line| console.line(line));
    }
    Ok(())
}

/// The plan that fits all workers: what the first one has chosen, all keep.
fn common_plan(
    config: &Config,
    source: Source<'_>,
    vocabulary_size: usize,
    workers: Workers<'_>,
    group: &Group,
) -> Result<Plan> {
    let is_kept_open = config.activation_checkpoint().mode == ActivationCheckpointMode::Auto;
    let has_file = config.parallelism().pipeline_parallel_schedule_file.is_some();
    if !is_kept_open && !has_file && open_classes(config).is_empty() {
        return fitting_plan(config, source, vocabulary_size, workers, None);
    }
    let is_root = group.rank() == Rank::ROOT;
    // Hosts may differ in their memory and their files, and workers must not differ in what they do.
    let own = match is_root {
        true => Some(fitting_plan(config, source, vocabulary_size, workers, None)?),
        false => None,
    };
    let chosen = StepChoices::of_root(own.as_ref().map(|plan| &plan.choices), group)?;
    match (own, chosen) {
        (Some(plan), _) => Ok(plan),
        (None, Some(chosen)) => fitting_plan(config, source, vocabulary_size, workers, Some(chosen)),
        (None, None) => {
            bail!("worker 0 runs a different version of trireme; use the same version on all workers")
        }
    }
}

/// What the run has taken of each worker's memory, beside what was predicted. Collective.
fn memory_table(trainer: &Trainer<'_>, plan: &Plan) -> Result<String> {
    let (peaks, total) = measured(trainer.executor().device());
    // Without state elsewhere the host is the device.
    let host = if plan.prediction.host > 0 { measured(trainer.executor().host()).1 } else { 0 };
    let predicted = plan.prediction;
    let numbers = |peaks: CategoryBytes, total: usize, host: usize| {
        Category::ALL.into_iter().map(move |category| peaks.get(category)).chain([total, host])
    };
    let own: Vec<u8> = numbers(peaks, total, host)
        .chain(numbers(predicted.peaks, predicted.total(), predicted.host))
        .flat_map(|bytes| (bytes as u64).to_le_bytes())
        .collect();
    let all = trainer.executor().group().all_gather_bytes(&own).wait()?;
    let most = |index: usize| {
        let of_rank = |bytes: &Vec<u8>| {
            let (numbers, _) = bytes.as_chunks::<8>();
            numbers.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes) as usize)
        };
        all.iter().map(of_rank).max().unwrap_or(0)
    };
    let num_categories = Category::ALL.len();
    // Where the predictions begin.
    let first = num_categories + 2;
    let mut columns = vec![("predicted", predicted.peaks, predicted.total()), ("measured", peaks, total)];
    if all.len() > 1 {
        let worst = CategoryBytes::new(std::array::from_fn(most));
        let foreseen = CategoryBytes::new(std::array::from_fn(|index| most(first + index)));
        columns = vec![
            ("predicted", foreseen, most(first + num_categories)),
            ("on rank 0", peaks, total),
            ("max over ranks", worst, most(num_categories)),
        ];
    }
    let since = trainer.moved_after().map(|step| format!("since units moved after step {step}:\n"));
    let mut text = format!("\n{}{}", since.unwrap_or_default(), table(&columns));
    if most(first + num_categories + 1) > 0 {
        let [predicted, measured] =
            [first + num_categories + 1, num_categories + 1].map(|index| Bytes(most(index) as u64));
        text += &format!(
            "in addition, state outside the device took {measured} of host memory; the prediction was at most \
             {predicted}, transfers included\n"
        );
    }
    Ok(text)
}

/// How good the model is, beside what counting pairs of tokens achieves.
fn verdict(trainer: &Trainer<'_>, summary: &RunSummary) -> Result<Option<String>> {
    let (train, validation) = trainer.tokens();
    let (Some(loss), Some(validation)) = (summary.validation_loss, validation) else { return Ok(None) };
    let baseline = bigram_baseline(train, validation).map_err(TrainError::from)?;
    let verdict = if loss < baseline { "below" } else { "not below" };
    Ok(Some(format!(
        "validation loss {loss:.4} nats per token, {verdict} the bigram baseline of {baseline:.4}"
    )))
}

/// Where everything is, and what to try next.
fn whereabouts(config: &Config, summary: &RunSummary) -> Vec<String> {
    let folder = config.run_folder();
    let folder = folder.display();
    let mut lines =
        vec![format!("run folder: {folder} (metrics.jsonl, config.toml, logs, TensorBoard events)")];
    lines.extend(summary.checkpoint.as_ref().map(|path| format!("last checkpoint: {}", path.display())));
    let prompt = match config.generate().prompt.as_str() {
        blank if blank.trim().is_empty() => String::new(),
        prompt => format!(" --prompt {prompt:?}"),
    };
    lines.extend([
        "next steps:".to_owned(),
        format!("  trireme generate {folder}{prompt}"),
        format!("  trireme checkpoint export {folder} exported   # a Hugging Face model directory"),
        format!("  tensorboard --logdir {}", config.run().folder.display()),
    ]);
    lines
}

fn sample_text(config: &Config, trainer: &Trainer<'_>, weights: &Parameters) -> Result<String> {
    let generate = config.generate();
    let settings = SampleSettings {
        prompt: generate.prompt.clone(),
        num_tokens: generate.num_tokens,
        sampling: Sampling {
            temperature: generate.temperature as f32,
            top_k: generate.top_k,
            top_p: generate.top_p as f32,
        },
        seed: generate.seed,
        stop_at_end: false,
    };
    let executor = trainer.executor();
    let mut text = settings.prompt.clone();
    let take = |piece: &str| text.push_str(piece);
    // Beside the training state, which is still there.
    let host = executor.device().host()?;
    sample(executor.model(), weights, &host, trainer.tokenizer(), &settings, take)?;
    Ok(text)
}
