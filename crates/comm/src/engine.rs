//! The engine of a group, which executes one operation at a time.
//!
//! A rank whose operation fails sends its place in the program ([`Place`](crate::Place)) and the reason to all peers over the control
//! connections, and writes its flight recorder's report. Peers that are executing an operation read the notice in their next
//! [`Control::tick`]. Idle peers read it in [`Engine::read_notices`] within [`NOTICE_INTERVAL_MAX`]. All of them then report their own
//! places and write their reports.

use crate::call::{Call, CallStatistics, Payload};
use crate::control::{Control, stall_threshold};
use crate::recorder::{GroupRecorder, Issued, Occasion};
use crate::transport::Transport;
use crate::{CommError, CommStatistics, Operation};
use std::time::{Duration, Instant};

/// Minimum time between two reads of the peers' notices before operations.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum interval between two reads of the peers' notices while the group is idle.
pub(crate) const NOTICE_INTERVAL_MAX: Duration = Duration::from_millis(500);

pub(crate) struct Engine {
    control: Control,
    transport: Box<dyn Transport>,
    timeout: Duration,
    next_sequence: u64,
    /// When the peers' notices were last read before an operation.
    notices_read_at: Option<Instant>,
    pub(crate) statistics: CommStatistics,
    recorder: GroupRecorder,
}

/// Keeps memory that peers or MPI may still access from being freed while a panic unwinds out of an operation.
struct AbandonOnPanic<'a> {
    transport: &'a mut dyn Transport,
    payload: &'a mut Payload,
}

impl Drop for AbandonOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.transport.abandon(self.payload);
        }
    }
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
            notices_read_at: None,
            statistics: CommStatistics::default(),
            recorder,
        }
    }

    /// Interval between two reads of the peers' notices while the group is idle.
    pub(crate) fn notice_interval(&self) -> Duration {
        NOTICE_INTERVAL_MAX.min(stall_threshold(self.timeout))
    }

    /// Executes the operation. After a failure, of which the peers are notified, only [`leave`](Engine::leave) may follow. `is_awaited`
    /// says whether the calling thread waits for this operation and has no other work.
    pub(crate) fn execute(
        &mut self,
        operation: Operation,
        issued: Issued,
        payload: &mut Payload,
        is_awaited: bool,
    ) -> Result<(), CommError> {
        let ready = payload.wait();
        let (sequence, started, timeout) = (self.next_sequence, Instant::now(), self.timeout);
        let call = Call { is_awaited, operation, sequence, started, timeout };
        self.next_sequence += 1;
        self.recorder.begin(&call, issued);
        self.control.call_statistics = CallStatistics::default();
        let result = ready.and_then(|()| self.check_peers(&call)).and_then(|()| {
            let running = AbandonOnPanic { transport: &mut *self.transport, payload };
            running.transport.execute(&call, running.payload, &mut self.control)
        });
        let cost = self.control.call_statistics;
        self.statistics.num_operations += 1;
        self.statistics.payload_bytes += cost.payload_bytes;
        let ended = Instant::now();
        self.statistics.busy += ended - call.started;
        self.statistics.waiting += cost.waiting;
        self.recorder.end(&call, ended, &result);
        if let Err(failure) = &result {
            // Peers are told first.
            self.control.announce(call.sequence, failure, self.recorder.reported_place());
            self.recorder.recorder.write(Occasion::Failed);
            self.transport.abandon(payload);
        }
        result
    }

    /// Fails if a peer has failed or left. Does nothing if the peers were checked recently: a check takes as long as a short operation, and
    /// an operation that waits checks them anyway.
    fn check_peers(&mut self, call: &Call) -> Result<(), CommError> {
        if self.notices_read_at.is_some_and(|last| call.started < last + CHECK_INTERVAL) {
            return Ok(());
        }
        self.notices_read_at = Some(call.started);
        self.control.check(call)
    }

    /// Reads the peers' notices between operations. The first time that a peer is found to have failed, reports this rank's place in the
    /// program to the peers, and returns the error with which the group's next operation will fail, if it will.
    pub(crate) fn read_notices(&mut self) -> Option<CommError> {
        if !self.control.read_while_idle(self.next_sequence) {
            return None;
        }
        self.control.report_place(self.next_sequence, self.recorder.reported_place());
        self.recorder.recorder.write(Occasion::Failed);
        let (operation, sequence) = (Operation::BARRIER, self.next_sequence);
        let (started, timeout) = (Instant::now(), self.timeout);
        self.control.check(&Call { is_awaited: false, operation, sequence, started, timeout }).err()
    }

    /// Leaves the group. Sends the peers a goodbye if nothing has failed. A failed message is announced to them here; a failed operation
    /// was announced when it failed.
    pub(crate) fn leave(mut self, failure: Option<CommError>) {
        match (failure, self.recorder.failure()) {
            (Some(_), _) => {}
            // A message failed, of which the peers have not been notified.
            (None, Some(failure)) => {
                self.control.announce(self.next_sequence, &failure, self.recorder.reported_place());
            }
            (None, None) => return self.control.leave(self.next_sequence),
        }
        // Closes the data connections now, so that ranks that wait on them notice. Devices do not wait for each other.
        self.transport.abandon(&mut Payload::Nothing);
        drop(self.transport);
        self.control.wait_for_places();
    }
}
