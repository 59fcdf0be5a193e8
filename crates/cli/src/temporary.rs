//! Folders for files that a command needs while it runs.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

/// Creates a folder in the temporary folder, whose name is `prefix` and random letters, and which only this user can read. It is removed when the value
/// is dropped.
///
/// # Errors
/// If no folder can be created there.
pub(crate) fn temporary_folder(prefix: &str) -> io::Result<TempDir> {
    tempfile::Builder::new().prefix(prefix).permissions(Permissions::from_mode(0o700)).tempdir()
}
