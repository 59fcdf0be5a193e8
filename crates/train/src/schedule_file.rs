//! A pipeline's schedule that a user gives in a file.

use crate::config::Config;
use crate::error::TrainError;
use crate::stages::{StageChoice, activation_bounds, pipeline_costs};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use trireme_schedule::ParseError;
use trireme_schedule::pipeline::{
    Costs, PassFault, Schedule, ScheduleError, WeightVersions, draw_error, validate,
};

/// The largest file that is read: enough for as many passes as a schedule may have.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Columns of the picture that an error shows: with their rank's label they fit into a terminal of 80, as does a mark but at the
/// right edge.
const PICTURE_COLUMNS: usize = 64;

/// What a schedule is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduleSizes {
    /// Ranks of the pipeline.
    pub num_ranks: usize,
    /// Microbatches of a step.
    pub num_microbatches: usize,
}

impl fmt::Display for ScheduleSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScheduleSizes { num_ranks, num_microbatches } = self;
        write!(f, "workers {num_ranks}, microbatches {num_microbatches}")
    }
}

/// Why the schedule of a file cannot be run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ScheduleFileError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    /// The file is too large to be a schedule.
    #[error("it has more than {FILE_BYTES_MAX} bytes; is it the right file?")]
    TooLarge,
    /// The text is no schedule.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The schedule is made for another pipeline.
    #[error(
        "it is for {found}, but the pipeline of this run has {expected}; change the file, or [parallelism] \
         pipeline_parallel_degree and [training] global_batch_size"
    )]
    SizesDiffer { found: ScheduleSizes, expected: ScheduleSizes },
    /// A worker has nothing to do.
    #[error("worker {rank} has no stage; give it one, or lower [parallelism] pipeline_parallel_degree")]
    Idle { rank: usize },
    /// Other steps, or other versions of weights.
    #[error(
        "it has {}, but the config asks for {}; change the file, or [parallelism] pipeline_parallel_schedule (\"pipedream\" for stashed weights, \
         \"pipedream-2bw\" for double-buffered ones, \"1f1b\" for one step and drained ones) and pipeline_parallel_drain_interval",
        steps(*found), steps(*expected)
    )]
    StepsDiffer {
        /// Steps between drains, and the versions of weights, of the file.
        found: (usize, WeightVersions),
        expected: (usize, WeightVersions),
    },
    /// The schedule must not run: what is wrong, and a grid of ranks and time in which the place is marked.
    #[error("{picture}")]
    Invalid { picture: String },
}

/// `a drain after 2 steps and stashed weights`.
fn steps((num_steps, weights): (usize, WeightVersions)) -> String {
    let steps = if num_steps == 1 { "step" } else { "steps" };
    format!("a drain after {num_steps} {steps} and {} weights", weights.name())
}

/// The schedule that a config gives in a file, if it does.
///
/// # Errors
/// If the file cannot be read, or has something else in it.
pub(crate) fn read_schedule(config: &Config) -> Result<Option<Schedule>, TrainError> {
    let Some(path) = schedule_path(config) else { return Ok(None) };
    read(path).map(Some).map_err(|source| TrainError::ScheduleFile { path: path.to_owned(), source })
}

/// Proves a schedule from the config's file for stages with these costs.
///
/// # Errors
/// If it is of another pipeline, or must not run.
pub(crate) fn check_schedule(
    config: &Config,
    stages: &[StageChoice],
    schedule: &Schedule,
) -> Result<(), TrainError> {
    // Its name may be in the config of rank 0 alone.
    let path = schedule_path(config).unwrap_or(Path::new("of rank 0"));
    check(config, stages, &pipeline_costs(stages)?, schedule)
        .map_err(|source| TrainError::ScheduleFile { path: path.to_owned(), source })
}

fn schedule_path(config: &Config) -> Option<&Path> {
    config.parallelism().pipeline_parallel_schedule_file.as_deref()
}

fn read(path: &Path) -> Result<Schedule, ScheduleFileError> {
    let mut text = String::new();
    let file = File::open(path).map_err(ScheduleFileError::Read)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(ScheduleFileError::Read)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(ScheduleFileError::TooLarge);
    }
    Ok(text.parse()?)
}

fn check(
    config: &Config,
    stages: &[StageChoice],
    costs: &Costs,
    schedule: &Schedule,
) -> Result<(), ScheduleFileError> {
    let kind = config.parallelism().pipeline_parallel_schedule;
    let (found, expected) =
        ((schedule.num_steps, schedule.weights), (config.steps_per_program(), kind.weights()));
    if found != expected {
        return Err(ScheduleFileError::StepsDiffer { found, expected });
    }
    let (found, expected) = (
        ScheduleSizes { num_ranks: schedule.num_ranks(), num_microbatches: schedule.num_microbatches },
        ScheduleSizes {
            num_ranks: config.parallelism().pipeline_parallel_degree,
            num_microbatches: config.num_microbatches(),
        },
    );
    if found != expected {
        return Err(ScheduleFileError::SizesDiffer { found, expected });
    }
    let num_held = |rank| schedule.stages_of(rank).count();
    if let Some(rank) = (0..schedule.num_ranks()).find(|&rank| num_held(rank) == 0) {
        return Err(ScheduleFileError::Idle { rank });
    }
    let stages_per_rank = (0..schedule.num_ranks()).map(num_held).max().unwrap_or(0);
    let bounds = activation_bounds(config, stages, stages_per_rank, None);
    validate(schedule, costs, bounds.as_deref()).map_err(|error| {
        let mut picture = draw_error(schedule, costs, &error, PICTURE_COLUMNS).trim_end().to_owned();
        if matches!(error, ScheduleError::Pass { fault: PassFault::TooManyActivations { .. }, .. }) {
            picture +=
                "\nactivations are measured in bytes; [parallelism] pipeline_parallel_in_flight_max sets the bound";
        }
        ScheduleFileError::Invalid { picture }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_schedule_is_read_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        let file = File::create(&path).unwrap();
        file.set_len(FILE_BYTES_MAX + 1).unwrap();
        assert!(matches!(read(&path), Err(ScheduleFileError::TooLarge)));
        file.set_len(FILE_BYTES_MAX).unwrap();
        let error = read(&path).unwrap_err();
        assert!(matches!(error, ScheduleFileError::Parse(_)) && error.to_string().len() < 400);
        std::fs::write(&path, [0xff]).unwrap();
        assert!(matches!(read(&path), Err(ScheduleFileError::Read(_))));
    }
}
