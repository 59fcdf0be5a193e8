//! What a rank tells of its groups when something has gone wrong: documents, for files and for people.

use super::text::{GroupName, Line};
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
    /// The names of the hosts of all ranks, if the program has said them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    pub process_id: u32,
    pub occasion: Occasion,
    pub written: f64,
    /// The rank's groups, the world first.
    pub groups: Vec<GroupReport>,
}

/// What gave rise to a report: the worst that has happened so far.
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
    /// `world`, or the name of the group it was split from and its own.
    pub name: String,
    /// The group's ranks, in the order of their ranks in the group.
    pub members: Vec<usize>,
    /// Operations that this rank has issued; messages not counted.
    pub num_issued: u64,
    /// What ended it, if it has failed.
    pub failure: Option<FailureReport>,
    /// The last operations, in the order of issue.
    pub operations: Vec<OperationReport>,
    /// The last messages, in the order of issue.
    pub messages: Vec<OperationReport>,
    /// Where other members were, as they have told this rank when something went wrong.
    pub heard: Vec<Place>,
}

/// What ended a group on a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct FailureReport {
    pub text: String,
    pub at: f64,
    pub missing: Vec<usize>,
    /// Who issued what at the same place, if that differed.
    pub mismatch: Vec<IssuedOperation>,
}

/// What a rank issued at a place of a group's sequence.
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
    /// Position in the group's sequence of operations, from 0; of a message, among those from the one rank to the other.
    pub sequence: u64,
    pub operation: Operation,
    pub peer: Option<MessagePeer>,
    /// The algorithm that was chosen for it, if it has been and there was a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<String>,
    /// The line of the program that issued it, if the program says so.
    pub line: String,
    pub state: OperationState,
    pub queued: f64,
    pub started: Option<f64>,
    /// When it was done, or failed.
    pub ended: Option<f64>,
}

/// The other side of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct MessagePeer {
    pub direction: Direction,
    pub rank: usize,
}

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Direction {
    Send,
    Receive,
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum OperationState {
    Queued,
    Running,
    Done,
    Failed,
}

/// Where a rank is: the operation that tells most.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// Who.
    pub rank: usize,
    /// In which group; where it is another rank that tells, the first 24 bytes of its name.
    pub group: String,
    /// Of several operations a failed one, else one under way, else the last that was done; none before the first.
    pub operation: Option<OperationReport>,
    /// Seconds since it began; since it ended, if it is done.
    pub seconds: f64,
}

impl RankReport {
    /// Version of the format that this program writes and reads.
    pub const FORMAT: u32 = 1;

    /// Where the rank is.
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
    /// What tells most comes first.
    fn precedence(&self) -> u8 {
        match self.state {
            OperationState::Failed => 0,
            OperationState::Running => 1,
            OperationState::Queued => 2,
            OperationState::Done => 3,
        }
    }

    /// Of failed and pending ones the first tells most, of those that are done the last.
    fn urgency(&self) -> f64 {
        match self.state {
            OperationState::Failed => self.ended.unwrap_or(self.queued),
            OperationState::Running | OperationState::Queued => self.since(),
            OperationState::Done => -self.since(),
        }
    }

    /// When it came into its state; of a failed one, when it began.
    fn since(&self) -> f64 {
        match self.state {
            OperationState::Queued => self.queued,
            OperationState::Running | OperationState::Failed => self.started.unwrap_or(self.queued),
            OperationState::Done => self.ended.unwrap_or(self.queued),
        }
    }
}

/// A [`Place`] as a rank tells it to its peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ToldPlace {
    pub(crate) group: GroupName,
    pub(crate) sequence: u64,
    pub(crate) operation: Operation,
    pub(crate) peer: Option<(Direction, Rank)>,
    pub(crate) line: Line,
    pub(crate) state: OperationState,
    pub(crate) milliseconds: u64,
}

impl ToldPlace {
    /// What tells one operation of this rank from another.
    pub(crate) fn operation_key(&self) -> (&str, u64) {
        (self.group.as_str(), self.sequence)
    }

    /// `None` before the first operation.
    pub(crate) fn of(place: &Place) -> Option<Self> {
        let operation = place.operation.as_ref()?;
        Some(ToldPlace {
            group: GroupName::of(format_args!("{}", place.group)),
            sequence: operation.sequence,
            operation: operation.operation,
            peer: operation.peer.map(|peer| (peer.direction, Rank(peer.rank))),
            line: Line::of(format_args!("{}", operation.line)),
            state: operation.state,
            milliseconds: (place.seconds * 1e3) as u64,
        })
    }

    /// What `rank` told, at the time `now`.
    pub(crate) fn place(told: Option<Self>, rank: Rank, now: f64) -> Place {
        let Some(told) = told else {
            return Place { rank: rank.0, group: String::new(), operation: None, seconds: 0.0 };
        };
        let seconds = told.milliseconds as f64 / 1e3;
        let has_ended = told.state == OperationState::Done;
        Place {
            rank: rank.0,
            group: told.group.as_str().to_owned(),
            operation: Some(OperationReport {
                sequence: told.sequence,
                operation: told.operation,
                peer: told.peer.map(|(direction, rank)| MessagePeer { direction, rank: rank.0 }),
                algorithm: None,
                line: told.line.as_str().to_owned(),
                state: told.state,
                queued: now - seconds,
                started: Some(now - seconds),
                ended: has_ended.then_some(now - seconds),
            }),
            seconds,
        }
    }
}
