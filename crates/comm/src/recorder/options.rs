//! Options of the flight recorder.

use crate::listener::LineListener;
use std::path::PathBuf;
use std::time::Duration;

/// Options of the flight recorder: its reports of stalls and failures.
#[derive(Debug, Clone, Default)]
pub struct RecorderOptions {
    /// Folder in which this rank writes its report, as `rank-N.json`. No report is written by default. A failed write is ignored, and a
    /// write that takes longer than 1 s when the rank joins or ends is not waited for: reports must not end a run.
    pub folder: Option<PathBuf>,
    /// Receives a line for each operation or message that takes long: once, after half of the timeout or 30 s, whichever is less.
    pub on_stall: Option<LineListener>,
    /// How long a failed group at most waits, before it ends, for its peers to report their places. Zero by default: a launcher reads the
    /// files. A process that reports a failure itself needs to wait.
    pub peer_reports_timeout: Duration,
}
