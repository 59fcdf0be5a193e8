//! From a config to what a trainer needs: corpus, model, optimizer, executor.

use crate::agreement::{Facts, agree};
use crate::choices::StepChoices;
use crate::config::{self, Config, ModelSource};
use crate::device::device_options;
use crate::error::TrainError;
use crate::fp8;
use crate::observer::Observer;
use crate::optimizer::optimizer_options;
use crate::stages;
use crate::task::Task;
use crate::weights::{adapt_to_weights, checked_weights, read_held};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;
use trireme_base::{ContextPlace, Rank};
use trireme_checkpoint::{CONFIG_FILE, ModelSource as WeightsSource, resolve_model};
use trireme_comm::Group;
use trireme_model::{
    AttentionConfig, ExchangeConfig, Family, Model, ModelConfig, Rehearsal, Rope, TensorSpec,
};
use trireme_optim::{LossScaling, LrSchedule};
use trireme_parallel::{
    Determinism, Executor, ExecutorOptions, ExecutorSetup, OffloadOptions, ParallelError, RankGrid,
    SwapOptions, ZeroPlusPlus, chain,
};
use trireme_schedule::lowering::{lay_out, recompute};
use trireme_schedule::{Chain, Program, StateClass, StateLayout, validate_pipeline};
use trireme_tensor::{Activation, Device, IntegerFormat, ModelPlace, Precision};

/// An equal share of this host's cores for each of `local_world_size` workers, at least one.
pub fn share_of_cores(local_world_size: usize) -> usize {
    (std::thread::available_parallelism().map_or(1, NonZeroUsize::get) / local_world_size.max(1)).max(1)
}

/// Threads of a worker: as the config says, or its `share` of the cores.
pub fn local_threads(config: &Config, share: usize) -> usize {
    match config.training().threads {
        0 => share,
        threads => threads,
    }
}

/// The model that the config describes, for a corpus whose ids lie below `vocabulary_size`; and notices for the user.
pub fn model_config(
    config: &Config,
    vocabulary_size: usize,
) -> Result<(ModelConfig, Vec<String>), TrainError> {
    let (mut model, text) = match config.model_source() {
        ModelSource::Inline(architecture) => {
            (inline_model(config, architecture, vocabulary_size), String::new())
        }
        ModelSource::File(path) | ModelSource::InitFrom(path) => {
            let (path, text) = description(config, path)?;
            let refused = |source| TrainError::ModelConfig { path, source };
            (ModelConfig::from_json(&text).map_err(refused)?, text)
        }
    };
    let mut notices: Vec<String> = dropout_notice(config, &text).into_iter().collect();
    // A plan needs no weights; where they are needed, the error is reported.
    if let Some(Ok(source)) = config.model().init_from.as_ref().map(|path| WeightsSource::open(path)) {
        notices.extend(adapt_to_weights(&mut model, &text, &source.weights())?);
    }
    if vocabulary_size > model.vocab_size {
        let folder = config.data().folder.clone();
        return Err(TrainError::VocabularyTooSmall {
            folder,
            tokenizer: vocabulary_size,
            model: model.vocab_size,
        });
    }
    model.dropout = config.model().dropout as f32;
    let experts = config.experts();
    match &mut model.experts {
        Some(own) => {
            own.balance_loss = experts.balance_loss.map_or(own.balance_loss, |weight| weight as f32);
            own.z_loss = experts.z_loss.map_or(own.z_loss, |weight| weight as f32);
            own.capacity_factor = experts.capacity_factor;
            let (num_shadowed, num_experts) = (experts.num_shadowed, own.num_experts);
            own.exchange = ExchangeConfig { num_chunks: experts.num_chunks, num_shadowed };
            if num_shadowed > num_experts {
                return Err(TrainError::TooManyShadowed { num_shadowed, num_experts });
            }
            if !own.has_bias && experts.bias_update_rate != config::Experts::default().bias_update_rate {
                return Err(TrainError::NoExpertBias { family: model.family.name() });
            }
        }
        None if *experts != config::Experts::default() => {
            return Err(TrainError::NoExperts { family: model.family.name() });
        }
        None => {}
    }
    let seq_len = config.training().seq_len;
    let max_position_embeddings = model.max_positions();
    if seq_len > max_position_embeddings {
        return Err(TrainError::SequenceTooLong { seq_len, max_position_embeddings });
    }
    Ok((model, notices))
}

/// Says that the dropout of a model's `config.json` does not apply, where the run has none of its own.
fn dropout_notice(config: &Config, text: &str) -> Option<String> {
    let keys = ModelConfig::dropout_keys(text);
    (config.model().dropout == 0.0 && !keys.is_empty()).then(|| {
        format!(
            "the model's config.json has {}; training uses no dropout unless [model] dropout is set",
            keys.join(", ")
        )
    })
}

/// The `config.json` that describes the model of the config's `[model] config` or `init_from`, and where it is.
fn description(config: &Config, path: &Path) -> Result<(PathBuf, String), TrainError> {
    let read = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => Ok((path, text)),
        Err(source) => Err(TrainError::ReadModelConfig { path, source }),
    };
    if let ModelSource::File(path) = config.model_source() {
        return read(if path.is_dir() { path.join(CONFIG_FILE) } else { path.to_owned() });
    }
    // A plan needs no weights.
    let alone = resolve_model(path)?.join(CONFIG_FILE);
    if alone.is_file() {
        return read(alone);
    }
    let missing = || TrainError::NoModelConfig { path: path.to_owned() };
    let source = WeightsSource::open(path)?;
    let text = source.read_file(CONFIG_FILE)?.ok_or_else(missing)?;
    Ok((source.path().join(CONFIG_FILE), String::from_utf8_lossy(&text).into_owned()))
}

/// The `config.json` for checkpoints of `model`, which the config describes. What another `config.json` says beyond that stays.
pub(crate) fn model_config_json(config: &Config, model: &ModelConfig) -> Result<String, TrainError> {
    match config.model_source() {
        ModelSource::Inline(_) => Ok(format!("{:#}\n", model.to_json())),
        ModelSource::File(path) | ModelSource::InitFrom(path) => {
            let (path, text) = description(config, path)?;
            model.to_json_within(&text).map_err(|source| TrainError::ModelConfig { path, source })
        }
    }
}

fn inline_model(config: &Config, architecture: config::Architecture, vocabulary_size: usize) -> ModelConfig {
    let (model, has_rope) = (config.model(), architecture == config::Architecture::Llama);
    ModelConfig {
        family: match architecture {
            config::Architecture::Gpt2 => Family::GPT2,
            config::Architecture::Llama => Family::LLAMA,
        },
        vocab_size: if model.vocab_size == 0 { vocabulary_size } else { model.vocab_size },
        hidden_size: model.hidden_size,
        num_layers: model.num_layers,
        num_heads: model.num_heads,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.hidden_size / model.num_heads,
        intermediate_size: model.intermediate_size,
        max_position_embeddings: model.max_position_embeddings,
        norm_epsilon: model.norm_eps as f32,
        tie_word_embeddings: model.tie_word_embeddings,
        rope: has_rope.then_some(Rope { theta: model.rope_theta, scaling: None }),
        qkv_bias: !has_rope,
        attention_output_bias: !has_rope,
        mlp_bias: !has_rope,
        activation: if has_rope { Activation::Silu } else { Activation::Gelu },
        attention: AttentionConfig::default(),
        logit_soft_cap: None,
        latent: None,
        experts: None,
        initializer_range: model.initializer_range as f32,
        dropout: 0.0,
    }
}

pub(crate) fn lr_schedule(config: &Config) -> LrSchedule {
    let scheduler = config.lr_scheduler();
    LrSchedule {
        peak: config.optimizer().lr,
        warmup_steps: scheduler.warmup_steps,
        decay: scheduler.decay,
        decay_steps: scheduler.decay_steps,
        total_steps: config.training().steps,
        min_factor: scheduler.min_lr_factor,
    }
}

fn loss_scaling(training: &config::Training) -> LossScaling {
    match (training.dtype, training.loss_scale) {
        (Precision::F32 | Precision::Bf16, _) => LossScaling::Off,
        (Precision::F16, 0) => LossScaling::Dynamic {
            initial: training.loss_scale_initial,
            growth_interval: training.loss_scale_growth_interval,
        },
        (Precision::F16, scale) => LossScaling::Static(scale),
    }
}

/// Says when the bits of this layout are its own.
pub(crate) fn notice_determinism(config: &Config, world_size: usize, observer: &mut dyn Observer) {
    if config.training().determinism == Determinism::Run {
        return;
    }
    let reduce_dtype = config.training().reduce_dtype;
    let num_microbatches = config.num_microbatches();
    let is_canonical = world_size.is_power_of_two() && num_microbatches.is_power_of_two();
    if reduce_dtype != Precision::F32 && world_size > 1 {
        observer.notice(&format!(
            "gradients are rounded to {} and summed over {world_size} workers: bits are reproducible, but differ for \
             other numbers of workers",
            reduce_dtype
        ));
    } else if config.parallelism().zero_quantized_weights
        || config.parallelism().zero_quantized_gradients != config::QuantizedGradients::None
    {
        observer.notice(
            "workers exchange parameters or gradients as integers: bits are reproducible, but differ for other layouts",
        );
    } else if !is_canonical {
        observer.notice(&format!(
            "{world_size} workers x {num_microbatches} microbatches: bits are reproducible, but match those of other \
             numbers of workers only if both numbers are powers of two"
        ));
    }
}

/// Says what helps where gradients are of old weights.
pub(crate) fn notice_delay(config: &Config, observer: &mut dyn Observer) {
    let optimizer = config.optimizer();
    let has_nu = optimizer.name.settings().contains(&"nu");
    if config.is_asynchronous() && has_nu && optimizer.settings.nu == 1.0 {
        observer.notice(
            "this schedule applies stale gradients; a smaller [optimizer] nu, such as 0.78, and a longer warm-up \
             cope with them better",
        );
    }
}

/// The model with its first weights, its optimizer and its program on one rank. Collective: all ranks begin with the same
/// weights, or none does.
pub(crate) fn build_executor(
    config: &Config,
    (model, rehearsal): (Model, Rehearsal),
    choices: &StepChoices,
    group: Group,
    device: &Device,
) -> Result<Executor, TrainError> {
    let chain = chain(model.table(), &rehearsal, executor_options(config).determinism);
    let place = group.rank().0 / config.workers_per_place();
    let program = proven_programs(config, &chain, choices)?.swap_remove(place);
    let mut executor = new_executor(config, (model, rehearsal), program, group, device)?;
    match &config.model().init_from {
        None => executor.initialize(config.training().seed)?,
        Some(folder) => {
            let stored = WeightsSource::open(folder)?.weights();
            agree(&Facts::of_weights(&stored)?, executor.group())?;
            let weights = checked_weights(&stored, executor.model())?;
            executor.load_parameters(read_held(&weights, config.model().allow_non_finite))?;
        }
    }
    Ok(executor)
}

/// What runs the program of one rank, with weights of zeros. Collective, unless the group is [dry](Group::dry).
///
/// # Errors
/// What devices, groups and disks refuse.
pub fn new_executor(
    config: &Config,
    (model, rehearsal): (Model, Rehearsal),
    program: Program,
    group: Group,
    device: &Device,
) -> Result<Executor, TrainError> {
    let ranks = RankGrid::new(group, config.degrees())?;
    let optimizer = &optimizer_options(config, model.table())?;
    let offload = &offload_options(config, &program.outline.state, device)?;
    let options = executor_options(config);
    let setup = ExecutorSetup { model, rehearsal, optimizer, ranks, device, program, options, offload };
    Ok(Executor::new(setup)?)
}

/// How the config wants steps to be run.
pub fn executor_options(config: &Config) -> ExecutorOptions {
    let training = config.training();
    ExecutorOptions {
        precision: training.dtype,
        fp8: fp8::recipe(training),
        shards_rows: config.parallelism().sequence_parallel,
        reduce_dtype: training.reduce_dtype,
        fusion_bytes: config.comm().fusion_bytes,
        zero_plus_plus: zero_plus_plus(config.parallelism()),
        compression: config.compression(),
        seed: training.seed,
        loss_scaling: loss_scaling(training),
        determinism: training.determinism,
    }
}

/// What each rank of the pipeline does in a step, before anything is recomputed, sharded or moved; one without a pipeline.
///
/// # Errors
/// If the pipeline's schedule does not fit its sizes, or the model.
pub fn base_programs(
    config: &Config,
    chain: &Chain,
    choices: &StepChoices,
) -> Result<Vec<Program>, TrainError> {
    if config.is_asynchronous() && !chain.ties.is_empty() {
        return Err(TrainError::TiedVersions);
    }
    stages::base_programs(config, chain, choices)
}

/// A [base program](base_programs) with what is recomputed, sharded and moved.
pub fn lowered(program: Program, choices: &StepChoices) -> Program {
    lay_out(recompute(program, &choices.keeps), choices.state)
}

/// What each rank of the pipeline does in a step; one without a pipeline.
///
/// # Errors
/// As [`base_programs`].
pub fn step_programs(
    config: &Config,
    chain: &Chain,
    choices: &StepChoices,
) -> Result<Vec<Program>, TrainError> {
    let programs = base_programs(config, chain, choices)?;
    Ok(programs.into_iter().map(|program| lowered(program, choices)).collect())
}

/// The [`step_programs`], after a proof that all ranks of the pipeline come to the end of theirs together.
///
/// # Errors
/// As those, or if the proof fails.
pub fn proven_programs(
    config: &Config,
    chain: &Chain,
    choices: &StepChoices,
) -> Result<Vec<Program>, TrainError> {
    let programs = step_programs(config, chain, choices)?;
    validate_pipeline(&programs).map_err(ParallelError::from)?;
    Ok(programs)
}

/// What a worker has of the tensors of a microbatch.
///
/// # Errors
/// [`TrainError::NoPositions`] and [`TrainError::UnequalPositions`] if workers cannot have equal parts of the positions.
pub fn positions_of_batch(
    batch: &[TensorSpec],
    context: ContextPlace,
    has_positions: bool,
) -> Result<Vec<TensorSpec>, TrainError> {
    let degree = context.degree();
    if degree > 1 && !has_positions {
        return Err(TrainError::NoPositions { degree });
    }
    let of_worker = |spec: &TensorSpec| match spec.num_positions() {
        Some(len) if degree > 1 && !len.is_multiple_of(2 * degree) => {
            Err(TrainError::UnequalPositions { tensor: format!("'{}' ({spec})", spec.name), len, degree })
        }
        _ => Ok(spec.of_positions(context)),
    };
    batch.iter().map(of_worker).collect()
}

/// What passes of a model are on a worker. `batch` has all positions.
pub(crate) fn rehearse(
    config: &Config,
    task: &dyn Task,
    (rank, num_threads): (Rank, usize),
    batch: &[TensorSpec],
) -> Result<Rehearsal, TrainError> {
    let places = (config.model_place(rank), config.context_place(rank));
    rehearse_at(config, task, (places, num_threads), batch)
}

/// As [`rehearse`], of a worker with this part of the model and of the positions.
pub(crate) fn rehearse_at(
    config: &Config,
    task: &dyn Task,
    ((place, context), num_threads): ((ModelPlace, ContextPlace), usize),
    batch: &[TensorSpec],
) -> Result<Rehearsal, TrainError> {
    let build = |device: &Device, table| task.build(device, table);
    let build_part = |device: &Device| Model::build_at(place, device, build);
    let passes = executor_options(config).passes(context);
    let batch = positions_of_batch(batch, context, task.has_positions())?;
    Ok(Rehearsal::of(build_part, device_options(config, num_threads), passes, &batch)?)
}

/// What it takes to have state where a layout says.
fn offload_options(
    config: &Config,
    state: &StateLayout,
    device: &Device,
) -> Result<OffloadOptions, TrainError> {
    let offload = config.offload();
    let is_away = |&class: &StateClass| state.is_away(class);
    let host = if StateClass::ALL.iter().any(is_away) { device.host()? } else { device.clone() };
    let run_folder = config.run_folder();
    if offload.folder == run_folder && !device.is_counting() {
        // The first rank makes it, but the others need not have seen that.
        std::fs::create_dir_all(&run_folder)
            .map_err(|source| TrainError::RunFolder { path: run_folder.clone(), source })?;
    }
    let timeout = Duration::from_secs_f64(offload.timeout_seconds);
    let swap = SwapOptions { timeout, ..SwapOptions::default() };
    Ok(OffloadOptions { host, folder: offload.folder.clone(), swap })
}

fn zero_plus_plus(parallelism: &config::Parallelism) -> ZeroPlusPlus {
    ZeroPlusPlus {
        quantized_weights: parallelism.zero_quantized_weights,
        secondary_shards: parallelism.zero_hpz,
        quantized_gradients: match parallelism.zero_quantized_gradients {
            config::QuantizedGradients::None => None,
            config::QuantizedGradients::Int8 => Some(IntegerFormat::Int8),
            config::QuantizedGradients::Int4 => Some(IntegerFormat::Int4),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::{AxisPlace, DType};

    #[test]
    fn workers_have_equal_parts_of_the_positions_of_a_batch_or_are_refused() {
        let specs = |len| {
            [("rows", &[3, len, 5][..]), ("lens", &[3])]
                .map(|(name, dims)| TensorSpec::new(name, dims, DType::U32))
        };
        let context = ContextPlace::new(AxisPlace::new(1, 2), 1);
        let found = positions_of_batch(&specs(8), context, true).unwrap();
        assert_eq!(found.iter().map(|spec| spec.shape.dims()).collect::<Vec<_>>(), [&[3, 4, 5][..], &[3]]);
        let refused = positions_of_batch(&specs(6), context, true).unwrap_err().to_string();
        assert!(refused.contains("rows") && refused.contains("6, which is not a multiple of 4"), "{refused}");
        let refused = positions_of_batch(&specs(8), context, false).unwrap_err().to_string();
        assert!(refused.contains("has_positions"), "{refused}");
        assert_eq!(positions_of_batch(&specs(6), ContextPlace::ALONE, false).unwrap(), specs(6));
    }
}
