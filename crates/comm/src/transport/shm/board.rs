use crate::CommError;
use crate::control::{Control, TICK};
use crate::engine::{Call, Cost};
use crate::operation::{OPERATION_WORDS, Operation};
use rustix::io::Errno;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// How long to spin before sleeping: about what it costs to sleep and be woken.
const SPIN: Duration = Duration::from_micros(10);
/// Looks at the clock once in so many looks at the peer.
const LOOKS_PER_CLOCK: u32 = 16;

/// What a rank tells its peers, at the start of its arena. Only its owner writes to it, but for
/// `num_sleepers`.
#[repr(C)]
pub(super) struct Board {
    /// `2 * sequence` + the phase the owner is in, wrapping.
    progress: Line<AtomicU32>,
    /// Peers asleep until `progress` changes.
    num_sleepers: Line<AtomicU32>,
    /// The latest operations of even and odd sequence number. The owner can be one operation ahead
    /// of a peer that still reads the other one, but not two.
    posts: [Line<Post>; 2],
}

/// Keeps what is written by different ranks or at different times in different cache lines.
#[repr(C, align(64))]
struct Line<T>(T);

struct Post {
    sequence: AtomicU64,
    operation: [AtomicU64; OPERATION_WORDS],
    location: AtomicU64,
}

impl Board {
    /// The owner has posted the operation.
    pub(super) const POSTED: u32 = 1;
    /// The owner no longer touches the peers' memory.
    pub(super) const FINISHED: u32 = 2;

    /// Publishes the owner's operation, and all memory it wrote before.
    pub(super) fn post(&self, call: &Call, location: u64) {
        let post = self.post_of(call);
        post.sequence.store(call.sequence, Ordering::Relaxed);
        post.location.store(location, Ordering::Relaxed);
        for (word, value) in post.operation.iter().zip(call.operation.encode()) {
            word.store(value, Ordering::Relaxed);
        }
        self.advance(call, Board::POSTED);
    }

    /// Publishes that the owner has finished its part of the operation.
    pub(super) fn finish(&self, call: &Call) {
        self.advance(call, Board::FINISHED);
    }

    /// Fails unless the owner, `rank`, posted the operation that `own` is in.
    pub(super) fn compare(&self, call: &Call, own: Rank, rank: Rank) -> Result<(), CommError> {
        let post = self.post_of(call);
        let words = [0, 1].map(|index: usize| post.operation[index].load(Ordering::Relaxed));
        if post.sequence.load(Ordering::Relaxed) != call.sequence {
            return Err(call.protocol(rank, "it posted an operation out of turn"));
        }
        match Operation::decode(words) {
            Some(operation) if operation == call.operation => Ok(()),
            Some(operation) => Err(call.mismatch(own, rank, operation)),
            None => Err(call.protocol(rank, "it posted what is no operation")),
        }
    }

    /// What the owner posted with the operation: the offset of its buffer, or the length of its block.
    pub(super) fn location(&self, call: &Call) -> u64 {
        self.post_of(call).location.load(Ordering::Relaxed)
    }

    /// Waits until the owner is in `phase` of the operation or beyond: a short spin, then asleep.
    pub(super) fn wait(
        &self,
        phase: u32,
        call: &Call,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let target = progress_word(call, phase);
        if has_reached(self.progress.0.load(Ordering::Acquire), target) {
            return Ok(());
        }
        let since = Instant::now();
        let result = if self.spin(target, since) { Ok(()) } else { self.sleep(target, call, control) };
        cost.waiting += since.elapsed();
        result
    }

    fn spin(&self, target: u32, since: Instant) -> bool {
        while since.elapsed() < SPIN {
            for _ in 0..LOOKS_PER_CLOCK {
                if has_reached(self.progress.0.load(Ordering::Acquire), target) {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
        false
    }

    fn sleep(&self, target: u32, call: &Call, control: &mut Control) -> Result<(), CommError> {
        let tick = TICK.try_into().expect("a tick is short");
        loop {
            // The count is raised before the progress is read, and the owner reads them the other way round:
            // either it sees a sleeper, or the sleeper sees the progress.
            self.num_sleepers.0.fetch_add(1, Ordering::SeqCst);
            let progress = self.progress.0.load(Ordering::SeqCst);
            let slept = if has_reached(progress, target) {
                Ok(())
            } else {
                futex::wait(&self.progress.0, futex::Flags::empty(), progress, Some(&tick))
            };
            self.num_sleepers.0.fetch_sub(1, Ordering::SeqCst);
            if has_reached(self.progress.0.load(Ordering::Acquire), target) {
                return Ok(());
            }
            match slept {
                Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => control.tick(call)?,
                Err(error) => return Err(call.wait_failed(error.into())),
            }
        }
    }

    fn advance(&self, call: &Call, phase: u32) {
        self.progress.0.store(progress_word(call, phase), Ordering::SeqCst);
        if self.num_sleepers.0.load(Ordering::SeqCst) > 0 {
            // Fails only for an address that is not mapped.
            let _ = futex::wake(&self.progress.0, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    fn post_of(&self, call: &Call) -> &Post {
        &self.posts[(call.sequence % 2) as usize].0
    }
}

fn progress_word(call: &Call, phase: u32) -> u32 {
    (call.sequence as u32).wrapping_mul(2).wrapping_add(phase)
}

/// Whether `progress` is at or after `target`; they are never far apart.
fn has_reached(progress: u32, target: u32) -> bool {
    progress.wrapping_sub(target) < 1 << 31
}
