//! The one place of this crate that needs `unsafe`: a read-only memory mapping of a file.
#![allow(unsafe_code)]

use memmap2::UncheckedAdvice;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};

/// A whole file as bytes, read by the kernel page by page when they are first touched.
///
/// The file must not be changed or shortened while it is mapped: a changed byte shows at once, and reading
/// past a new, shorter end kills the process with SIGBUS. [`crate::prepare`] keeps to this: it never writes
/// into a token file in place but renames a new file over it, which leaves an existing mapping untouched.
#[derive(Debug)]
pub(crate) struct Mapping(memmap2::Mmap);

impl Mapping {
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        // SAFETY: the mapping is private to this process and read-only, and lives as long as the value.
        // That nobody changes the file meanwhile is the documented condition above; every value read is
        // treated as untrusted bytes, so that a change can give a wrong token but no invalid memory access
        // other than the signal named above.
        unsafe { memmap2::Mmap::map(file) }.map(Mapping)
    }

    /// Lets the kernel take back the memory of a range that will not be read again soon. Only advice: where
    /// the kernel does not follow it, nothing but memory is lost.
    pub(crate) fn release(&self, range: Range<usize>) {
        // SAFETY: the mapping is read-only and backed by the file, so a page that is dropped comes back from
        // the file with the same content when it is touched again.
        let advised =
            unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
        drop(advised);
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
