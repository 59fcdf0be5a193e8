//! Creation of swap files: resources taken from the system, and errors if the system refuses them.

use crate::support::{METHODS, create, folder, options, round_trip, unnamed_file};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use trireme_swap::{ALIGNMENT, IoMethod, SwapError, SwapFile, SwapOptions, measure_bandwidth};
use trireme_testkit::or_skip;

#[test]
fn space_is_reserved_at_creation_and_freed_by_drop() {
    let folder = folder();
    let swap =
        SwapFile::create(folder.path(), &[1, 0, 5000, 1 << 20], &SwapOptions::default()).expect("a file");
    let size = (4096 + 8192 + (1 << 20)) as u64;
    assert_eq!(swap.description().size.0, size);
    let file = unnamed_file(folder.path());
    let metadata = file.metadata().expect("facts of the file");
    assert_eq!(metadata.len(), size);
    if swap.description().is_reserved {
        assert!(metadata.blocks() * 512 >= size, "only {} units of 512 bytes are taken", metadata.blocks());
    }
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
    drop((swap, file));
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
}

#[test]
fn every_method_serves_blocks_of_any_length() {
    let folder = folder();
    let lengths = [0, 1, 4095, 4096, 4097, 8192, 100_003];
    for method in METHODS {
        let Some(swap) = create(folder.path(), &lengths, &options(method)) else { continue };
        for (block, len) in lengths.into_iter().enumerate() {
            round_trip(&swap, block, len, block as u32).expect("a disk that works");
        }
        let statistics = swap.statistics();
        let bytes: usize = lengths.iter().map(|len| len.next_multiple_of(ALIGNMENT)).sum();
        assert_eq!((statistics.bytes_written, statistics.bytes_read), (bytes as u64, bytes as u64));
    }
}

#[test]
fn a_disk_that_is_too_small_refuses_at_the_start() {
    let folder = folder();
    let error =
        SwapFile::create(folder.path(), &[1 << 60], &SwapOptions::default()).expect_err("no such disk");
    let SwapError::Space { asked, free, source, .. } = &error else { panic!("another error: {error}") };
    // Free space is checked before the file system is asked, which may fill the disk before it refuses.
    assert_eq!((asked.0, source.kind()), (1 << 60, std::io::ErrorKind::StorageFull));
    let text = error.to_string();
    assert!(free.0 < asked.0 && text.contains(&free.to_string()), "{text}");
    assert!(text.contains(&folder.path().display().to_string()), "{text}");
}

#[test]
fn a_path_that_is_not_a_folder_is_refused() {
    let folder = folder();
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    for wrong in [&folder.path().join("absent"), &file] {
        let error = SwapFile::create(wrong, &[4096], &SwapOptions::default()).expect_err("no folder");
        assert!(matches!(&error, SwapError::Create { folder, .. } if folder == wrong), "{error}");
    }
}

#[test]
fn lengths_that_no_file_can_have_are_refused() {
    let folder = folder();
    for lengths in [&[usize::MAX][..], &[1 << 62, 1 << 62], &[isize::MAX as usize - 4096, 4096]] {
        let options = SwapOptions { part_bytes: 1 << 30, ..SwapOptions::default() };
        let error = SwapFile::create(folder.path(), lengths, &options).expect_err("no such file");
        assert!(matches!(error, SwapError::Options { .. } | SwapError::Space { .. }), "{error}");
    }
}

#[test]
fn the_description_says_what_was_chosen() {
    let folder = folder();
    for method in METHODS {
        let swap = SwapFile::create(folder.path(), &[10_000], &options(method)).expect("a swap file");
        let description = swap.description();
        assert!(description.method >= method, "faster than asked for: {description}");
        assert_eq!(description.method == method, description.unavailable.is_empty(), "{description}");
        let text = description.to_string();
        assert!(text.contains("12.00KiB") && text.contains(&description.method.to_string()), "{text}");
        assert!(description.unavailable.iter().all(|(_, reason)| text.contains(reason)), "{text}");
    }
}

/// A swap file works on a tmpfs, whichever IO methods the kernel supports there.
#[test]
fn a_swap_file_works_on_tmpfs() {
    let folder = Path::new("/dev/shm");
    let Some(_) = or_skip("file system in memory", folder.metadata()) else { return };
    let swap = SwapFile::create(folder, &[100_000], &options(IoMethod::Ring)).expect("a swap file");
    round_trip(&swap, 0, 100_000, 1).expect("memory works");
}

#[test]
fn buffers_that_are_dropped_are_used_again() {
    let folder = folder();
    let swap = SwapFile::create(folder.path(), &[9000, 9000], &options(IoMethod::Ring)).expect("a swap file");
    for seed in 0..20 {
        round_trip(&swap, 0, 9000, seed).expect("a disk that works");
        drop(swap.write(1, crate::support::filled(&swap, 9000, seed)));
        // The dropped transfer's buffer returns no later than the end of the next transfer of its block.
        drop(swap.read(1, swap.buffer(9000).expect("memory")).wait().expect("a disk that works"));
    }
    assert_eq!(swap.statistics().buffer_bytes, 2 * 12288);
}

#[test]
fn a_disk_has_a_bandwidth() {
    let folder = folder();
    for block_bytes in [1 << 20, usize::MAX] {
        let bandwidth = measure_bandwidth(folder.path(), block_bytes, &SwapOptions::default());
        let bandwidth = bandwidth.expect("a disk that works");
        assert!(bandwidth.read > 0.0 && bandwidth.write > 0.0, "{bandwidth:?}");
    }
}
