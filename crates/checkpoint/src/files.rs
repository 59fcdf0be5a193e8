//! File-system changes as data, and reading of files of bounded size.

use crate::error::CheckpointError;
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};
use trireme_base::{create_regular, open_regular};

/// A small file to store next to the tensors, such as the model's `config.json`.
#[derive(Debug, Clone, Copy)]
pub struct ExtraFile<'a> {
    /// Name of the file, without a folder.
    pub name: &'a str,
    /// Contents of the file.
    pub contents: &'a [u8],
}

/// Maximum size of a JSON file in bytes. Larger files are refused before they are read.
pub(crate) const JSON_BYTES_MAX: u64 = 256 << 20;

/// One change of the file system. A publication is a list of these changes, so that tests can stop between any two of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileOperation {
    /// Creates a folder and its missing parents.
    CreateFolder(PathBuf),
    /// Writes a file, replacing an existing one, and syncs it to the disk.
    WriteFile { path: PathBuf, contents: Vec<u8> },
    /// Syncs the entries of a folder to the disk.
    SyncFolder(PathBuf),
    /// Renames a file or folder. Both paths are in the same folder.
    Rename { from: PathBuf, to: PathBuf },
    /// Removes a file, or a folder with its contents.
    Remove(PathBuf),
}

impl FileOperation {
    pub(crate) fn execute(&self) -> Result<(), CheckpointError> {
        self.execute_with_progress(&|| {})
    }

    /// Makes the change. Calls `on_progress` before it, and before each entry of a folder that is removed.
    pub(crate) fn execute_with_progress(&self, on_progress: &dyn Fn()) -> Result<(), CheckpointError> {
        on_progress();
        match self {
            FileOperation::CreateFolder(path) => fs::create_dir_all(path).map_err(writing(path)),
            FileOperation::WriteFile { path, contents } => {
                write_synced(path, contents).map_err(writing(path))
            }
            FileOperation::SyncFolder(path) => {
                File::open(path).and_then(|folder| folder.sync_all()).map_err(writing(path))
            }
            FileOperation::Rename { from, to } => fs::rename(from, to)
                .map_err(|source| CheckpointError::Rename { from: from.clone(), to: to.clone(), source }),
            FileOperation::Remove(path) => remove(path, on_progress)
                .map_err(|source| CheckpointError::Remove { path: path.clone(), source }),
        }
    }
}

/// Removes a file, or a folder with its contents. Calls `on_progress` before each entry of the folder, because removing gigabytes takes
/// seconds on slow storage.
pub(crate) fn remove(path: &Path, on_progress: &dyn Fn()) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return fs::remove_file(path);
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        on_progress();
        if !entry.file_type()?.is_dir() {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_dir_all(path)
}

fn write_synced(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = create_regular(path)?;
    file.write_all(contents)?;
    file.sync_all()
}

pub(crate) fn writing(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Write { path: path.to_owned(), source }
}

pub(crate) fn reading(path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    move |source| CheckpointError::Read { path: path.to_owned(), source }
}

pub(crate) fn damaged(path: &Path, reason: impl ToString) -> CheckpointError {
    CheckpointError::Damaged { path: path.to_owned(), reason: reason.to_string() }
}

/// Opens a regular file (not a pipe, which would block) and returns it with its size in bytes.
pub(crate) fn open_file(path: &Path) -> Result<(File, u64), CheckpointError> {
    let file = open_regular(path).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => damaged(path, error),
        _ => reading(path)(error),
    })?;
    let size = file.metadata().map_err(reading(path))?.len();
    Ok((file, size))
}

/// Reads a file of at most `bytes_max` bytes. A larger one is refused as damaged.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CheckpointError> {
    let (file, size) = open_file(path)?;
    if size > bytes_max {
        return Err(damaged(path, format!("it has {size} bytes, more than the allowed {bytes_max}")));
    }
    let mut contents = Vec::with_capacity(size as usize);
    file.take(bytes_max).read_to_end(&mut contents).map_err(reading(path))?;
    Ok(contents)
}

/// Returns whether `name` is a single file name, so that a path made of a folder and `name` stays in that folder.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(['\\', '\0'])
}

pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Returns a suffix for the name of an unfinished folder. It is random, so that no two attempts write to the same folder, whatever their
/// process or host.
pub(crate) fn partial_suffix() -> String {
    random_suffix(PARTIAL_PREFIX)
}

/// Returns a suffix for the name of a damaged checkpoint that is set aside.
pub(crate) fn damaged_suffix() -> String {
    random_suffix(".damaged-")
}

/// Returns `start` and eight random hexadecimal digits.
fn random_suffix(start: &str) -> String {
    let random = std::hash::RandomState::new().build_hasher().finish();
    format!("{start}{:08x}", random as u32)
}

/// Returns whether `suffix` has the form of a [`partial_suffix`].
pub(crate) fn is_partial_suffix(suffix: &str) -> bool {
    suffix.strip_prefix(PARTIAL_PREFIX).is_some_and(|digits| {
        digits.len() == 8 && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
    })
}

const PARTIAL_PREFIX: &str = ".partial-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_not_plain_names() {
        assert!(is_plain_name("shard-00000.safetensors"));
        for name in ["", ".", "..", "/etc/passwd", "a/b", "../a", "a/", "./a", "a\\b", "a\0b"] {
            assert!(!is_plain_name(name), "{name:?}");
        }
    }

    #[test]
    fn removing_a_folder_reports_progress_for_each_file() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("step-1");
        fs::create_dir_all(checkpoint.join("inner")).unwrap();
        for name in ["a", "b", "inner/c"] {
            fs::write(checkpoint.join(name), name).unwrap();
        }
        std::os::unix::fs::symlink(folder.path(), checkpoint.join("link")).unwrap();
        let calls = std::cell::Cell::new(0);
        FileOperation::Remove(checkpoint.clone())
            .execute_with_progress(&|| calls.set(calls.get() + 1))
            .unwrap();
        assert!(!checkpoint.exists() && folder.path().exists());
        assert_eq!(calls.get(), 5);
    }

    #[test]
    fn partial_suffixes_differ_and_are_known() {
        assert_ne!(partial_suffix(), partial_suffix());
        assert!(is_partial_suffix(&partial_suffix()));
        for other in ["", ".partial-", ".partial-1234567", ".partial-1234567g", ".partial-123456789"] {
            assert!(!is_partial_suffix(other), "{other}");
        }
    }

    #[test]
    fn files_that_are_too_large_or_not_regular_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        fs::write(&path, "12345").unwrap();
        assert_eq!(read_bounded(&path, 5).unwrap(), b"12345");
        assert!(matches!(read_bounded(&path, 4), Err(CheckpointError::Damaged { .. })));
        assert!(matches!(read_bounded(folder.path(), 4), Err(CheckpointError::Damaged { .. })));
        assert!(matches!(read_bounded(&folder.path().join("none"), 4), Err(CheckpointError::Read { .. })));
    }
}
