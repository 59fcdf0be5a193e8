//! Which checkpoint a run resumes from, and what it takes from it.

use crate::checkpointing::{TrainingState, state_name};
use crate::compression::read_compressors;
use crate::config::{Config, Resume};
use crate::error::TrainError;
use crate::fp8::read_histories;
use crate::observer::Observer;
use crate::weights::{checked_weights, read_extents, read_held};
use serde::de::Error as _;
use std::path::Path;
use trireme_base::Rank;
use trireme_checkpoint::{
    CHECKPOINTS_FOLDER, Checkpoint, CheckpointError, SkippedCheckpoint, find_latest, list_checkpoints,
    set_aside, tidy, with_sources,
};
use trireme_comm::Group;
use trireme_data::TokenFile;
use trireme_parallel::Executor;

/// The longest description of damage that ranks send each other, in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Resumes from a checkpoint if there is one, else begins at the first sample. Collective.
pub(crate) fn resume(
    config: &Config,
    executor: &mut Executor,
    train: &TokenFile,
    observer: &mut dyn Observer,
) -> Result<TrainingState, TrainError> {
    let beginning = TrainingState {
        step: 0,
        next_sample: 0,
        tokens: 0,
        seed: config.training().seed,
        seq_len: config.training().seq_len,
        corpus: format!("{:08x}", train.fingerprint().unwrap_or_default()),
        corpus_tokens: train.num_tokens(),
        loss_scaler: executor.loss_scaler().state(),
        compression: None,
    };
    let checkpoint = find_resume(config, executor.group(), observer)?;
    let state = match &checkpoint {
        Some(checkpoint) => restore(checkpoint, config, executor, &beginning, observer)?,
        None => beginning,
    };
    if executor.group().rank() == Rank::ROOT && config.checkpoint().enable {
        let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
        check_newest(&folder, state.step)?;
        if let Some(newest) = checkpoint.filter(|newest| newest.path().parent() == Some(&folder)) {
            for error in tidy(&newest, config.checkpoint().keep_latest_k) {
                observer.notice(&untidy_notice(&error));
            }
        }
    }
    executor.check_replicas()?;
    Ok(state)
}

/// The checkpoint to resume from, if there is one, after the ranks have read all of it: nothing is loaded from one that is
/// damaged. Damaged ones that are newer are renamed. Collective.
///
/// Cost: each byte of the checkpoint is read once, by one rank.
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

/// The checkpoint that rank 0 chooses, for the others may see the folder later. `damaged` is rank 0's. Collective.
fn choose_together(
    config: &Config,
    group: &Group,
    damaged: &mut Vec<SkippedCheckpoint>,
) -> Result<Option<Checkpoint>, TrainError> {
    let mut chosen = Ok(None);
    if group.rank() == Rank::ROOT {
        chosen = choose_checkpoint(config, damaged);
    }
    // A failure travels as a mark, so that no rank waits for a failed one.
    let message = match &chosen {
        Ok(None) => String::new(),
        Ok(Some(checkpoint)) => format!("+{}", checkpoint.path().display()),
        Err(_) => "!".to_owned(),
    };
    let messages = group.all_gather_bytes(message.as_bytes()).wait()?;
    if group.rank() == Rank::ROOT {
        return chosen;
    }
    match String::from_utf8_lossy(&messages[0]).split_at_checked(1) {
        Some(("+", path)) => Ok(Some(Checkpoint::open(Path::new(path))?)),
        None => Ok(None),
        Some(_) => Err(TrainError::NoCheckpointChosen),
    }
}

/// The checkpoint that the config asks for. With `auto` it is the newest that opens; those that are damaged and newer join
/// `damaged`, and are not chosen again.
pub(crate) fn choose_checkpoint(
    config: &Config,
    damaged: &mut Vec<SkippedCheckpoint>,
) -> Result<Option<Checkpoint>, TrainError> {
    match &config.checkpoint().resume {
        Resume::Never => Ok(None),
        Resume::From(path) => Ok(Some(Checkpoint::open(path)?)),
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

/// Reads the whole checkpoint, each rank a share of it; the damage, if any rank has found some. Collective.
fn verify_together(checkpoint: &Checkpoint, group: &Group) -> Result<Option<CheckpointError>, TrainError> {
    group.set_line(format_args!("reading {}", checkpoint.path().display()));
    let own = checkpoint.verify_share(group.rank().0, group.world_size()).into_iter().next();
    let own = own.or_else(|| state_damage(checkpoint));
    let (is_damage, text) =
        own.as_ref().map_or((true, String::new()), |own| (own.is_damage(), with_sources(own)));
    let mut message = text.into_bytes();
    message.truncate(MESSAGE_BYTES_MAX);
    let messages = group.all_gather_bytes(&message).wait()?;
    if let Some(own) = own {
        return if is_damage { Ok(Some(own)) } else { Err(own.into()) };
    }
    let elsewhere = messages.iter().position(|message| !message.is_empty());
    Ok(elsewhere.map(|rank| CheckpointError::DamagedElsewhere {
        path: checkpoint.path().to_owned(),
        rank: Rank(rank),
        reason: String::from_utf8_lossy(&messages[rank]).into_owned(),
    }))
}

/// What keeps the state of a checkpoint from being this program's.
fn state_damage(checkpoint: &Checkpoint) -> Option<CheckpointError> {
    let reason = TrainingState::read(checkpoint.state(), checkpoint.step()).err()?.to_string();
    Some(CheckpointError::Damaged { path: checkpoint.path().to_owned(), reason })
}

/// What the user should know of an `error` in tidying up the checkpoints.
pub(crate) fn untidy_notice(error: &CheckpointError) -> String {
    format!("{}; the checkpoints are complete, and the next save will try again", with_sources(error))
}

/// Refuses to resume after `step` where `folder` has later checkpoints: the run's next ones could not be told from them.
fn check_newest(folder: &Path, step: u64) -> Result<(), TrainError> {
    match list_checkpoints(folder)?.last() {
        Some(&(newest, _)) if newest > step => {
            Err(TrainError::NewerCheckpoints { step, newest, folder: folder.to_owned() })
        }
        _ => Ok(()),
    }
}

/// Reads weights, optimizer state and position from a checkpoint; `expected` tells what order of samples
/// this run has.
fn restore(
    checkpoint: &Checkpoint,
    config: &Config,
    executor: &mut Executor,
    expected: &TrainingState,
    observer: &mut dyn Observer,
) -> Result<TrainingState, TrainError> {
    let path = checkpoint.path();
    let unreadable = |source| TrainError::ResumeState { path: path.to_owned(), source };
    let state = TrainingState::read(checkpoint.state(), checkpoint.step()).map_err(unreadable)?;
    state.check_order(expected, path)?;
    let restored = executor.loss_scaler_mut().restore(state.loss_scaler);
    restored.map_err(|error| unreadable(serde_json::Error::custom(error)))?;
    let model = executor.model().clone();
    let weights = checked_weights(&checkpoint.weights(), &model)?;
    executor.load_parameters(read_held(&weights, config.model().allow_non_finite))?;
    executor.load_optimizer(|info, values| {
        read_extents(checkpoint.tensors(), &state_name(info), info.shape, info.held.clone(), values)
    })?;
    if let Some(fp8) = executor.fp8_state_mut() {
        read_histories(checkpoint.tensors(), fp8, model.table(), path)?;
    }
    read_compressors(checkpoint, state.compression.as_ref(), executor, observer)?;
    Ok(state)
}
