//! The records of a run, as reports read them.

use crate::statistics::median;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Deserializer};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use trireme_train::metrics::{METRICS_FILE, MemoryPeakBytes};

/// No record comes near this length.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// What reports read of a line of `metrics.jsonl`. Numbers that are not finite are `null` there.
#[derive(Debug, Deserialize)]
pub(super) struct Record {
    pub(super) step: u64,
    pub(super) loss: Option<f64>,
    pub(super) grad_norm: Option<f64>,
    pub(super) lr: Option<f64>,
    /// Records of earlier versions have only tokens.
    samples: Option<u64>,
    samples_per_second: Option<f64>,
    tokens: Option<u64>,
    tokens_per_second: Option<f64>,
    pub(super) step_seconds: Option<f64>,
    pub(super) comm_seconds_exposed: Option<f64>,
    pub(super) mfu: Option<f64>,
    /// None where the step did not measure it, and `Some(None)` where it was not finite.
    #[serde(default, deserialize_with = "measured")]
    pub(super) validation_loss: Option<Option<f64>>,
    pub(super) initial_validation_loss: Option<f64>,
    pub(super) memory_peak_bytes: MemoryPeakBytes,
    pub(super) memory_predicted_bytes: Option<MemoryPeakBytes>,
}

/// Tells a value that is `null` from one that is absent.
fn measured<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Of what a run counts its progress and its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Tokens,
    Samples,
}

impl Unit {
    pub(super) fn plural(self) -> &'static str {
        match self {
            Unit::Tokens => "tokens",
            Unit::Samples => "samples",
        }
    }
}

impl Record {
    /// How much the run has been trained on so far.
    pub(super) fn amount(&self, unit: Unit) -> Option<u64> {
        match unit {
            Unit::Tokens => self.tokens,
            Unit::Samples => self.samples,
        }
    }

    /// The speed of all workers together.
    pub(super) fn per_second(&self, unit: Unit) -> Option<f64> {
        match unit {
            Unit::Tokens => self.tokens_per_second,
            Unit::Samples => self.samples_per_second,
        }
    }
}

/// The records of a run: at least one.
#[derive(Debug)]
pub(super) struct Records(Vec<Record>);

impl Records {
    /// Reads the records in a run's folder. The last line may be one that is being written.
    pub(super) fn read(run_folder: &Path) -> Result<Self> {
        let path = records_file(run_folder);
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "{} has no metrics.jsonl; expected the folder of a run, such as runs/NAME, with [metrics] jsonl = true",
                run_folder.display()
            ),
            file => file.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let mut reader = BufReader::new(file);
        let (mut records, mut line) = (Vec::new(), Vec::new());
        for number in 1.. {
            line.clear();
            let read = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
            read.with_context(|| format!("cannot read {}", path.display()))?;
            if !line.ends_with(b"\n") && (line.len() as u64) < LINE_BYTES_MAX {
                break;
            }
            let record = serde_json::from_slice(&line);
            records.push(
                record
                    .with_context(|| format!("line {number} of {} is not a step record", path.display()))?,
            );
        }
        if records.is_empty() {
            bail!("{} has no recorded steps yet", run_folder.display());
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

    pub(super) fn unit(&self) -> Unit {
        if self.last().tokens.is_some() { Unit::Tokens } else { Unit::Samples }
    }

    /// Steps that measured a finite validation loss, with that loss.
    pub(super) fn validations(&self) -> impl DoubleEndedIterator<Item = (u64, f64)> {
        self.0.iter().filter_map(|record| Some((record.step, record.validation_loss??)))
    }

    /// The lowest validation loss, with its step.
    pub(super) fn best_validation(&self) -> Option<(u64, f64)> {
        self.validations().min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The median of the model FLOPs utilization, where the devices' peaks were known.
    pub(super) fn median_mfu(&self) -> Option<f64> {
        let values: Vec<f64> = self.iter().filter_map(|record| record.mfu).collect();
        (!values.is_empty()).then(|| median(values))
    }

    /// In units a second.
    pub(super) fn median_speed(&self) -> Option<f64> {
        let speeds: Vec<f64> = self.iter().filter_map(|record| record.per_second(self.unit())).collect();
        (!speeds.is_empty()).then(|| median(speeds))
    }
}

/// The file in a run's folder that holds its records.
pub(super) fn records_file(run_folder: &Path) -> PathBuf {
    run_folder.join(METRICS_FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_validation_that_was_not_finite_is_told_from_none() {
        let read = |rest: &str| -> Record {
            serde_json::from_str(&format!("{{\"step\":1,\"memory_peak_bytes\":{{}}{rest}}}")).unwrap()
        };
        assert_eq!(read("").validation_loss, None);
        assert_eq!(read(",\"validation_loss\":null").validation_loss, Some(None));
        assert_eq!(read(",\"validation_loss\":2.5").validation_loss, Some(Some(2.5)));
    }

    #[test]
    fn a_line_without_an_end_is_read_no_further_than_a_record_can_be() {
        let folder = tempfile::tempdir().unwrap();
        let spaces = " ".repeat(2 * LINE_BYTES_MAX as usize);
        std::fs::write(records_file(folder.path()), spaces).unwrap();
        let error = format!("{:#}", Records::read(folder.path()).unwrap_err());
        assert!(error.contains("line 1 of") && error.contains("not a step record"), "{error}");
        std::fs::write(records_file(folder.path()), "{\"step\":1").unwrap();
        let error = Records::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("no recorded steps yet"), "{error}");
    }
}
