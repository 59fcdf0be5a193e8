//! Helpers shared by the tests of this crate.
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Mutex;
use tempfile::TempDir;
use trireme_swap::{Access, AlignedBuffer, Interceptor, IoMethod, SwapError, SwapFile, SwapOptions};
use trireme_testkit::or_skip;

pub(crate) const METHODS: [IoMethod; 3] =
    [IoMethod::Ring, IoMethod::DirectThreads, IoMethod::BufferedThreads];

/// Returns a temporary folder on disk.
pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder for temporary files")
}

/// Returns options with small parts, so that even small blocks have several.
pub(crate) fn options(method: IoMethod) -> SwapOptions {
    SwapOptions { method, part_bytes: 8192, queue_depth: 4, num_threads: 3, ..SwapOptions::default() }
}

/// Creates a swap file with the method in `options`. Returns `None` and reports a skipped test if the system does not allow the method.
pub(crate) fn create(folder: &Path, blocks: &[usize], options: &SwapOptions) -> Option<SwapFile> {
    let swap = SwapFile::create(folder, blocks, options).expect("a swap file");
    let has_method = swap.description().method == options.method;
    let reason = swap.description().to_string();
    or_skip(&options.method.to_string(), if has_method { Ok(swap) } else { Err(reason) })
}

/// Returns a buffer whose content depends on the seed.
pub(crate) fn filled(swap: &SwapFile, len: usize, seed: u32) -> AlignedBuffer {
    let mut buffer = swap.buffer(len).expect("memory");
    buffer.copy_from_slice(&content(len, seed));
    buffer
}

pub(crate) fn content(len: usize, seed: u32) -> Vec<u8> {
    let mut value = seed.wrapping_mul(2_654_435_761) | 1;
    let next = |_| {
        value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (value >> 24) as u8
    };
    (0..len).map(next).collect()
}

/// Writes a block, reads it back and checks its content.
pub(crate) fn round_trip(swap: &SwapFile, block: usize, len: usize, seed: u32) -> Result<(), SwapError> {
    let buffer = swap.write(block, filled(swap, len, seed)).wait()?;
    let buffer = swap.read(block, buffer).wait()?;
    assert!(*buffer == *content(len, seed), "block {block} came back other than it was written");
    Ok(())
}

/// Opens a second descriptor of the unnamed file that this process has open in `folder`.
pub(crate) fn unnamed_file(folder: &Path) -> File {
    let folder = folder.canonicalize().expect("the folder is there");
    let descriptors = fs::read_dir("/proc/self/fd").expect("a list of descriptors");
    let path = descriptors
        .map(|entry| entry.expect("a descriptor").path())
        .find(|path| fs::read_link(path).is_ok_and(|target| target.starts_with(&folder)))
        .expect("the swap file is open");
    OpenOptions::new().read(true).write(true).open(path).expect("the file opens again")
}

/// Lets the first `num_passing` operations succeed, and fails all later ones.
#[derive(Debug)]
pub(crate) struct FailAfter {
    pub(crate) num_passing: Mutex<usize>,
    pub(crate) failure: Failure,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Failure {
    /// The system error with this errno.
    Errno(i32),
    /// Only half of the bytes are moved.
    Short,
    Panic,
}

impl FailAfter {
    pub(crate) fn new(num_passing: usize, failure: Failure) -> Self {
        FailAfter { num_passing: Mutex::new(num_passing), failure }
    }
}

impl Interceptor for FailAfter {
    fn result(&self, access: &Access, result: io::Result<usize>) -> io::Result<usize> {
        let mut num_passing = self.num_passing.lock().expect("no thread panics while it holds the number");
        if *num_passing > 0 {
            *num_passing -= 1;
            return result;
        }
        drop(num_passing);
        match self.failure {
            Failure::Errno(number) => Err(io::Error::from_raw_os_error(number)),
            Failure::Short => Ok(access.bytes / 2),
            Failure::Panic => panic!("made by a test"),
        }
    }
}
