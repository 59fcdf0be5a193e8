//! Transfers do not allocate once their buffers exist.

#[allow(dead_code, reason = "the other test binary uses the rest")]
#[path = "swap/support/mod.rs"]
mod support;

use support::{METHODS, create, filled, folder, options};
use trireme_swap::{SwapFile, SwapOptions};
use trireme_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const LENGTHS: [usize; 3] = [100_003, 5000, 64 << 10];

/// Issues a write and a read of every block, all at once, and waits for them. The buffers are reused from the previous round.
fn round(swap: &SwapFile) {
    let transfers = [0, 1, 2].map(|block| {
        let buffer = swap.buffer(LENGTHS[block]).expect("memory");
        let write = swap.write(block, buffer);
        (write, swap.read(block, swap.buffer(LENGTHS[block]).expect("memory")))
    });
    for (write, read) in transfers {
        let (sent, received) =
            (write.wait().expect("a disk that works"), read.wait().expect("a disk that works"));
        assert!(*sent == *received);
    }
}

#[test]
fn a_steady_state_allocates_nothing() {
    let folder = folder();
    for method in METHODS {
        // With several threads, the last one may start only after many rounds, and starting a thread allocates.
        let options = SwapOptions { num_threads: 1, ..options(method) };
        let Some(swap) = create(folder.path(), &LENGTHS, &options) else { continue };
        drop(LENGTHS.map(|len| filled(&swap, len, 1)));
        (0..3).for_each(|_| round(&swap));
        let before = ALLOCATOR.num_allocations();
        (0..20).for_each(|_| round(&swap));
        assert_eq!(ALLOCATOR.num_allocations() - before, 0, "allocations with {method}");
    }
}
