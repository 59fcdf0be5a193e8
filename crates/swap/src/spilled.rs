use crate::SwapError;
use crate::{raw, space};
use memmap2::MmapMut;
use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Arc;

/// Memory whose pages the system writes to a disk as it needs room, and takes back as they are used.
///
/// The space on the disk is taken at once, in a file without a name, which ends with this.
#[derive(Debug)]
pub struct SpilledMemory(MmapMut);

impl SpilledMemory {
    /// So many zeroed bytes, in a file in `folder`.
    ///
    /// # Errors
    /// A folder where no file can be made, or too little space there.
    pub fn new(folder: &Path, num_bytes: usize) -> Result<Self, SwapError> {
        let (mut file, is_reserved) = space::create(folder, num_bytes as u64)?;
        let fail = |source| SwapError::Create { folder: folder.to_owned(), source: Arc::new(source) };
        if !is_reserved {
            // A page without a block on a full disk would end the process.
            io::copy(&mut io::repeat(0).take(num_bytes as u64), &mut file).map_err(fail)?;
        }
        Ok(SpilledMemory(raw::map(&file).map_err(fail)?))
    }
}

impl Deref for SpilledMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for SpilledMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spilled_memory_keeps_what_is_written_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut memory = SpilledMemory::new(folder.path(), 10_000).unwrap();
        assert!(memory.iter().all(|&byte| byte == 0));
        memory.fill(7);
        assert_eq!((memory.len(), memory[9_999]), (10_000, 7));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(SpilledMemory::new(&folder.path().join("absent"), 1).is_err());
    }
}
