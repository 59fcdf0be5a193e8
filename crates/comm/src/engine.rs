use crate::buffer::Storage;
use crate::control::{Control, stall};
use crate::recorder::{GroupRecorder, Issued, Occasion};
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
    /// Those of an all-to-all with blocks of any lengths.
    Variable { input: Storage, output: Storage, lens: BlockLens },
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
    fn wait(&mut self) {
        match self {
            Payload::Vector(vector) => vector.wait(),
            Payload::Pair { input, output } | Payload::Variable { input, output, .. } => {
                input.wait();
                output.wait();
            }
            Payload::Nothing | Payload::Blocks(_) => (),
        }
    }
}

/// Peers' notices are read before an operation if that was not done for this long.
const LOOK_AROUND_INTERVAL: Duration = Duration::from_millis(1);

/// How often to look what the peers say while there is nothing to do, at most.
pub(crate) const LOOK_INTERVAL_MAX: Duration = Duration::from_millis(500);

/// Executes a group's operations, one at a time.
pub(crate) struct Engine {
    control: Control,
    transport: Box<dyn Transport>,
    timeout: Duration,
    next_sequence: u64,
    /// When the peers' notices were last read before an operation.
    looked_around: Option<Instant>,
    statistics: CommStatistics,
    recorder: GroupRecorder,
}

/// One operation under way on this rank, as its transport sees it.
pub(crate) struct Call {
    /// Whether the executing thread has nothing else to do for this rank, but to wait for this.
    pub(crate) is_awaited: bool,
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
    pub(crate) fn new(
        control: Control,
        transport: Box<dyn Transport>,
        timeout: Duration,
        recorder: GroupRecorder,
    ) -> Self {
        Engine {
            control,
            transport,
            timeout,
            next_sequence: 0,
            looked_around: None,
            statistics: CommStatistics::default(),
            recorder,
        }
    }

    /// How often to look what the peers say while there is nothing to do.
    pub(crate) fn look_interval(&self) -> Duration {
        LOOK_INTERVAL_MAX.min(stall(self.timeout))
    }

    pub(crate) fn statistics(&self) -> CommStatistics {
        self.statistics
    }

    /// Executes the operation. After a failure, which the peers are told, the engine is of no use but to
    /// [`leave`](Engine::leave). `is_awaited` is whether the calling thread has nothing else to do.
    pub(crate) fn execute(
        &mut self,
        operation: Operation,
        issued: Issued,
        payload: &mut Payload,
        is_awaited: bool,
    ) -> Result<(), CommError> {
        payload.wait();
        let (sequence, started, timeout) = (self.next_sequence, Instant::now(), self.timeout);
        let call = Call { is_awaited, operation, sequence, started, timeout };
        self.next_sequence += 1;
        self.recorder.begin(&call, issued);
        let mut cost = Cost::default();
        let result = self
            .check_peers(&call)
            .and_then(|()| self.transport.execute(&call, payload, &mut self.control, &mut cost));
        self.statistics.num_operations += 1;
        self.statistics.payload_bytes += cost.payload_bytes;
        let ended = Instant::now();
        self.statistics.busy += ended - call.started;
        self.statistics.waiting += cost.waiting;
        self.recorder.end(&call, ended, &result);
        if let Err(failure) = &result {
            self.transport.abandon(payload);
            self.control.announce(call.sequence, failure, self.recorder.told_place());
            self.recorder.recorder().write(Occasion::Failed);
        }
        result
    }

    /// Fails if a peer has ended, as far as that is not long known: a look takes as long as a short operation, and who
    /// waits looks anyway.
    fn check_peers(&mut self, call: &Call) -> Result<(), CommError> {
        if self.looked_around.is_some_and(|last| call.started < last + LOOK_AROUND_INTERVAL) {
            return Ok(());
        }
        self.looked_around = Some(call.started);
        self.control.check(call)
    }

    /// Sees what the peers say while this rank is in no operation. Who hears of a failure reports where it is.
    /// Returns, once, what an operation would fail with.
    pub(crate) fn look_around(&mut self) -> Option<CommError> {
        if !self.control.look(self.next_sequence) {
            return None;
        }
        self.control.tell_place(self.next_sequence, self.recorder.told_place());
        self.recorder.recorder().write(Occasion::Failed);
        let (operation, sequence) = (Operation::BARRIER, self.next_sequence);
        let (started, timeout) = (Instant::now(), self.timeout);
        self.control.check(&Call { is_awaited: false, operation, sequence, started, timeout }).err()
    }

    /// Ends this rank's part: in good order, or after a failure, of which the peers know or are told now.
    pub(crate) fn leave(mut self, failure: Option<CommError>) {
        match (failure, self.recorder.failure()) {
            (Some(_), _) => {}
            // A message has failed, of which the peers do not know.
            (None, Some(failure)) => {
                self.control.announce(self.next_sequence, &failure, self.recorder.told_place());
            }
            (None, None) => return self.control.leave(self.next_sequence),
        }
        // Data connections end now, so that who waits at one learns of it.
        drop(self.transport);
        if self.recorder.recorder().gathers() {
            self.control.gather();
        }
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
        CommError::mismatch(self.sequence, (own, self.operation), (rank, theirs))
    }
}
