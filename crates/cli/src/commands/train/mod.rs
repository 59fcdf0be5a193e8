//! `trireme train`.

mod dry_run;
mod outcome;
mod preparation;
mod process;
mod worker;

use super::check_config_path;
use super::init::DEFAULT_CONFIG;
use crate::diagnostics::{print_diagnostic, set_format};
use crate::host::HostShare;
use crate::launch::{
    LaunchError, LocalWorld, OnSignal, WorkerEnvironment, before_joining, interface, is_under_launcher,
    join_options, run_local_workers, work_in_world, worker_command,
};
use crate::planning::{ConfigSource, Workers};
use crate::process_state::AbnormalExit;
use crate::simd::{Simd, Verification};
use crate::timeout::run_with_timeout;
use anyhow::{Result, bail};
use preparation::{prepare_run, with_corpus_and_steps};
use process::{ProcessContext, log_folder};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::{Heartbeat, Rank};
use trireme_checkpoint::{CHECKPOINTS_FOLDER, list_checkpoints};
use trireme_comm::{Group, GroupOptions, JoinOptions, TlsOptions, single};
use trireme_parallel::Determinism;
use trireme_train::config::{Comm, Config, Resume, TaskKind};
use trireme_train::{FLIGHT_RECORDER_FOLDER, Task, TrainError, all_gather_json, local_gpus, preflight};
use worker::train;

/// Maximum time to list the run's checkpoints after a worker has died.
const LIST_TIMEOUT: Duration = Duration::from_secs(1);

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
    /// Check the config, data, memory and checkpoint, print what the run would do, and exit. Reads only the first 64 MiB of texts that are
    /// not prepared.
    #[arg(long)]
    dry_run: bool,
    /// Override a key of the file; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
}

/// Runs `trireme train`. `custom_task` is the program's own task; `None` trains a language model.
pub(crate) fn run(args: &TrainArgs, started: Instant, custom_task: Option<&Arc<dyn Task>>) -> Result<()> {
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
    let is_launcher = environment.is_none();
    let task_kind = if custom_task.is_some() { TaskKind::CustomTask } else { TaskKind::LanguageModel };
    let source = ConfigSource { path: &args.config, overrides: &overrides, world_size, task_kind };
    let num_local = |config: &Config| {
        environment.as_ref().map_or(config.world_size(), |environment| environment.local_world_size)
    };
    let (config, simd) = before_joining(environment.as_ref(), || {
        check_config_path(&args.config)?;
        let config = source.load(&[])?;
        set_format(config.metrics().log_format);
        // Fails before workers start or join if one has no usable GPU.
        local_gpus(&config, num_local(&config))?;
        Ok((config, Simd::choose(Verification::Cached)?))
    })?;
    let num_local = num_local(&config);
    let share = HostShare::of_equal_workers(num_local, config.memory().huge_pages);
    let local_rank = environment.as_ref().map(|environment| environment.local_rank);
    let simd_level = simd.level;
    let process = ProcessContext { source, share: &share, started, local_rank, simd_level, custom_task };
    match environment {
        _ if args.dry_run && !is_launcher => {
            bail!("--dry-run needs no launcher; start the command by itself")
        }
        _ if args.dry_run => dry_run::dry_run(&config, process),
        Some(environment) => {
            if environment.local_rank == 0 {
                simd.warn();
            }
            let options = before_joining(Some(&environment), || world_options(&config, &environment))?;
            let recorder_folder = config.run_folder().join(FLIGHT_RECORDER_FOLDER);
            work_in_world(options, Some(recorder_folder), |group| prepare_and_train(config, group, process))
        }
        None => {
            simd.warn();
            let workers = Workers::local(&config, &process.share.limits, process.simd_level);
            let version = prepare_run(&config, process, workers, Heartbeat::new())?;
            let config = with_corpus_and_steps(config, version, process)?;
            match config.world_size() {
                1 => train(&config, single(), process),
                _ => launch(&config, started, &simd),
            }
        }
    }
}

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
    if let Err(error @ LaunchError::WorkerDied { death: AbnormalExit::Signal(_), .. }) = &ended
        && let Some(step) = resumable_step(config)
    {
        bail!("{error}\n  try: run the same command again; it resumes after step {step}");
    }
    Ok(ended?)
}

/// Returns the step of the checkpoint from which the same command would resume, if there is one.
fn resumable_step(config: &Config) -> Option<u64> {
    if !config.checkpoint().enable || config.checkpoint().resume != Resume::Auto {
        return None;
    }
    let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
    // A file system that hangs must not keep an error from being shown.
    let checkpoints = run_with_timeout(LIST_TIMEOUT, move || list_checkpoints(&folder)).ok()?.ok()?;
    Some(checkpoints.last()?.0)
}

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

fn prepare_and_train(config: Config, group: Group, process: ProcessContext<'_>) -> Result<()> {
    let warnings = preflight(&config, Some(process.simd_level), &group)?;
    if group.rank() == Rank::ROOT {
        warnings.iter().for_each(|warning| print_diagnostic(&format!("warning: {warning}")));
    }
    let share = HostShare::of_world(&group, config.memory().huge_pages, config.launch().bind)?;
    let process = ProcessContext { share: &share, ..process };
    let found = match group.rank() {
        Rank::ROOT => {
            prepare_run(&config, process, process.workers(&config, &group), group.heartbeat().clone())?
        }
        _ => None,
    };
    let version = all_gather_json(&group, &found)?[Rank::ROOT.0];
    let config = with_corpus_and_steps(config, version, process)?;
    train(&config, group, process)
}

/// Returns the files for TLS. The config has all of them or none.
fn tls_options(comm: &Comm) -> Option<TlsOptions> {
    Some(TlsOptions {
        certificate: comm.tls_certificate.clone()?,
        key: comm.tls_key.clone()?,
        authority: comm.tls_ca.clone()?,
        name: comm.tls_name.clone(),
    })
}
