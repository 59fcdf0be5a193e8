//! Loom models of shared memory: `cargo test -p trireme-comm --features loom --lib loom_`.
//!
//! Boards and rings are compiled here a second time, against loom's atomics. Loom runs each test with every interleaving of its threads,
//! and with every value that a load may return. Each plain byte is in a [`Cell`], which fails the test if two threads access it without
//! synchronization. Only a wake-up ends a sleep, so a lost one is a deadlock, which loom reports.
//!
//! Loom treats a `SeqCst` access as `AcqRel`, but supports `SeqCst` fences, so the protocols use fences.

mod boards;
mod rings;

#[path = "../board.rs"]
#[expect(clippy::duplicate_mod, dead_code, reason = "a second time, for the models, which use a part of it")]
mod board;
#[path = "../ring.rs"]
#[expect(clippy::duplicate_mod, reason = "a second time, for the models")]
mod ring;

mod atomics {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
}

/// Sleep on words, as with the kernel's futex, but without a tick that ends it.
mod futex {
    use super::atomics::{AtomicU32, Ordering};
    use loom::sync::{Condvar, Mutex};
    use rustix::io::Errno;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    loom::lazy_static! {
        /// The sleepers, by the address of their word.
        static ref SLEEPERS: Mutex<BTreeMap<usize, Arc<Condvar>>> = Mutex::default();
    }

    pub(super) fn wait(word: &AtomicU32, seen: u32) -> Result<(), Errno> {
        let mut sleepers = SLEEPERS.lock().unwrap();
        if word.load(Ordering::Relaxed) != seen {
            return Err(Errno::AGAIN);
        }
        let own = Arc::clone(sleepers.entry(std::ptr::from_ref(word).addr()).or_default());
        drop(own.wait(sleepers).unwrap());
        Ok(())
    }

    pub(super) fn wake(word: &AtomicU32) {
        let sleepers = SLEEPERS.lock().unwrap();
        if let Some(sleepers) = sleepers.get(&std::ptr::from_ref(word).addr()) {
            sleepers.notify_all();
        }
    }
}

/// The memory of a ring, with so few bytes that it is soon full.
mod ring_memory {
    use super::Cell;
    use super::ring::State;
    use loom::sync::Arc;

    #[derive(Clone, Default)]
    pub(super) struct RingMemory(Arc<(State, [Cell<u8>; RingMemory::CAPACITY])>);

    impl RingMemory {
        pub(super) const CAPACITY: usize = 3;

        pub(super) fn state(&self) -> &State {
            &self.0.0
        }

        pub(super) unsafe fn write(&self, first: usize, from: &[u8]) {
            self.0.1[first..].iter().zip(from).for_each(|(cell, &byte)| cell.set(byte));
        }

        pub(super) unsafe fn read(&self, first: usize, to: &mut [u8]) {
            self.0.1[first..].iter().zip(to).for_each(|(cell, byte)| *byte = cell.get());
        }
    }
}

/// Plain memory that threads share by a protocol.
#[derive(Default)]
struct Cell<T>(loom::cell::UnsafeCell<T>);

// SAFETY: loom fails the test at a write unless all other accesses are ordered before or after it.
unsafe impl<T: Send> Sync for Cell<T> {}

impl<T: Copy> Cell<T> {
    fn set(&self, value: T) {
        // SAFETY: as above; the pointer does not leave the closure.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    fn get(&self) -> T {
        // SAFETY: as above.
        self.0.with(|cell| unsafe { *cell })
    }
}
