//! One operation that this rank executes: its identity, payload and cost.

use crate::buffer::Storage;
use crate::{CommError, Operation};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::{DeviceTransportError, Rank};

/// The operation that this rank is executing, with its sequence number, start and timeout. Passed to the transport.
pub(crate) struct Call {
    /// Whether the executing thread waits for this operation's result and has no other work.
    pub(crate) is_awaited: bool,
    pub(crate) operation: Operation,
    pub(crate) sequence: u64,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CallStatistics {
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

    pub(crate) fn device_failure(&self, failure: DeviceTransportError) -> CommError {
        match failure {
            DeviceTransportError::Device(cause) => CommError::DeviceFailed { cause },
            DeviceTransportError::Library(cause) => {
                CommError::DeviceTransport { operation: self.operation, sequence: self.sequence, cause }
            }
        }
    }

    /// The failure of this operation if `own` issued it and `rank` issued `theirs` instead.
    pub(crate) fn mismatch(&self, own: Rank, rank: Rank, theirs: Operation) -> CommError {
        CommError::mismatch(self.sequence, (own, self.operation), (rank, theirs))
    }
}

/// The data of an operation: inputs before it runs, results after it.
pub(crate) enum Payload {
    /// The payload of a barrier.
    Nothing,
    /// Makes the ranks join the communicator of their devices.
    JoinDevices,
    /// The vector of an in-place operation.
    Vector(Storage),
    /// The vectors of an out-of-place operation. `lens` are the block lengths of a variable all-to-all.
    Pair { input: Storage, output: Storage, lens: Option<BlockLens> },
    /// Control data, one block per rank. Before the operation, only this rank's block is filled.
    Blocks(Vec<Vec<u8>>),
}

/// Block lengths of a variable all-to-all, in elements. The variant decides how blocks are routed.
pub(crate) enum BlockLens {
    /// Lengths to each rank, and from each rank. Blocks go directly to their receivers.
    Own([Vec<usize>; 2]),
    /// Lengths between all ranks: a matrix in row-major order, with a row per sender and a column per receiver. A block for another host
    /// goes through a rank of the sender's host.
    All(Arc<[usize]>),
}

impl BlockLens {
    /// Numbers of elements that `rank` sends to each rank, and receives from each.
    pub(crate) fn of_rank(&self, rank: Rank, world_size: usize) -> [Vec<usize>; 2] {
        match self {
            BlockLens::Own(lens) => lens.clone(),
            BlockLens::All(lens) => {
                let sent = lens[rank.0 * world_size..][..world_size].to_vec();
                [sent, lens.iter().skip(rank.0).step_by(world_size).copied().collect()]
            }
        }
    }

    /// Numbers of elements that `rank` sends and receives in total.
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
    /// Whether the vectors are in memory of a device.
    pub(crate) fn is_on_device(&self) -> bool {
        match self {
            Payload::Vector(vector) => vector.is_on_device(),
            Payload::Pair { input, output, .. } => input.is_on_device() || output.is_on_device(),
            Payload::Nothing | Payload::JoinDevices | Payload::Blocks(_) => false,
        }
    }

    /// Blocks until no device uses the vectors.
    ///
    /// # Errors
    /// If the device has failed.
    pub(crate) fn wait(&mut self) -> Result<(), CommError> {
        match self {
            Payload::Vector(vector) => vector.wait(),
            Payload::Pair { input, output, .. } => input.wait().and_then(|()| output.wait()),
            Payload::Nothing | Payload::JoinDevices | Payload::Blocks(_) => Ok(()),
        }
    }
}

/// A function that receives the result of an operation on the thread that executed it.
pub(crate) type Callback<T> = Box<dyn FnOnce(Result<T, CommError>) + Send>;
