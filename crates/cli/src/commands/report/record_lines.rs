//! Files of a run that have a JSON object a line.

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::marker::PhantomData;
use std::path::PathBuf;
use trireme_base::open_regular;

/// The records of a file, read one at a time. A last line without an end is being written, and is left out.
pub(super) struct RecordLines<T> {
    path: PathBuf,
    reader: BufReader<File>,
    line: Vec<u8>,
    line_bytes_max: usize,
    /// The name of a record, for errors.
    kind: &'static str,
    /// The number of the last line that was read.
    number: usize,
    records: PhantomData<T>,
}

impl<T: DeserializeOwned> RecordLines<T> {
    /// Opens a file of records of this `kind`, which have at most `line_bytes_max` bytes each. `advice` is for a user whose folder has no such
    /// file.
    pub(super) fn open(
        path: PathBuf,
        (kind, line_bytes_max): (&'static str, usize),
        advice: &str,
    ) -> Result<Self> {
        let file = match open_regular(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let folder = path.parent().unwrap_or(&path).display();
                let name = path.file_name().unwrap_or_default().display();
                bail!("{folder} has no {name}; {advice}")
            }
            file => file.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let reader = BufReader::new(file);
        Ok(RecordLines {
            path,
            reader,
            line: Vec::new(),
            line_bytes_max,
            kind,
            number: 0,
            records: PhantomData,
        })
    }

    /// The last line that was read, for errors.
    pub(super) fn place(&self) -> String {
        format!("line {} of {}", self.number, self.path.display())
    }

    fn read(&mut self) -> Result<Option<T>> {
        self.line.clear();
        self.number += 1;
        let read = (&mut self.reader).take(self.line_bytes_max as u64).read_until(b'\n', &mut self.line);
        read.with_context(|| format!("cannot read {}", self.path.display()))?;
        if !self.line.ends_with(b"\n") && self.line.len() < self.line_bytes_max {
            return Ok(None);
        }
        let record = serde_json::from_slice(&self.line);
        record.map(Some).with_context(|| format!("{} is not a {}", self.place(), self.kind))
    }
}

impl<T: DeserializeOwned> Iterator for RecordLines<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        self.read().transpose()
    }
}
