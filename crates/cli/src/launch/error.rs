use crate::hang::indented;
use crate::process_state::{AbnormalExit, signal_name};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use std::io;
use std::path::PathBuf;
use trireme_base::Rank;
use trireme_comm::CommError;

/// An error of starting or supervising workers, or an environment that describes no possible worker.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    /// Some of the variables that describe a worker are set and some are not.
    #[error(
        "{present} is set but {missing} is not; set both, or unset {present} to let this command start the workers"
    )]
    MissingVariable { present: &'static str, missing: &'static str },
    /// A variable has an invalid value.
    #[error("the environment variable {variable} is '{value}'; expected {expected}")]
    InvalidVariable { variable: &'static str, value: String, expected: String },
    /// Two variables cannot both be right.
    #[error(
        "the environment variables {first} = {first_value} and {second} = {second_value} contradict each other; \
         correct one, or unset the ones that do not apply"
    )]
    ContradictoryVariables {
        first: &'static str,
        first_value: usize,
        second: &'static str,
        second_value: usize,
    },
    #[error("cannot write the log of rank {rank} to {}", path.display())]
    Log { rank: Rank, path: PathBuf, source: io::Error },
    /// No TCP port is available for the workers to meet.
    #[error(
        "cannot use TCP port {port} of 127.0.0.1; set [launch] master_port to another one, or to 0 for any free port"
    )]
    Port {
        /// The port; 0 means any.
        port: u16,
        source: io::Error,
    },
    #[error("cannot generate a secret for the workers")]
    Secret {
        #[from]
        source: CommError,
    },
    #[error("cannot start rank {rank} as {program}")]
    Start { rank: Rank, program: String, source: io::Error },
    /// The operating system refused a call that the supervision of processes needs.
    #[error("cannot monitor the workers")]
    Supervise {
        #[from]
        source: io::Error,
    },
    /// A worker died, and the others have been ended. Of several deaths, this is the first that was not itself the loss of a peer.
    #[error("{}{}", describe_death(*rank, death, survivors, log, last_lines), indented(table))]
    WorkerDied {
        rank: Rank,
        death: AbnormalExit,
        /// Workers that SIGKILL has not ended.
        survivors: Vec<Rank>,
        log: PathBuf,
        last_lines: Vec<String>,
        /// Table of the state of all workers, if this is a failure between them.
        table: Vec<String>,
    },
    /// A signal, such as SIGINT from Ctrl-C, ended the launcher and so its workers.
    #[error("interrupted by {}", signal_name(*signal))]
    Interrupted { signal: i32 },
    /// A signal asked the run to end. The run has stopped gracefully and reported it.
    #[error("stopped by {}", signal_name(*signal))]
    Stopped { signal: i32 },
    /// The launcher has exited, so this worker ends.
    #[error("the launcher of this worker has exited")]
    LauncherGone,
}

/// Returns the signal for which a process of a run has exited with `code`, if there is one.
pub(super) fn stopped_by(code: i32) -> Option<i32> {
    let signal = code.checked_sub(128)?;
    [SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM].contains(&signal).then_some(signal)
}

impl LaunchError {
    /// Returns the exit code of the process: 128 plus the signal if a signal ended it, as in shells.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            LaunchError::Interrupted { signal } | LaunchError::Stopped { signal } => {
                128 + (*signal & 0x7f) as u8
            }
            _ => 1,
        }
    }
}

fn describe_death(
    rank: Rank,
    death: &AbnormalExit,
    left: &[Rank],
    log: &std::path::Path,
    last_lines: &[String],
) -> String {
    let mut text = format!("rank {rank} {death}; the other workers have been stopped");
    if !left.is_empty() {
        let left = left.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ");
        text.push_str(&format!(
            ", except rank {left}, which does not respond to SIGKILL: check for a disk that hangs"
        ));
    }
    text.push_str(&format!(". Its log is {}", log.display()));
    if !last_lines.is_empty() {
        text += &format!(", which ends with:\n    {}", last_lines.join("\n    "));
    }
    text
}
