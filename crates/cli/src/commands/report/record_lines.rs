//! Files of a run with one JSON object per line.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::path::{Path, PathBuf};
use trireme_base::open_regular;

/// A reader of a file's lines, one at a time. A last line without a line end is still being written, and is left out.
pub(super) struct RecordLines {
    path: PathBuf,
    reader: BufReader<File>,
    line: Vec<u8>,
    line_bytes_max: usize,
    /// Number of the last line that was read.
    number: usize,
}

impl RecordLines {
    /// Opens a file whose records have at most `line_bytes_max` bytes each. `advice` is for a user whose folder has no such file.
    pub(super) fn open(folder: &Path, name: &str, line_bytes_max: usize, advice: &str) -> Result<Self> {
        let path = folder.join(name);
        let file = match open_regular(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("{} has no {name}; {advice}", folder.display())
            }
            file => file.with_context(|| format!("cannot read {}", path.display()))?,
        };
        Ok(RecordLines { path, reader: BufReader::new(file), line: Vec::new(), line_bytes_max, number: 0 })
    }

    /// Returns the place of the last line that was read, for errors.
    pub(super) fn location(&self) -> String {
        format!("line {} of {}", self.number, self.path.display())
    }

    /// Returns the next line with its number, from 1. A line that is longer than any record is cut off, and so has no line end.
    pub(super) fn read(&mut self) -> Result<Option<(usize, &[u8])>> {
        // Skips the rest of a line that is longer than any record.
        while !self.line.is_empty() && !self.line.ends_with(b"\n") {
            self.fill()?;
        }
        self.number += 1;
        self.fill()?;
        let is_written = self.line.ends_with(b"\n") || self.line.len() >= self.line_bytes_max;
        Ok(is_written.then_some((self.number, &self.line)))
    }

    fn fill(&mut self) -> Result<()> {
        self.line.clear();
        let read = (&mut self.reader).take(self.line_bytes_max as u64).read_until(b'\n', &mut self.line);
        read.map(drop).with_context(|| format!("cannot read {}", self.path.display()))
    }
}
