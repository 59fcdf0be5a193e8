//! Folders for files that a command needs while it runs.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

/// Creates a folder in the temporary folder, which only this user can read and which is removed when the value is dropped. Its name is
/// `prefix` and random letters.
pub(crate) fn temporary_folder(prefix: &str) -> io::Result<TempDir> {
    tempfile::Builder::new().prefix(prefix).permissions(Permissions::from_mode(0o700)).tempdir()
}
