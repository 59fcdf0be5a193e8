//! Checks of the sharding of the training state, of recomputation, of offloading and of huge pages.

use super::checks::{Checks, changed_keys};
use super::choice::{ActivationCheckpointMode, DeviceName, Fp8, HugePages, QuantizedGradients, Tier};
use super::layout::{ActivationCheckpoint, Memory, Offload, Parallelism};
use super::sections::{Experts, Sections, Training};
use trireme_codec::CodecName;
use trireme_schedule::{Portion, StateClass, StateLayout, Tier as StateTier};
use trireme_tensor::Precision;

/// Keys of `[parallelism]` that have an effect only with `zero_stage = 3`.
const STAGE_3_KEYS: [&str; 5] = [
    "zero_prefetch",
    "reshard_after_forward",
    "zero_quantized_weights",
    "zero_hpz",
    "zero_quantized_gradients",
];

impl Parallelism {
    /// Returns the layout of the training state on the workers. All state is on their devices.
    pub fn state_layout(&self) -> StateLayout {
        let mut state = StateLayout {
            gather_ahead: self.zero_prefetch,
            keep_gathered: !self.reshard_after_forward,
            ..StateLayout::zero(self.zero_stage as usize)
        };
        if self.shard_gradients {
            state.gradients.portion = Portion::Shard;
        }
        state
    }
}

/// Returns the key that turns sharding on.
pub(super) fn sharding_key(parallelism: &Parallelism) -> &'static str {
    if parallelism.zero_stage == 0 { "parallelism.shard_gradients" } else { "parallelism.zero_stage" }
}

/// Returns the number of replicas and the number of workers that shard each. A degree that is not given is as large as the workers allow,
/// but the number of workers that shard a replica is 1 if nothing is sharded.
pub(super) fn degrees(parallelism: &Parallelism, data_parallel_degree: usize) -> (usize, usize) {
    let given = |degree: i64| usize::try_from(degree).ok().filter(|&degree| degree > 0);
    let replicas = given(parallelism.data_parallel_replicate_degree);
    let shards = given(parallelism.data_parallel_shard_degree);
    match (replicas, shards) {
        _ if !parallelism.state_layout().has_shards() => {
            (replicas.unwrap_or(data_parallel_degree), shards.unwrap_or(1))
        }
        (Some(replicas), Some(shards)) => (replicas, shards),
        (Some(replicas), None) => (replicas, data_parallel_degree / replicas),
        (None, shards) => {
            let shards = shards.unwrap_or(data_parallel_degree);
            (data_parallel_degree / shards, shards)
        }
    }
}

pub(super) fn check_parallelism(checks: &mut Checks<'_>, data_parallel_degree: usize) {
    let Sections { parallelism, comm, .. } = &checks.unchecked.sections;
    let state = parallelism.state_layout();
    let (replicas, shards) = degrees(parallelism, data_parallel_degree);
    let keys = [
        "parallelism.data_parallel_shard_degree",
        "parallelism.data_parallel_replicate_degree",
        "launch.workers",
    ];
    checks.require(state.has_shards() || shards == 1, &keys, || {
        format!("data_parallel_shard_degree = {shards} has no effect with zero_stage = 0; set zero_stage = 1, 2 or 3, or shard_gradients = true, or remove this key")
    });
    checks.require(replicas * shards == data_parallel_degree, &keys, || {
        format!("{replicas} replicas of {shards} shards take {} workers, but there are {data_parallel_degree} that see different samples; set one of the two \
             degrees to -1, which takes what the other leaves", replicas * shards)
    });
    checks.require(
        !state.has_shards() || comm.compression == CodecName::None,
        &["comm.compression", sharding_key(parallelism)],
        || {
            "compression needs the whole sum of gradients on every worker; set zero_stage = 0 and shard_gradients = \
             false, or remove this key"
                .to_owned()
        },
    );
    for key in changed_keys(parallelism).filter(|key| STAGE_3_KEYS.contains(key)) {
        let keys = [&format!("parallelism.{key}"), "parallelism.zero_stage"];
        checks.only_applies(state.is_sharded(StateClass::Parameters), &keys, "zero_stage = 3");
    }
    let has_effect = !parallelism.shard_gradients || parallelism.zero_stage < 2;
    checks.require(has_effect, &["parallelism.shard_gradients", "parallelism.zero_stage"], || {
        "has no effect with zero_stage = 2 or 3, which shard gradients; remove this key".to_owned()
    });
    check_zero_plus_plus(checks);
}

fn check_zero_plus_plus(checks: &mut Checks<'_>) {
    let Sections { parallelism, training, .. } = &checks.unchecked.sections;
    checks.require(
        !parallelism.zero_quantized_weights || training.fp8 == Fp8::Off,
        &["parallelism.zero_quantized_weights", "training.fp8"],
        || {
            "fp8 would round values again that are already rounded to integers with other scales; remove one of the \
             two keys"
                .to_owned()
        },
    );
    checks.require(
        parallelism.zero_quantized_gradients == QuantizedGradients::None
            || training.reduce_dtype == Precision::F32,
        &["parallelism.zero_quantized_gradients", "training.reduce_dtype"],
        || {
            "gradients are rounded to integers, so reduce_dtype has no effect; remove one of the two keys"
                .to_owned()
        },
    );
}

pub(super) fn check_activation_checkpoint(checks: &mut Checks<'_>) {
    let ActivationCheckpoint { mode, every_k, memory } = checks.unchecked.sections.activation_checkpoint;
    checks.only_applies(
        mode == ActivationCheckpointMode::Auto || memory.0.is_none(),
        &["activation_checkpoint.memory", "activation_checkpoint.mode"],
        "mode = \"auto\"",
    );
    checks.only_applies(
        mode == ActivationCheckpointMode::EveryK || every_k == ActivationCheckpoint::default().every_k,
        &["activation_checkpoint.every_k", "activation_checkpoint.mode"],
        "mode = \"every-k\"",
    );
}

pub(super) fn is_on_disk(offload: &Offload) -> bool {
    offload.tiers().into_iter().any(|(_, tier)| matches!(tier, Tier::Disk | Tier::Auto))
}

/// Returns whether activations may be spilled to files if loads of experts are uneven.
pub(super) fn may_spill(parallelism: &Parallelism, experts: &Experts, memory: &Memory) -> bool {
    // A capacity bounds memory, so nothing has to be spilled.
    let is_bounded = experts.capacity_factor.is_some();
    let has_budget = memory.device_budget.0.is_some();
    parallelism.expert_parallel_degree > 1 && has_budget && experts.spill && !is_bounded
}

/// Returns whether a worker sums the gradients of several microbatches in a step.
fn accumulates(training: &Training, data_parallel_degree: usize) -> bool {
    training.global_batch_size > training.local_batch_size * data_parallel_degree
}

pub(super) fn check_bf16_parameters(checks: &mut Checks<'_>) {
    const KEY: &str = "memory.bf16_parameters";
    let Sections { training, memory, parallelism, .. } = &checks.unchecked.sections;
    let is_on = memory.bf16_parameters;
    checks.require(!is_on || training.dtype == Precision::Bf16, &[KEY, "training.dtype"], || {
        "parameters in bf16 require matrix multiplications in bf16; set [training] dtype = \"bf16\", or remove bf16_parameters".to_owned()
    });
    checks.require(!is_on || training.fp8 == Fp8::Off, &[KEY, "training.fp8"], || {
        "fp8 rounds f32 parameters, but bf16_parameters stores none; remove one of the two keys".to_owned()
    });
    checks.require(
        !is_on || !parallelism.zero_quantized_weights,
        &[KEY, "parallelism.zero_quantized_weights"],
        || "zero_quantized_weights rounds f32 parameters, but bf16_parameters stores none; remove one of the two keys".to_owned(),
    );
}

pub(super) fn check_free_gradients(checks: &mut Checks<'_>, data_parallel_degree: usize) {
    const KEY: &str = "memory.free_gradients";
    let Sections { memory, training, parallelism, comm, optimizer, .. } = &checks.unchecked.sections;
    let (frees_gradients, clips_by_previous) = (memory.free_gradients, training.clip_by_previous_norm);
    checks.only_applies(
        frees_gradients || !clips_by_previous,
        &["training.clip_by_previous_norm", KEY],
        "[memory] free_gradients = true",
    );
    checks.only_applies(
        training.max_norm > 0.0 || !clips_by_previous,
        &["training.clip_by_previous_norm", "training.max_norm"],
        "a max_norm above 0",
    );
    if !frees_gradients {
        return;
    }
    checks.require(training.max_norm == 0.0 || clips_by_previous, &[KEY, "training.max_norm"], || {
        "gradients are freed before the norm of all of them is known, so a step cannot clip by it; set [training] \
         max_norm = 0, or clip_by_previous_norm = true"
            .to_owned()
    });
    let is_sharded = parallelism.state_layout().is_sharded(StateClass::Gradients);
    checks.require(!is_sharded, &[KEY, sharding_key(parallelism)], || {
        "a sharded gradient is freed as soon as it is reduced to its shard; remove free_gradients".to_owned()
    });
    checks.require(training.dtype != Precision::F16, &[KEY, "training.dtype"], || {
        "f16 skips a step whose gradients overflow, which is known only at its end; use dtype = \"bf16\""
            .to_owned()
    });
    let is_accumulated = accumulates(training, data_parallel_degree);
    checks.require(!is_accumulated, &[KEY, "training.global_batch_size"], || {
        "the gradients of several microbatches are summed in memory, so none could be freed; use a larger \
         local_batch_size, or remove free_gradients"
            .to_owned()
    });
    let has_pipeline = parallelism.pipeline_parallel_degree > 1;
    checks.require(!has_pipeline, &[KEY, "parallelism.pipeline_parallel_degree"], || {
        "a pipeline sums the gradients of several microbatches in memory, so none could be freed; remove free_gradients"
            .to_owned()
    });
    checks.require(comm.compression == CodecName::None, &[KEY, "comm.compression"], || {
        "compression keeps a gradient of each unit from step to step; remove one of the two keys".to_owned()
    });
    checks.require(!optimizer.name.exchanges_momentum(), &[KEY, "optimizer.name"], || {
        "this optimizer compresses momentum, which keeps a gradient of each unit from step to step; use another \
         optimizer, or remove free_gradients"
            .to_owned()
    });
}

pub(super) fn check_huge_pages(checks: &mut Checks<'_>) {
    let Sections { memory, training, .. } = &checks.unchecked.sections;
    let is_cpu = training.device == DeviceName::Cpu;
    checks.require(
        memory.huge_pages != HugePages::Reserved || is_cpu,
        &["memory.huge_pages", "training.device"],
        || "only the CPU's memory can lie in reserved huge pages; use \"transparent\"".to_owned(),
    );
}

pub(super) fn check_offload(checks: &mut Checks<'_>, data_parallel_degree: usize) {
    let Sections { offload, parallelism, .. } = &checks.unchecked.sections;
    let Offload { optimizer, parameters, gradients, .. } = *offload;
    let state = parallelism.state_layout();
    for (class, tier) in [
        (StateClass::Optimizer, optimizer),
        (StateClass::Parameters, parameters),
        (StateClass::Gradients, gradients),
    ] {
        let keys = [&format!("offload.{}", class.name())[..], "parallelism.zero_stage"];
        // State that is set to `auto` stays on the device if it cannot leave.
        let may_stay_on_device = matches!(tier, Tier::Device | Tier::Auto);
        let can_leave = |state: StateLayout| state.can_reside(class, StateTier::Host, 1);
        checks.require(may_stay_on_device || can_leave(state), &keys, || {
            let stage_min = (0..=3).find(|&stage| can_leave(StateLayout::zero(stage)));
            let stage_min = stage_min.expect("stage 3 shards every class");
            format!("can only leave the device with zero_stage = {stage_min} or above; set that, even on one worker")
        });
    }
    let training = &checks.unchecked.sections.training;
    let is_accumulated = accumulates(training, data_parallel_degree);
    checks.require(
        gradients != Tier::Disk || !is_accumulated,
        &["offload.gradients", "training.global_batch_size"],
        || "gradients of several microbatches are summed in memory; use \"host\", or a larger local_batch_size".to_owned(),
    );
    let is_on_disk = is_on_disk(offload);
    let Sections { experts, memory, .. } = &checks.unchecked.sections;
    let may_spill = may_spill(parallelism, experts, memory);
    for key in changed_keys(offload).filter(|key| ["folder", "timeout_seconds"].contains(key)) {
        checks.require(is_on_disk || may_spill && key == "folder", &[&format!("offload.{key}")], || {
            "only applies if something is on \"disk\", or may be with \"auto\"; set that, or remove this key".to_owned()
        });
    }
}
