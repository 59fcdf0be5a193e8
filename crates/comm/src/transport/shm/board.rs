use super::atomics::{AtomicU32, AtomicU64, Ordering, fence};
use super::futex;
use crate::CommError;
use crate::backoff::Backoff;
use crate::call::Call;
use crate::control::Control;
use crate::operation::{OPERATION_WORDS, Operation};
use rustix::io::Errno;
use std::time::Instant;
use trireme_base::Rank;

/// The state that a rank publishes to its peers, at the start of its area. Only the owner writes to it, except for `num_sleepers`.
#[derive(Default)]
#[repr(C)]
pub(super) struct Board {
    /// The posts for the last even and the last odd barrier. The owner can be one barrier ahead of a peer that still reads, but not two.
    barrier_words: [CachePadded<BarrierWords>; 2],
    /// Number of peers that sleep until the owner arrives at a barrier.
    num_sleepers: CachePadded<AtomicU32>,
}

/// A cache line. Values written by different ranks or at different times are in different lines, and values read together are in one: to
/// fetch a line from another core's cache takes longer than to process it.
#[derive(Default)]
#[repr(C, align(64))]
struct CachePadded<T>(T);

/// The words that a rank publishes for a barrier.
#[derive(Default)]
#[repr(C)]
struct BarrierWords {
    /// Number of the last even or the last odd barrier at which the owner arrived. Wraps around.
    barrier: AtomicU32,
    sequence: AtomicU64,
    operation: [AtomicU64; OPERATION_WORDS],
    input: AtomicU64,
    output: AtomicU64,
}

/// The location of a rank's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Location {
    /// Memory that peers do not map.
    Private,
    /// The full vector, at this offset of the rank's arena.
    Vector(usize),
    /// Only the rank's own block of the vector, at this offset of the rank's arena.
    Block(usize),
}

impl Location {
    const PRIVATE: u64 = u64::MAX;

    fn encode(self) -> u64 {
        match self {
            Location::Private => Location::PRIVATE,
            Location::Vector(offset) => (offset as u64) << 1,
            Location::Block(offset) => (offset as u64) << 1 | 1,
        }
    }

    fn decode(word: u64) -> Self {
        match word {
            Location::PRIVATE => Location::Private,
            word if word.is_multiple_of(2) => Location::Vector((word >> 1) as usize),
            word => Location::Block((word >> 1) as usize),
        }
    }
}

/// The locations of a rank's operands in an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Post {
    pub(super) input: Location,
    pub(super) output: Location,
}

impl Post {
    /// Whether the result overwrites the input. Also true if both vectors are in private memory.
    pub(super) fn is_in_place(&self) -> bool {
        self.input == self.output
    }

    /// Whether the locations match the operation: a location is a block only where the operation has blocks, and an input in the arena is a
    /// block where the operation has blocks, unless it is in place.
    pub(super) fn fits(&self, operation: Operation) -> bool {
        let is_block = |location: Location| matches!(location, Location::Block(_));
        let (input_is_block, output_is_block) = (operation.input_is_block(), operation.output_is_block());
        let is_one_block = |location, may_be| !is_block(location) || may_be;
        is_one_block(self.input, input_is_block)
            && is_one_block(self.output, output_is_block)
            && (self.is_in_place()
                || is_block(self.input) == input_is_block
                || matches!(self.input, Location::Private))
    }

    /// The post of an operation whose data goes through stages.
    pub(super) const STAGED: Post = Post { input: Location::Private, output: Location::Private };
}

impl Board {
    /// Posts the owner's operands for barrier number `barrier`. Visible to peers after [`arrive`](Board::arrive) at that barrier.
    pub(super) fn post(&self, barrier: u32, call: &Call, post: Post) {
        let words = self.words(barrier);
        words.sequence.store(call.sequence, Ordering::Relaxed);
        words.input.store(post.input.encode(), Ordering::Relaxed);
        words.output.store(post.output.encode(), Ordering::Relaxed);
        for (word, value) in words.operation.iter().zip(call.operation.encode()) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Reads the operands that the board's owner, `rank`, posted for a barrier. Fails unless the owner posted the operation that rank `own`
    /// executes.
    pub(super) fn read(&self, barrier: u32, call: &Call, own: Rank, rank: Rank) -> Result<Post, CommError> {
        let words = self.words(barrier);
        let operation = [0, 1].map(|index: usize| words.operation[index].load(Ordering::Relaxed));
        if words.sequence.load(Ordering::Relaxed) != call.sequence {
            return Err(call.protocol(rank, "it posted an operation out of order"));
        }
        match Operation::decode(operation) {
            Some(operation) if operation == call.operation => Ok(Post {
                input: Location::decode(words.input.load(Ordering::Relaxed)),
                output: Location::decode(words.output.load(Ordering::Relaxed)),
            }),
            Some(operation) => Err(call.mismatch(own, rank, operation)),
            None => Err(call.protocol(rank, "it posted something that is not an operation")),
        }
    }

    /// Publishes that the owner has arrived at a barrier, and all memory that it wrote before.
    pub(super) fn arrive(&self, barrier: u32) {
        let word = &self.words(barrier).barrier;
        word.store(barrier, Ordering::Release);
        // A sleeper increments the count before it reads the barrier number a last time. The owner writes the barrier number before it
        // reads the count. So either the owner sees the sleeper, or the sleeper sees that the owner has arrived.
        fence(Ordering::SeqCst);
        if self.num_sleepers.0.load(Ordering::Relaxed) > 0 {
            futex::wake(word);
        }
    }

    /// Waits until the owner has arrived at this or a later barrier. Polls for a moment, then sleeps.
    pub(super) fn wait(
        &self,
        barrier: u32,
        call: &Call,
        backoff: &mut Backoff,
        control: &mut Control,
    ) -> Result<(), CommError> {
        if self.has_arrived(barrier) {
            return Ok(());
        }
        let since = Instant::now();
        let has_arrived = backoff.poll(call.is_awaited, || self.has_arrived(barrier));
        let result = if has_arrived { Ok(()) } else { self.sleep(barrier, call, control) };
        if !has_arrived && result.is_ok() {
            control.record_progress();
        }
        control.call_statistics.waiting += since.elapsed();
        result
    }

    pub(super) fn has_arrived(&self, barrier: u32) -> bool {
        let behind = barrier.wrapping_sub(self.words(barrier).barrier.load(Ordering::Acquire));
        behind == 0 || behind >= 1 << 31
    }

    fn words(&self, barrier: u32) -> &BarrierWords {
        &self.barrier_words[barrier as usize % 2].0
    }

    fn sleep(&self, barrier: u32, call: &Call, control: &mut Control) -> Result<(), CommError> {
        loop {
            match self.sleep_once(barrier) {
                Ok(true) => return Ok(()),
                Ok(false) => control.tick(call)?,
                Err(error) => return Err(call.wait_failed(error.into())),
            }
        }
    }

    /// Sleeps until the owner may have arrived, for at most a tick. Returns whether it has.
    pub(super) fn sleep_once(&self, barrier: u32) -> Result<bool, Errno> {
        let word = &self.words(barrier).barrier;
        self.num_sleepers.0.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = word.load(Ordering::Relaxed);
        let slept = if self.has_arrived(barrier) { Ok(()) } else { futex::wait(word, seen) };
        self.num_sleepers.0.fetch_sub(1, Ordering::Relaxed);
        match slept {
            _ if self.has_arrived(barrier) => Ok(true),
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
