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
    /// Maximum time for which a failed group waits until its peers have reported their places or ended; dropping the group blocks for as
    /// long. It is zero by default, for runs whose launcher reads the files. A process that explains a failure itself needs the places.
    pub peer_reports_timeout: Duration,
}
