use super::clock::Clock;
use super::report::{
    FailureReport, GroupReport, IssuedOperation, MessagePeer, OperationReport, OperationState, ReportedPlace,
};
use super::ring::{Record, RecordRing};
use super::text::ProgramLineText;
use crate::selection::Selection;
use crate::{CommError, Operation};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::thread::ThreadId;
use std::time::Instant;
use trireme_base::Rank;

pub(super) struct GroupLog {
    pub(super) name: String,
    pub(super) own: Rank,
    pub(super) members: Vec<Rank>,
    /// The group's choice of algorithms, once it is known.
    pub(super) selection: OnceLock<Selection>,
    state: Mutex<State>,
}

/// The threads that issue a group's operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Issuer {
    Unknown,
    One(ThreadId),
    Several,
}

pub(super) struct State {
    pub(super) issuer: Issuer,
    /// Whether the only issuing thread waits for one of this group's operations.
    pub(super) is_issuer_waiting: bool,
    pub(super) line: ProgramLineText,
    pub(super) operations: RecordRing,
    pub(super) messages: RecordRing,
    pub(super) num_issued: u64,
    pub(super) num_messages: u64,
    pub(super) failure: Option<(Instant, CommError)>,
    /// By member: the place that the member reported last, and when.
    pub(super) reported_places: Vec<Option<(Instant, Option<ReportedPlace>)>>,
    /// By member: the latest time at which it is known to have made progress.
    pub(super) progress: Vec<Option<Instant>>,
    /// By member: whether it must be asked for its progress.
    pub(super) must_ask: Vec<bool>,
    pub(super) is_dropped: bool,
}

impl GroupLog {
    pub(super) fn new(name: String, own: Rank, members: Vec<Rank>) -> Self {
        let state = State {
            issuer: Issuer::Unknown,
            is_issuer_waiting: false,
            line: ProgramLineText::EMPTY,
            operations: RecordRing::new(),
            messages: RecordRing::new(),
            num_issued: 0,
            num_messages: 0,
            failure: None,
            reported_places: vec![None; members.len()],
            progress: vec![None; members.len()],
            must_ask: vec![false; members.len()],
            is_dropped: false,
        };
        GroupLog { name, own, members, selection: OnceLock::new(), state: Mutex::new(state) }
    }

    pub(super) fn is_dropped(&self) -> bool {
        self.lock().is_dropped
    }

    pub(super) fn report(&self, clock: &Clock) -> GroupReport {
        let state = self.lock();
        let reports =
            |ring: &RecordRing| ring.records().iter().map(|record| self.operation(record, clock)).collect();
        let heard = state.reported_places.iter().enumerate().filter_map(|(member, heard)| {
            let (at, told) = (*heard)?;
            Some(ReportedPlace::place(told, self.members[member], clock.unix(at)))
        });
        GroupReport {
            name: self.name.clone(),
            members: self.members.iter().map(|member| member.0).collect(),
            num_issued: state.num_issued,
            failure: state.failure.as_ref().map(|(at, failure)| self.failure(clock.unix(*at), failure)),
            operations: reports(&state.operations),
            messages: reports(&state.messages),
            heard: heard.collect(),
        }
    }

    fn operation(&self, record: &Record, clock: &Clock) -> OperationReport {
        OperationReport {
            sequence: record.sequence,
            operation: record.operation,
            peer: record
                .peer
                .map(|(direction, peer)| MessagePeer { direction, rank: self.members[peer.0].0 }),
            algorithm: self.algorithm(record.operation),
            line: record.issued.line.as_str().to_owned(),
            state: match (record.started, record.ended) {
                (_, Some(_)) if record.has_failed => OperationState::Failed,
                (_, Some(_)) => OperationState::Done,
                (Some(_), None) => OperationState::Running,
                (None, None) => OperationState::Queued,
            },
            queued: clock.unix(record.issued.at),
            started: record.started.map(|at| clock.unix(at)),
            ended: record.ended.map(|at| clock.unix(at)),
        }
    }

    fn algorithm(&self, operation: Operation) -> Option<String> {
        Some(self.selection.get()?.chosen(operation)?.to_string())
    }

    fn failure(&self, at: f64, failure: &CommError) -> FailureReport {
        let in_world = |rank: Rank| self.members[rank.0].0;
        let mismatch = match *failure {
            CommError::Mismatch { sequence, rank, operation, other_rank, other_operation } => {
                [(rank, operation), (other_rank, other_operation)]
                    .map(|(rank, operation)| IssuedOperation { rank: in_world(rank), sequence, operation })
                    .into()
            }
            _ => Vec::new(),
        };
        let missing = failure.missing().into_iter().map(in_world).collect();
        FailureReport { text: failure.to_string(), at, missing, mismatch }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds a group's records")
    }
}
