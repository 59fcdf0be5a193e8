//! Reports of a rank's groups for diagnosis after a failure, as JSON documents.

use super::text::{GroupName, ProgramLineText};
use crate::Operation;
use serde::{Deserialize, Serialize};
use trireme_base::Rank;

/// The contents of a rank's flight recorder. Ranks are ranks of the world; times are seconds since 1970 on the rank's host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct RankReport {
    pub format: u32,
    pub rank: usize,
    pub world_size: usize,
    pub host: String,
    /// Names of all ranks' hosts, if the program has set them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    pub process_id: u32,
    pub occasion: Occasion,
    pub written: f64,
    /// The rank's groups, the world first.
    pub groups: Vec<GroupReport>,
}

/// The cause of a report: the worst event so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Occasion {
    Joined,
    Stalled,
    /// A group has failed, on this rank or another one.
    Failed,
}

/// One group of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// `world`, or the path of the parent group and the group's own name.
    pub name: String,
    /// World ranks of the members, in the order of their ranks in the group.
    pub members: Vec<usize>,
    /// Number of operations that this rank has issued, without messages.
    pub num_issued: u64,
    /// The failure that ended the group, if it has failed.
    pub failure: Option<FailureReport>,
    /// The most recent operations, in the order of issue.
    pub operations: Vec<OperationReport>,
    /// The most recent messages, in the order of issue.
    pub messages: Vec<OperationReport>,
    /// The places that other members reported to this rank after a failure.
    pub heard: Vec<Place>,
}

/// The failure that ended a group on a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct FailureReport {
    pub text: String,
    pub at: f64,
    pub missing: Vec<usize>,
    /// The operations that ranks issued at the same position, if they differed.
    pub mismatch: Vec<IssuedOperation>,
}

/// An operation that a rank issued at a position in a group's sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct IssuedOperation {
    pub rank: usize,
    /// Position in the group's sequence of operations, from 0.
    pub sequence: u64,
    pub operation: Operation,
}

/// An operation of a group, or a message between two ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct OperationReport {
    /// Position in the group's sequence of operations, from 0. For a message, position among the messages with the same sender and
    /// receiver.
    pub sequence: u64,
    pub operation: Operation,
    pub peer: Option<MessagePeer>,
    /// The chosen algorithm, if one was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<String>,
    /// The program line that issued the operation, or an empty string.
    pub line: String,
    pub state: OperationState,
    pub queued: f64,
    pub started: Option<f64>,
    /// When the operation completed or failed.
    pub ended: Option<f64>,
}

/// The peer of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct MessagePeer {
    pub direction: Direction,
    pub rank: usize,
}

/// The direction of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Direction {
    Send,
    Receive,
}

/// The state of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum OperationState {
    Queued,
    Running,
    Done,
    Failed,
}

/// The position of a rank in its program: its earliest failed operation, else its earliest pending one, else its last completed one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// Name of the group. If another rank reported the place, the first 24 bytes of the name.
    pub group: String,
    /// A failed operation if there is one, else a pending one, else the last completed one. `None` before the first operation.
    pub operation: Option<OperationReport>,
    /// Seconds since the operation began; since it was issued if it is queued; since it ended if it is done.
    pub seconds: f64,
}

impl Place {
    /// Returns whether the place is in the group `name`.
    pub(crate) fn is_in(&self, name: &str) -> bool {
        self.group == name || self.group == GroupName::of(format_args!("{name}")).as_str()
    }
}

impl RankReport {
    /// Version of the format that this program writes and reads.
    pub const FORMAT: u32 = 1;

    /// The rank's place in the groups of this report.
    pub fn place(&self) -> Place {
        let all = self.groups.iter().flat_map(|group| {
            let operations = group.operations.iter().chain(&group.messages);
            operations.map(move |operation| (group, operation))
        });
        let chosen = all.min_by(|(_, one), (_, other)| {
            one.precedence().cmp(&other.precedence()).then(one.urgency().total_cmp(&other.urgency()))
        });
        match chosen {
            None => Place { rank: self.rank, group: String::new(), operation: None, seconds: 0.0 },
            Some((group, operation)) => Place {
                rank: self.rank,
                group: group.name.clone(),
                seconds: (self.written - operation.since()).max(0.0),
                operation: Some(operation.clone()),
            },
        }
    }
}

impl OperationReport {
    /// Significance of the state: 0 is the most significant.
    fn precedence(&self) -> u8 {
        match self.state {
            OperationState::Failed => 0,
            OperationState::Running => 1,
            OperationState::Queued => 2,
            OperationState::Done => 3,
        }
    }

    /// Sort key among operations in the same state. The lowest key is chosen: it belongs to the earliest failed or pending operation, or to
    /// the latest completed one.
    fn urgency(&self) -> f64 {
        match self.state {
            OperationState::Failed => self.ended.unwrap_or(self.queued),
            OperationState::Running | OperationState::Queued => self.since(),
            OperationState::Done => -self.since(),
        }
    }

    /// When the operation entered its state. For a failed operation, when it began.
    fn since(&self) -> f64 {
        match self.state {
            OperationState::Queued => self.queued,
            OperationState::Running | OperationState::Failed => self.started.unwrap_or(self.queued),
            OperationState::Done => self.ended.unwrap_or(self.queued),
        }
    }
}

/// A [`Place`] in the fixed-size form that ranks send to their peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportedPlace {
    pub(crate) group: GroupName,
    pub(crate) sequence: u64,
    pub(crate) operation: Operation,
    pub(crate) peer: Option<(Direction, Rank)>,
    pub(crate) line: ProgramLineText,
    pub(crate) state: OperationState,
    pub(crate) milliseconds: u64,
}

impl ReportedPlace {
    /// A key that identifies the operation among all operations of this rank.
    pub(crate) fn operation_key(&self) -> (&str, u64) {
        (self.group.as_str(), self.sequence)
    }

    /// Converts a place. `None` before the first operation.
    pub(crate) fn of(place: &Place) -> Option<Self> {
        let operation = place.operation.as_ref()?;
        Some(ReportedPlace {
            group: GroupName::of(format_args!("{}", place.group)),
            sequence: operation.sequence,
            operation: operation.operation,
            peer: operation.peer.map(|peer| (peer.direction, Rank(peer.rank))),
            line: ProgramLineText::of(format_args!("{}", operation.line)),
            state: operation.state,
            milliseconds: (place.seconds * 1e3) as u64,
        })
    }

    /// Converts a place that `rank` reported at time `now`, in seconds since 1970.
    pub(crate) fn place(reported: Option<Self>, rank: Rank, now: f64) -> Place {
        let Some(reported) = reported else {
            return Place { rank: rank.0, group: String::new(), operation: None, seconds: 0.0 };
        };
        let seconds = reported.milliseconds as f64 / 1e3;
        let has_ended = reported.state == OperationState::Done;
        Place {
            rank: rank.0,
            group: reported.group.as_str().to_owned(),
            operation: Some(OperationReport {
                sequence: reported.sequence,
                operation: reported.operation,
                peer: reported.peer.map(|(direction, rank)| MessagePeer { direction, rank: rank.0 }),
                algorithm: None,
                line: reported.line.as_str().to_owned(),
                state: reported.state,
                queued: now - seconds,
                started: Some(now - seconds),
                ended: has_ended.then_some(now - seconds),
            }),
            seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reported_place_is_in_its_group_even_if_the_name_is_long() {
        let place = |name: &str| {
            let group = GroupName::of(format_args!("{name}")).as_str().to_owned();
            Place { rank: 0, group, operation: None, seconds: 0.0 }
        };
        for name in ["world", "world/expert shards/within"] {
            assert!(place(name).is_in(name) && !place(name).is_in("world/data"));
        }
    }
}
