//! The choice and verification of the checkpoint that a run resumes from, and the restoration of its state.

use crate::changes::check_changes;
use crate::checkpointing::{Difference, TrainingState, ValidationHistory, cleanup_notice, state_name};
use crate::compression::read_compressors;
use crate::config::{Change, Config, Resume};
use crate::dataset::Dataset;
use crate::error::TrainError;
use crate::fp8::read_histories;
use crate::metrics::METRICS_FILE;
use crate::observer::Observer;
use crate::task::Task;
use crate::weights::{checked_weights, read_boxes, read_held, tensor_part};
use serde::de::Error as _;
use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::Path;
use trireme_base::{Heartbeat, Rank, with_sources};
use trireme_checkpoint::{
    CHECKPOINTS_FOLDER, Checkpoint, CheckpointError, SkippedCheckpoint, best_step, clean_up, find_latest,
    list_checkpoints, mark_best, open_newest, set_aside,
};
use trireme_comm::Group;
use trireme_optim::StateInfo;
use trireme_parallel::Executor;
use trireme_plan::LocalShape;

/// Maximum number of bytes in the description of a failure that ranks send each other.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Resumes from a checkpoint if there is one. Otherwise, begins at the first sample. Returns the training state and the checkpoint.
/// Collective.
pub(crate) fn resume(
    config: &Config,
    task: &dyn Task,
    executor: &mut Executor,
    train: &dyn Dataset,
    observer: &mut dyn Observer,
) -> Result<(TrainingState, Option<Checkpoint>), TrainError> {
    let beginning = TrainingState {
        seed: config.training().seed,
        samples: train.identity(),
        loss_scaler: executor.loss_scaler().state(),
        ..TrainingState::default()
    };
    let checkpoint = find_resume(config, executor.group(), observer)?;
    let state = match &checkpoint {
        Some(checkpoint) => restore(checkpoint, config, task, executor, &beginning, observer)?,
        None => beginning,
    };
    if executor.group().rank() == Rank::ROOT && config.checkpoint().enable {
        check_newest(&config.run_folder().join(CHECKPOINTS_FOLDER), state.step)?;
    }
    executor.check_replicas()?;
    Ok((state, checkpoint))
}

/// Cleans up the folder of the checkpoint that the run has resumed from, if it is the run's own. Called on rank 0 after all checks that may
/// refuse the run, because the checkpoints that are removed here cannot be resumed from.
pub(crate) fn clean_up_after_resume(
    config: &Config,
    resumed: &Checkpoint,
    validations: &ValidationHistory,
    heartbeat: &Heartbeat,
    observer: &mut dyn Observer,
) {
    let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
    if config.checkpoint().enable && resumed.path().parent() == Some(&folder) {
        // A crash may have occurred between the save and the marking of the best checkpoint.
        if let Some(step) = validations.best_step.filter(|_| config.keeps_best())
            && best_step(&folder) != Some(step)
            && list_checkpoints(&folder).is_ok_and(|all| all.iter().any(|(found, _)| *found == step))
            && let Err(error) = mark_best(&folder, step)
        {
            observer.notice(&cleanup_notice(&error));
        }
        for error in
            clean_up(&folder, resumed.step(), config.checkpoint().keep_latest_k, &|| heartbeat.beat())
        {
            observer.notice(&cleanup_notice(&error));
        }
    }
}

/// Returns the checkpoint to resume from, if there is one, after the ranks have verified all of it. So nothing is loaded from a damaged
/// checkpoint. Damaged checkpoints that are newer are renamed. Collective.
///
/// Each byte of the checkpoint is read once, by one rank.
fn find_resume(
    config: &Config,
    group: &Group,
    observer: &mut dyn Observer,
) -> Result<Option<Checkpoint>, TrainError> {
    let mut damaged = Vec::new();
    loop {
        let Some(checkpoint) = choose_together(config, group, &mut damaged)? else { return Ok(None) };
        let Some(reason) = verify_together(&checkpoint, group)? else {
            for SkippedCheckpoint { path, reason } in &damaged {
                let (aside, reason) = (set_aside(path)?, with_sources(reason));
                observer.notice(&format!(
                    "renamed {} to {}, because {reason}",
                    path.display(),
                    aside.display()
                ));
            }
            return Ok(Some(checkpoint));
        };
        if config.checkpoint().resume != Resume::Auto {
            return Err(reason.into());
        }
        if group.rank() == Rank::ROOT {
            damaged.push(SkippedCheckpoint { path: checkpoint.path().to_owned(), reason });
        }
    }
}

/// Returns the checkpoint that rank 0 chooses. Only rank 0 chooses, because changes of the folder may become visible on the other ranks
/// later. All ranks open the same checkpoint, or all fail. Only rank 0 uses `damaged`. Collective.
fn choose_together(
    config: &Config,
    group: &Group,
    damaged: &mut Vec<SkippedCheckpoint>,
) -> Result<Option<Checkpoint>, TrainError> {
    let is_root = group.rank() == Rank::ROOT;
    let mut chosen = if is_root { choose_checkpoint(config, damaged) } else { Ok(None) };
    // If rank 0 fails, it sends a mark, so that no rank waits for it.
    let message = match &chosen {
        Ok(None) => String::new(),
        Ok(Some(checkpoint)) => format!("{:08x} {}", checkpoint.fingerprint(), checkpoint.path().display()),
        Err(_) => "!".to_owned(),
    };
    let messages = group.all_gather_bytes(message.as_bytes()).wait()?;
    let choice = String::from_utf8_lossy(&messages[0]);
    let Some((fingerprint, path)) = choice.split_once(' ') else {
        return if is_root || choice.is_empty() { chosen } else { Err(TrainError::NoCheckpointChosen) };
    };
    let path = Path::new(path);
    if !is_root {
        chosen = open_same(path, fingerprint).map(Some).map_err(TrainError::from);
    }
    all_or_none(chosen, path, group)
}

/// Opens the checkpoint at the path at which rank 0 has opened it. Fails if its fingerprint is not `expected`, the fingerprint that rank 0
/// has found.
fn open_same(path: &Path, expected: &str) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    let found = checkpoint.fingerprint();
    if format!("{found:08x}") != expected {
        let (path, expected) = (path.to_owned(), expected.to_owned());
        return Err(CheckpointError::OtherCheckpoint { path, found, expected });
    }
    Ok(checkpoint)
}

/// Returns this rank's `result` about the checkpoint at `path`, or an error if another rank has failed. Collective.
fn all_or_none<T>(result: Result<T, TrainError>, path: &Path, group: &Group) -> Result<T, TrainError> {
    let failure = first_failure(result.as_ref().err(), group)?;
    let value = result?;
    match failure {
        Some((rank, reason)) => {
            Err(CheckpointError::UnusableElsewhere { path: path.to_owned(), rank, reason }.into())
        }
        None => Ok(value),
    }
}

/// Returns the first rank with an error, and the description of the error. `own` is this rank's error. Collective.
fn first_failure<E: Error + 'static>(
    own: Option<&E>,
    group: &Group,
) -> Result<Option<(Rank, String)>, TrainError> {
    let mut message = own.map(|own| with_sources(own)).unwrap_or_default().into_bytes();
    message.truncate(MESSAGE_BYTES_MAX);
    let messages = group.all_gather_bytes(&message).wait()?;
    let first = messages.iter().position(|message| !message.is_empty());
    Ok(first.map(|rank| (Rank(rank), String::from_utf8_lossy(&messages[rank]).into_owned())))
}

/// Returns the checkpoint that a run would resume from, before its contents are verified.
///
/// # Errors
/// If the checkpoint does not open, or if all checkpoints are damaged.
pub fn resume_point(config: &Config) -> Result<Option<Checkpoint>, TrainError> {
    choose_checkpoint(config, &mut Vec::new())
}

/// Returns [`TrainError::EarlierRun`] if the run's folder has metrics of an earlier run that this run would neither continue nor move
/// aside.
///
/// # Errors
/// If the checkpoint to resume from does not open.
pub fn earlier_run_error(config: &Config) -> Result<Option<TrainError>, TrainError> {
    let folder = config.run_folder();
    let metrics = folder.join(METRICS_FILE);
    let is_there = fs::metadata(&metrics).is_ok_and(|metadata| metadata.len() > 0);
    if config.checkpoint().resume == Resume::Never || !is_there {
        return Ok(None);
    }
    // The same path may be written in several ways.
    let canonical = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let own = canonical(&folder.join(CHECKPOINTS_FOLDER));
    let continues =
        resume_point(config)?.is_some_and(|checkpoint| canonical(checkpoint.path()).parent() == Some(&own));
    Ok((!continues).then_some(TrainError::EarlierRun { folder }))
}

/// Returns the checkpoint that the config asks for. With `auto`, this is the newest one that opens. Newer ones that are damaged are added
/// to `damaged`. Checkpoints in `damaged` are not chosen.
pub(crate) fn choose_checkpoint(
    config: &Config,
    damaged: &mut Vec<SkippedCheckpoint>,
) -> Result<Option<Checkpoint>, TrainError> {
    match &config.checkpoint().resume {
        Resume::Never => Ok(None),
        // A checkpoint that the user asked for is never replaced by an older one.
        Resume::From(path) => Ok(Some(open_newest(path)?)),
        Resume::Auto => {
            let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
            let found = find_latest(&folder, damaged)?;
            if let Some(index) = damaged.iter().position(|skipped| !skipped.reason.is_damage()) {
                return Err(damaged.swap_remove(index).reason.into());
            }
            match (&found, damaged.is_empty()) {
                (None, false) => {
                    let reasons = damaged.iter().map(|skipped| with_sources(&skipped.reason)).collect();
                    Err(TrainError::AllCheckpointsDamaged { folder, reasons })
                }
                _ => Ok(found),
            }
        }
    }
}

/// Reads the whole checkpoint, one share per rank. Returns the damage, if any rank has found some. Collective.
fn verify_together(checkpoint: &Checkpoint, group: &Group) -> Result<Option<CheckpointError>, TrainError> {
    group.set_program_line(format_args!("reading {}", checkpoint.path().display()));
    let beat = || group.heartbeat().beat();
    let own = checkpoint.verify_share(group.rank().0, group.world_size(), &beat).into_iter().next();
    let damage = match own.or_else(|| state_damage(checkpoint)) {
        Some(error) if !error.is_damage() => Err(error.into()),
        damage => Ok(damage),
    };
    let path = checkpoint.path();
    let damage = all_or_none(damage, path, group)?;
    let first = first_failure(damage.as_ref(), group)?;
    let elsewhere =
        |(rank, reason)| CheckpointError::DamagedElsewhere { path: path.to_owned(), rank, reason };
    Ok(damage.or_else(|| first.map(elsewhere)))
}

/// Returns the damage if the training state of a checkpoint cannot be read.
fn state_damage(checkpoint: &Checkpoint) -> Option<CheckpointError> {
    let reason = TrainingState::read(checkpoint.state(), checkpoint.step()).err()?.to_string();
    Some(CheckpointError::Damaged { path: checkpoint.path().to_owned(), reason })
}

/// Refuses to resume after `step` if `folder` has later checkpoints, because they could be confused with checkpoints that the run will
/// write.
fn check_newest(folder: &Path, step: u64) -> Result<(), TrainError> {
    match list_checkpoints(folder)?.last() {
        Some(&(newest, _)) if newest > step => {
            Err(TrainError::NewerCheckpoints { step, newest, folder: folder.to_owned() })
        }
        _ => Ok(()),
    }
}

/// Reads the weights, the optimizer state and the position in the data from a checkpoint. `expected` holds the seed and the identity of the
/// samples of this run.
fn restore(
    checkpoint: &Checkpoint,
    config: &Config,
    task: &dyn Task,
    executor: &mut Executor,
    expected: &TrainingState,
    observer: &mut dyn Observer,
) -> Result<TrainingState, TrainError> {
    let path = checkpoint.path();
    let unreadable = |source| TrainError::ResumeState { path: path.to_owned(), source };
    let state = TrainingState::read(checkpoint.state(), checkpoint.step()).map_err(unreadable)?;
    let allowed = &config.checkpoint().allow_changed;
    let reads_optimizer = check_changes(config, checkpoint, observer)?;
    let mut next_sample = state.next_sample;
    if let Some(difference) = state.data_difference(expected) {
        if !allowed.contains(&Change::Data) {
            let Difference { what, found, expected } = difference;
            return Err(TrainError::ResumeDiffers { path: path.to_owned(), what, found, expected });
        }
        observer.notice(&format!(
            "the samples differ from those of the checkpoint ({difference}), so the run reads them from the first one"
        ));
        next_sample = 0;
    }
    let state =
        TrainingState { seed: expected.seed, samples: expected.samples.clone(), next_sample, ..state };
    let restored = executor.loss_scaler_mut().restore(state.loss_scaler);
    restored.map_err(|error| unreadable(serde_json::Error::custom(error)))?;
    let norms: Vec<f64> = state.earlier_norms.iter().map(|&bits| f64::from_bits(bits)).collect();
    executor.restore_earlier_norms(&norms);
    let model = executor.model().clone();
    if !allowed.contains(&Change::Model) {
        task.check(checkpoint)?;
    }
    let weights = checked_weights(&checkpoint.weights(), &model)?;
    executor.load_parameters(read_held(&weights, config.model().allow_non_finite))?;
    let stateless = parameters_without_state(executor, checkpoint, reads_optimizer);
    if reads_optimizer && let Some(example) = stateless.first() {
        observer.notice(&format!(
            "the optimizer state of {} parameters, such as {example}, starts from zero: the checkpoint has none, as for parameters that were frozen until now",
            stateless.len()
        ));
    }
    for (index, info) in model.table().parameters().iter().enumerate() {
        let start = if stateless.contains(&info.name) {
            state.num_updates()
        } else {
            state.optimizer_starts.get(&info.name).copied().unwrap_or(0)
        };
        executor.optimizer_mut().set_state_start(index, start);
    }
    executor.load_optimizer(|info, values| {
        if stateless.contains(&info.parameter.name) {
            return Ok(());
        }
        let part = if info.has_parameter_layout {
            tensor_part(info.parameter)
        } else {
            LocalShape::full(info.shape.dims())
        };
        read_boxes(checkpoint.tensors(), &state_name(info), &part, info.held.clone(), values)
    })?;
    if let Some(fp8) = executor.fp8_state_mut() {
        read_histories(checkpoint.tensors(), fp8, model.table(), path)?;
    }
    // Momentum that was not sent yet belongs to the optimizer's moments, so it is read only together with them.
    if reads_optimizer || !executor.optimizer().exchanges_momentum() {
        read_compressors(checkpoint, state.compression.as_ref(), executor, observer)?;
    }
    Ok(state)
}

/// Returns the names of the parameters that the optimizer updates and whose state starts from zero. If the optimizer is the checkpoint's
/// (`is_same`), these are the parameters for which the checkpoint has no state, because they were frozen. Otherwise, they are all
/// parameters that the optimizer updates.
fn parameters_without_state(executor: &Executor, checkpoint: &Checkpoint, is_same: bool) -> BTreeSet<String> {
    let units = 0..executor.model().num_units();
    let states = units.flat_map(|unit| executor.optimizer().states(unit));
    let is_missing = |info: &StateInfo<'_>| !is_same || checkpoint.tensors().get(&state_name(info)).is_none();
    states.filter(|state| is_missing(&state.info)).map(|state| state.info.parameter.name.clone()).collect()
}
