//! The metrics of a run: one [`StepRecord`] per step, written as a line of `metrics.jsonl` and as scalars for TensorBoard.
//!
//! Writing a record to the files does not allocate on the heap, and costs one system call per file.

mod error;
mod event_file;
mod hashes;
mod json_lines;
mod prometheus;
mod record;
mod record_file;

pub use error::MetricsError;
pub(crate) use hashes::HashWriter;
pub use hashes::{HASH_LINE_BYTES_MAX, HASHES_FILE, HashRecord, HexBits, TensorHashes, UnitHashes};
pub(crate) use prometheus::PrometheusEndpoint;
pub use record::{MemoryPeakBytes, MetricValues, StepRecord};

use crate::config::Metrics;
use event_file::EventFile;
use json_lines::JsonLines;
use record_file::{RecordFile, Unwritten};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// The file of step records in a run's folder, with one JSON object per line.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// Maximum number of bytes in a line of `metrics.jsonl`. No record is nearly as long, so a longer line is not a record.
pub const LINE_BYTES_MAX: usize = 1 << 16;

/// Maximum number of metrics that the units of a model report. It bounds the length of a record, so that a record fits its buffer.
const METRICS_MAX: usize = 64;

const METRIC_NAME_MAX: usize = 48;

/// Refuses metrics of units if there are too many, or if their names could be confused with other parts of a record.
pub(crate) fn check_names(names: &[&'static str]) -> Result<(), MetricsError> {
    if names.len() > METRICS_MAX {
        return Err(MetricsError::TooMany { found: names.len(), most: METRICS_MAX });
    }
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./".contains(&byte);
    let is_good = |name: &str| {
        let has_length = (1..=METRIC_NAME_MAX).contains(&name.len());
        has_length && name.bytes().all(is_letter) && name != "loss" && !name.starts_with("validation_")
    };
    match names.iter().find(|name| !is_good(name)) {
        Some(name) => Err(MetricsError::Name { name, most: METRIC_NAME_MAX }),
        None => Ok(()),
    }
}

/// Writes the records of a run into its folder.
#[derive(Debug)]
pub struct MetricsWriter {
    json_lines: Option<JsonLines>,
    event_file: Option<EventFile>,
    /// Serves the most recent record as well.
    pub(crate) prometheus: Option<PrometheusEndpoint>,
    /// Whether records wait in memory for the disk.
    is_waiting: bool,
}

/// The outcome of writing a record.
#[derive(Debug)]
pub enum Written {
    /// The record is in its files.
    Now,
    /// Some files cannot be written, each for the listed reason. For these files, the record waits in memory and is written with the next
    /// one.
    Later(Vec<MetricsError>),
    /// The record is in its files, and so are the records that waited.
    WithWaiting,
}

impl MetricsWriter {
    /// Opens the files that the config asks for in `folder`, which exists, to continue after `resumed_step`. 0 stands for a new run.
    ///
    /// `metrics.jsonl` keeps the records up to that step. Later ones are removed, because the run will write them again. TensorBoard's
    /// event files cannot be truncated, because a reader may have them open. So a new one is created, which tells the reader to discard the
    /// steps after `resumed_step`.
    ///
    /// # Errors
    /// If a file cannot be opened, read, truncated or written, or if `metrics.jsonl` is damaged.
    pub fn open(folder: &Path, config: &Metrics, resumed_step: u64) -> Result<Self, MetricsError> {
        let open = || JsonLines::open(folder.join(METRICS_FILE), resumed_step, LINE_BYTES_MAX);
        let json_lines = config.jsonl.then(open).transpose()?;
        let event_file =
            config.tensorboard.then(|| EventFile::create(folder, wall_time(), resumed_step)).transpose()?;
        Ok(MetricsWriter { json_lines, event_file, prometheus: None, is_waiting: false })
    }

    /// Writes the record of a step to each file. If the disk is full, the record waits in memory.
    ///
    /// # Errors
    /// If the limit of waiting bytes is exceeded, or if the record is too long.
    pub fn write(&mut self, record: &StepRecord) -> Result<Written, MetricsError> {
        if let Some(prometheus) = &self.prometheus {
            prometheus.show(record);
        }
        let outcomes = [
            self.json_lines.as_mut().map_or(Ok(()), |json_lines| json_lines.write(record)),
            self.event_file.as_mut().map_or(Ok(()), |event_file| event_file.write(record, wall_time())),
        ];
        let mut errors = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok(()) => {}
                Err(Unwritten::Waits(error)) => errors.push(error),
                Err(Unwritten::Refused(error)) => return Err(error),
            }
        }
        let has_waited = std::mem::replace(&mut self.is_waiting, !errors.is_empty());
        Ok(match (errors.is_empty(), has_waited) {
            (false, _) => Written::Later(errors),
            (true, true) => Written::WithWaiting,
            (true, false) => Written::Now,
        })
    }

    /// Makes a last attempt to write the waiting records to every file.
    ///
    /// # Errors
    /// If records are lost; the error names the first file that fails.
    pub fn finish(&mut self) -> Result<(), MetricsError> {
        let json_lines = self.json_lines.as_mut().map(|json_lines| &mut json_lines.file);
        let event_file = self.event_file.as_mut().map(|event_file| &mut event_file.file);
        let outcomes = json_lines.into_iter().chain(event_file).map(RecordFile::finish);
        // `fold` visits every file, where collecting would stop at the first error.
        outcomes.fold(Ok(()), Result::and)
    }
}

/// Returns the time since 1970, as event files store it.
fn wall_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_the_files_that_are_asked_for() {
        for (jsonl, tensorboard) in [(true, true), (true, false), (false, true), (false, false)] {
            let folder = tempfile::tempdir().unwrap();
            let config = Metrics { jsonl, tensorboard, ..Metrics::default() };
            let mut writer = MetricsWriter::open(folder.path(), &config, 0).unwrap();
            writer.write(&StepRecord { step: 1, ..StepRecord::default() }).unwrap();
            let names = || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
            let count =
                |start: &str| names().filter(|name| name.to_str().unwrap().starts_with(start)).count();
            assert_eq!(count("metrics.jsonl"), usize::from(jsonl));
            assert_eq!(count("events.out.tfevents."), usize::from(tensorboard));
            assert_eq!(names().count(), usize::from(jsonl) + usize::from(tensorboard));
        }
    }

    #[test]
    fn the_last_attempt_reaches_every_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::open(folder.path(), &Metrics::default(), 0).unwrap();
        let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
        let json_lines = &mut writer.json_lines.as_mut().unwrap().file;
        *json_lines = RecordFile::new("metrics.jsonl".into(), full(), 0, 0);
        assert!(json_lines.append(b"first").is_err());
        // The disk of the second file has room again.
        let events = folder.path().join("events");
        let mut waiting = RecordFile::new(events.clone(), full(), 0, 0);
        assert!(waiting.append(b"second").is_err());
        waiting.file = std::fs::File::create(&events).unwrap();
        writer.event_file.as_mut().unwrap().file = waiting;
        let error = writer.finish().unwrap_err();
        assert!(error.to_string().ends_with("metrics.jsonl"), "{error}");
        assert_eq!(std::fs::read(events).unwrap(), b"second");
    }

    #[test]
    fn a_missing_folder_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let error = MetricsWriter::open(&folder.path().join("missing"), &Metrics::default(), 0).unwrap_err();
        assert!(error.to_string().ends_with("missing/metrics.jsonl"), "{error}");
    }

    #[test]
    fn ambiguous_metric_names_are_refused() {
        check_names(&["accuracy", "router/entropy_0.5-x"]).unwrap();
        for name in ["", "loss", "validation_accuracy", "two words", "a\nb", "ä", &"x".repeat(49)] {
            let name: &'static str = name.to_owned().leak();
            let refused = check_names(&["accuracy", name]).unwrap_err().to_string();
            assert!(refused.contains(&format!("{name:?}")), "{refused}");
        }
        let refused = check_names(&["x"; METRICS_MAX + 1]).unwrap_err().to_string();
        assert_eq!(
            refused,
            "the model reports 65 metrics, but a run has at most 64; report several units under one name"
        );
    }
}
