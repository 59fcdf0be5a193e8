//! Sleep on words of shared memory.

use super::atomics::AtomicU32;
use crate::control::TICK;
use rustix::io::Errno;
use rustix::thread::futex;

/// Sleeps unless `word` differs from `seen`: until it is woken, or for a tick.
pub(super) fn wait(word: &AtomicU32, seen: u32) -> Result<(), Errno> {
    let tick = TICK.try_into().expect("a tick is short");
    futex::wait(word, futex::Flags::empty(), seen, Some(&tick))
}

/// Wakes all who sleep on the word.
pub(super) fn wake(word: &AtomicU32) {
    // Fails only for an address that is not mapped.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
