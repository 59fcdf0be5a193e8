//! Writing small files so that a crash leaves the old or the new content, never a part.

use crate::DataError;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use trireme_base::create_regular;

/// Writes `content` beside `path`, waits until it is on the disk, and renames it to `path`.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<(), DataError> {
    let mut name = path.file_name().map(OsString::from).unwrap_or_default();
    name.push(".partial");
    let aside = path.with_file_name(name);
    let written = write_synced(&aside, content).and_then(|()| fs::rename(&aside, path));
    written.map_err(|source| {
        // The first failure is the one to report.
        let _ = fs::remove_file(&aside);
        DataError::Write { path: PathBuf::from(path), source }
    })
}

fn write_synced(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = create_regular(path)?;
    file.write_all(content)?;
    file.sync_all()
}
