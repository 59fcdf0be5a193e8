//! One operation in flight on this rank: what it works on, and what it costs.

use crate::buffer::Storage;
use crate::{CommError, Operation};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// One operation in flight on this rank, as its transport sees it.
pub(crate) struct Call {
    /// Whether the executing thread has nothing else to do for this rank, but to wait for this.
    pub(crate) is_awaited: bool,
    pub(crate) operation: Operation,
    pub(crate) sequence: u64,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cost {
    pub(crate) payload_bytes: u64,
    pub(crate) waiting: Duration,
}

impl Call {
    pub(crate) fn peer_lost(&self, rank: Rank) -> CommError {
        CommError::PeerLost { rank, operation: self.operation, sequence: self.sequence }
    }

    pub(crate) fn peer_left(&self, rank: Rank) -> CommError {
        CommError::PeerLeft { rank, operation: self.operation, sequence: self.sequence }
    }

    pub(crate) fn peer_failed(&self, rank: Rank) -> CommError {
        CommError::PeerFailed { rank, operation: self.operation, sequence: self.sequence }
    }

    pub(crate) fn timed_out(&self, missing: Vec<Rank>) -> CommError {
        CommError::TimedOut {
            operation: self.operation,
            sequence: self.sequence,
            timeout: self.timeout,
            missing,
        }
    }

    pub(crate) fn protocol(&self, rank: Rank, what: impl Into<String>) -> CommError {
        CommError::Protocol { rank, operation: self.operation, sequence: self.sequence, what: what.into() }
    }

    pub(crate) fn wait_failed(&self, source: io::Error) -> CommError {
        CommError::Wait { operation: self.operation, sequence: self.sequence, source: Arc::new(source) }
    }

    /// The failure if `rank` issued `theirs` where `own` issued this call's operation.
    pub(crate) fn mismatch(&self, own: Rank, rank: Rank, theirs: Operation) -> CommError {
        CommError::mismatch(self.sequence, (own, self.operation), (rank, theirs))
    }
}

/// What an operation works on, before and after it.
pub(crate) enum Payload {
    /// A barrier has none.
    Nothing,
    /// The vector of an operation in place.
    Vector(Storage),
    /// The vectors of an operation out of place, with the lengths of an all-to-all with blocks of any lengths.
    Pair { input: Storage, output: Storage, lens: Option<BlockLens> },
    /// Control data of each rank: this rank's block before, all blocks after.
    Blocks(Vec<Vec<u8>>),
}

/// Elements of the blocks of an all-to-all, and by that how they travel.
pub(crate) enum BlockLens {
    /// To each rank, and from each rank: blocks go straight there.
    Own([Vec<usize>; 2]),
    /// From each rank to each rank, first by who sends and then by who receives: blocks go by hosts.
    All(Arc<[usize]>),
}

impl BlockLens {
    /// How many elements `rank` sends and receives in all.
    pub(crate) fn totals(&self, rank: Rank, world_size: usize) -> [usize; 2] {
        match self {
            BlockLens::Own(lens) => lens.each_ref().map(|lens| lens.iter().sum()),
            BlockLens::All(lens) => {
                let sent = &lens[rank.0 * world_size..][..world_size];
                [sent.iter().sum(), lens.iter().skip(rank.0).step_by(world_size).sum()]
            }
        }
    }
}

impl Payload {
    /// Waits until no device works with the vectors any more.
    pub(crate) fn wait(&mut self) {
        match self {
            Payload::Vector(vector) => vector.wait(),
            Payload::Pair { input, output, .. } => {
                input.wait();
                output.wait();
            }
            Payload::Nothing | Payload::Blocks(_) => (),
        }
    }
}

/// Is called with what came of an operation, by the thread that executes it.
pub(crate) type Callback<T> = Box<dyn FnOnce(Result<T, CommError>) + Send>;
