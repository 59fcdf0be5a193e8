use crate::buffer::Storage;
use crate::control::Control;
use crate::transport::Transport;
use crate::{CommError, CommStatistics, Operation};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// What an operation works on, before and after it.
pub(crate) enum Payload {
    /// A barrier has none.
    Nothing,
    /// The vector of an operation in place.
    Vector(Storage),
    /// The vectors of an operation out of place.
    Pair { input: Storage, output: Storage },
    /// Those of an all-to-all with blocks of any lengths: elements to and from each rank.
    Variable { input: Storage, output: Storage, lens: [Vec<usize>; 2] },
    /// Control data of each rank: this rank's block before, all blocks after.
    Blocks(Vec<Vec<u8>>),
}

/// Executes a group's operations, one at a time.
pub(crate) struct Engine {
    control: Control,
    transport: Box<dyn Transport>,
    timeout: Duration,
    next_sequence: u64,
    statistics: CommStatistics,
}

/// One operation under way on this rank, as its transport sees it.
pub(crate) struct Call {
    pub(crate) operation: Operation,
    pub(crate) sequence: u64,
    pub(crate) started: Instant,
    pub(crate) timeout: Duration,
}

/// What an operation cost.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cost {
    pub(crate) payload_bytes: u64,
    pub(crate) waiting: Duration,
}

impl Engine {
    pub(crate) fn new(control: Control, transport: Box<dyn Transport>, timeout: Duration) -> Self {
        Engine { control, transport, timeout, next_sequence: 0, statistics: CommStatistics::default() }
    }

    pub(crate) fn statistics(&self) -> CommStatistics {
        self.statistics
    }

    /// Executes the operation. After a failure, which the peers are told, the engine is of no use.
    pub(crate) fn execute(&mut self, operation: Operation, payload: &mut Payload) -> Result<(), CommError> {
        let call =
            Call { operation, sequence: self.next_sequence, started: Instant::now(), timeout: self.timeout };
        self.next_sequence += 1;
        let mut cost = Cost::default();
        let result = self
            .control
            .check(&call)
            .and_then(|()| self.transport.execute(&call, payload, &mut self.control, &mut cost));
        self.statistics.num_operations += 1;
        self.statistics.payload_bytes += cost.payload_bytes;
        self.statistics.busy += call.started.elapsed();
        self.statistics.waiting += cost.waiting;
        if let Err(failure) = &result {
            self.transport.abandon();
            self.control.announce(&call, failure);
        }
        result
    }

    /// Ends this rank's part in good order.
    pub(crate) fn leave(mut self) {
        self.control.leave(self.next_sequence);
    }
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
        let mut sides = [(own, self.operation), (rank, theirs)];
        sides.sort_by_key(|(rank, _)| *rank);
        let [(rank, operation), (other_rank, other_operation)] = sides;
        CommError::Mismatch { sequence: self.sequence, rank, operation, other_rank, other_operation }
    }
}
