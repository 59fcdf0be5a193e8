//! `trireme train`.

mod dry_run;
mod outcome;

use super::check_config_path;
use super::init::DEFAULT_CONFIG;
use super::prepare::Display;
use crate::bounded::within;
use crate::console::Console;
use crate::death::Death;
use crate::host::HostShare;
use crate::interrupts::Interrupts;
use crate::launch::{
    LaunchError, LocalWorld, OnSignal, WorkerEnvironment, before_joining, error_log, interface,
    is_under_launcher, join_options, run_end, run_local_workers, work_in_world, worker_command,
};
use crate::machine_cache::MachineCache;
use crate::peak::worker_peak;
use crate::planning::{Blueprint, Job, Limit, Plan, PredictedTime, Source, Workers, changes, open_classes};
use crate::remarks::{remark, set_format};
use crate::simd::{Proof, Simd};
use anyhow::{Context, Result, anyhow, bail};
use outcome::{memory_table, sample_text, stopped, verdict, whereabouts};
use signal_hook::consts::SIGUSR1;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::{Heartbeat, Rank};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, ModelSource, list_checkpoints};
use trireme_comm::{Group, GroupOptions, JoinOptions, TlsOptions, single};
use trireme_data::Corpus;
use trireme_parallel::Determinism;
use trireme_tensor::{CpuFeatures, OverBudget};
use trireme_train::config::{ActivationCheckpointMode, Bind, Comm, Config, Resume, Subject};
use trireme_train::{
    CorpusState, FLIGHT_RECORDER_FOLDER, LanguageTask, Observer, RunCorpus, RunLock, Samples, Sequences,
    StepChoices, StoppedBy, Task, TrainError, Trainer, TrainerOptions, corpus_folder, earlier_run,
    ensure_corpus, local_threads, model_config, preflight,
};

/// How long it may take to list the run's checkpoints after a worker has died.
const LIST_MAX: Duration = Duration::from_secs(1);

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
the newest checkpoint. Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 save a checkpoint after the
current step and end the run; a second Ctrl-C, SIGTERM or SIGHUP ends it at once.
`trireme config --explain` describes every key.";

/// Train a model described by a config file.
///
/// Starts the workers of this host itself, unless another launcher has set RANK and WORLD_SIZE (torchrun),
/// SLURM_PROCID or OMPI_COMM_WORLD_RANK. Under such a launcher, each process becomes one rank.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TrainArgs {
    /// Config file.
    #[arg(default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Number of local workers; same as `--set launch.workers=N`. 0 starts one for each device: one on a CPU.
    #[arg(long, value_name = "N", aliases = ["nproc", "nproc-per-node", "nproc_per_node", "num-processes"])]
    workers: Option<usize>,
    /// Where to resume: `auto`, `never` (a new run; an earlier one is moved aside), or the path of a checkpoint or run; same as
    /// `--set checkpoint.resume=WHERE`.
    #[arg(long, value_name = "WHERE", overrides_with = "resume")]
    resume: Option<String>,
    /// Check the config, data, memory and checkpoint, print what the run would do, and exit. Of texts that are not prepared, the first 64
    /// MiB are read.
    #[arg(long)]
    dry_run: bool,
    /// Override a key of the file; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// This process, as `trireme train` was called in it.
#[derive(Clone, Copy)]
struct Process<'a> {
    source: Source<'a>,
    /// What this worker may take of its host.
    share: &'a HostShare,
    /// When the command started.
    started: Instant,
    /// The SIMD level of its kernels.
    features: CpuFeatures,
    /// What the program trains if it is no language model.
    own: Option<&'a Arc<dyn Task>>,
}

impl<'a> Process<'a> {
    fn workers(&self, config: &Config, group: &Group) -> Workers<'a> {
        Workers::of(config, group, self.share, self.features)
    }
}

/// Runs `trireme train`, or trains a task of the program's own.
pub(crate) fn run(args: &TrainArgs, started: Instant, own: Option<&Arc<dyn Task>>) -> Result<()> {
    let environment = WorkerEnvironment::of_this_process()?;
    if let Some(WorkerEnvironment { world_size, .. }) = environment
        && args.workers.is_some()
        && !is_under_launcher()
    {
        bail!(
            "--workers starts workers on this host, but another launcher has started this process, one of {world_size}; leave --workers out, \
             or unset the launcher's variables"
        );
    }
    let mut overrides = args.overrides.clone();
    overrides.extend(args.workers.map(|workers| format!("launch.workers={workers}")));
    overrides.extend(args.resume.as_ref().map(|resume| format!("checkpoint.resume={resume}")));
    let world_size = environment.as_ref().map(|environment| environment.world_size);
    let is_ours = environment.is_none();
    let subject = if own.is_some() { Subject::OwnTask } else { Subject::LanguageModel };
    let source = Source { path: &args.config, overrides: &overrides, world_size, subject };
    let (config, simd) = before_joining(environment.as_ref(), || {
        check_config_path(&args.config)?;
        let config = source.load(&[])?;
        set_format(config.metrics().log_format);
        Ok((config, Simd::choose(Proof::Cached)?))
    })?;
    let num_local =
        environment.as_ref().map_or(config.world_size(), |environment| environment.local_world_size);
    let process = Process {
        source,
        share: &HostShare::of_equals(num_local, config.memory().huge_pages),
        started,
        features: simd.level,
        own,
    };
    match environment {
        _ if args.dry_run && !is_ours => bail!("--dry-run needs no launcher; start the command by itself"),
        _ if args.dry_run => dry_run::dry_run(&config, process),
        Some(environment) => {
            if environment.local_rank == 0 {
                simd.warn();
            }
            work(config, &environment, process)
        }
        None => {
            simd.warn();
            let workers = Workers::local(&config, &process.share.limits, process.features);
            let version = prepare_run(&config, process, workers, Heartbeat::new())?;
            let config = with_length(config, version, process)?;
            match config.world_size() {
                1 => train(&config, single(), process),
                _ => launch(&config, started, &simd),
            }
        }
    }
}

/// Locks the run's folder, finds or prepares the corpus, and refuses what does not fit it or the machine, all of it before
/// a file of the run is written or a worker is started; the version of the corpus, if the run has one.
fn prepare_run(
    config: &Config,
    process: Process<'_>,
    workers: Workers,
    heartbeat: Heartbeat,
) -> Result<Option<u64>> {
    let _lock = RunLock::of_run(config)?;
    if let Some(earlier) = earlier_run(config)? {
        return Err(earlier.into());
    }
    let source = process.source;
    if let Some(task) = process.own {
        let sample = Samples::open(&**task, config)?.train.sample();
        check_weights(config)?;
        let blueprint = Blueprint::Task { task: &**task, sample: &sample };
        check_plan(Job { config, source, blueprint, workers })?;
        return Ok(None);
    }
    let display = Display::new(heartbeat);
    let check = |corpus: &Corpus| check(config, corpus, source, workers).map(drop);
    let corpus = ensure_corpus(config, &display, check);
    display.clear();
    let RunCorpus { version, state } = corpus?;
    // Under a launcher of ours, the launcher has said so.
    if error_log().is_none() {
        match state {
            CorpusState::Kept => remark(
                "warning: the inputs have changed, but the run resumes with the corpus that it began with; to train on \
                 the new text, start again with --resume never",
            ),
            CorpusState::Made => {
                let folder = corpus_folder(&config.data().folder, version);
                if version > 1 {
                    remark(&format!(
                        "note: the corpus is in {}, next to the one that an earlier run used",
                        folder.display()
                    ));
                }
            }
            CorpusState::Current => {}
        }
    }
    Ok(Some(version))
}

fn with_corpus(config: Config, version: Option<u64>) -> Config {
    match version {
        None => config,
        Some(version) => {
            let folder = corpus_folder(&config.data().folder, version);
            config.with_data_folder(folder)
        }
    }
}

/// The config with the corpus, and with the steps of as many passes over it as it asks for.
fn with_length(config: Config, version: Option<u64>, process: Process<'_>) -> Result<Config> {
    let config = with_corpus(config, version);
    if config.training().epochs == 0.0 {
        return Ok(config);
    }
    let num_samples = match process.own {
        Some(task) => Samples::open(&**task, &config)?.train.num_samples(),
        None => {
            let corpus = Corpus::open(&config.data().folder)?;
            let sequences = Sequences::new(&config, corpus.report.has_loss_mask);
            sequences.sampler(&corpus, config.training().seed)?.num_windows()
        }
    };
    let Some(steps) = config.steps_of_epochs(num_samples) else { return Ok(config) };
    let folder = config.data().folder.clone();
    let config = process.source.load(&[format!("training.steps={steps}")])?;
    Ok(config.with_data_folder(folder))
}

/// Refuses a model, a plan or settings that do not fit the corpus; the plan, unless a launcher of ours has planned.
fn check(config: &Config, corpus: &Corpus, source: Source<'_>, workers: Workers) -> Result<Option<Plan>> {
    let vocabulary_size = corpus.train.tokens.vocabulary_size();
    let (model, _) = model_config(config, vocabulary_size)?;
    let training = config.training();
    let sequences = Sequences::new(config, corpus.report.has_loss_mask);
    let num_cut = sequences.sampler(corpus, training.seed)?.num_cut_documents();
    let num_documents = corpus.train.tokens.num_documents();
    // A text among conversations is cut, and that is no loss. Under a launcher of ours, the launcher has said so.
    if corpus.report.has_loss_mask && num_cut > num_documents / 100 && error_log().is_none() {
        let seq_len = training.seq_len;
        remark(&format!(
            "warning: {num_cut} of {num_documents} documents are longer than [training] seq_len = {seq_len} and are cut; their later parts \
             are learned without what comes before"
        ));
    }
    if let Some(num_tokens) = corpus.validation.as_ref().map(|validation| validation.tokens.num_tokens())
        && num_tokens < sequences.num_tokens_min()
    {
        return Err(TrainError::ValidationTooShort { num_tokens, seq_len: training.seq_len }.into());
    }
    check_weights(config)?;
    let blueprint = Blueprint::Language { model: &model, sequences };
    check_plan(Job { config, source, blueprint, workers })
}

/// Refuses a folder without the weights that the run shall begin with.
fn check_weights(config: &Config) -> Result<()> {
    if let Some(folder) = &config.model().init_from {
        ModelSource::open(folder).map_err(TrainError::from)?;
    }
    Ok(())
}

/// Refuses what does not fit the machine; the plan, unless a launcher of ours has planned.
fn check_plan(job: Job<'_>) -> Result<Option<Plan>> {
    if error_log().is_some() {
        return Ok(None);
    }
    let plan = Plan::largest(job)?;
    plan.check(job)?;
    Ok(Some(plan))
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
        on_signal: OnSignal::Save,
    };
    let command = worker_command(started, Some(simd))?;
    let ended = run_local_workers(world, |_| command());
    if let Err(error @ LaunchError::WorkerDied { death: Death::Signal(_), .. }) = &ended
        && let Some(step) = resumable_step(config)
    {
        bail!("{error}\n  try: run the same command again; it resumes after step {step}");
    }
    Ok(ended?)
}

/// The step of the checkpoint that the same command would resume from, if there is one.
fn resumable_step(config: &Config) -> Option<u64> {
    if !config.checkpoint().enable || config.checkpoint().resume != Resume::Auto {
        return None;
    }
    let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
    // A file system that hangs must not keep an error from being shown.
    let checkpoints = within(LIST_MAX, move || list_checkpoints(&folder)).ok()?.ok()?;
    Some(checkpoints.last()?.0)
}

/// How a worker of a config joins the others.
pub(crate) fn world_options(config: &Config, environment: &WorkerEnvironment) -> Result<JoinOptions> {
    let comm = config.comm();
    Ok(JoinOptions {
        transport: comm.transport,
        job: config.run().name.clone(),
        requires_secret: comm.require_secret,
        listen: comm.listen,
        interface: interface(environment, comm.interface.as_deref()),
        ports: comm.ports.clone(),
        join_timeout: Duration::from_secs_f64(comm.join_timeout_seconds),
        tls: tls_options(comm),
        group: GroupOptions {
            timeout: Duration::from_secs_f64(comm.timeout_seconds),
            network_pause: Duration::from_secs_f64(comm.network_pause_seconds),
            keeps_order: config.training().determinism == Determinism::Layout,
            algorithm: comm.algorithm,
            costs: config.costs(),
            sockets_per_peer: comm.sockets_per_peer,
            zero_copy: comm.zero_copy,
            checksums: comm.checksums,
            ..GroupOptions::default()
        },
        ..join_options(environment, comm.secret_file.as_deref())?
    })
}

/// One worker of a world that a launcher has started.
fn work(config: Config, environment: &WorkerEnvironment, process: Process<'_>) -> Result<()> {
    let options = before_joining(Some(environment), || world_options(&config, environment))?;
    let recorder_folder = config.run_folder().join(FLIGHT_RECORDER_FOLDER);
    work_in_world(options, Some(recorder_folder), |group| prepare_and_train(config, group, process))
}

fn prepare_and_train(config: Config, group: Group, process: Process<'_>) -> Result<()> {
    let warnings = preflight(&config, Some(process.features), &group)?;
    if group.rank() == Rank::ROOT {
        warnings.iter().for_each(|warning| remark(&format!("warning: {warning}")));
    }
    let share = HostShare::of_world(&group, config.memory().huge_pages, config.launch().bind)?;
    let process = Process { share: &share, ..process };
    let found = match group.rank() {
        Rank::ROOT => {
            prepare_run(&config, process, process.workers(&config, &group), group.heartbeat().clone())?
        }
        _ => None,
    };
    let found = found.map_or_else(Vec::new, |version| version.to_le_bytes().to_vec());
    let versions = group.all_gather_bytes(&found).wait()?;
    let version = versions[0].as_slice().try_into().ok().map(u64::from_le_bytes);
    let config = with_length(config, version, process)?;
    train(&config, group, process)
}

/// How long a step is predicted to take, told on rank 0. Collective.
fn predicted_seconds(job: Job<'_>, plan: &Plan, group: &Group, console: &mut Console) -> Result<Option<f64>> {
    if group.hosts().num_hosts() > 1 {
        console.notice("step times are only predicted for workers on one host");
        return Ok(None);
    }
    let found = plan.step_time(job, group.split_by("measured", |_| 0)?);
    let found = found.context("cannot predict the time of a step; set metrics.predict_step_time = false")?;
    let Some(PredictedTime { time, unmeasured }) = found else { return Ok(None) };
    console.notice(&format!("predicted step time: {:.4} s", time.seconds));
    if !unmeasured.is_empty() {
        console.notice(&format!(
            "the predicted step time lacks what was not measured: {}",
            unmeasured.join(", ")
        ));
    }
    Ok(Some(time.seconds))
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
fn train(config: &Config, group: Group, process: Process<'_>) -> Result<()> {
    let is_root = group.rank() == Rank::ROOT;
    // Under a launcher of ours, the launcher tells.
    let is_worker = group.world_size() > 1 || WorkerEnvironment::of_this_process()?.is_some();
    let interrupts = Interrupts::listen(is_root && error_log().is_none(), is_worker);
    let interrupts = interrupts.context("cannot install signal handlers")?;
    let mut console = Console::new(group.rank(), config.metrics(), &log_folder(config))?;
    let (task, language) = match process.own {
        Some(own) => (Arc::clone(own), None),
        None => {
            let language = Arc::new(LanguageTask::open(config)?);
            (Arc::clone(&language) as Arc<dyn Task>, Some(language))
        }
    };
    let sample = Samples::open(&*task, config)?.train.sample();
    let Process { source, started, features, .. } = process;
    let blueprint = Blueprint::Task { task: &*task, sample: &sample };
    let job = Job { config, source, blueprint, workers: process.workers(config, &group) };
    let plan = common_plan(job, &group)?;
    plan.reasons.iter().for_each(|reason| console.notice(reason));
    let step_seconds = match config.metrics().predict_step_time {
        true => predicted_seconds(job, &plan, &group, &mut console)?,
        false => None,
    };
    let planned = Some(plan.worker_plan(step_seconds));
    // Before this process is bound to some of the host's cores.
    let cache = MachineCache::of_this_machine("peaks");
    let peak = worker_peak(config, process.share, features, &group, cache)?;
    peak.iter().for_each(|peak| console.log(&peak.note));
    process.share.bind().context("cannot bind this worker to its cores; set [launch] bind = \"none\"")?;
    if let Some(cpus) = process.share.bound_to() {
        console.log(&format!("note: this worker is bound to {cpus}"));
    }
    if config.launch().bind == Bind::Cores
        && let Some(why) = &process.share.why_unbound
    {
        console.notice(&format!("workers are not bound to cores: {why}"));
    }
    let num_threads = local_threads(config, process.share.num_threads);
    let given_config = if is_root { Some(source.given(config)?) } else { None };
    let options = TrainerOptions {
        num_threads,
        features_max: Some(features),
        peak_flops: peak.map(|peak| peak.flops),
        started,
        plan: planned,
        ends_at: if is_root { run_end(config, started, &|name| std::env::var(name).ok())? } else { None },
        given_config,
    };
    let over_budget = |error: TrainError| match error.over_budget() {
        Some(OverBudget { budget, .. }) => {
            let now = plan.prediction.total().max(*budget);
            anyhow!("{error}\n{}", changes(job, now, Limit::Device))
        }
        None => error.into(),
    };
    let mut trainer =
        Trainer::new(config, Arc::clone(&task), group, options, &mut console).map_err(over_budget)?;
    let saves = interrupts.save_for(trainer.requests());
    let summary = trainer.run().map_err(over_budget)?;
    drop(saves);
    if let Some(stopped_by) = summary.stopped_by {
        // The others must not outrun rank 0, as below.
        trainer.executor().group().barrier().wait()?;
        drop(trainer);
        console.finish();
        if is_root {
            stopped(config, &summary).iter().for_each(|line| console.line(line));
        }
        let signal = match stopped_by {
            StoppedBy::Signal(signal) => signal,
            // As if the batch system had sent what it is used to send.
            StoppedBy::TimeLimit => SIGUSR1,
        };
        return Err(LaunchError::Stopped { signal }.into());
    }
    // What was predicted before units moved was of other stages.
    let plan = match trainer.moved_after() {
        Some(_) => Plan::new(job, Some(trainer.choices().clone()))?,
        None => plan,
    };
    let memory = match summary.seconds_to_first_step {
        Some(_) => Some(memory_table(&trainer, &plan)?),
        None => None,
    };
    let learns_answers = language.as_ref().is_some_and(|language| language.learns_answers());
    // A model that has learned answers has none unless it is asked.
    let is_silent = learns_answers && config.generate().prompt.trim().is_empty();
    let weights = match config.generate().num_tokens {
        0 => Ok(None),
        _ if is_silent => Ok(None),
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
        let verdict = verdict(language.as_deref(), &summary)?;
        let text = language.zip(weights);
        let text = text.map(|(language, weights)| sample_text(config, &language, &trainer, weights?));
        drop(trainer);
        console.finish();
        memory.iter().chain(&verdict).for_each(|text| console.line(text));
        match text {
            Some(Ok(text)) => console.line(&format!("\n--- sample ---\n{text}\n--------------\n")),
            // What was trained is saved, and a sample can be made from it at any time.
            Some(Err(error)) => console.line(&format!("\ncannot generate a sample: {error:#}\n")),
            None => {}
        }
        whereabouts(config, &summary, learns_answers).iter().for_each(|line| console.line(line));
    }
    Ok(())
}

/// The plan that fits all workers: what the first one has chosen, all keep.
fn common_plan(job: Job<'_>, group: &Group) -> Result<Plan> {
    let fitting = |chosen: Option<StepChoices>| {
        let plan = Plan::new(job, chosen)?;
        plan.check(job)?;
        anyhow::Ok(plan)
    };
    let config = job.config;
    let is_kept_open = config.activation_checkpoint().mode == ActivationCheckpointMode::Auto;
    let has_file = config.parallelism().pipeline_parallel_schedule_file.is_some();
    // Ranks of the tensor axis may have parts of the vocabulary of unequal cost, and must not cut stages by their own.
    let is_divided = config.parallelism().tensor_parallel_degree > 1;
    if !is_kept_open && !has_file && !is_divided && open_classes(config).is_empty() {
        return fitting(None);
    }
    let is_root = group.rank() == Rank::ROOT;
    // Hosts may differ in their memory and their files, and workers must not differ in what they do.
    let own = match is_root {
        true => Some(fitting(None)?),
        false => None,
    };
    let chosen = StepChoices::of_root(own.as_ref().map(|plan| &plan.choices), group)?;
    match (own, chosen) {
        (Some(plan), _) => Ok(plan),
        (None, Some(chosen)) => fitting(Some(chosen)),
        (None, None) => {
            bail!("worker 0 runs a different version of trireme; use the same version on all workers")
        }
    }
}
