//! Checks of the degrees of parallelism, and of the split of a model into pipeline stages.

use super::checks::{Checks, changed_keys};
use super::choice::{Fp8, QuantizedGradients, Tier};
use super::layout::Parallelism;
use super::memory::degrees;
use super::sections::Sections;
use super::value::Interval;
use trireme_codec::CodecName;
use trireme_schedule::StateClass;
use trireme_schedule::pipeline::ScheduleKind;
use trireme_tensor::Precision;

const TENSOR_DEGREE: &str = "parallelism.tensor_parallel_degree";
const CONTEXT_DEGREE: &str = "parallelism.context_parallel_degree";
const HEADS_DEGREE: &str = "parallelism.context_parallel_heads_degree";
const EXPERT_DEGREE: &str = "parallelism.expert_parallel_degree";
const PIPELINE_DEGREE: &str = "parallelism.pipeline_parallel_degree";
const SCHEDULE: &str = "parallelism.pipeline_parallel_schedule";
const SCHEDULE_FILE: &str = "parallelism.pipeline_parallel_schedule_file";
const REBALANCE_INTERVAL: &str = "parallelism.pipeline_parallel_rebalance_interval";

/// Checks the degrees of parallelism. Returns the number of workers that see different data.
pub(super) fn check_degrees(checks: &mut Checks<'_>, world_size: usize) -> usize {
    let Parallelism { pipeline_parallel_degree, context_parallel_degree, tensor_parallel_degree, .. } =
        checks.unchecked.sections.parallelism;
    let degrees = [
        (PIPELINE_DEGREE, "pipeline degree", pipeline_parallel_degree),
        (CONTEXT_DEGREE, "context degree", context_parallel_degree),
        (TENSOR_DEGREE, "tensor degree", tensor_parallel_degree),
    ];
    let several: Vec<_> = degrees.into_iter().filter(|(_, _, degree)| *degree > 1).collect();
    let num_model_parallel = pipeline_parallel_degree * context_parallel_degree * tensor_parallel_degree;
    let keys: Vec<&str> = several.iter().map(|(key, ..)| *key).chain(["launch.workers"]).collect();
    checks.require(world_size.is_multiple_of(num_model_parallel), &keys, || {
        let names: Vec<String> =
            several.iter().map(|(_, name, degree)| format!("the {name} {degree}")).collect();
        let product = if several.len() > 1 { format!(" = {num_model_parallel}") } else { String::new() };
        let nearest = match world_size / num_model_parallel * num_model_parallel {
            0 => num_model_parallel.to_string(),
            below => format!("{below} or {}", below + num_model_parallel),
        };
        let workers = if world_size == 1 { "worker" } else { "workers" };
        format!(
            "{world_size} {workers} is not a multiple of {}{product}; use {nearest} workers, or other degrees",
            names.join(" times ")
        )
    });
    check_heads(checks);
    check_pipeline(checks);
    let data_parallel_degree = (world_size / num_model_parallel).max(1);
    check_expert_degree(checks, data_parallel_degree * context_parallel_degree);
    data_parallel_degree
}

/// Checks that the positions of a sequence can be split evenly over the context axis.
pub(super) fn check_positions(checks: &mut Checks<'_>) {
    let Sections { parallelism, training, .. } = &checks.unchecked.sections;
    let (degree, seq_len) = (parallelism.context_parallel_degree, training.seq_len);
    let tensor = if parallelism.sequence_parallel { parallelism.tensor_parallel_degree } else { 1 };
    // Each worker has two parts of a sequence. With sequence parallelism, the tensor axis divides a worker's positions further.
    let parts_each = if tensor.is_multiple_of(2) { tensor } else { 2 * tensor };
    let num_parts = degree * parts_each;
    checks.require(degree == 1 || seq_len.is_multiple_of(num_parts), &["training.seq_len", CONTEXT_DEGREE], || {
        let below = seq_len / num_parts * num_parts;
        let nearest = match below {
            0 => num_parts.to_string(),
            _ => format!("{below} or {}", below + num_parts),
        };
        format!(
            "{degree} workers have {parts_each} equal parts each of a sequence, but {seq_len} is not a multiple of {num_parts}; use \
             {nearest}, or other degrees"
        )
    });
}

fn check_heads(checks: &mut Checks<'_>) {
    let parallelism = &checks.unchecked.sections.parallelism;
    let (degree, heads) = (parallelism.context_parallel_degree, parallelism.context_parallel_heads_degree);
    checks.require(heads == 0 || degree.is_multiple_of(heads), &[HEADS_DEGREE, CONTEXT_DEGREE], || {
        format!("{heads} does not divide context_parallel_degree = {degree}; use a divisor of it, or 0")
    });
}

/// Checks that `expert_parallel_degree` divides `num_data`, the number of workers that see different samples or positions, and that no
/// other key excludes it.
fn check_expert_degree(checks: &mut Checks<'_>, num_data: usize) {
    let Sections { parallelism, comm, .. } = &checks.unchecked.sections;
    let degree = parallelism.expert_parallel_degree;
    checks.require(num_data.is_multiple_of(degree), &[EXPERT_DEGREE, "launch.workers"], || {
        let divides = |degree: &usize| num_data.is_multiple_of(*degree);
        let below = (1..degree).rev().find(divides);
        let nearest = below.into_iter().chain((degree + 1..=num_data).find(divides));
        let nearest: Vec<String> = nearest.map(|degree| degree.to_string()).collect();
        format!(
            "{degree} does not divide the {num_data} workers that see different samples or positions; nearest possible degree: {}",
            nearest.join(" or ")
        )
    });
    checks.require(
        degree == 1 || comm.compression == CodecName::None,
        &["comm.compression", EXPERT_DEGREE],
        || "compressors would round what workers with different experts hold together; remove this key, or set expert_parallel_degree = 1".to_owned(),
    );
    let uses_zero_plus_plus = parallelism.zero_quantized_weights
        || parallelism.zero_hpz
        || parallelism.zero_quantized_gradients != QuantizedGradients::None;
    let keys = [
        "parallelism.zero_quantized_weights",
        "parallelism.zero_hpz",
        "parallelism.zero_quantized_gradients",
        EXPERT_DEGREE,
    ];
    checks.require(degree == 1 || !uses_zero_plus_plus, &keys, || {
        "ZeRO++ gathers units from all workers of a replica, which have different experts; remove this key, or set \
         expert_parallel_degree = 1"
            .to_owned()
    });
}

/// Checks that the workers of the expert axis are shards of one replica, or full replicas.
pub(super) fn check_expert_shards(checks: &mut Checks<'_>, data_parallel_degree: usize) {
    let parallelism = &checks.unchecked.sections.parallelism;
    let degree = parallelism.expert_parallel_degree;
    let (_, shards) = degrees(parallelism, data_parallel_degree);
    let num_shards = if parallelism.state_layout().has_shards() {
        shards.max(1) * parallelism.context_parallel_degree
    } else {
        1
    };
    let fits = num_shards.is_multiple_of(degree) || degree.is_multiple_of(num_shards);
    checks.require(fits, &[EXPERT_DEGREE, "parallelism.data_parallel_shard_degree"], || {
        format!("{degree} neither divides the {num_shards} workers of a replica, nor is a multiple of them; use a degree that does, or another data_parallel_shard_degree")
    });
}

fn check_pipeline(checks: &mut Checks<'_>) {
    let parallelism = &checks.unchecked.sections.parallelism;
    let degree = parallelism.pipeline_parallel_degree;
    check_schedule(checks);
    check_split_points(checks);
    check_rebalance(checks);
    check_asynchronous(checks);
    let unused = [
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_file",
        "pipeline_parallel_stages_per_rank",
        "pipeline_parallel_in_flight_max",
        "pipeline_parallel_split_points",
        "pipeline_parallel_rebalance_interval",
    ];
    for key in changed_keys(parallelism).filter(|key| unused.contains(key)) {
        let keys = [&format!("parallelism.{key}"), PIPELINE_DEGREE];
        checks.only_applies(degree > 1, &keys, "pipeline_parallel_degree above 1");
    }
}

fn check_schedule(checks: &mut Checks<'_>) {
    let Sections { parallelism, .. } = &checks.unchecked.sections;
    let schedule = parallelism.pipeline_parallel_schedule;
    if parallelism.pipeline_parallel_schedule_file.is_some() {
        let says_versions = schedule == ScheduleKind::OneFOneB || !schedule.is_synchronous();
        checks.require(says_versions, &[SCHEDULE_FILE, SCHEDULE], || {
            "the file replaces the schedule; remove one of the two keys".to_owned()
        });
        const STAGES: &str = "parallelism.pipeline_parallel_stages_per_rank";
        checks.require(parallelism.pipeline_parallel_stages_per_rank == 0, &[STAGES, SCHEDULE_FILE], || {
            "the file says how many stages each worker has; remove this key".to_owned()
        });
        return;
    }
    let (min, max) = schedule.stages_per_rank().into_inner();
    let stages = parallelism.pipeline_parallel_stages_per_rank;
    let keys = ["parallelism.pipeline_parallel_stages_per_rank", SCHEDULE];
    checks.require(stages == 0 || stages >= min, &keys, || {
        format!("the schedule needs at least {min} stages per worker; set that, or use \"1f1b\"")
    });
    checks.require(stages == 0 || stages <= max, &keys, || match max {
        1 => "the schedule has one stage per worker; remove this key, or use \"interleaved-1f1b\" or \"breadth-first\"".to_owned(),
        _ => format!("the schedule has {max} stages per worker; set that, or use \"interleaved-1f1b\""),
    });
}

fn check_split_points(checks: &mut Checks<'_>) {
    let Sections { parallelism, .. } = &checks.unchecked.sections;
    let (points, num_stages) = (&parallelism.pipeline_parallel_split_points, parallelism.num_stages());
    const KEY: &str = "parallelism.pipeline_parallel_split_points";
    let keys = [KEY, PIPELINE_DEGREE, "parallelism.pipeline_parallel_stages_per_rank", SCHEDULE];
    // A schedule file determines the number of stages.
    let is_open = points.is_empty() || parallelism.pipeline_parallel_schedule_file.is_some();
    checks.require(is_open || num_stages == 1 || points.len() == num_stages - 1, &keys, || {
        let (needed, found) = (num_stages - 1, points.len());
        format!("{num_stages} stages need {needed} split points, but there are {found}; give the first unit of each \
             stage after the first")
    });
    let follow = points.first() != Some(&0) && points.is_sorted_by(|left, right| left < right);
    checks.require(follow, &[KEY], || {
        "expected increasing numbers from 1 on, such as [3, 5], so that every stage has a unit".to_owned()
    });
}

fn check_rebalance(checks: &mut Checks<'_>) {
    let Sections { parallelism, memory, comm, optimizer, .. } = &checks.unchecked.sections;
    let is_on = parallelism.pipeline_parallel_rebalance_interval > 0;
    for (key, budget) in [("device_budget", memory.device_budget), ("host_budget", memory.host_budget)] {
        checks.require(!is_on || budget.0.is_none(), &[REBALANCE_INTERVAL, &format!("memory.{key}")], || {
            format!(
                "units might move to a worker that has no room for them; remove this key, or {key} of [memory]"
            )
        });
    }
    let exchanges_momentum = optimizer.name.exchanges_momentum();
    checks.require(
        !is_on || comm.compression == CodecName::None,
        &[REBALANCE_INTERVAL, "comm.compression"],
        || "what compressors keep of a unit does not move with it; remove one of the two keys".to_owned(),
    );
    checks.require(!is_on || !exchanges_momentum, &[REBALANCE_INTERVAL, "optimizer.name"], || {
        "what this optimizer's compressors keep of a unit does not move with it; remove this key, or use \"adamw\"".to_owned()
    });
    let is_sharded = parallelism.state_layout().is_sharded(StateClass::Parameters);
    checks.require(!is_on || !is_sharded, &[REBALANCE_INTERVAL, "parallelism.zero_stage"], || {
        "units whose parameters are sharded do not move; remove this key, or set zero_stage = 2".to_owned()
    });
    const KEY: &str = "pipeline_parallel_rebalance_threshold";
    if changed_keys(parallelism).any(|key| key == KEY) {
        checks.require(is_on, &[&format!("parallelism.{KEY}"), REBALANCE_INTERVAL], || {
            "only applies with pipeline_parallel_rebalance_interval; set that, such as to 100, or remove this key".to_owned()
        });
    }
}

/// Checks the keys that exclude a pipeline that does not drain between steps.
fn check_asynchronous(checks: &mut Checks<'_>) {
    let Sections { parallelism, training, checkpoint, metrics, offload, .. } = &checks.unchecked.sections;
    let is_on = parallelism.is_asynchronous();
    const KEY: &str = "parallelism.pipeline_parallel_drain_interval";
    if changed_keys(parallelism).any(|key| KEY.ends_with(key)) {
        checks.require(is_on, &[KEY, SCHEDULE], || {
            "only applies with the schedules \"pipedream\" and \"pipedream-2bw\"; use one of these, or remove this key".to_owned()
        });
    }
    if !is_on {
        return;
    }
    let drain = parallelism.pipeline_parallel_drain_interval;
    let steps_between_checkpoints = match checkpoint.interval {
        Interval::Steps(steps) if checkpoint.enable => steps,
        _ => 0,
    };
    // The steps of epochs are rounded up to a multiple.
    let configured_steps = if training.epochs > 0.0 { 0 } else { training.steps };
    for (key, steps) in [
        ("training.steps", configured_steps),
        ("training.validation_interval", training.validation_interval),
        ("metrics.trace_interval", metrics.trace_interval),
        ("checkpoint.interval", steps_between_checkpoints),
    ] {
        checks.require(steps.is_multiple_of(drain), &[key, KEY], || {
            format!("the pipeline drains only every {drain} steps, and {steps} is not a multiple of that; change it, \
                 or pipeline_parallel_drain_interval")
        });
    }
    checks.require(parallelism.pipeline_parallel_rebalance_interval == 0, &[REBALANCE_INTERVAL, SCHEDULE], || {
        "moving units would change the staleness of their gradients; remove this key, or use a schedule that drains".to_owned()
    });
    let are_grads_whole = !parallelism.state_layout().is_sharded(StateClass::Gradients);
    let key =
        if parallelism.shard_gradients { "parallelism.shard_gradients" } else { "parallelism.zero_stage" };
    checks.require(are_grads_whole, &[key, SCHEDULE], || {
        "gradients would be sharded for each version of the weights; set zero_stage = 0 or 1 and shard_gradients = false, or use a schedule that drains".to_owned()
    });
    checks.require(training.dtype != Precision::F16, &["training.dtype", SCHEDULE], || {
        "a step that overflows cannot be skipped once later steps have begun; use \"bf16\" or \"f32\""
            .to_owned()
    });
    checks.require(training.fp8 == Fp8::Off, &["training.fp8", SCHEDULE], || {
        "all workers agree on fp8 scales after each step, but these workers do not synchronize there; remove this \
         key, or use a schedule that drains".to_owned()
    });
    for (class, tier) in offload.tiers() {
        checks.require(tier == Tier::Device, &[&format!("offload.{}", class.name()), SCHEDULE], || {
            "state stays in memory for all steps between two drains; remove this key, or use a schedule that drains".to_owned()
        });
    }
}

impl Parallelism {
    /// Returns whether there is a pipeline that does not drain between steps.
    pub fn is_asynchronous(&self) -> bool {
        self.pipeline_parallel_degree > 1 && !self.pipeline_parallel_schedule.is_synchronous()
    }

    /// Returns the number of stages of each worker of the pipeline; 1 without a pipeline.
    pub fn stages_per_rank(&self) -> usize {
        let usual = match self.pipeline_parallel_schedule {
            ScheduleKind::BreadthFirst => 2,
            schedule => *schedule.stages_per_rank().start(),
        };
        match self.pipeline_parallel_stages_per_rank {
            _ if self.pipeline_parallel_degree == 1 => 1,
            0 => usual,
            given => given,
        }
    }

    /// Returns the number of stages of the model; 1 without a pipeline.
    pub fn num_stages(&self) -> usize {
        self.pipeline_parallel_degree * self.stages_per_rank()
    }
}
