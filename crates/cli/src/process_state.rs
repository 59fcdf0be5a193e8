//! States of worker processes: abnormal exits and suspension.

use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AbnormalExit {
    /// The process exited with this code, which is not 0.
    Exit(i32),
    Signal(i32),
}

/// The states of the worker processes that have ended abnormally or are suspended, by rank.
pub(crate) type ProcessStates = BTreeMap<usize, ProcessState>;

/// The state of a worker's process, as its launcher observes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    /// The process has ended abnormally.
    Exited(AbnormalExit),
    /// The process is suspended, by SIGSTOP or by a debugger, until a signal continues it.
    Suspended,
}

impl fmt::Display for AbnormalExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AbnormalExit::Exit(code) => write!(f, "exited with code {code}"),
            // Unless a user sends SIGKILL, only the OOM killer does.
            AbnormalExit::Signal(9) => {
                f.write_str("was killed by SIGKILL (sent by a user, or because memory ran out)")
            }
            AbnormalExit::Signal(signal) => write!(f, "was killed by {}", signal_name(*signal)),
        }
    }
}

/// Returns the name of a signal, such as `SIGTERM`.
pub(crate) fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}
