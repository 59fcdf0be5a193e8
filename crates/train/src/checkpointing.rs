//! What a run keeps in its checkpoints, and how it resumes from one.

use crate::compression::{CompressionState, compressor_bytes, compressor_placements, read_compressors};
use crate::config::{Config, Resume};
use crate::error::TrainError;
use crate::fp8::{history_placements, read_histories};
use crate::observer::Observer;
use crate::weights::{checked_weights, read_extents, read_held};
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use trireme_base::{DType, Rank};
use trireme_checkpoint::{
    CHECKPOINTS_FOLDER, CONFIG_FILE, Checkpoint, CheckpointError, ExtraFile, OPTIMIZER_PREFIX, Saved,
    SkippedCheckpoint, Snapshot, TensorSource, WriteBytes, find_latest, list_checkpoints, save, set_aside,
    with_sources,
};
use trireme_comm::Group;
use trireme_data::{TokenFile, Tokenizer};
use trireme_optim::{LossScalerState, StateInfo};
use trireme_parallel::{Executor, ParallelError, parameter_placements};
use trireme_plan::{Axis, Mesh, Placement, TensorPlacement};
use trireme_schedule::StateClass;

/// The longest description of damage that ranks send each other, in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Everything besides tensors that determines the steps to come. Random numbers are functions of the seed and a
/// counter, so the seed and the next sample are all of the generator's state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrainingState {
    /// Steps done.
    pub(crate) step: u64,
    /// Global index of the next sample.
    pub(crate) next_sample: u64,
    /// Tokens trained on.
    pub(crate) tokens: u64,
    /// Seed of the run.
    pub(crate) seed: u64,
    /// Tokens of a window.
    pub(crate) seq_len: usize,
    /// Checksum of the corpus.
    pub(crate) corpus: String,
    /// Tokens of the corpus.
    pub(crate) corpus_tokens: u64,
    /// The loss scale and the steps skipped for it; versions without f16 have none, and skipped none.
    #[serde(default)]
    pub(crate) loss_scaler: LossScalerState,
    /// Whose state is among the tensors, in checkpoints of runs that compress gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) compression: Option<CompressionState>,
}

impl TrainingState {
    /// Reads the state of a checkpoint of `step`.
    fn read(state: &serde_json::Value, step: u64) -> Result<Self, serde_json::Error> {
        let state = TrainingState::deserialize(state)?;
        if state.step != step {
            let differs =
                format!("it is the state of step {}, and the manifest's step is {step}", state.step);
            return Err(serde_json::Error::custom(differs));
        }
        if state.loss_scaler.skipped_steps > state.step {
            return Err(serde_json::Error::custom("more steps were skipped than were made"));
        }
        if let Some(compression) = &state.compression {
            compression.check().map_err(serde_json::Error::custom)?;
        }
        Ok(state)
    }

    /// Refuses a state whose samples come in another order than this run's.
    fn check_order(&self, expected: &TrainingState, path: &Path) -> Result<(), TrainError> {
        let checks = [
            ("[training] seed", self.seed.to_string(), expected.seed.to_string()),
            ("[training] seq_len", self.seq_len.to_string(), expected.seq_len.to_string()),
            ("a corpus of", self.corpus_tokens.to_string(), expected.corpus_tokens.to_string()),
            ("a corpus with checksum", self.corpus.clone(), expected.corpus.clone()),
        ];
        for (what, found, expected) in checks {
            if found != expected {
                return Err(TrainError::ResumeDiffers { path: path.to_owned(), what, found, expected });
            }
        }
        Ok(())
    }
}

/// The checksum of the corpus that a checkpoint was trained on, if it states one.
pub(crate) fn corpus_of(checkpoint: &Checkpoint) -> Option<String> {
    Some(checkpoint.state()["corpus"].as_str()?.to_owned())
}

/// Small files that go into every checkpoint.
pub(crate) struct RunFiles {
    /// Resolved config of the run.
    pub(crate) config_toml: String,
    /// The model's `config.json`.
    pub(crate) model_json: String,
}

/// Writes a checkpoint of all ranks. Collective.
pub(crate) fn write_checkpoint(
    executor: &mut Executor,
    run_folder: &Path,
    state: &TrainingState,
    files: &RunFiles,
    tokenizer: &Tokenizer,
    keep_latest_k: usize,
) -> Result<Saved, TrainError> {
    let mesh = executor.ranks().mesh();
    let outline = executor.program().outline.clone();
    let mut tensors = parameter_placements(executor.model().table(), &outline, &mesh);
    let mut entries: Vec<Entry> = (0..tensors.len()).map(Entry::Parameter).collect();
    for unit in 0..executor.model().num_units() {
        for (index, found) in executor.optimizer().states(unit).iter().enumerate() {
            tensors.push(state_placement(&found.info, &tensors, outline.rank_of(unit), &mesh));
            entries.push(Entry::OptimizerState { unit, index });
        }
    }
    if let Some(state) = executor.fp8_state() {
        tensors.extend(history_placements(state, executor.model().table(), &mesh));
        entries.extend(
            (entries.len()..tensors.len()).enumerate().map(|(layer, _)| Entry::AmaxHistory { layer }),
        );
    }
    tensors.extend(compressor_placements(executor, &mesh));
    entries.extend((entries.len()..tensors.len()).enumerate().map(|(index, _)| Entry::Compressor { index }));
    let (tokenizer_name, tokenizer) = tokenizer.file();
    let files = [
        ExtraFile { name: "config.toml", contents: files.config_toml.as_bytes() },
        ExtraFile { name: CONFIG_FILE, contents: files.model_json.as_bytes() },
        ExtraFile { name: tokenizer_name, contents: tokenizer },
    ];
    let state = &TrainingState { compression: CompressionState::of(executor), ..state.clone() };
    let state_json = serde_json::to_value(state).expect("a state has only texts and numbers");
    let snapshot =
        Snapshot { step: state.step, mesh: &mesh, tensors: &tensors, state: &state_json, files: &files };
    let (group, folder) = (Arc::clone(executor.ranks().world()), run_folder.join(CHECKPOINTS_FOLDER));
    let mut source = RunTensors { executor, entries: &entries, tensors: &tensors, brought: None };
    let saved = save(&group, &folder, &snapshot, &mut source, keep_latest_k);
    // Also after a failure, which need not end the run.
    source.send_back()?;
    Ok(saved?)
}

/// What a tensor of a checkpoint is.
#[derive(Debug, Clone, Copy)]
enum Entry {
    /// By its place in the model's table.
    Parameter(usize),
    /// By its place among the unit's.
    OptimizerState { unit: usize, index: usize },
    /// Of fp8.
    AmaxHistory { layer: usize },
    /// By its place among all that compressors keep.
    Compressor { index: usize },
}

/// The tensors of a run. Of state that lives on a disk a unit's is in memory at a time.
struct RunTensors<'a> {
    executor: &'a mut Executor,
    entries: &'a [Entry],
    tensors: &'a [TensorPlacement],
    /// What was brought last.
    brought: Option<(StateClass, usize)>,
}

impl RunTensors<'_> {
    fn bring(&mut self, class: StateClass, unit: usize) -> Result<(), ParallelError> {
        if self.brought == Some((class, unit)) {
            return Ok(());
        }
        self.send_back()?;
        self.executor.bring_state(class, unit)?;
        self.brought = Some((class, unit));
        Ok(())
    }

    fn send_back(&mut self) -> Result<(), ParallelError> {
        match self.brought.take() {
            Some((class, unit)) => self.executor.send_state(class, unit, false),
            None => Ok(()),
        }
    }
}

impl TensorSource for RunTensors<'_> {
    fn with_bytes(&mut self, index: usize, write: WriteBytes<'_>) -> Result<(), CheckpointError> {
        let entry = self.entries[index];
        let brought = match entry {
            Entry::Parameter(parameter) => {
                let unit = self.executor.model().table().parameters()[parameter].unit;
                self.bring(self.executor.weights_class(), unit)
            }
            Entry::OptimizerState { unit, .. } => self.bring(StateClass::Optimizer, unit),
            Entry::AmaxHistory { .. } | Entry::Compressor { .. } => Ok(()),
        };
        let name = || self.tensors[index].name.clone();
        brought.map_err(|error| CheckpointError::Source { name: name(), source: error.into() })?;
        let executor = &*self.executor;
        match entry {
            Entry::Parameter(parameter) => {
                let info = &executor.model().table().parameters()[parameter];
                let range = &executor.parts()[info.unit];
                let values = info.held(range).map_or(&[][..], |held| {
                    let first = info.offset + held.start - range.start;
                    &executor.shard(info.unit).f32s()[first..first + held.len()]
                });
                write(bytemuck::cast_slice(values))
            }
            Entry::OptimizerState { unit, index } => {
                let states = executor.optimizer().states(unit);
                write(bytemuck::cast_slice(&states[index].values(executor.device())))
            }
            Entry::AmaxHistory { layer } => {
                let state = executor.fp8_state().expect("only fp8 has histories");
                write(bytemuck::cast_slice(state.history(layer).0))
            }
            Entry::Compressor { index } => write(compressor_bytes(executor, index)),
        }
    }
}

/// Where a state of the optimizer lies: with its parameter; with all of its unit's ranks, `rank` of the pipeline, if it has a
/// shape of its own.
fn state_placement(
    info: &StateInfo<'_>,
    placements: &[TensorPlacement],
    rank: usize,
    mesh: &Mesh,
) -> TensorPlacement {
    let (name, shape) = (state_name(info), info.shape.dims().to_vec());
    let placements = if info.is_like_parameter {
        let of_parameter = placements.iter().find(|placement| placement.name == info.parameter.name);
        of_parameter.expect("a state is of a parameter").placements.clone()
    } else {
        let along = |&(axis, _): &(Axis, usize)| match axis {
            Axis::Pipeline => Placement::Single { rank },
            Axis::DataReplicate | Axis::DataShard => Placement::Replicate,
        };
        mesh.axes().iter().map(along).collect()
    };
    TensorPlacement { name, shape, dtype: DType::F32, placements }
}

/// The name of a state of the optimizer in a checkpoint.
fn state_name(info: &StateInfo<'_>) -> String {
    format!("{OPTIMIZER_PREFIX}{}.{}", info.name, info.parameter.name)
}

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
    let state = match find_resume(config, executor.group(), observer)? {
        Some(checkpoint) => restore(&checkpoint, config, executor, &beginning, observer)?,
        None => beginning,
    };
    if executor.group().rank() == Rank::ROOT && config.checkpoint().enable {
        check_newest(&config.run_folder(), state.step)?;
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
                observer.notice(&format!("{} is now {}, because {reason}", path.display(), aside.display()));
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
fn choose_checkpoint(
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

/// Refuses to go on after `step` where later checkpoints are: the run's next ones could not be told from them.
fn check_newest(run_folder: &Path, step: u64) -> Result<(), TrainError> {
    let folder = run_folder.join(CHECKPOINTS_FOLDER);
    match list_checkpoints(&folder)?.last() {
        Some(&(newest, _)) if newest > step => Err(TrainError::NewerCheckpoints { step, newest, folder }),
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_state_without_a_loss_scale_has_skipped_nothing() {
        let mut state = json!({
            "step": 5, "next_sample": 80, "tokens": 1920, "seed": 0, "seq_len": 24, "corpus": "01234567", "corpus_tokens": 9,
        });
        let older = TrainingState::read(&state, 5).unwrap();
        let other = TrainingState::read(&state, 6).unwrap_err().to_string();
        assert!(other.contains("state of step 5, and the manifest's step is 6"), "{other}");
        assert_eq!((older.step, older.loss_scaler), (5, LossScalerState::default()));
        state["loss_scaler"] = json!({"scale": 512, "good_steps": 2, "skipped_steps": 5});
        let read = TrainingState::read(&state, 5).unwrap();
        assert_eq!(read.loss_scaler, LossScalerState { scale: Some(512), good_steps: 2, skipped_steps: 5 });
        assert_eq!(serde_json::to_value(&read).unwrap(), state);
        state["loss_scaler"]["skipped_steps"] = json!(6);
        assert!(TrainingState::read(&state, 5).unwrap_err().to_string().contains("more steps were skipped"));
        state["loss_scaler"] = json!({"scale": -1, "good_steps": 2, "skipped_steps": 5});
        assert!(TrainingState::read(&state, 5).is_err());
    }

    #[test]
    fn kept_gradients_have_a_loss_scale() {
        let mut state = json!({
            "step": 5, "next_sample": 80, "tokens": 1920, "seed": 0, "seq_len": 24, "corpus": "01234567", "corpus_tokens": 9,
            "loss_scaler": {"scale": null, "good_steps": 0, "skipped_steps": 0},
            "compression": {"codec": "top_k", "world_size": 2, "loss_scale": 64},
        });
        let read = TrainingState::read(&state, 5).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), state);
        state["compression"]["loss_scale"] = json!(0);
        let error = TrainingState::read(&state, 5).unwrap_err().to_string();
        assert!(error.contains("0 is no loss scale of compressed gradients"), "{error}");
        state["compression"] = json!(7);
        assert!(TrainingState::read(&state, 5).is_err());
    }
}
