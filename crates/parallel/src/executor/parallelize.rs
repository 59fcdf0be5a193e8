//! Creates an executor: applies a layout to a model.

use super::{
    AsynchronousUpdates, Executor, HashRecorder, InFlight, OffloadState, Optimization, Passes,
    PendingMessages, ShardExchange, StepReports, SynchronizedScales, Timeline,
};
use crate::axis::UnitAxes;
use crate::error::Result;
use crate::gradients::{Gradients, SquaredNorms};
use crate::layout::{Placements, RankGrid};
use crate::memory::WaitTracker;
use crate::offload::OffloadOptions;
use crate::parameters::{RankParameters, ReplicatedParameters};
use crate::step::{ExecutorOptions, ZeroPlusPlus};
use std::sync::Arc;
use trireme_codec::CodecName;
use trireme_model::{Model, ModelProfile};
use trireme_optim::{LossScaler, LossScaling, Optimizer, OptimizerOptions};
use trireme_schedule::lowering::apply_layout;
use trireme_schedule::{Program, ProgramHeader, StateClass, single, validate};
use trireme_tensor::{Category, Device, Precision};

/// The arguments of [`Executor::new`].
pub struct ExecutorSetup<'a> {
    /// The model.
    pub model: Model,
    /// The shapes, memory and costs of the model's passes over a microbatch.
    pub profile: ModelProfile,
    /// Options of the optimizer that updates this rank's [parts](Placements::parts) of the units.
    pub optimizer: &'a OptimizerOptions,
    /// All ranks.
    pub ranks: RankGrid,
    /// The device that this rank computes on.
    pub device: &'a Device,
    /// The step program of this rank.
    pub program: Program,
    /// Options of all steps.
    pub options: ExecutorOptions,
    /// Devices and files for state that resides off the device.
    pub offload: &'a OffloadOptions,
}

/// Returns the program that runs units without training. It has been validated.
pub(super) fn forward_program(training: &ProgramHeader) -> Result<Program> {
    let program = apply_layout(single::forward_only(training), training.state.forward_only());
    validate(&program, 1)?;
    Ok(program)
}

impl Executor {
    /// Creates an executor. Validates the program, and allocates parameters and optimizer state (zeros) and gradients. Collective.
    ///
    /// Each axis of the [ranks](RankGrid) splits one thing, and one part of the executor communicates along it:
    ///
    /// | axis | what its ranks split | what communicates |
    /// |---|---|---|
    /// | pipeline | the units | `PendingMessages`; and `AsynchronousUpdates`, if the pipeline does not drain |
    /// | tensor | parameters, and with sequence parallelism rows | operations of units, by `UnitAxes` |
    /// | context | the positions of samples | attention, by `UnitAxes`; gradients are summed as over replicas |
    /// | experts | the experts of a unit | operations of units, by `UnitAxes` |
    /// | shards | state, by the program header's `StateLayout` | `RankParameters`, `Gradients`, `ShardExchange` |
    /// | replicas | samples only | `Gradients` |
    ///
    /// `ReplicatedParameters` keeps the replicas of parameters across the tensor or expert axis equal. All ranks agree on losses
    /// (`StepReports`), the gradient norm (`SquaredNorms`) and the fp8 scales (`SynchronizedScales`).
    ///
    /// # Errors
    /// If the program is not valid; errors of devices, groups and disks.
    ///
    /// # Panics
    /// If the model's parameters belong to another rank, or if there are shards but the program shards no state. If the program updates
    /// early, but steps may be skipped because of a loss scale, or the gradients are compressed. If parameters are in bf16, but `precision`
    /// is not, or with fp8 or quantized weights.
    pub fn new(setup: ExecutorSetup<'_>) -> Result<Self> {
        let is_checked_first = setup.options.loss_scaling != LossScaling::Off
            || setup.options.compression.codec() != CodecName::None;
        assert!(!(setup.program.header.state.updates_early && is_checked_first), "updates cannot be early");
        let ExecutorOptions { bf16_parameters, precision, fp8, zero_plus_plus, .. } = setup.options;
        let reads_bf16 = precision == Precision::Bf16 && fp8.is_none() && !zero_plus_plus.quantized_weights;
        assert!(!bf16_parameters || reads_bf16, "operations read parameters in another format than bf16");
        let ExecutorSetup { model, profile, optimizer, ranks, device, program, options, offload } = setup;
        // Without a pipeline, microbatches run one after the other.
        let in_flight_max =
            if program.header.stages.is_empty() { 1 } else { program.header.num_microbatches };
        validate(&program, in_flight_max)?;
        let (header, table, state) = (&program.header, model.table(), program.header.state);
        let (ranks, updates) = split_groups(ranks, &model, header, &options)?;
        device.staging().charge_outside_arena(Category::Communication, ranks.fixed_bytes())?;

        // Communication within units: the tensor, context and expert axes.
        let axes = UnitAxes::new(&ranks, device);
        let partial_gradients = ReplicatedParameters::with_partial_gradients(table, &profile, &ranks, device);
        let fp8 = options
            .fp8
            .map(|recipe| SynchronizedScales::new(recipe, &model, device, ranks.world()))
            .transpose()?;

        // State: shards and replicas.
        let placements = Placements::new(table, header, ranks.mesh().clone());
        let parts = placements.parts(table, ranks.world().rank());
        let squares = SquaredNorms::new(table, &ranks, device, optimizer)?;
        let optimizer_device = offload.device_of(&state, StateClass::Optimizer, device).clone();
        let is_moved = state.is_fetched(StateClass::Optimizer);
        let make = if is_moved { Optimizer::without_memory } else { Optimizer::new };
        let stepped = if state.is_trained() { parts.clone() } else { vec![0..0; parts.len()] };
        let optimizer = make(optimizer, table, &stepped, &optimizer_device)?;
        let exchanges = ShardExchange::of_units(&ranks, header, &optimizer_device, device);
        let shards_device = offload.device_of(&state, state.class_of_weights(), device);
        let parameters = RankParameters::new(table, parts, header, &options, &ranks, device, shards_device)?;

        // Communication between units: the pipeline.
        let messages = PendingMessages::new(&ranks, header.num_microbatches, device);
        let shards_device = offload.device_of(&state, StateClass::Gradients, device);
        let mut gradients =
            Gradients::new(table, header, &ranks, device, shards_device, &messages.pool, &options)?;
        if optimizer.exchanges_momentum() {
            gradients.reserve_for_momentum(matches!(options.loss_scaling, LossScaling::Dynamic { .. }))?;
        }
        let reports = StepReports::new(header, &ranks, &profile, device, Arc::default())?;

        let mut executor = Executor {
            forward_program: forward_program(header)?,
            timeline: Timeline::new(program.actions.len()),
            offload: OffloadState::new(offload, &program, device),
            passes: Passes {
                axes,
                fp8,
                in_flight: InFlight::new(header, &profile),
                validation_memory: Vec::new(),
            },
            optimization: Optimization {
                optimizer,
                device: optimizer_device,
                exchanges,
                partial_gradients,
                squares,
                loss_scaler: LossScaler::new(options.loss_scaling),
                previous_norm: None,
                hashes: HashRecorder::default(),
            },
            device: device.clone(),
            model,
            profile,
            ranks,
            options,
            program,
            placements,
            parameters,
            gradients,
            messages,
            reports,
            updates,
            waiting: WaitTracker::default(),
            failure: None,
            outcomes: Vec::with_capacity(1),
        };
        executor.ranks.join_devices()?;
        executor.declare_offload_sizes();
        executor.write_initial_zeros()?;
        Ok(executor)
    }
}

/// Splits the groups that the layout needs in addition to the groups of the axes, and creates the state of a pipeline that does not drain.
/// Collective.
fn split_groups(
    mut ranks: RankGrid,
    model: &Model,
    header: &ProgramHeader,
    options: &ExecutorOptions,
) -> Result<(Arc<RankGrid>, Option<AsynchronousUpdates>)> {
    let (state, num_shards) = (&header.state, ranks.shards().world_size());
    assert!(num_shards == 1 || state.has_shards(), "{num_shards} shards of no state");
    assert_eq!(model.table().model_rank(), ranks.model_rank(), "the model's parts are those of this rank");
    if state.is_sharded(StateClass::Parameters)
        && num_shards > 1
        && options.zero_plus_plus != ZeroPlusPlus::NONE
    {
        ranks.split_by_hosts()?;
    }
    ranks.split_replicated_parameters(model.table())?;
    let updates = AsynchronousUpdates::new(header, &mut ranks)?;
    Ok((Arc::new(ranks), updates))
}
