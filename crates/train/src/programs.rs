//! The schedule of a pipeline, and the programs of its ranks.

use crate::choices::StepChoices;
use crate::config::Config;
use crate::error::TrainError;
use crate::schedule_file::check_schedule;
use crate::stages::{StageChoice, activation_bounds, pipeline_costs};
use std::ops::Range;
use trireme_base::Bytes;
use trireme_parallel::ParallelError;
use trireme_schedule::lowering::{lay_out, recompute};
use trireme_schedule::pipeline::{self, GenerateError, Kind, Schedule, Sizes};
use trireme_schedule::{Chain, Program, single, validate_pipeline};

/// The schedule of a config's pipeline: the one that is `given` in a file, or one made by its name.
///
/// # Errors
/// If its sizes do not fit the schedule, it holds more than `pipeline_parallel_in_flight_max` allows, or a given one must not
/// run.
pub fn pipeline_schedule(
    config: &Config,
    stages: &[StageChoice],
    given: Option<&Schedule>,
) -> Result<Schedule, TrainError> {
    if let Some(given) = given {
        check_schedule(config, stages, given)?;
        return Ok(given.clone());
    }
    let parallelism = config.parallelism();
    let (kind, num_ranks) = (parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree);
    let sizes = Sizes {
        num_ranks,
        num_microbatches: config.num_microbatches(),
        stages_per_rank: parallelism.stages_per_rank(),
        num_steps: config.steps_per_program(),
    };
    let usual = (kind == Kind::Automatic).then_some(num_ranks);
    let bounds = activation_bounds(config, stages, parallelism.stages_per_rank(), usual);
    let made = pipeline::generate(kind, sizes, &pipeline_costs(stages)?, bounds.as_deref());
    made.map_err(|error| match error {
        GenerateError::Memory { kind, rank, needed, bound, remedy } => {
            TrainError::InFlight { kind, rank, needed: Bytes(needed), bound: Bytes(bound), remedy }
        }
        error => TrainError::Pipeline(error),
    })
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
    if config.parallelism().is_asynchronous() && !chain.ties.is_empty() {
        return Err(TrainError::TiedVersions);
    }
    let StepChoices { stages, schedule: given, .. } = choices;
    if stages.is_empty() {
        return Ok(vec![single::program(chain, config.num_microbatches())]);
    }
    let schedule = pipeline_schedule(config, stages, given.as_ref())?;
    let units: Vec<Range<usize>> = stages.iter().map(|stage| stage.units.clone()).collect();
    Ok(pipeline::programs(&schedule, &pipeline_costs(stages)?, &units, chain))
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
