//! Errors of schedule files.

use std::io;
use trireme_schedule::ParseError;
use trireme_schedule::pipeline::WeightVersions;

/// Maximum size of a schedule file in bytes: enough for as many passes as a schedule may have.
pub(super) const FILE_BYTES_MAX: u64 = 64 << 20;

/// The reason why a schedule from a file cannot be run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ScheduleFileError {
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    #[error("it has more than {FILE_BYTES_MAX} bytes; is it the right file?")]
    TooLarge,
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error(
        "it is for workers {}, microbatches {}, but the pipeline of this run has workers {}, microbatches {}; change the file, or [parallelism] \
         pipeline_parallel_degree and [training] global_batch_size",
        found.0, found.1, expected.0, expected.1
    )]
    SizesDiffer {
        /// Number of ranks of the pipeline and of microbatches per step, in the file.
        found: (usize, usize),
        expected: (usize, usize),
    },
    #[error("worker {rank} has no stage; give it one, or lower [parallelism] pipeline_parallel_degree")]
    Idle { rank: usize },
    #[error(
        "it has {}, but the config asks for {}; change the file, or [parallelism] pipeline_parallel_schedule (\"pipedream\" for stashed weights, \
         \"pipedream-2bw\" for double-buffered ones, \"1f1b\" for one step and drained ones) and pipeline_parallel_drain_interval",
        steps(*found), steps(*expected)
    )]
    StepsDiffer {
        /// Number of steps between drains, and the weight versions, in the file.
        found: (usize, WeightVersions),
        expected: (usize, WeightVersions),
    },
    /// The schedule is invalid. `picture` describes the fault, and marks it in a grid of ranks and time.
    #[error("{picture}")]
    Invalid { picture: String },
}

/// Formats steps and weights, such as `a drain after 2 steps and stashed weights`.
fn steps((num_steps, weights): (usize, WeightVersions)) -> String {
    let steps = if num_steps == 1 { "step" } else { "steps" };
    format!("a drain after {num_steps} {steps} and {} weights", weights.name())
}
