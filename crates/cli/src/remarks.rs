//! What a process tells besides its results: on the error output, and in the log of its rank.

use crate::bounded::within;
use crate::clock;
use serde::Serialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use trireme_base::Rank;
use trireme_train::config::LogFormat;

/// How long a line may take to be written to a log, whose file system may hang.
pub(crate) const LOG_MAX: Duration = Duration::from_secs(1);

/// How this process tells.
static TELLER: RwLock<Teller> =
    RwLock::new(Teller { rank: None, is_shared: false, format: LogFormat::Text, log: None });

#[derive(Clone)]
struct Teller {
    rank: Option<Rank>,
    /// Whether the error output is that of several ranks.
    is_shared: bool,
    format: LogFormat,
    log: Option<Arc<File>>,
}

impl Teller {
    fn current() -> Self {
        TELLER.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(change: impl FnOnce(&mut Self)) {
        change(&mut TELLER.write().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The name of this host, or nothing if it has none.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// From now on, remarks say that they come from this rank of another launcher's, and from which host.
pub(crate) fn speak_as(rank: Rank) {
    Teller::change(|teller| (teller.rank, teller.is_shared) = (Some(rank), true));
}

/// From now on, remarks have this format.
pub(crate) fn speak_in(format: LogFormat) {
    Teller::change(|teller| teller.format = format);
}

/// From now on, remarks are those of this rank, and in its log as well, if that is not the error output.
pub(crate) fn log_to(rank: Rank, log: Option<Arc<File>>) {
    Teller::change(|teller| (teller.rank, teller.log) = (Some(rank), log));
}

/// Tells something that is no result.
pub(crate) fn remark(text: &str) {
    let teller = Teller::current();
    let line = match teller.format {
        LogFormat::Json => object(teller.rank, "message", text).into(),
        LogFormat::Text => with_origin(&teller, text),
    };
    // What stands on the line is a progress bar, which is drawn again.
    let clear = if io::stderr().is_terminal() { "\r\x1b[K" } else { "" };
    // Nobody listening is no reason to stop. In one piece, so that lines of several ranks do not mix.
    let _ = io::stderr().write_all(format!("{clear}{line}\n").as_bytes());
    if let Some(log) = teller.log {
        let line = format!("{}\n", stamped(teller.format, &formatted(text)));
        let _ = within(LOG_MAX, move || (&*log).write_all(line.as_bytes()));
    }
}

/// The text with its origin behind the word that says what it is, if the error output has several.
fn with_origin<'a>(teller: &Teller, text: &'a str) -> Cow<'a, str> {
    match (teller.rank.filter(|_| teller.is_shared), text.split_once(": ")) {
        (Some(rank), Some((kind, rest))) if ["error", "warning", "note"].contains(&kind) => {
            Cow::Owned(format!("{kind}: rank {rank} on {}: {rest}", host_name()))
        }
        _ => Cow::Borrowed(text),
    }
}

/// The text as a log has it, but for the time.
pub(crate) fn formatted(text: &str) -> Cow<'_, str> {
    let teller = Teller::current();
    match teller.format {
        LogFormat::Json => object(teller.rank, "message", text.trim()).into(),
        LogFormat::Text => text.into(),
    }
}

/// A line of JSON that says when and where something is.
pub(crate) fn object(rank: Option<Rank>, name: &str, value: impl Serialize) -> String {
    let mut object = json!({ "time": clock::now(), "host": host_name() });
    if let Some(rank) = rank {
        object["rank"] = json!(rank.0);
    }
    object[name] = json!(value);
    object.to_string()
}

/// The text of a line of a log, if the line is JSON that has one.
pub(crate) fn message(line: &str) -> Option<String> {
    match serde_json::from_str::<Value>(line).ok()?.get_mut("message")?.take() {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// Each line with the time, unless they are JSON, which has it.
pub(crate) fn stamped(format: LogFormat, text: &str) -> String {
    match format {
        LogFormat::Text => {
            let now = clock::now();
            let lines = text.lines().filter(|line| !line.is_empty()).map(|line| format!("{now} {line}"));
            lines.collect::<Vec<_>>().join("\n")
        }
        LogFormat::Json => text.to_owned(),
    }
}
