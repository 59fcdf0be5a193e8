//! Checks of how a model is divided into stages.

use super::choice::{ActivationCheckpointMode, PipelineSchedule, Tier};
use super::sections::{Parallelism, Sections};
use super::validate::{Checks, changed_keys};
use trireme_comm::CodecName;

const DEGREE: &str = "parallelism.pipeline_parallel_degree";
const SCHEDULE: &str = "parallelism.pipeline_parallel_schedule";
const INTERVAL: &str = "parallelism.pipeline_parallel_rebalance_interval";

/// The workers that see different data.
pub(super) fn check_pipeline(checks: &mut Checks<'_>, world_size: usize) -> usize {
    let Sections { parallelism, comm, .. } = &checks.loose.sections;
    let degree = parallelism.pipeline_parallel_degree;
    checks.require(world_size.is_multiple_of(degree), &[DEGREE, "launch.workers"], || {
        format!("{world_size} workers are no multiple of the {degree} of a pipeline")
    });
    checks.require(
        degree == 1 || comm.compression == CodecName::None,
        &["comm.compression", DEGREE],
        || "what compressors keep would differ from stage to stage; remove this key, or set pipeline_parallel_degree = 1".to_owned(),
    );
    checks.require(
        degree == 1 || parallelism.zero_stage < 3,
        &["parallelism.zero_stage", DEGREE],
        || {
            "parameters would be gathered anew for every microbatch of a stage; set zero_stage = 2, which shares out all else".to_owned()
        },
    );
    let Sections { activation_checkpoint, offload, .. } = &checks.loose.sections;
    let is_open = activation_checkpoint.mode == ActivationCheckpointMode::Auto;
    checks.require(degree == 1 || !is_open, &["activation_checkpoint.mode", DEGREE], || {
        "\"auto\" chooses for one microbatch at a time, and a pipeline has several in flight; take \"selective\", \"block\" or \"every-k\"".to_owned()
    });
    let tiers = [
        ("optimizer", offload.optimizer),
        ("parameters", offload.parameters),
        ("gradients", offload.gradients),
        ("activations", offload.activations),
    ];
    for (key, tier) in tiers {
        checks.require(degree == 1 || tier != Tier::Auto, &[&format!("offload.{key}"), DEGREE], || {
            "\"auto\" chooses for one worker, and those of a pipeline differ; say where it lives".to_owned()
        });
    }
    let schedule = parallelism.pipeline_parallel_schedule;
    let (min, max) = schedule.kind().stages_per_rank();
    let stages = parallelism.pipeline_parallel_stages_per_rank;
    let keys = ["parallelism.pipeline_parallel_stages_per_rank", SCHEDULE];
    checks.require(stages == 0 || stages >= min, &keys, || {
        format!("the schedule needs {min} stages a worker; set that, or take \"1f1b\"")
    });
    checks.require(stages == 0 || stages <= max, &keys, || match max {
        1 => "the schedule has one stage a worker; remove this key, or take \"interleaved-1f1b\" or \"breadth-first\"".to_owned(),
        _ => format!("the schedule has {max} stages a worker; set that, or take \"interleaved-1f1b\""),
    });
    check_split_points(checks);
    check_rebalance(checks);
    let unused = [
        "pipeline_parallel_schedule",
        "pipeline_parallel_stages_per_rank",
        "pipeline_parallel_in_flight_max",
        "pipeline_parallel_split_points",
        "pipeline_parallel_rebalance_interval",
    ];
    for key in changed_keys(parallelism).filter(|key| unused.contains(key)) {
        checks.require(degree > 1, &[&format!("parallelism.{key}"), DEGREE], || {
            "counts only with pipeline_parallel_degree above 1; set that, or remove this key".to_owned()
        });
    }
    (world_size / degree).max(1)
}

fn check_split_points(checks: &mut Checks<'_>) {
    let Sections { parallelism, .. } = &checks.loose.sections;
    let (points, num_stages) = (&parallelism.pipeline_parallel_split_points, parallelism.num_stages());
    const KEY: &str = "parallelism.pipeline_parallel_split_points";
    let keys = [KEY, DEGREE, "parallelism.pipeline_parallel_stages_per_rank", SCHEDULE];
    checks.require(points.is_empty() || num_stages == 1 || points.len() == num_stages - 1, &keys, || {
        let (needed, found) = (num_stages - 1, points.len());
        format!("{num_stages} stages are cut at {needed} units, and here are {found}; give where each stage after the first begins")
    });
    let follow = points.first() != Some(&0) && points.is_sorted_by(|left, right| left < right);
    checks.require(follow, &[KEY], || {
        "every stage has a unit: give increasing numbers from 1 on, such as [3, 5]".to_owned()
    });
}

fn check_rebalance(checks: &mut Checks<'_>) {
    let Sections { parallelism, memory, .. } = &checks.loose.sections;
    let is_on = parallelism.pipeline_parallel_rebalance_interval > 0;
    for (key, budget) in [("device_budget", memory.device_budget), ("host_budget", memory.host_budget)] {
        checks.require(!is_on || budget.0.is_none(), &[INTERVAL, &format!("memory.{key}")], || {
            format!(
                "units may come to a worker that has no room for them; remove this key, or {key} of [memory]"
            )
        });
    }
    const KEY: &str = "pipeline_parallel_rebalance_threshold";
    if changed_keys(parallelism).any(|key| key == KEY) {
        checks.require(is_on, &[&format!("parallelism.{KEY}"), INTERVAL], || {
            "counts only with pipeline_parallel_rebalance_interval; set that, such as to 100, or remove this key".to_owned()
        });
    }
}

impl Parallelism {
    /// Stages of a worker of the pipeline.
    pub(super) fn stages_per_rank(&self) -> usize {
        let usual = match self.pipeline_parallel_schedule {
            PipelineSchedule::BreadthFirst => 2,
            schedule => schedule.kind().stages_per_rank().0,
        };
        match self.pipeline_parallel_stages_per_rank {
            _ if self.pipeline_parallel_degree == 1 => 1,
            0 => usual,
            given => given,
        }
    }

    /// Stages of the model; 1 without a pipeline.
    pub(super) fn num_stages(&self) -> usize {
        self.pipeline_parallel_degree * self.stages_per_rank()
    }
}
