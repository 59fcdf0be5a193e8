//! The executor of a worker, built from a config.

use crate::agreement::{Facts, agree};
use crate::choices::StepChoices;
use crate::config::{Config, Parallelism, QuantizedGradients, Training};
use crate::error::TrainError;
use crate::fp8;
use crate::optimizer::optimizer_options;
use crate::programs::proven_programs;
use crate::weights::{checked_weights, read_held};
use std::time::Duration;
use trireme_checkpoint::ModelSource as WeightsSource;
use trireme_comm::Group;
use trireme_model::{Model, ModelProfile};
use trireme_optim::LossScaling;
use trireme_parallel::{
    Executor, ExecutorOptions, ExecutorSetup, OffloadOptions, RankGrid, SwapOptions, ZeroPlusPlus, chain,
};
use trireme_schedule::{Program, StateClass, StateLayout};
use trireme_tensor::{Device, IntegerFormat, Precision};

fn loss_scaling(training: &Training) -> LossScaling {
    match (training.dtype, training.loss_scale) {
        (Precision::F32 | Precision::Bf16, _) => LossScaling::Off,
        (Precision::F16, 0) => LossScaling::Dynamic {
            initial: training.loss_scale_initial,
            growth_interval: training.loss_scale_growth_interval,
        },
        (Precision::F16, scale) => LossScaling::Static(scale),
    }
}

/// Builds the executor of one rank, with the model's initial weights. Collective: fails on all ranks if they would not begin with the same
/// weights.
pub(crate) fn build_executor(
    config: &Config,
    model: Model,
    profile: ModelProfile,
    choices: &StepChoices,
    group: Group,
    device: &Device,
) -> Result<Executor, TrainError> {
    let chain = chain(model.table(), &profile, executor_options(config).determinism);
    let pipeline_rank = group.rank().0 / config.workers_per_pipeline_rank();
    let program = proven_programs(config, &chain, choices)?.swap_remove(pipeline_rank);
    let mut executor = new_executor(config, model, profile, program, group, device)?;
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

/// Builds the executor for the program of one rank, with weights of zeros. Collective, unless the group is [dry](Group::dry).
///
/// # Errors
/// Failures of the device, the groups or the offload folder.
pub fn new_executor(
    config: &Config,
    model: Model,
    profile: ModelProfile,
    program: Program,
    group: Group,
    device: &Device,
) -> Result<Executor, TrainError> {
    let ranks = RankGrid::new(group, config.degrees())?;
    let optimizer = &optimizer_options(config, model.table())?;
    let offload = &offload_options(config, &program.header.state, device)?;
    let options = executor_options(config);
    let setup = ExecutorSetup { model, profile, optimizer, ranks, device, program, options, offload };
    Ok(Executor::new(setup)?)
}

/// Returns the executor options of a config.
pub fn executor_options(config: &Config) -> ExecutorOptions {
    let training = config.training();
    ExecutorOptions {
        precision: training.dtype,
        bf16_parameters: config.memory().bf16_parameters,
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

/// Returns the options for state that the layout stores away from the device.
fn offload_options(
    config: &Config,
    state: &StateLayout,
    device: &Device,
) -> Result<OffloadOptions, TrainError> {
    let offload = config.offload();
    let is_away = |&class: &StateClass| state.is_offloaded(class);
    let host = if StateClass::ALL.iter().any(is_away) { device.host()? } else { device.clone() };
    let run_folder = config.run_folder();
    if offload.folder == run_folder && !device.is_counting() {
        // The first rank creates the folder, but the other ranks may not see it yet.
        std::fs::create_dir_all(&run_folder)
            .map_err(|source| TrainError::RunFolder { path: run_folder.clone(), source })?;
    }
    let timeout = Duration::from_secs_f64(offload.timeout_seconds);
    let swap = SwapOptions { timeout, ..SwapOptions::default() };
    Ok(OffloadOptions { host, folder: offload.folder.clone(), swap })
}

fn zero_plus_plus(parallelism: &Parallelism) -> ZeroPlusPlus {
    ZeroPlusPlus {
        quantized_weights: parallelism.zero_quantized_weights,
        secondary_shards: parallelism.zero_hpz,
        quantized_gradients: match parallelism.zero_quantized_gradients {
            QuantizedGradients::None => None,
            QuantizedGradients::Int8 => Some(IntegerFormat::Int8),
            QuantizedGradients::Int4 => Some(IntegerFormat::Int4),
        },
    }
}
