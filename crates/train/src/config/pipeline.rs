//! Checks of how a model is divided into stages.

use super::choice::{ActivationCheckpointMode, Tier};
use super::sections::Sections;
use super::validate::{Checks, changed_keys};
use trireme_comm::CodecName;

const DEGREE: &str = "parallelism.pipeline_parallel_degree";

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
    let keys = ["parallelism.pipeline_parallel_stages_per_rank", "parallelism.pipeline_parallel_schedule"];
    checks.require(stages == 0 || stages >= min, &keys, || {
        format!("the schedule needs {min} stages a worker; set that, or take \"1f1b\"")
    });
    checks.require(stages == 0 || stages <= max, &keys, || match max {
        1 => "the schedule has one stage a worker; remove this key, or take \"interleaved-1f1b\" or \"breadth-first\"".to_owned(),
        _ => format!("the schedule has {max} stages a worker; set that, or take \"interleaved-1f1b\""),
    });
    let unused = [
        "pipeline_parallel_schedule",
        "pipeline_parallel_stages_per_rank",
        "pipeline_parallel_in_flight_max",
    ];
    for key in changed_keys(parallelism).filter(|key| unused.contains(key)) {
        checks.require(degree > 1, &[&format!("parallelism.{key}"), DEGREE], || {
            "counts only with pipeline_parallel_degree above 1; set that, or remove this key".to_owned()
        });
    }
    (world_size / degree).max(1)
}
