//! Custom pipeline schedules from files.

mod error;

pub use error::ScheduleFileError;

use crate::config::Config;
use crate::error::TrainError;
use crate::stages::{StageChoice, activation_bounds, pipeline_costs};
use error::FILE_BYTES_MAX;
use std::io::Read;
use std::path::Path;
use trireme_base::open_regular;
use trireme_schedule::pipeline::{Costs, PassFault, Schedule, ScheduleError, draw_error, validate};

/// Columns of the diagram that an error shows. With the label of its rank, a row fits into 80 columns. So does the line that marks the
/// place of the error, unless that place is at the right edge.
const DIAGRAM_COLUMNS: usize = 64;

/// Reads the schedule file that the config names, if it names one. Fails if the file cannot be read or parsed.
pub(crate) fn read_schedule(config: &Config) -> Result<Option<Schedule>, TrainError> {
    let Some(path) = schedule_path(config) else { return Ok(None) };
    read(path).map(Some).map_err(|source| TrainError::ScheduleFile { path: path.to_owned(), source })
}

/// Validates a schedule from a file for stages with these costs. Fails if it belongs to another pipeline, or if it is invalid.
pub(crate) fn check_schedule(
    config: &Config,
    stages: &[StageChoice],
    schedule: &Schedule,
) -> Result<(), TrainError> {
    // Only the config of rank 0 has to name the file.
    let path = schedule_path(config).unwrap_or(Path::new("of rank 0"));
    check(config, stages, &pipeline_costs(stages)?, schedule)
        .map_err(|source| TrainError::ScheduleFile { path: path.to_owned(), source })
}

fn schedule_path(config: &Config) -> Option<&Path> {
    config.parallelism().pipeline_parallel_schedule_file.as_deref()
}

fn read(path: &Path) -> Result<Schedule, ScheduleFileError> {
    let mut text = String::new();
    let file = open_regular(path).map_err(ScheduleFileError::Read)?;
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
    let found = (schedule.num_ranks(), schedule.num_microbatches);
    let expected = (config.parallelism().pipeline_parallel_degree, config.num_microbatches());
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
        let mut picture = draw_error(schedule, costs, &error, DIAGRAM_COLUMNS).trim_end().to_owned();
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
    use std::fs::File;

    #[test]
    fn files_that_are_no_schedule_are_read_within_bounds() {
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
