//! The contents of a run's checkpoints: its tensors, its training state and its files.

use crate::compression::{CompressionInfo, CompressorStates, compressor_bytes};
use crate::config::Config;
use crate::error::TrainError;
use crate::fp8::history_placements;
use crate::run_folder::CONFIG_TOML;
use crate::task::Task;
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, with_sources};
use trireme_checkpoint::{
    CHECKPOINTS_FOLDER, Checkpoint, CheckpointError, ExtraFile, OPTIMIZER_PREFIX, Saved, Snapshot,
    TensorSource, WriteBytes, save,
};
use trireme_optim::{LossScalerState, State, StateInfo};
use trireme_parallel::{Executor, ParallelError};
use trireme_plan::{LocalBox, TensorPlacement};
use trireme_schedule::StateClass;

/// The name of the corpus checksum in the identity of the samples.
pub(crate) const CORPUS: &str = "corpus";

/// The name of the tokenizer's hash in the identity of the samples.
pub(crate) const TOKENIZER: &str = "tokenizer";

/// All state other than tensors that determines the steps to come. Random numbers are functions of the seed and a counter, so the seed and
/// the index of the next sample are the generator's whole state.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct TrainingState {
    /// Number of completed steps.
    pub(crate) step: u64,
    /// Global index of the next sample.
    pub(crate) next_sample: u64,
    /// Number of tokens trained on; 0 if samples have no tokens.
    pub(crate) tokens: u64,
    pub(crate) seed: u64,
    /// The [identity](crate::Dataset::identity) of the training samples.
    pub(crate) samples: BTreeMap<String, String>,
    /// The loss scale, and the number of steps skipped because of it. Checkpoints of versions without f16 have the default: no scale and no
    /// skipped steps.
    #[serde(default)]
    pub(crate) loss_scaler: LossScalerState,
    /// Describes the compressor state among the checkpoint's tensors. `None` if the run compresses no gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) compression: Option<CompressionInfo>,
    #[serde(default)]
    pub(crate) validations: ValidationHistory,
    /// The gradient norms by which the next steps clip, as bits of f64. Only runs that free gradients, and pipelines that do
    /// not drain between steps, have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) earlier_norms: Vec<u64>,
    /// By parameter name, the number of updates before the parameter's optimizer state began. Parameters whose state began with the run are
    /// absent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) optimizer_starts: BTreeMap<String, u64>,
}

/// The results of validations so far.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct ValidationHistory {
    /// Identifies the validation samples. Checkpoints of earlier versions do not state it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<BTreeMap<String, String>>,
    /// The step with the lowest validation loss, if there was a validation.
    pub(crate) best_step: Option<u64>,
    /// The lowest loss, as bits of f64.
    pub(crate) best_loss: u64,
    /// Number of validations since `best_step`.
    pub(crate) num_since: u64,
}

impl ValidationHistory {
    /// Records the validation loss after a step. Returns whether it is the lowest so far.
    pub(crate) fn add(&mut self, step: u64, loss: f64) -> bool {
        let is_best = loss.is_finite() && (self.best_step.is_none() || loss < f64::from_bits(self.best_loss));
        if is_best {
            (self.best_step, self.best_loss, self.num_since) = (Some(step), loss.to_bits(), 0);
        } else {
            self.num_since += 1;
        }
        is_best
    }

    /// Prepares for validations on the samples that `samples` identifies. Losses on different samples cannot be compared, so results on
    /// other samples are reset. Returns the difference if it caused a reset of results.
    pub(crate) fn begin(&mut self, samples: BTreeMap<String, String>) -> Option<Difference> {
        let difference = self.samples.as_ref().and_then(|found| difference(found, &samples));
        let has_results = self.best_step.is_some() || self.num_since > 0;
        if difference.is_some() {
            *self = ValidationHistory::default();
        }
        self.samples = Some(samples);
        difference.filter(|_| has_results)
    }
}

/// A property of the samples that differs between a checkpoint and the run that resumes from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) what: String,
    /// The value in the checkpoint.
    pub(crate) found: String,
    pub(crate) expected: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { what, found, expected } = self;
        write!(f, "{what}: {found} -> {expected}")
    }
}

fn difference(found: &BTreeMap<String, String>, expected: &BTreeMap<String, String>) -> Option<Difference> {
    let names: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    let name = names.into_iter().find(|&name| found.get(name) != expected.get(name))?;
    let value = |identity: &BTreeMap<String, String>| {
        identity.get(name).map_or_else(|| "(not stated)".to_owned(), String::clone)
    };
    Some(Difference { what: name.clone(), found: value(found), expected: value(expected) })
}

impl TrainingState {
    pub(crate) fn num_updates(&self) -> u64 {
        self.step - self.loss_scaler.skipped_steps
    }

    pub(crate) fn read(state: &serde_json::Value, step: u64) -> Result<Self, serde_json::Error> {
        let mut state = state.clone();
        if let Value::Object(members) = &mut state
            && !members.contains_key("samples")
        {
            // Earlier versions supported only language models and stated their samples at the top level.
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let known = [CORPUS, "corpus_tokens", "seq_len"].into_iter();
            let identity = known.filter_map(|name| Some((name, text(members.get(name)?))));
            let identity: BTreeMap<&str, String> = identity.collect();
            members.insert("samples".to_owned(), serde_json::to_value(identity)?);
        }
        let state: TrainingState = serde_json::from_value(state)?;
        if state.step != step {
            let differs =
                format!("it is the state of step {}, but the manifest says step {step}", state.step);
            return Err(serde_json::Error::custom(differs));
        }
        if state.loss_scaler.skipped_steps > state.step {
            return Err(serde_json::Error::custom("more steps were skipped than trained"));
        }
        if let Some((name, start)) =
            state.optimizer_starts.iter().find(|(_, start)| **start > state.num_updates())
        {
            let text =
                format!("the optimizer state of {name} began after {start} updates, but there were fewer");
            return Err(serde_json::Error::custom(text));
        }
        let is_norm = |bits: &u64| (0.0..f64::INFINITY).contains(&f64::from_bits(*bits));
        if !state.earlier_norms.iter().all(is_norm) {
            return Err(serde_json::Error::custom("a norm of earlier gradients is no finite number"));
        }
        if let Some(compression) = &state.compression {
            compression.check().map_err(serde_json::Error::custom)?;
        }
        Ok(state)
    }

    /// Returns the first difference from `expected` in the seed or in the identity of the training samples.
    pub(crate) fn data_difference(&self, expected: &TrainingState) -> Option<Difference> {
        if self.seed != expected.seed {
            let (found, expected) = (self.seed.to_string(), expected.seed.to_string());
            return Some(Difference { what: "seed".to_owned(), found, expected });
        }
        let mut samples = expected.samples.clone();
        // Earlier versions did not state the tokenizer. The checksum of the tokens covers it.
        if !self.samples.contains_key(TOKENIZER) {
            samples.remove(TOKENIZER);
        }
        difference(&self.samples, &samples)
    }
}

/// Returns the [identity](crate::Dataset::identity) of the samples that a checkpoint was trained on, or `None` if its state cannot be read.
pub(crate) fn samples_of(checkpoint: &Checkpoint) -> Option<BTreeMap<String, String>> {
    Some(TrainingState::read(checkpoint.state(), checkpoint.step()).ok()?.samples)
}

/// Writes a checkpoint. Collective over all ranks.
pub(crate) fn write_checkpoint(
    executor: &mut Executor,
    state: &TrainingState,
    config: &Config,
    task: &dyn Task,
) -> Result<Saved, TrainError> {
    let mesh = executor.placements().mesh().clone();
    let header = executor.program().header.clone();
    let mut tensors = executor.placements().tensors().to_vec();
    let mut entries: Vec<Entry> = (0..tensors.len()).map(Entry::Parameter).collect();
    let of_parameters = executor.placements().tensors();
    let of_parameters: HashMap<&str, &TensorPlacement> =
        of_parameters.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for unit in 0..executor.model().num_units() {
        for (index, State { info, .. }) in executor.optimizer().states(unit).iter().enumerate() {
            // A state tensor with the parameter's shape is placed like the parameter. Other state tensors are replicated on all ranks that
            // store any part of the parameter.
            let placements = if info.has_parameter_layout {
                of_parameters[info.parameter.name.as_str()].placements.clone()
            } else {
                executor.placements().replicated_with(executor.model().table(), &header, info.parameter)
            };
            let (name, shape) = (state_name(info), info.shape.dims().to_vec());
            tensors.push(TensorPlacement { name, shape, dtype: DType::F32, placements });
            entries.push(Entry::OptimizerState { unit, index });
        }
    }
    if let Some(state) = executor.fp8_state() {
        tensors.extend(history_placements(state, executor.model().table(), &mesh));
        entries.extend(
            (entries.len()..tensors.len()).enumerate().map(|(layer, _)| Entry::AmaxHistory { layer }),
        );
    }
    let compressors = CompressorStates::gather(executor)?;
    tensors.extend(compressors.placements(&mesh));
    entries.extend(compressors.own_indices(executor).map(|index| Entry::Compressor { index }));
    let (config_toml, of_task) = (config.to_toml(), task.files());
    let mut files = vec![ExtraFile { name: CONFIG_TOML, contents: config_toml.as_bytes() }];
    files.extend(of_task.iter().map(|file| ExtraFile { name: file.name, contents: &file.contents }));
    let earlier_norms = executor.earlier_norms().into_iter().map(f64::to_bits).collect();
    let state = &TrainingState {
        compression: CompressionInfo::of(executor, &compressors),
        earlier_norms,
        optimizer_starts: optimizer_starts(executor),
        ..state.clone()
    };
    let state_json = serde_json::to_value(state).expect("a state has only texts and numbers");
    let snapshot =
        Snapshot { step: state.step, mesh: &mesh, tensors: &tensors, state: &state_json, files: &files };
    let group = Arc::clone(executor.ranks().world());
    let folder = config.run_folder().join(CHECKPOINTS_FOLDER);
    let mut source = RunTensors { executor, entries: &entries, tensors: &tensors, fetched: None };
    let saved = save(&group, &folder, &snapshot, &mut source, config.checkpoint().keep_latest_k);
    // State is also moved back after a failure, because the run may continue.
    source.evict_fetched()?;
    Ok(saved?)
}

/// Returns the number of updates before each optimizer state that did not begin with the run, by parameter name.
fn optimizer_starts(executor: &Executor) -> BTreeMap<String, u64> {
    let parameters = executor.model().table().parameters().iter().enumerate();
    let starts = parameters.map(|(index, info)| (info.name.clone(), executor.optimizer().state_start(index)));
    starts.filter(|(_, start)| *start > 0).collect()
}

/// Returns the size of the parameters and the optimizer state in a checkpoint, in bytes.
pub(crate) fn checkpoint_bytes(executor: &Executor) -> u64 {
    let size = |shape: &[usize], dtype: DType| shape.iter().product::<usize>() as u64 * dtype.size() as u64;
    let parameters = executor.placements().tensors().iter().map(|tensor| size(&tensor.shape, tensor.dtype));
    let units = 0..executor.model().num_units();
    let states = units.flat_map(|unit| executor.optimizer().states(unit));
    let states = states.map(|State { info, .. }| size(info.shape.dims(), DType::F32));
    parameters.chain(states).sum()
}

/// The source of one tensor of a checkpoint.
#[derive(Debug, Clone, Copy)]
enum Entry {
    /// The parameter with this index in the model's table.
    Parameter(usize),
    /// A state tensor of a unit, by its index among the unit's states.
    OptimizerState { unit: usize, index: usize },
    /// The amax history of an fp8 layer.
    AmaxHistory { layer: usize },
    /// Compressor state, by its index among all state of this rank's compressors. `None` if another rank of the pipeline has it.
    Compressor { index: Option<usize> },
}

/// The tensors of a run, as the source of a checkpoint. Offloaded state is fetched one unit at a time, and is evicted before the next
/// fetch.
struct RunTensors<'a> {
    executor: &'a mut Executor,
    entries: &'a [Entry],
    tensors: &'a [TensorPlacement],
    fetched: Option<(StateClass, usize)>,
}

impl RunTensors<'_> {
    fn fetch(&mut self, class: StateClass, unit: usize) -> Result<(), ParallelError> {
        if self.fetched == Some((class, unit)) {
            return Ok(());
        }
        self.evict_fetched()?;
        self.executor.fetch_state(class, unit)?;
        self.fetched = Some((class, unit));
        Ok(())
    }

    /// Returns this rank's values of a tensor, in the order of the boxes (hyperrectangles of the tensor) that this rank stores.
    fn in_boxes(&self, index: usize, values: Vec<f32>) -> Result<Vec<f32>, CheckpointError> {
        let executor = &*self.executor;
        let (mesh, rank) = (executor.placements().mesh(), executor.group().rank());
        let boxes = self.tensors[index].boxes(mesh, rank)?;
        let runs: Vec<Range<usize>> = boxes.iter().flat_map(LocalBox::runs).collect();
        let is_in_order = runs.iter().scan(0, |next, run| {
            let is_next = run.start == *next;
            *next = run.end;
            Some(is_next)
        });
        let num_elements: usize = runs.iter().map(Range::len).sum();
        if num_elements == values.len() && is_in_order.into_iter().all(|is_next| is_next) {
            return Ok(values);
        }
        Ok(runs.into_iter().flat_map(|run| values[run].iter().copied()).collect())
    }

    fn evict_fetched(&mut self) -> Result<(), ParallelError> {
        match self.fetched.take() {
            Some((class, unit)) => self.executor.evict_state(class, unit, false),
            None => Ok(()),
        }
    }
}

impl TensorSource for RunTensors<'_> {
    fn with_bytes(&mut self, index: usize, write: WriteBytes<'_>) -> Result<(), CheckpointError> {
        let entry = self.entries[index];
        let fetch_result = match entry {
            Entry::Parameter(parameter) => {
                let unit = self.executor.model().table().parameters()[parameter].unit;
                self.fetch(self.executor.class_of_weights(), unit)
            }
            Entry::OptimizerState { unit, .. } => self.fetch(StateClass::Optimizer, unit),
            Entry::AmaxHistory { .. } | Entry::Compressor { .. } => Ok(()),
        };
        let source_error =
            |source| CheckpointError::Source { name: self.tensors[index].name.clone(), source };
        fetch_result.map_err(|error| source_error(error.into()))?;
        let executor = &*self.executor;
        match entry {
            Entry::Parameter(parameter) => {
                let info = &executor.model().table().parameters()[parameter];
                let range = &executor.parts()[info.unit];
                let read = |held: Range<usize>| {
                    let first = info.offset + held.start - range.start;
                    executor
                        .shard_device()
                        .read_f32s(executor.shard(info.unit).part(first, [held.len()].into()))
                };
                let values = info.stored(range).map_or_else(|| Ok(Vec::new()), read);
                let values = values.map_err(|error| source_error(error.into()))?;
                write(bytemuck::cast_slice(&self.in_boxes(index, values)?))
            }
            Entry::OptimizerState { unit, index: state } => {
                let states = executor.optimizer().states(unit);
                let values = states[state].values(executor.optimizer_device());
                let values = values.map_err(|error| source_error(error.into()))?;
                write(bytemuck::cast_slice(&self.in_boxes(index, values)?))
            }
            Entry::AmaxHistory { layer } => {
                let state = executor.fp8_state().expect("only fp8 has histories");
                write(bytemuck::cast_slice(state.history(layer).0))
            }
            Entry::Compressor { index } => {
                write(index.map_or(&[], |index| compressor_bytes(executor, index)))
            }
        }
    }
}

pub(crate) fn state_name(info: &StateInfo<'_>) -> String {
    format!("{OPTIMIZER_PREFIX}{}.{}", info.name, info.parameter.name)
}

/// Returns the notice for a failed cleanup of old checkpoints.
pub(crate) fn cleanup_notice(error: &CheckpointError) -> String {
    format!("{}; the checkpoints are complete, and the next save will try again", with_sources(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_state_of_an_earlier_version_is_read() {
        let mut state = json!({
            "step": 5, "next_sample": 80, "tokens": 1920, "seed": 0, "seq_len": 24, "corpus": "01234567", "corpus_tokens": 9,
        });
        let older = TrainingState::read(&state, 5).unwrap();
        let other = TrainingState::read(&state, 6).unwrap_err().to_string();
        assert!(other.contains("state of step 5, but the manifest says step 6"), "{other}");
        assert_eq!((older.step, older.loss_scaler), (5, LossScalerState::default()));
        let samples = [(CORPUS, "01234567"), ("corpus_tokens", "9"), ("seq_len", "24")];
        assert_eq!(older.samples, samples.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        for name in ["seq_len", "corpus", "corpus_tokens"] {
            state.as_object_mut().unwrap().remove(name);
        }
        state["samples"] = json!({ "corpus": "01234567", "corpus_tokens": "9", "seq_len": "24" });
        state["validations"] = json!({ "best_step": null, "best_loss": 0, "num_since": 0 });
        assert_eq!(TrainingState::read(&state, 5).unwrap(), older);
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
    fn samples_of_another_identity_come_in_another_order() {
        let state = |samples: serde_json::Value| {
            let state = json!({ "step": 5, "next_sample": 80, "tokens": 0, "seed": 0, "samples": samples });
            TrainingState::read(&state, 5).unwrap()
        };
        let (known, more) = (json!({ "number": "8" }), json!({ "number": "8", "crop": "4" }));
        let differing = |found: &Value, expected: &Value| {
            let difference = state(found.clone()).data_difference(&state(expected.clone()));
            difference.map(|difference| difference.what)
        };
        assert_eq!((differing(&known, &known), differing(&more, &more)), (None, None));
        for (found, expected) in [(&known, &more), (&more, &known)] {
            assert_eq!(differing(found, expected).as_deref(), Some("crop"));
        }
    }

    #[test]
    fn losses_of_other_validation_samples_are_not_compared() {
        let of = |value: &str| BTreeMap::from([("validation_samples".to_owned(), value.to_owned())]);
        let mut validations = ValidationHistory::default();
        assert_eq!(validations.begin(of("8")), None);
        assert!(validations.add(5, 2.0) && !validations.add(10, 2.5));
        let before = validations.clone();
        assert_eq!(validations.begin(of("8")), None);
        assert_eq!(validations, before);
        let difference = validations.begin(of("16")).unwrap();
        assert_eq!((&*difference.found, &*difference.expected), ("8", "16"));
        assert_eq!(
            validations,
            ValidationHistory { samples: Some(of("16")), ..ValidationHistory::default() }
        );
        assert!(validations.add(15, 3.0), "a higher loss of other samples is their lowest");
        // No results are reset, so there is nothing to report.
        validations = ValidationHistory { samples: Some(of("8")), ..ValidationHistory::default() };
        assert_eq!(validations.begin(of("16")), None);
        // Earlier versions did not state the samples.
        validations = ValidationHistory { samples: None, ..before.clone() };
        assert_eq!(validations.begin(of("8")), None);
        assert_eq!(validations, before);
    }

    #[test]
    fn compressor_state_has_a_loss_scale() {
        let mut state = json!({
            "step": 5, "next_sample": 80, "tokens": 1920, "seed": 0, "samples": {"seq_len": "24"},
            "loss_scaler": {"scale": null, "good_steps": 0, "skipped_steps": 0},
            "compression": {"codec": "top_k", "world_size": 2, "loss_scale": 64},
            "validations": {"best_step": 3, "best_loss": 7, "num_since": 1},
        });
        let read = TrainingState::read(&state, 5).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), state);
        state["compression"]["loss_scale"] = json!(0);
        let error = TrainingState::read(&state, 5).unwrap_err().to_string();
        assert!(error.contains("0 is not a valid loss scale of compressed gradients"), "{error}");
        state["compression"] = json!(7);
        assert!(TrainingState::read(&state, 5).is_err());
    }
}
