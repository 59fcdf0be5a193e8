//! Weights from checkpoints and Hugging Face directories.

use crate::error::TrainError;
use std::ops::Range;
use std::path::Path;
use trireme_base::parse_json;
use trireme_checkpoint::{CONFIG_FILE, ModelSource, StoredTensors};
use trireme_model::{Model, ModelConfig, ModelProfile, TensorSpec, canonical_names, tied_names, token_specs};
use trireme_parallel::{Executor, Placements};
use trireme_plan::{LocalShape, Mesh};
use trireme_schedule::ProgramHeader;
use trireme_tensor::{Category, Device, DeviceOptions, ParameterInfo, Parameters, Precision};

/// A model with its weights, for use without training.
pub struct LoadedModel {
    /// The executor of the model.
    pub executor: Executor,
    /// The config from which the model was built.
    pub config: ModelConfig,
    /// Notices for the user: newer checkpoints that were skipped, and settings without effect.
    pub notices: Vec<String>,
}

/// The weights of a model that are not loaded yet.
pub(crate) struct ModelWeights {
    source: ModelSource,
    pub(crate) config: ModelConfig,
    /// Notices as in [`LoadedModel`].
    pub(crate) notices: Vec<String>,
}

impl ModelWeights {
    /// Opens the model of a checkpoint, of a run's newest checkpoint, or of a Hugging Face directory.
    pub(crate) fn open(path: &Path) -> Result<Self, TrainError> {
        let source = ModelSource::open(path)?;
        let missing = || TrainError::NoModelConfig { path: source.path().to_owned() };
        let text = source.read_file(CONFIG_FILE)?.ok_or_else(missing)?;
        let text = String::from_utf8_lossy(&text);
        let file = source.path().join(CONFIG_FILE);
        let mut config = ModelConfig::from_json(&text)
            .map_err(|error| TrainError::ModelConfig { path: file, source: error })?;
        let adapted = adapt_to_weights(&mut config, &text, &source.weights())?;
        let skipped = match &source {
            ModelSource::Checkpoint { skipped, .. } => skipped
                .iter()
                .map(|skipped| format!("skipped {}: {}", skipped.path.display(), skipped.reason))
                .collect(),
            ModelSource::HuggingFace(_) => Vec::new(),
        };
        let notices = [skipped, adapted].concat();
        Ok(ModelWeights { source, config, notices })
    }

    /// Builds the model for sequences of at most `seq_len` tokens, and reads its weights.
    pub(crate) fn load(
        self,
        seq_len: usize,
        allow_non_finite: bool,
        device: &Device,
    ) -> Result<(Model, Parameters), TrainError> {
        let model = self.config.build(seq_len, device)?;
        // Checked before memory is allocated, because a config can describe a model of any size.
        let weights = checked_weights(&self.source.weights(), &model)?;
        let mut parameters = Parameters::zeros(model.table(), device, Category::Parameters)?;
        parameters.load(read_held(&weights, allow_non_finite))?;
        Ok((model, parameters))
    }
}

/// Loads the model of a checkpoint, of a run's newest checkpoint, or of a Hugging Face directory.
///
/// # Errors
/// If weights contain NaN or infinity, unless `allow_non_finite`; if files are missing, damaged, or not the model's.
pub fn load_model(path: &Path, allow_non_finite: bool, device: &Device) -> Result<LoadedModel, TrainError> {
    let weights = ModelWeights::open(path)?;
    let (config, notices) = (weights.config.clone(), weights.notices.clone());
    // Text generation does not need a `seq_len` here, because its KV cache has its own limit.
    let (model, parameters) = weights.load(0, allow_non_finite, device)?;
    Ok(LoadedModel { executor: forward_executor(&config, model, parameters, device)?, config, notices })
}

/// Returns an executor that runs a language model without training. `model` was built from `config` for any number of positions.
///
/// # Errors
/// Failures of the model or the device.
pub fn forward_executor(
    config: &ModelConfig,
    model: Model,
    parameters: Parameters,
    device: &Device,
) -> Result<Executor, TrainError> {
    evaluating_executor(config, model, parameters, &token_specs(1, 1), device)
}

/// Like [`forward_executor`], for batches of these tensors.
pub(crate) fn evaluating_executor(
    config: &ModelConfig,
    model: Model,
    parameters: Parameters,
    batch: &[TensorSpec],
    device: &Device,
) -> Result<Executor, TrainError> {
    let counting_options = DeviceOptions { num_threads: 1, ..DeviceOptions::default() };
    let seq_len = batch.first().and_then(TensorSpec::num_positions).unwrap_or(1);
    let build = |device: &Device| config.build(seq_len, device);
    let profile = ModelProfile::of(build, counting_options, Precision::F32, batch)?;
    Ok(Executor::forward_only(model, profile, parameters, device)?)
}

/// Adapts the config of a model to the weights that are stored with it. `text` is the `config.json` from which `config` was read. If the
/// weights contain an output layer that differs from the embedding, the two are not tied, as in transformers. Returns notices for the user.
///
/// If the config ties an output layer that is stored, this reads both tensors up to their first difference.
///
/// # Errors
/// If the weights are quantized, or if files cannot be read.
pub(crate) fn adapt_to_weights(
    config: &mut ModelConfig,
    text: &str,
    stored: &StoredTensors,
) -> Result<Vec<String>, TrainError> {
    let mut notices = Vec::new();
    let file = stored.path().join(CONFIG_FILE);
    if stored.check_quantization(&parse_json(text.as_bytes()).unwrap_or_default())? {
        notices.push(format!(
            "{} has a quantization_config, but the weights are not quantized; checkpoints and exports leave it out",
            file.display()
        ));
    }
    if config.tie_word_embeddings {
        let counting = Device::counting(DeviceOptions::default())?;
        let model = config.build(0, &counting)?;
        if let Some([embedding, output]) = tied_names(model.table(), stored.iter().map(|(name, _)| name))
            && !stored.are_equal(embedding, output)?
        {
            config.tie_word_embeddings = false;
            notices.push(format!(
                "'{output}' differs from '{embedding}', so the output layer is not tied to the embedding, although {} ties them",
                file.display()
            ));
        }
    }
    Ok(notices)
}

/// Returns the weights under the names of `model`. Missing, extra and mis-shaped tensors are errors, which are reported together.
pub(crate) fn checked_weights(stored: &StoredTensors, model: &Model) -> Result<StoredTensors, TrainError> {
    let stored = stored.renamed(canonical_names(model.table()))?;
    let whole = Placements::new(model.table(), &ProgramHeader::default(), Mesh::data_parallel(1));
    stored.check_against(whole.tensors())?;
    Ok(stored)
}

/// Returns a function that reads the held elements of a parameter from the tensor with its name. NaN and infinity are errors, unless
/// `allow_non_finite`, because a step with them ends in a loss that does not show where they came from.
pub(crate) fn read_held(
    stored: &StoredTensors,
    allow_non_finite: bool,
) -> impl FnMut(&ParameterInfo, Range<usize>, &mut [f32]) -> Result<(), TrainError> {
    move |info, held, values| {
        read_boxes(stored, &info.name, &tensor_part(info), held.clone(), values)?;
        match values.iter().position(|value| !value.is_finite()) {
            Some(first) if !allow_non_finite => Err(TrainError::NonFiniteWeights {
                path: stored.path().to_owned(),
                name: info.name.to_string(),
                count: values.iter().filter(|value| !value.is_finite()).count(),
                num_elements: values.len(),
                first: held.start + first,
                value: values[first],
            }),
            _ => Ok(()),
        }
    }
}

/// Returns this rank's part of a parameter on the tensor axis.
pub(crate) fn tensor_part(info: &ParameterInfo) -> LocalShape {
    let whole = LocalShape::full(info.full_shape.dims());
    match info.split {
        Some(cut) if info.tensor_rank.degree > 1 => whole.split(cut, info.tensor_rank),
        // With a single rank, `LocalShape::split` would split a dim with groups into one box per group.
        _ => whole,
    }
}

/// Reads the elements `held` of a rank's part of a tensor.
pub(crate) fn read_boxes(
    stored: &StoredTensors,
    name: &str,
    part: &LocalShape,
    held: Range<usize>,
    values: &mut [f32],
) -> Result<(), TrainError> {
    let mut scratch = Vec::new();
    for held in part.boxes(held) {
        let mut runs = held.runs();
        if let (Some(run), None) = (runs.next(), runs.next()) {
            stored.read_into(name, &held.extent, bytemuck::cast_slice_mut(&mut values[run]))?;
            continue;
        }
        scratch.resize(held.extent.num_elements(), 0.0);
        stored.read_into(name, &held.extent, bytemuck::cast_slice_mut(&mut scratch))?;
        let mut rest = &scratch[..];
        for run in held.runs() {
            let (own, others) = rest.split_at(run.len());
            values[run].copy_from_slice(own);
            rest = others;
        }
    }
    Ok(())
}
