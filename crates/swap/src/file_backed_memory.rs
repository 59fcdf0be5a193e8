use crate::SwapError;
use crate::{raw, unnamed_file};
use memmap2::MmapMut;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;

/// Memory backed by a file on disk: the system writes its pages to the file when it needs room, and reads them back on access.
///
/// The space on disk is reserved at creation. The file has no name and is deleted when this value is dropped.
#[derive(Debug)]
pub struct FileBackedMemory(MmapMut);

impl FileBackedMemory {
    /// Maps `num_bytes` zeroed bytes of a new file in `folder`.
    ///
    /// # Errors
    /// If no file can be created in the folder, or the disk has too little space.
    pub fn new(folder: &Path, num_bytes: usize) -> Result<Self, SwapError> {
        let (mut file, is_reserved) = unnamed_file::create(folder, num_bytes as u64)?;
        let fail = |source| SwapError::Create { folder: folder.to_owned(), source: Arc::new(source) };
        if !is_reserved {
            // Writing to a page without a disk block would kill the process if the disk is full.
            io::copy(&mut io::repeat(0).take(num_bytes as u64), &mut file).map_err(fail)?;
        }
        Ok(FileBackedMemory(raw::map(&file).map_err(fail)?))
    }
}

impl Deref for FileBackedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for FileBackedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_backed_memory_keeps_its_content_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut memory = FileBackedMemory::new(folder.path(), 10_000).unwrap();
        assert!(memory.iter().all(|&byte| byte == 0));
        memory.fill(7);
        assert_eq!((memory.len(), memory[9_999]), (10_000, 7));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(FileBackedMemory::new(&folder.path().join("absent"), 1).is_err());
    }
}
