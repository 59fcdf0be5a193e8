use super::MetricsError;
use super::record_file::RECORD_BYTES;
use super::record_file::{RecordFile, Unwritten};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use trireme_base::open_regular_with;

/// A file of records in the order of their steps, with one JSON object per line.
#[derive(Debug)]
pub(super) struct JsonLines {
    pub(super) file: RecordFile,
    line: Vec<u8>,
    line_bytes_max: usize,
}

impl JsonLines {
    /// Opens or creates the file, and removes the records after `resumed_step` and the torn line that a crash may have left. A line of more
    /// than `line_bytes_max` bytes is not a record.
    pub(super) fn open(
        path: PathBuf,
        resumed_step: u64,
        line_bytes_max: usize,
    ) -> Result<Self, MetricsError> {
        let refuse = |source| MetricsError::Open { path: path.clone(), source };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = open_regular_with(&path, &mut options).map_err(refuse)?;
        let kept_bytes = match scan_records(&file, resumed_step, line_bytes_max as u64).map_err(refuse)? {
            Scan::Records { kept_bytes } => kept_bytes,
            Scan::Damaged { line } => return Err(MetricsError::Damaged { path, line }),
        };
        file.set_len(kept_bytes).map_err(refuse)?;
        let file = RecordFile::new(path, file, kept_bytes, RECORD_BYTES);
        Ok(JsonLines { file, line: Vec::with_capacity(RECORD_BYTES), line_bytes_max })
    }

    pub(super) fn write(&mut self, record: &impl Serialize) -> Result<(), Unwritten> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, record).expect("a record of numbers and names is JSON");
        self.line.push(b'\n');
        if self.line.len() > self.line_bytes_max {
            let (path, found, most) = (self.file.path.clone(), self.line.len(), self.line_bytes_max);
            return Err(Unwritten::Refused(MetricsError::TooLong { path, found, most }));
        }
        self.file.append(&self.line)
    }
}

enum Scan {
    Records { kept_bytes: u64 },
    Damaged { line: usize },
}

/// Returns the length in bytes of the records up to `resumed_step`.
fn scan_records(file: &File, resumed_step: u64, line_bytes_max: u64) -> io::Result<Scan> {
    #[derive(Deserialize)]
    struct Step {
        step: u64,
    }

    let mut reader = BufReader::new(file);
    let mut kept_bytes = 0;
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let length = (&mut reader).take(line_bytes_max).read_until(b'\n', &mut text)?;
        if !text.ends_with(b"\n") && (length as u64) < line_bytes_max {
            break;
        }
        match serde_json::from_slice::<Step>(&text) {
            Ok(Step { step }) if step <= resumed_step => kept_bytes += length as u64,
            Ok(_) => break,
            Err(_) => return Ok(Scan::Damaged { line }),
        }
    }
    Ok(Scan::Records { kept_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{LINE_BYTES_MAX, MemoryPeakBytes, StepRecord};
    use serde_json::Value;
    use std::path::Path;
    use trireme_base::CategoryBytes;

    fn record(step: u64) -> StepRecord {
        StepRecord { step, loss: 1.0 / step as f64, ..StepRecord::default() }
    }

    fn write(path: &Path, resumed_step: u64, steps: impl IntoIterator<Item = u64>) {
        let mut lines = JsonLines::open(path.to_owned(), resumed_step, LINE_BYTES_MAX).unwrap();
        steps.into_iter().for_each(|step| lines.write(&record(step)).unwrap());
    }

    fn steps(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap())
            .collect()
    }

    #[test]
    fn a_record_has_the_documented_keys_and_exact_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(path.clone(), 0, LINE_BYTES_MAX).unwrap();
        let loss = f64::from(2.610_2_f32);
        let memory_peak_bytes = MemoryPeakBytes { categories: CategoryBytes([7, 0, 0, 0, 0]), total: 7 };
        lines.write(&StepRecord { loss, grad_norm: f64::NAN, memory_peak_bytes, ..record(1) }).unwrap();
        lines
            .write(&StepRecord {
                validation_loss: Some(f64::INFINITY),
                seconds_to_first_step: Some(0.25),
                loss_scale: Some(1 << 16),
                skipped_steps: Some(3),
                compression_bytes_saved: Some(1 << 20),
                compression_error_norm: Some(0.5),
                tokens: Some(512),
                tokens_per_second: Some(64.0),
                ..record(2)
            })
            .unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let keys: Vec<&str> = records[0].as_object().unwrap().keys().map(String::as_str).collect();
        let expected = [
            "step",
            "loss",
            "grad_norm",
            "lr",
            "samples",
            "epoch",
            "unix_seconds",
            "samples_per_second",
            "step_seconds",
            "comm_seconds_exposed",
            "comm_bytes",
            "memory_peak_bytes",
        ];
        assert_eq!(keys, expected);
        assert_eq!(records[0]["loss"].as_f64().map(|loss| loss as f32), Some(2.610_2));
        assert_eq!(records[0]["grad_norm"], Value::Null);
        assert_eq!(records[0]["memory_peak_bytes"]["parameters"], 7);
        assert_eq!(records[1]["validation_loss"], Value::Null);
        assert_eq!(records[1]["seconds_to_first_step"], 0.25);
        let saved = (&records[1]["compression_bytes_saved"], &records[1]["compression_error_norm"]);
        let tokens = (&records[1]["tokens"], &records[1]["tokens_per_second"]);
        assert_eq!(tokens, (&512.into(), &64.0.into()));
        assert_eq!(saved, (&1_048_576.into(), &0.5.into()));
        assert_eq!((&records[1]["loss_scale"], &records[1]["skipped_steps"]), (&65_536.into(), &3.into()));
    }

    #[test]
    fn resuming_leaves_each_step_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write(&path, 0, 1..=7);
        write(&path, 5, 6..=8);
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6, 7, 8]);
        // A crash in the middle of a record leaves part of a line.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 5]).unwrap();
        write(&path, 8, [9]);
        assert_eq!(steps(&path), [1, 2, 3, 4, 5, 6, 7, 9]);
        write(&path, 0, [1]);
        assert_eq!(steps(&path), [1]);
    }

    #[test]
    fn does_not_cut_a_file_that_holds_something_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        write(&path, 0, 1..=2);
        let records = std::fs::read_to_string(&path).unwrap();
        for other in ["no json\n".to_owned(), "{}\n".to_owned(), "x".repeat(LINE_BYTES_MAX + 9)] {
            let text = format!("{records}{other}{records}");
            std::fs::write(&path, &text).unwrap();
            let error = JsonLines::open(path.clone(), 2, LINE_BYTES_MAX).unwrap_err();
            assert!(matches!(error, MetricsError::Damaged { line: 3, .. }), "{error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
