//! Failures of the disk: every pending and later transfer fails with an error that states the facts.

use crate::support::{
    FailAfter, Failure, METHODS, content, create, filled, folder, options, round_trip, unnamed_file,
};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;
use trireme_swap::{Access, Direction, Interceptor, IoMethod, SwapError, SwapFile, SwapOptions};

const LEN: usize = 50_000;
/// Bytes that a block of [`LEN`] bytes occupies in the file.
const SPAN: u64 = 53_248;
/// Number of parts of a block of [`LEN`] bytes, with the part size of [`options`].
const NUM_PARTS: usize = 7;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn failing(method: IoMethod, num_passing: usize, failure: Failure) -> SwapOptions {
    SwapOptions { interceptor: Some(Arc::new(FailAfter::new(num_passing, failure))), ..options(method) }
}

/// Asserts that every new transfer fails at once with an error of this text.
fn assert_failed(swap: &SwapFile, text: &str) {
    for transfer in [swap.write(0, filled(swap, LEN, 1)), swap.read(1, swap.buffer(LEN).expect("memory"))] {
        assert!(transfer.is_done());
        assert_eq!(transfer.wait().expect_err("the file has failed").to_string(), text);
    }
}

#[test]
fn a_refused_transfer_fails_the_file() {
    let folder = folder();
    for method in METHODS {
        // The first case fails in the second write. The second case fails in the read, before any part of the write that is issued after it
        // can end.
        for (num_passing, errno, direction) in
            [(NUM_PARTS + 2, ENOSPC, Direction::Write), (2 * NUM_PARTS + 2, EIO, Direction::Read)]
        {
            let options = failing(method, num_passing, Failure::Errno(errno));
            let Some(swap) = create(folder.path(), &[LEN; 3], &options) else { continue };
            let writes = [0, 1].map(|block| swap.write(block, filled(&swap, LEN, block as u32)).wait());
            let read = swap.read(1, swap.buffer(LEN).expect("memory"));
            let pending = swap.write(2, filled(&swap, LEN, 2));
            let error = read.wait().expect_err("the disk fails");
            assert!(writes[0].is_ok());
            assert_eq!(writes[1].is_err(), direction == Direction::Write);
            assert!(pending.wait().is_err());
            let SwapError::Io { access, folder: place, source } = &error else { panic!("{error}") };
            assert_eq!((access.direction, access.block), (direction, 1));
            assert!((SPAN..2 * SPAN).contains(&access.offset), "{access:?}");
            assert_eq!((place.as_path(), source.raw_os_error()), (folder.path(), Some(errno)));
            assert_failed(&swap, &error.to_string());
        }
    }
}

#[test]
fn a_short_transfer_fails_the_file() {
    let folder = folder();
    for method in METHODS {
        let options = failing(method, NUM_PARTS, Failure::Short);
        let Some(swap) = create(folder.path(), &[LEN; 2], &options) else { continue };
        swap.write(1, filled(&swap, LEN, 1)).wait().expect("the write passes");
        let error = swap.read(1, swap.buffer(LEN).expect("memory")).wait().expect_err("the read is short");
        let SwapError::Short { access, moved, .. } = &error else { panic!("{error}") };
        assert_eq!((access.direction, access.block, *moved), (Direction::Read, 1, access.bytes / 2));
        assert_failed(&swap, &error.to_string());
    }
}

#[test]
fn a_shortened_file_fails() {
    let folder = folder();
    for method in METHODS {
        let Some(swap) = create(folder.path(), &[LEN; 2], &options(method)) else { continue };
        swap.write(1, filled(&swap, LEN, 1)).wait().expect("a disk that works");
        unnamed_file(folder.path()).set_len(SPAN + 100).expect("the file can be cut");
        let error = swap.read(1, swap.buffer(LEN).expect("memory")).wait().expect_err("the block is gone");
        assert!(matches!(&error, SwapError::Short { access, .. } if access.block == 1), "{error}");
    }
}

#[test]
fn a_bit_that_flips_on_disk_is_found() {
    let folder = folder();
    for method in METHODS {
        for position in [0, 20_000, LEN as u64 - 1] {
            let Some(swap) = create(folder.path(), &[LEN; 2], &options(method)) else { continue };
            (0..2).for_each(|block| round_trip(&swap, block, LEN, block as u32).expect("a disk that works"));
            flip_bit(&swap, &folder, SPAN + position);
            // The other block is intact.
            let buffer =
                swap.read(0, swap.buffer(LEN).expect("memory")).wait().expect("this block is unchanged");
            assert!(*buffer == *content(LEN, 0));
            let error = swap.read(1, buffer).wait().expect_err("the block changed");
            let SwapError::Corrupted { access, expected, found, .. } = &error else { panic!("{error}") };
            assert_eq!((access.block, access.offset), (1, SPAN + position / 8192 * 8192));
            assert_ne!(expected, found);
            assert_failed(&swap, &error.to_string());
        }
    }
}

fn flip_bit(swap: &SwapFile, folder: &tempfile::TempDir, offset: u64) {
    assert_eq!(swap.description().size.0, 2 * SPAN);
    let file = unnamed_file(folder.path());
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("the byte is there");
    file.write_all_at(&[byte[0] ^ 0x10], offset).expect("the byte can be changed");
    file.sync_all().expect("the change reaches the disk");
}

/// Timeout of transfers on a disk that hangs.
const TIMEOUT: Duration = Duration::from_millis(50);

/// Blocks every operation until the other end of the channel is dropped.
#[derive(Debug)]
struct Hang {
    released: Mutex<Receiver<()>>,
    /// Dropped with the interceptor, when no thread uses it any more.
    _ended: Sender<()>,
}

impl Interceptor for Hang {
    fn result(&self, _: &Access, result: io::Result<usize>) -> io::Result<usize> {
        let _ = self.released.lock().expect("no thread panics while it hangs").recv();
        result
    }
}

/// Creates a swap file with two blocks on a disk that hangs, or returns `None` if the system does not allow the method. Dropping the
/// returned sender releases the disk. The returned receiver disconnects when no thread uses the disk any more.
fn hanging(folder: &Path, method: IoMethod) -> Option<(SwapFile, Sender<()>, Receiver<()>)> {
    let (release, released) = channel();
    let (_ended, ended) = channel();
    let interceptor = Hang { released: Mutex::new(released), _ended };
    let options =
        SwapOptions { interceptor: Some(Arc::new(interceptor)), timeout: TIMEOUT, ..options(method) };
    create(folder, &[LEN; 2], &options).map(|swap| (swap, release, ended))
}

#[test]
fn a_disk_that_hangs_fails_all_transfers_at_the_timeout() {
    let folder = folder();
    for method in METHODS {
        let Some((swap, release, ended)) = hanging(folder.path(), method) else { continue };
        let transfer = swap.write(1, filled(&swap, LEN, 1));
        let later = swap.read(1, swap.buffer(LEN).expect("memory"));
        let other = swap.write(0, filled(&swap, LEN, 1));
        assert!(!transfer.is_done());
        // The oldest transfer is reported as hanging, whichever transfer is waited for.
        let error = later.wait().expect_err("the disk hangs");
        let SwapError::Timeout { access, timeout: allowed, .. } = &error else { panic!("{error}") };
        assert_eq!((access.direction, access.block, access.offset), (Direction::Write, 1, SPAN));
        assert_eq!((access.bytes as u64, *allowed), (SPAN, TIMEOUT));
        assert!(other.is_done());
        assert_eq!(other.wait().expect_err("the disk hangs").to_string(), error.to_string());
        assert_failed(&swap, &error.to_string());
        // The thread is still blocked, and the transfer outlives its file.
        drop(swap);
        assert_eq!(transfer.wait().expect_err("the disk hangs").to_string(), error.to_string());
        drop(release);
        ended.recv().expect_err("the threads end once the system answers");
    }
}

#[test]
fn a_drop_waits_for_a_disk_that_hangs_until_the_timeout() {
    let folder = folder();
    for method in METHODS {
        let Some((swap, release, ended)) = hanging(folder.path(), method) else { continue };
        let transfer = swap.write(0, filled(&swap, LEN, 1));
        drop(swap);
        assert!(matches!(transfer.wait(), Err(SwapError::Closed { .. } | SwapError::Timeout { .. })));
        drop(release);
        ended.recv().expect_err("the threads end once the system answers");
    }
}

#[test]
fn a_file_that_is_dropped_ends_its_transfers() {
    let folder = folder();
    for method in METHODS {
        let Some(swap) = create(folder.path(), &[LEN; 8], &options(method)) else { continue };
        let transfers: Vec<_> =
            (0..8).map(|block| swap.write(block, filled(&swap, LEN, block as u32))).collect();
        drop(swap);
        for (block, transfer) in transfers.into_iter().enumerate() {
            assert!(transfer.is_done());
            match transfer.wait() {
                Ok(buffer) => assert!(*buffer == *content(LEN, block as u32)),
                Err(error) => assert!(matches!(error, SwapError::Closed { .. }), "{error}"),
            }
        }
    }
}

#[test]
fn a_panic_of_a_thread_fails_the_file() {
    let folder = folder();
    for method in METHODS {
        let Some(swap) = create(folder.path(), &[LEN; 2], &failing(method, 3, Failure::Panic)) else {
            continue;
        };
        let error = swap.write(1, filled(&swap, LEN, 1)).wait().expect_err("the thread panics");
        assert!(matches!(&error, SwapError::Panicked { .. }), "{error}");
    }
}

/// Blocks each operation until another operation is about to end, too.
#[derive(Debug)]
struct WaitForAnother(Barrier);

impl Interceptor for WaitForAnother {
    fn result(&self, _: &Access, result: io::Result<usize>) -> io::Result<usize> {
        self.0.wait();
        result
    }
}

#[test]
fn different_blocks_are_in_flight_concurrently() {
    let folder = folder();
    let interceptor: Arc<dyn Interceptor> = Arc::new(WaitForAnother(Barrier::new(2)));
    let options =
        SwapOptions { num_threads: 2, interceptor: Some(interceptor), ..options(IoMethod::BufferedThreads) };
    let swap = create(folder.path(), &[4096; 2], &options).expect("any system can do that");
    let transfers = [0, 1].map(|block| swap.write(block, filled(&swap, 4096, 1)));
    for transfer in transfers {
        transfer.wait().expect("the transfers meet");
    }
}

#[test]
#[should_panic(expected = "was never written")]
fn a_block_that_was_never_written_is_not_read() {
    let folder = folder();
    let swap = SwapFile::create(folder.path(), &[4096; 2], &SwapOptions::default()).expect("a swap file");
    let buffer = swap.write(0, filled(&swap, 4096, 1)).wait().expect("a disk that works");
    drop(swap.read(1, buffer));
}

#[test]
#[should_panic(expected = "different lengths")]
fn a_buffer_of_another_length_is_not_written() {
    let folder = folder();
    let swap = SwapFile::create(folder.path(), &[4096], &SwapOptions::default()).expect("a swap file");
    drop(swap.write(0, filled(&swap, 4095, 1)));
}
