//! Creates unnamed files with reserved space.

use crate::SwapError;
use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use trireme_base::Bytes;

/// Creates an unnamed file of `bytes` in `folder`, which is deleted when its last handle is closed. Returns the file, and whether its space
/// is reserved, which not every file system supports.
pub(crate) fn create(folder: &Path, bytes: u64) -> Result<(File, bool), SwapError> {
    let file = tempfile::tempfile_in(folder)
        .map_err(|source| SwapError::Create { folder: folder.to_owned(), source: Arc::new(source) })?;
    let refuse = |source: io::Error, free: u64| SwapError::Space {
        folder: folder.to_owned(),
        asked: Bytes(bytes),
        free: Bytes(free),
        source: Arc::new(source),
    };
    let status = fstatvfs(&file).map_err(|error| refuse(error.into(), 0))?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    // Check first: if asked for too much, a file system may fill the disk before it fails. File systems without blocks, such as a tmpfs
    // without a limit, do not report free space.
    if status.f_blocks > 0 && free < bytes {
        return Err(refuse(Errno::NOSPC.into(), free));
    }
    match rustix::io::retry_on_intr(|| fallocate(&file, FallocateFlags::empty(), 0, bytes)) {
        Ok(()) => Ok((file, true)),
        Err(Errno::OPNOTSUPP) => {
            file.set_len(bytes).map_err(|error| refuse(error, free))?;
            Ok((file, false))
        }
        Err(error) => Err(refuse(error.into(), free)),
    }
}
