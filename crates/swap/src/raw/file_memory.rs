use memmap2::MmapMut;
use std::fs::File;
use std::io;

/// Maps a file that has no name.
pub(crate) fn map(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the file has no name and no other user, so nothing truncates the file or writes to it while it is mapped.
    unsafe { MmapMut::map_mut(file) }
}
