//! The step records of a run, as reports read them.

use super::record_lines::RecordLines;
use crate::diagnostics::print_diagnostic;
use crate::numbers::with_noun;
use crate::statistics::median;
use anyhow::{Result, bail};
use serde::{Deserialize, Deserializer};
use std::path::{Path, PathBuf};
use trireme_data::{Corpus, bigram_baseline};
use trireme_train::CONFIG_TOML;
use trireme_train::config::Config;
use trireme_train::metrics::{LINE_BYTES_MAX, METRICS_FILE, MemoryPeakBytes};

/// The fields of a line of `metrics.jsonl` that reports read. Numbers that are not finite are `null` in the file.
#[derive(Debug, Deserialize)]
pub(super) struct Record {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) grad_norm: Option<f64>,
    pub(super) lr: Option<f64>,
    /// Absent in records of earlier versions, which have only tokens.
    samples: Option<u64>,
    samples_per_second: Option<f64>,
    tokens: Option<u64>,
    tokens_per_second: Option<f64>,
    pub(super) step_seconds: Option<f64>,
    pub(super) comm_seconds_exposed: Option<f64>,
    pub(super) mfu: Option<f64>,
    /// `None` where the step did not measure it, and `Some(None)` where it was not finite.
    #[serde(default, deserialize_with = "measured")]
    pub(super) validation_loss: Option<Option<f64>>,
    pub(super) initial_validation_loss: Option<f64>,
    pub(super) memory_peak_bytes: MemoryPeakBytes,
    pub(super) memory_predicted_bytes: Option<MemoryPeakBytes>,
}

/// Deserializes `null` to `Some(None)`, which distinguishes it from an absent value.
fn measured<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// The unit in which a run counts its progress and its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProgressUnit {
    Tokens,
    Samples,
}

impl ProgressUnit {
    pub(super) fn plural(self) -> &'static str {
        match self {
            ProgressUnit::Tokens => "tokens",
            ProgressUnit::Samples => "samples",
        }
    }
}

impl Record {
    /// Returns the number of units on which the run has trained so far.
    pub(super) fn amount(&self, unit: ProgressUnit) -> Option<u64> {
        match unit {
            ProgressUnit::Tokens => self.tokens,
            ProgressUnit::Samples => self.samples,
        }
    }

    /// Returns the speed of all workers together, in units per second.
    pub(super) fn per_second(&self, unit: ProgressUnit) -> Option<f64> {
        match unit {
            ProgressUnit::Tokens => self.tokens_per_second,
            ProgressUnit::Samples => self.samples_per_second,
        }
    }
}

/// The records of a run: at least one.
#[derive(Debug)]
pub(super) struct Records(Vec<Record>);

impl Records {
    /// Reads the records in a run's folder. Lines that are not step records are skipped with a warning.
    pub(super) fn read(run_folder: &Path) -> Result<Self> {
        let (records, skipped) = read_records(run_folder)?;
        let skipped = skipped.map(|Skipped { num_lines, first }| {
            let (lines, path) = (with_noun(num_lines, "line"), records_file(run_folder));
            format!("skipped {lines} of {} without a step record; the first is line {first}", path.display())
        });
        match skipped {
            Some(skipped) if records.is_empty() => {
                bail!("{} has no step record: {skipped}", run_folder.display())
            }
            None if records.is_empty() => bail!("{} has no recorded steps yet", run_folder.display()),
            Some(skipped) => print_diagnostic(&format!("warning: {skipped}")),
            None => {}
        }
        Ok(Records(records))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Record> {
        self.0.iter()
    }

    pub(super) fn first(&self) -> &Record {
        &self.0[0]
    }

    pub(super) fn last(&self) -> &Record {
        &self.0[self.0.len() - 1]
    }

    pub(super) fn unit(&self) -> ProgressUnit {
        if self.last().tokens.is_some() { ProgressUnit::Tokens } else { ProgressUnit::Samples }
    }

    /// Returns the steps that measured a finite validation loss, with that loss.
    pub(super) fn validations(&self) -> impl DoubleEndedIterator<Item = (u64, f64)> {
        self.0.iter().filter_map(|record| Some((record.step, record.validation_loss??)))
    }

    /// Returns the step with the lowest validation loss, and that loss.
    pub(super) fn best_validation(&self) -> Option<(u64, f64)> {
        self.validations().min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns the median of the model FLOPs utilization, over the steps at which the devices' peaks were known.
    pub(super) fn median_mfu(&self) -> Option<f64> {
        let values: Vec<f64> = self.iter().filter_map(|record| record.mfu).collect();
        (!values.is_empty()).then(|| median(values))
    }

    /// Returns the median speed in units per second.
    pub(super) fn median_speed(&self) -> Option<f64> {
        let speeds: Vec<f64> = self.iter().filter_map(|record| record.per_second(self.unit())).collect();
        (!speeds.is_empty()).then(|| median(speeds))
    }
}

/// Lines that are not step records.
#[derive(Debug, PartialEq, Eq)]
struct Skipped {
    num_lines: usize,
    /// The number of the first one, from 1.
    first: usize,
}

/// Reads the records in a run's folder, and counts the lines that are not records.
fn read_records(run_folder: &Path) -> Result<(Vec<Record>, Option<Skipped>)> {
    let advice = "expected the folder of a run, such as runs/NAME, with [metrics] jsonl = true";
    let mut lines = RecordLines::open(run_folder, METRICS_FILE, LINE_BYTES_MAX, advice)?;
    let (mut records, mut skipped) = (Vec::new(), None);
    while let Some((number, line)) = lines.read()? {
        match serde_json::from_slice(line) {
            Ok(record) if line.ends_with(b"\n") => records.push(record),
            _ => skipped.get_or_insert(Skipped { num_lines: 0, first: number }).num_lines += 1,
        }
    }
    Ok((records, skipped))
}

/// Returns the file in a run's folder that holds its records.
pub(super) fn records_file(run_folder: &Path) -> PathBuf {
    run_folder.join(METRICS_FILE)
}

/// Returns the loss of the bigram baseline on the run's corpus, if the corpus can be found from here.
pub(super) fn baseline(run_folder: &Path) -> Option<f64> {
    let path = Some(run_folder.join(CONFIG_TOML)).filter(|path| path.is_file())?;
    let config = Config::load(&path, &[], None).ok()?;
    let corpus = Corpus::open(&config.data().folder).ok()?;
    bigram_baseline(&corpus.train.tokens, &corpus.validation?.tokens).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_that_was_not_finite_is_distinguished_from_none() {
        let read = |rest: &str| -> Record {
            serde_json::from_str(&format!("{{\"step\":1,\"memory_peak_bytes\":{{}}{rest}}}")).unwrap()
        };
        assert_eq!(read("").validation_loss, None);
        assert_eq!(read(",\"validation_loss\":null").validation_loss, Some(None));
        assert_eq!(read(",\"validation_loss\":2.5").validation_loss, Some(Some(2.5)));
    }

    #[test]
    fn lines_that_are_no_records_are_skipped_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = records_file(folder.path());
        let record = |step: u64| format!("{{\"step\":{step},\"memory_peak_bytes\":{{}}}}\n");
        let long = " ".repeat(3 * LINE_BYTES_MAX);
        let text = [&record(1)[..], "\0\0{\n", "\n", &long, "\n", &record(5), "{\"step\":6"].concat();
        std::fs::write(&path, text).unwrap();
        let (records, skipped) = read_records(folder.path()).unwrap();
        let steps: Vec<u64> = records.iter().map(|record| record.step).collect();
        assert_eq!((steps, skipped), (vec![1, 5], Some(Skipped { num_lines: 3, first: 2 })));
        std::fs::write(&path, long).unwrap();
        let error = format!("{:#}", Records::read(folder.path()).unwrap_err());
        assert!(error.contains("no step record: skipped 1 line of"), "{error}");
        std::fs::write(&path, "{\"step\":1").unwrap();
        let error = Records::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no recorded steps yet"), "{error}");
    }
}
