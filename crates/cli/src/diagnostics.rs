//! Errors, warnings and notes on standard error and in the rank's log.

use crate::clock;
use crate::timeout::run_with_timeout;
use serde::Serialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use trireme_base::{Rank, printable};
use trireme_comm::host_name;
use trireme_train::config::LogFormat;

/// Maximum time to write a line to a log, whose file system may hang.
pub(crate) const LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of diagnostics that are kept before the log is known.
const EARLY_MAX: usize = 100;

static OUTPUT: RwLock<DiagnosticOutput> =
    RwLock::new(DiagnosticOutput { rank: None, is_shared: false, format: LogFormat::Text, log: None });

/// Diagnostics from before the log was known; `None` afterwards.
static EARLY: Mutex<Option<Vec<String>>> = Mutex::new(Some(Vec::new()));

/// Destination and format of diagnostics and of log lines.
#[derive(Clone)]
pub(crate) struct DiagnosticOutput {
    rank: Option<Rank>,
    /// Whether several ranks share standard error.
    is_shared: bool,
    pub(crate) format: LogFormat,
    log: Option<Arc<File>>,
}

impl DiagnosticOutput {
    pub(crate) fn current() -> Self {
        OUTPUT.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(change: impl FnOnce(&mut Self)) {
        change(&mut OUTPUT.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Formats a text: as it is, or as a JSON object with the time.
    pub(crate) fn formatted<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.format {
            LogFormat::Json => self.object("message", text.trim()).into(),
            LogFormat::Text => printable(text),
        }
    }

    /// Returns a JSON object with time, host, rank and one more member.
    pub(crate) fn object(&self, name: &str, value: impl Serialize) -> String {
        let mut object = json!({ "time": clock::now(), "host": host_name() });
        if let Some(rank) = self.rank {
            object["rank"] = json!(rank.0);
        }
        object[name] = json!(value);
        object.to_string()
    }

    /// Adds the time to each line of a formatted text. JSON objects have the time already.
    pub(crate) fn stamped(&self, formatted: &str) -> String {
        if self.format == LogFormat::Json {
            return formatted.to_owned();
        }
        let now = clock::now();
        let lines = formatted.lines().filter(|line| !line.is_empty());
        lines.map(|line| format!("{now} {line}")).collect::<Vec<_>>().join("\n")
    }

    /// Writes a formatted text to this rank's log, with times.
    pub(crate) fn log(&self, formatted: &str) {
        write(self.log.as_deref(), &self.stamped(formatted));
    }

    /// Inserts rank and host after `error:`, `warning:` or `note:` if ranks share standard error.
    fn with_origin<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match (self.rank.filter(|_| self.is_shared), text.split_once(": ")) {
            (Some(rank), Some((kind, rest))) if ["error", "warning", "note"].contains(&kind) => {
                Cow::Owned(format!("{kind}: rank {rank} on {}: {rest}", host_name()))
            }
            _ => Cow::Borrowed(text),
        }
    }
}

/// Attributes later diagnostics to `rank`. Where ranks share standard error, the rank and its host follow `error:`, `warning:` or `note:`.
pub(crate) fn set_rank(rank: Rank, is_shared: bool) {
    DiagnosticOutput::change(|output| (output.rank, output.is_shared) = (Some(rank), is_shared));
}

pub(crate) fn set_format(format: LogFormat) {
    DiagnosticOutput::change(|output| output.format = format);
}

/// Attributes later diagnostics and log lines to `rank`, and writes all diagnostics to `log`. `log` is `None` if the output of the process
/// already goes to the log, or if there is no log.
pub(crate) fn set_log(rank: Rank, log: Option<File>) {
    let log = log.map(Arc::new);
    DiagnosticOutput::change(|output| (output.rank, output.log) = (Some(rank), log.clone()));
    let early = EARLY.lock().unwrap_or_else(PoisonError::into_inner).take();
    early.into_iter().flatten().for_each(|line| write(log.as_deref(), &line));
}

/// Writes an error, a warning or a note to standard error and to the log.
pub(crate) fn print_diagnostic(text: &str) {
    let output = DiagnosticOutput::current();
    let formatted = output.formatted(text);
    let shown = match output.format {
        LogFormat::Json => Cow::Borrowed(&*formatted),
        LogFormat::Text => output.with_origin(&formatted),
    };
    // Clears a progress bar on the line. The bar is drawn again.
    let clear = if io::stderr().is_terminal() { "\r\x1b[K" } else { "" };
    // A closed standard error does not end the process. One write keeps lines of several ranks from mixing.
    let _ = io::stderr().write_all(format!("{clear}{shown}\n").as_bytes());
    let line = output.stamped(&formatted);
    let mut early = EARLY.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *early {
        Some(lines) if lines.len() < EARLY_MAX => lines.push(line),
        Some(_) => {}
        None => {
            drop(early);
            // Read again, because the log may have been set since.
            if let Some(log) = DiagnosticOutput::current().log {
                let _ = run_with_timeout(LOG_TIMEOUT, move || write(Some(&log), &line));
            }
        }
    }
}

fn write(log: Option<&File>, line: &str) {
    // A log that cannot be written is no reason to stop: the run's record is metrics.jsonl, and that is checked.
    if let Some(mut log) = log {
        let _ = log.write_all(format!("{line}\n").as_bytes());
    }
}

/// Returns the `message` of a JSON log line.
pub(crate) fn message(line: &str) -> Option<String> {
    match serde_json::from_str::<Value>(line).ok()?.get_mut("message")?.take() {
        Value::String(text) => Some(text),
        _ => None,
    }
}
