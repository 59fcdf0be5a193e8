//! Diagnosis of failures between workers: one table of all ranks, and what to try.

mod advice;
mod table;

pub(crate) use table::{describe_operation, escape_controls, lines};

use crate::process_state::ProcessStates;
use anyhow::Error;
use trireme_comm::{Diagnosis, FlightRecorder, Occasion, Source};

/// A failure between workers, with a table of all of them.
#[derive(Debug, thiserror::Error)]
#[error("{failure}{}", indented(table))]
pub(crate) struct DiagnosedFailure {
    /// The error that ended this worker.
    #[source]
    pub(crate) failure: Error,
    table: Vec<String>,
}

/// Indents lines for display below an error.
pub(crate) fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

/// Adds a table of all workers to a failure between workers, if nothing is known about lower ranks, so that only the lowest known rank
/// prints it. Call it after the worker's groups have been dropped.
pub(crate) fn explain(failure: Error, recorder: &FlightRecorder) -> Error {
    let report = recorder.report();
    let diagnosis = Diagnosis::of(std::slice::from_ref(&report));
    let is_first = diagnosis.findings[..report.rank].iter().all(|finding| finding.source == Source::Nothing);
    if report.occasion != Occasion::Failed || !is_first {
        return failure;
    }
    DiagnosedFailure { failure, table: lines(&diagnosis, &ProcessStates::new()) }.into()
}
