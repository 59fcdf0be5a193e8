//! Sleep and wake-up on words of shared memory.

use super::atomics::AtomicU32;
use crate::control::TICK;
use rustix::io::Errno;
use rustix::thread::futex;

/// Sleeps until it is woken, for at most a tick. Returns at once if `word` is not `seen`.
pub(super) fn wait(word: &AtomicU32, seen: u32) -> Result<(), Errno> {
    let tick = TICK.try_into().expect("a tick is short");
    futex::wait(word, futex::Flags::empty(), seen, Some(&tick))
}

/// Wakes all threads that sleep on the word.
pub(super) fn wake(word: &AtomicU32) {
    // Fails only for an address that is not mapped.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
