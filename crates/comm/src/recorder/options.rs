//! What the flight recorder does when something goes wrong.

use crate::listener::LineListener;
use std::path::PathBuf;

/// What the flight recorder does when something goes wrong.
#[derive(Debug, Clone, Default)]
pub struct RecorderOptions {
    /// Where this rank writes its report, as `rank-N.json`; nowhere by default. A file that cannot be written is left
    /// out, and so is one that takes longer than 1 s when the rank joins or ends: it must not be what ends a run.
    pub folder: Option<PathBuf>,
    /// Is told of operations that take long: once each, at half of the timeout or after 30 s.
    pub on_stall: Option<LineListener>,
    /// Whether dropping a failed group waits until other ranks have told where they are, 1.5 s at most: if no launcher reads files.
    pub gathers: bool,
}
