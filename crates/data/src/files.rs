use crate::DataError;
use std::io::Write;
use std::path::{Path, PathBuf};
use trireme_base::replace_file;

/// Replaces the content of a file, as [`replace_file`] does.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<(), DataError> {
    replace_file(path, |file| file.write_all(content))
        .map_err(|source| DataError::Write { path: PathBuf::from(path), source })
}
