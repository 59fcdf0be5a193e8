//! What happened between the workers when something went wrong: one table, and what to try.

mod advice;
mod table;

pub(crate) use table::{described, lines, plain};

use crate::death::Fates;
use anyhow::Error;
use trireme_comm::{Diagnosis, FlightRecorder, Occasion, Source};

/// A failure between workers, with what is known of all of them.
#[derive(Debug, thiserror::Error)]
#[error("{failure}{}", indented(table))]
pub(crate) struct Hang {
    /// What ended this worker.
    #[source]
    pub(crate) failure: Error,
    table: Vec<String>,
}

/// The lines as they stand below an error.
pub(crate) fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n  {line}")).collect()
}

/// Adds to a worker's failure what the others have told it, if it is one between workers and this worker is the one to tell
/// it: the lowest rank that is heard of. To be called when the worker's groups are no more.
pub(crate) fn explain(failure: Error, recorder: &FlightRecorder) -> Error {
    let report = recorder.report();
    let diagnosis = Diagnosis::of(std::slice::from_ref(&report));
    let is_first = diagnosis.findings[..report.rank].iter().all(|finding| finding.source == Source::Nothing);
    if report.occasion != Occasion::Failed || !is_first {
        return failure;
    }
    Hang { failure, table: lines(&diagnosis, &Fates::new()) }.into()
}
