use super::FlightRecorder;
use super::group_log::{GroupLog, Issuer};
use super::report::{Direction, Occasion, OperationState, ReportedPlace};
use super::ring::{Issued, Record};
use super::text::{GroupName, ProgramLineText};
use crate::call::Call;
use crate::selection::Selection;
use crate::{CommError, Operation};
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use trireme_base::{Rank, format_ranks};

/// A guard that marks its thread as waiting for an operation.
pub(crate) struct Wait<'a> {
    log: Option<&'a GroupLog>,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if let Some(log) = self.log {
            log.lock().is_issuer_waiting = false;
        }
    }
}

#[derive(Clone)]
pub(crate) struct GroupRecorder {
    pub(crate) recorder: FlightRecorder,
    log: Arc<GroupLog>,
}

impl GroupRecorder {
    pub(super) fn new(recorder: FlightRecorder, log: Arc<GroupLog>) -> Self {
        GroupRecorder { recorder, log }
    }

    pub(crate) fn name(&self) -> &str {
        &self.log.name
    }

    /// The members, by their ranks in the world.
    pub(crate) fn members(&self) -> &[Rank] {
        &self.log.members
    }

    /// Sets the group's choice of algorithms, so that reports can name them.
    pub(crate) fn set_selection(&self, selection: Selection) {
        let is_first = self.log.selection.set(selection).is_ok();
        assert!(is_first, "a group is made once");
    }

    /// Sets the program line of all operations issued from now on.
    pub(crate) fn set_program_line(&self, line: fmt::Arguments<'_>) {
        let line = ProgramLineText::of(line);
        self.log.lock().line = line;
        self.recorder.heartbeat().beat();
    }

    /// Records that the group's next operation was issued.
    ///
    /// # Errors
    /// The failure that has ended the group on this rank, such as a failed message.
    pub(crate) fn issue(&self, operation: Operation) -> Result<Issued, CommError> {
        let mut state = self.log.lock();
        if let Some((_, failure)) = &state.failure {
            return Err(failure.clone());
        }
        let issued = Issued { line: state.line, at: Instant::now() };
        self.recorder.heartbeat().beat_at(issued.at);
        let thread = Issuer::One(thread::current().id());
        state.issuer = match state.issuer {
            Issuer::Unknown => thread,
            known if known == thread => thread,
            _ => Issuer::Several,
        };
        let number = state.num_issued;
        state.num_issued += 1;
        state.operations.add(Record::issued(number, number, operation, issued));
        Ok(issued)
    }

    pub(crate) fn begin(&self, call: &Call, issued: Issued) {
        let mut state = self.log.lock();
        match state.operations.find(call.sequence) {
            Some(record) => record.started = Some(call.started),
            // The ring had no room when the operation was issued. Now all earlier ones have ended.
            None => state.operations.add(Record {
                started: Some(call.started),
                ..Record::issued(call.sequence, call.sequence, call.operation, issued)
            }),
        }
    }

    pub(crate) fn end(&self, call: &Call, ended: Instant, result: &Result<(), CommError>) {
        let mut state = self.log.lock();
        if let Some(record) = state.operations.find(call.sequence) {
            record.ended = Some(ended);
            record.has_failed = result.is_err();
        }
        match result {
            Ok(()) => self.recorder.heartbeat().beat_at(ended),
            Err(failure) => {
                state.failure.get_or_insert_with(|| (ended, failure.clone()));
            }
        }
    }

    /// Records when a member last made progress.
    pub(crate) fn record_progress(&self, member: Rank, at: Instant) {
        let mut state = self.log.lock();
        let known = &mut state.progress[member.0];
        *known = (*known).max(Some(at));
    }

    /// Time since `member` last made progress, counted from `since` at the earliest. Also records the member's progress as this rank's own,
    /// for ranks that wait for this one.
    pub(crate) fn time_since_progress(&self, member: Rank, since: Instant) -> Duration {
        let progress = self.log.lock().progress[member.0];
        if let Some(at) = progress {
            self.recorder.heartbeat().beat_at(at);
        }
        progress.map_or(since, |at| at.max(since)).elapsed()
    }

    pub(crate) fn request_progress(&self, member: Rank) {
        self.log.lock().must_ask[member.0] = true;
    }

    /// Returns and clears the members to ask for their progress.
    pub(crate) fn take_progress_requests(&self) -> Vec<Rank> {
        let mut state = self.log.lock();
        let asked = state.must_ask.iter_mut().enumerate();
        asked.filter_map(|(member, is_asked)| std::mem::take(is_asked).then_some(Rank(member))).collect()
    }

    /// Marks the calling thread as waiting for an operation until the guard is dropped.
    pub(crate) fn wait(&self) -> Wait<'_> {
        let mut state = self.log.lock();
        let is_issuer = state.issuer == Issuer::One(thread::current().id());
        state.is_issuer_waiting |= is_issuer;
        Wait { log: is_issuer.then_some(&*self.log) }
    }

    /// The place in another group where the thread that issues this group's operations waits. `None` if it waits in no other group, or if
    /// several threads or none have issued operations of this group.
    pub(crate) fn blocked_elsewhere(&self) -> Option<ReportedPlace> {
        let issuer = self.log.lock().issuer;
        let groups = self.recorder.groups().clone();
        let now = Instant::now();
        groups.iter().filter(|group| !Arc::ptr_eq(group, &self.log)).find_map(|group| {
            let state = group.lock();
            let is_blocked =
                matches!(issuer, Issuer::One(_)) && state.issuer == issuer && state.is_issuer_waiting;
            let records = is_blocked.then(|| state.operations.records())?;
            let record = records.into_iter().find(|record| record.ended.is_none())?;
            let since = record.started.unwrap_or(record.issued.at);
            Some(ReportedPlace {
                group: GroupName::of(format_args!("{}", group.name)),
                sequence: record.sequence,
                operation: record.operation,
                peer: None,
                line: record.issued.line,
                state: OperationState::Running,
                milliseconds: now.saturating_duration_since(since).as_millis() as u64,
            })
        })
    }

    /// Whether this rank and member `other` wait for each other. `other` waits at `place`, in another group. The ranks are deadlocked if
    /// both are members of that group, and the thread of this rank that waits here has not issued the operation there.
    pub(crate) fn is_deadlocked_with(&self, other: Rank, place: &ReportedPlace) -> bool {
        let issuer = {
            let state = self.log.lock();
            if !state.is_issuer_waiting {
                return false;
            }
            state.issuer
        };
        let groups = self.recorder.groups().clone();
        // Groups of one split may have the same name, but have no member in common.
        let other = self.in_world(other);
        let is_theirs = |group: &&Arc<GroupLog>| {
            GroupName::of(format_args!("{}", group.name)) == place.group && group.members.contains(&other)
        };
        let mut named = groups.iter().filter(is_theirs).filter(|group| !group.is_dropped());
        match (named.next(), named.next()) {
            (Some(group), None) => {
                let state = group.lock();
                state.issuer == issuer && state.num_issued <= place.sequence
            }
            _ => false,
        }
    }

    /// The operation that this rank issued as number `sequence`, if its record still exists.
    pub(crate) fn issued(&self, sequence: u64) -> Option<Operation> {
        self.log.lock().operations.find(sequence).map(|record| record.operation)
    }

    /// Records that a message was issued, the `sequence`-th from its sender to its receiver. Returns its number.
    pub(crate) fn issue_message(
        &self,
        direction: Direction,
        peer: Rank,
        sequence: u64,
        operation: Operation,
        at: Instant,
    ) -> u64 {
        let mut state = self.log.lock();
        let issued = Issued { line: state.line, at };
        self.recorder.heartbeat().beat_at(at);
        let number = state.num_messages;
        state.num_messages += 1;
        let peer = Some((direction, peer));
        state.messages.add(Record { peer, ..Record::issued(number, sequence, operation, issued) });
        number
    }

    /// Records that the message can move, because all earlier messages with the same peer and direction have completed.
    pub(crate) fn begin_message(&self, number: u64) {
        if let Some(record) = self.log.lock().messages.find(number) {
            record.started = Some(Instant::now());
        }
    }

    pub(crate) fn end_message(&self, number: u64) {
        if let Some(record) = self.log.lock().messages.find(number) {
            record.ended = Some(Instant::now());
        }
        self.recorder.heartbeat().beat();
    }

    /// Records a failure that ended the group outside of an operation, such as a failed message or a panic. `number` is the number of the
    /// failed message, if there is one.
    pub(crate) fn fail(&self, failure: &CommError, number: Option<u64>) {
        let now = Instant::now();
        let mut state = self.log.lock();
        if let Some(record) = number.and_then(|number| state.messages.find(number)) {
            record.ended = Some(now);
            record.has_failed = true;
        }
        state.failure.get_or_insert_with(|| (now, failure.clone()));
        drop(state);
        self.recorder.write(Occasion::Failed);
    }

    /// The failure that ended the group on this rank.
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.log.lock().failure.as_ref().map(|(_, failure)| failure.clone())
    }

    /// Records the place that a member reported.
    pub(crate) fn record_place(&self, member: Rank, told: Option<ReportedPlace>) {
        self.log.lock().reported_places[member.0] = Some((Instant::now(), told));
    }

    /// This rank's place, to be reported to its peers.
    pub(crate) fn reported_place(&self) -> Option<ReportedPlace> {
        ReportedPlace::of(&self.recorder.report().place())
    }

    /// Warns the user that an operation takes long, and names the ranks it waits for.
    pub(crate) fn report_stall(&self, call: &Call, missing: &[Rank]) {
        let whom = match missing {
            [] => "for the end of an operation that all ranks have begun,".to_owned(),
            [one] => format!("for rank {}", self.in_world(*one)),
            several => format!("for {}", format_ranks(several.iter().map(|rank| self.in_world(*rank)))),
        };
        let line = self.log.lock().operations.find(call.sequence).map(|record| record.issued.line);
        self.report_wait(call, &whom, "operation", line);
    }

    pub(crate) fn report_message_stall(&self, call: &Call, direction: Direction, peer: Rank, number: u64) {
        let whom = match direction {
            Direction::Send => format!("for rank {} to receive", self.in_world(peer)),
            Direction::Receive => format!("for rank {} to send", self.in_world(peer)),
        };
        let line = self.log.lock().messages.find(number).map(|record| record.issued.line);
        self.report_wait(call, &whom, "message", line);
    }

    fn report_wait(&self, call: &Call, whom: &str, kind: &str, line: Option<ProgramLineText>) {
        let (own, name) = (self.in_world(self.log.own), &self.log.name);
        let Call { sequence, operation, timeout, started, .. } = call;
        let line = line.filter(|line| *line != ProgramLineText::EMPTY);
        let line = line.map_or_else(String::new, |line| format!(", {}", line.as_str()));
        self.recorder.add_stall(format!(
            "rank {own} has been waiting {whom} in {operation} ({name}, {kind} {sequence}{line}) for {:.1} s; it \
             will give up after {:.1} s without a sign of progress",
            started.elapsed().as_secs_f64(),
            timeout.as_secs_f64()
        ));
    }

    fn in_world(&self, member: Rank) -> Rank {
        self.log.members[member.0]
    }

    pub(crate) fn drop_group(&self) {
        self.log.lock().is_dropped = true;
    }
}
