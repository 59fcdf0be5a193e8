use super::error::MetricsError;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Size of the buffers in which records are assembled. It exceeds the longest usual record, so that buffers do not grow.
pub(super) const RECORD_BYTES: usize = 16 << 10;

/// Maximum number of bytes per file of records that wait in memory until the disk has room again.
const WAITING_BYTES_MAX: usize = 16 << 20;

/// A file to which whole records are appended. A record that cannot be written, such as on a full disk, waits in memory and is written with
/// the next one.
#[derive(Debug)]
pub(super) struct RecordFile {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Number of bytes that are written completely. A partial record after them is overwritten.
    written_bytes: u64,
    waiting: Vec<u8>,
}

impl RecordFile {
    /// Appends to the first `written_bytes` of `file`. Allocates a buffer of `record_bytes`, so that appending records up to that length
    /// does not allocate.
    pub(super) fn new(path: PathBuf, file: File, written_bytes: u64, record_bytes: usize) -> Self {
        RecordFile { path, file, written_bytes, waiting: Vec::with_capacity(record_bytes) }
    }

    /// Appends a record after the waiting ones, in one system call.
    ///
    /// # Errors
    /// [`Unwritten::Waits`] if the record waits in memory, where it stays until it is written or the file is dropped.
    /// [`Unwritten::Refused`] if too many bytes wait already.
    pub(super) fn append(&mut self, record: &[u8]) -> Result<(), Unwritten> {
        let is_full = self.waiting.len() + record.len() > WAITING_BYTES_MAX;
        if !is_full {
            self.waiting.extend_from_slice(record);
        }
        let written = self.file.write_all_at(&self.waiting, self.written_bytes);
        match written {
            Ok(()) => {
                self.written_bytes += self.waiting.len() as u64;
                self.waiting.clear();
                if is_full { self.append(record) } else { Ok(()) }
            }
            Err(source) => {
                let error = MetricsError::Write { path: self.path.clone(), source };
                Err(if is_full { Unwritten::Refused(error) } else { Unwritten::Waits(error) })
            }
        }
    }

    /// Makes a last attempt to write the waiting records.
    pub(super) fn finish(&mut self) -> Result<(), MetricsError> {
        if self.is_waiting() { self.append(&[]).map_err(Unwritten::into_error) } else { Ok(()) }
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

/// The reason why a record is not in its file.
#[derive(Debug)]
pub(super) enum Unwritten {
    /// The record waits in memory and is written with the next one.
    Waits(MetricsError),
    /// The record is lost.
    Refused(MetricsError),
}

impl Unwritten {
    pub(super) fn into_error(self) -> MetricsError {
        match self {
            Unwritten::Waits(error) | Unwritten::Refused(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    #[test]
    fn records_wait_until_the_disk_has_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("records");
        std::fs::write(&path, "kept;torn").unwrap();
        let open = |path| OpenOptions::new().write(true).open(path).unwrap();
        let mut records = RecordFile::new(path.clone(), open(std::path::Path::new("/dev/full")), 5, 0);
        for record in ["a;", "b;"] {
            let unwritten = records.append(record.as_bytes()).unwrap_err();
            assert!(matches!(unwritten, Unwritten::Waits(MetricsError::Write { .. })));
            assert!(records.is_waiting());
        }
        let long = vec![b'x'; WAITING_BYTES_MAX];
        assert!(matches!(records.append(&long), Err(Unwritten::Refused(_))), "memory is bounded");
        records.file = open(&path);
        records.append(b"c;").unwrap();
        assert!(!records.is_waiting());
        records.append(b"d;").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "kept;a;b;c;d;");
        // A record of the maximum waiting size is written after the waiting ones.
        records.file = open(std::path::Path::new("/dev/full"));
        records.append(b"e;").unwrap_err();
        records.file = open(&path);
        records.append(&long).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 15 + WAITING_BYTES_MAX as u64);
    }
}
