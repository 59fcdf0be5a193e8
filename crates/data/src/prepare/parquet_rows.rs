//! Reading the rows of Parquet files as JSON Lines.

use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use std::fs::File;
use std::io::{self, Read};

/// A reader that returns each row as a line of JSON. One row is in memory at a time, with the pages of its columns.
pub(super) struct Rows {
    rows: RowIter<'static>,
    line: Vec<u8>,
    /// Number of bytes of `line` that were already returned.
    given: usize,
}

impl Rows {
    pub(super) fn open(file: File) -> io::Result<Self> {
        let file = SerializedFileReader::new(file).map_err(io::Error::other)?;
        Ok(Rows { rows: RowIter::from_file_into(Box::new(file)), line: Vec::new(), given: 0 })
    }
}

impl Read for Rows {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.given == self.line.len() {
            let Some(row) = self.rows.next() else { return Ok(0) };
            self.given = 0;
            self.line = serde_json::to_vec(&row.map_err(io::Error::other)?.to_json_value())?;
            self.line.push(b'\n');
        }
        let length = out.len().min(self.line.len() - self.given);
        out[..length].copy_from_slice(&self.line[self.given..][..length]);
        self.given += length;
        Ok(length)
    }
}
