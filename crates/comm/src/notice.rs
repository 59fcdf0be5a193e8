use crate::operation::Operation;
use crate::recorder::{Direction, GroupName, OperationState, ProgramLineText, ReportedPlace};
use crate::words;
use trireme_base::Rank;

/// A message about a rank's state that it sends to its peers over the control connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Notice {
    /// Number of the sender's operation that the notice refers to.
    pub(crate) sequence: u64,
    pub(crate) kind: NoticeKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoticeKind {
    /// The sender has been waiting in this operation, number `sequence`, for a while.
    Waiting { operation: Operation },
    /// The sender's place in its program, after a failure; `None` before its first operation. Further notices may follow.
    Place(Option<ReportedPlace>),
    /// The sender has not reached an operation in which others wait, because its thread is blocked at this place, in another group.
    Blocked(ReportedPlace),
    /// The sender waits until the receiver sends or receives a message, and asks for the receiver's progress.
    ProgressRequest,
    /// Milliseconds since the sender, or a rank that it waits for, last made progress.
    Progress { milliseconds: u64 },
    /// The sender leaves cleanly before the operation.
    Goodbye,
    /// The operation failed on the sender because `rank` was lost.
    Lost { rank: Rank },
    /// The operation failed on the sender because `rank` had left.
    Left { rank: Rank },
    /// The operation failed on the sender because two ranks issued different ones as number `sequence`.
    Mismatch { sequence: u64, first: (Rank, Operation), second: (Rank, Operation) },
    /// The operation timed out on the sender.
    TimedOut,
    /// The operation failed on the sender for another reason.
    Failed,
}

const WORDS: usize = 17;

/// Bytes of a notice on the wire: 17 little-endian words. Words 0 and 1 are the tag and the sequence. A mismatch has its sequence in word
/// 2, the ranks in 3 and 4, and the operations in 5 to 8. A lost or departed rank is in word 3, the operation of `Waiting` in 5 and 6, the
/// milliseconds of `Progress` in 4. A place has its sequence in word 2, state, direction and peer in 3, milliseconds in 4, the operation in
/// 5 and 6, the program line in 7 to 13, and the group in 14 to 16.
pub(crate) const NOTICE_BYTES: usize = 8 * WORDS;

const STATES: [OperationState; 4] =
    [OperationState::Queued, OperationState::Running, OperationState::Done, OperationState::Failed];

impl Notice {
    pub(crate) fn encode(self) -> [u8; NOTICE_BYTES] {
        let mut words = [0; WORDS];
        words[1] = self.sequence;
        words[0] = match self.kind {
            NoticeKind::Waiting { operation } => {
                words[5..7].copy_from_slice(&operation.encode());
                1
            }
            NoticeKind::Goodbye => 2,
            NoticeKind::Lost { rank } => {
                words[3] = rank.0 as u64;
                3
            }
            NoticeKind::Left { rank } => {
                words[3] = rank.0 as u64;
                4
            }
            NoticeKind::Mismatch { sequence, first, second } => {
                words[2..5].copy_from_slice(&[sequence, first.0.0 as u64, second.0.0 as u64]);
                words[5..7].copy_from_slice(&first.1.encode());
                words[7..9].copy_from_slice(&second.1.encode());
                5
            }
            NoticeKind::TimedOut => 6,
            NoticeKind::Failed => 7,
            NoticeKind::Place(place) => {
                place.iter().for_each(|place| encode_place(place, &mut words));
                8
            }
            NoticeKind::Blocked(place) => {
                encode_place(&place, &mut words);
                9
            }
            NoticeKind::ProgressRequest => 10,
            NoticeKind::Progress { milliseconds } => {
                words[4] = milliseconds;
                11
            }
        };
        words::to_bytes(words)
    }

    /// Decodes a notice of a group of `world_size` ranks. `None` if the bytes are not a valid notice.
    pub(crate) fn decode(bytes: &[u8; NOTICE_BYTES], world_size: usize) -> Option<Self> {
        let words: [u64; WORDS] = words::from_bytes(bytes);
        let rank =
            |index: usize| usize::try_from(words[index]).ok().filter(|&rank| rank < world_size).map(Rank);
        let operation = |first: usize| Operation::decode([words[first], words[first + 1]]);
        let event = match words[0] {
            1 => NoticeKind::Waiting { operation: operation(5)? },
            2 => NoticeKind::Goodbye,
            3 => NoticeKind::Lost { rank: rank(3)? },
            4 => NoticeKind::Left { rank: rank(3)? },
            5 => NoticeKind::Mismatch {
                sequence: words[2],
                first: (rank(3)?, operation(5)?),
                second: (rank(4)?, operation(7)?),
            },
            6 => NoticeKind::TimedOut,
            7 => NoticeKind::Failed,
            8 if words[3] == 0 => NoticeKind::Place(None),
            8 => NoticeKind::Place(Some(decode_place(&words)?)),
            9 => NoticeKind::Blocked(decode_place(&words)?),
            10 => NoticeKind::ProgressRequest,
            11 => NoticeKind::Progress { milliseconds: words[4] },
            _ => return None,
        };
        Some(Notice { sequence: words[1], kind: event })
    }
}

fn encode_place(place: &ReportedPlace, words: &mut [u64; WORDS]) {
    let state =
        1 + STATES.iter().position(|&state| state == place.state).expect("every state is in the table");
    let (direction, peer) = match place.peer {
        None => (0, 0),
        Some((Direction::Send, peer)) => (1, peer.0),
        Some((Direction::Receive, peer)) => (2, peer.0),
    };
    words[2] = place.sequence;
    words[3] = state as u64 | direction << 8 | (peer as u64) << 32;
    words[4] = place.milliseconds;
    words[5..7].copy_from_slice(&place.operation.encode());
    place.line.encode(&mut words[7..14]);
    place.group.encode(&mut words[14..17]);
}

fn decode_place(words: &[u64; WORDS]) -> Option<ReportedPlace> {
    let peer = Rank((words[3] >> 32) as usize);
    Some(ReportedPlace {
        group: GroupName::decode(&words[14..17])?,
        sequence: words[2],
        operation: Operation::decode([words[5], words[6]])?,
        peer: match words[3] >> 8 & 0xff {
            0 => None,
            1 => Some((Direction::Send, peer)),
            2 => Some((Direction::Receive, peer)),
            _ => return None,
        },
        line: ProgramLineText::decode(&words[7..14])?,
        state: *STATES.get(((words[3] & 0xff) as usize).checked_sub(1)?)?,
        milliseconds: words[4],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use trireme_schedule::collective::CollectiveKind;

    #[test]
    fn notices_read_back() {
        let operation =
            Operation::of(CollectiveKind::Broadcast.with_root(Rank(2), 9), trireme_base::DType::F64);
        let mismatch = NoticeKind::Mismatch {
            sequence: 5,
            first: (Rank(0), Operation::BARRIER),
            second: (Rank(3), operation),
        };
        let lost = NoticeKind::Lost { rank: Rank(1) };
        let left = NoticeKind::Left { rank: Rank(2) };
        let place = ReportedPlace {
            group: GroupName::of(format_args!("world/data")),
            sequence: 12,
            operation,
            peer: Some((Direction::Receive, Rank(70_000))),
            line: ProgramLineText::of(format_args!("step 3, line 7: REDUCE_GRAD 2")),
            state: OperationState::Failed,
            milliseconds: 1500,
        };
        let places = [None, Some(place), Some(ReportedPlace { peer: None, ..place })].map(NoticeKind::Place);
        let waiting = NoticeKind::Waiting { operation };
        let others = [
            NoticeKind::Blocked(place),
            waiting,
            NoticeKind::Goodbye,
            lost,
            left,
            mismatch,
            NoticeKind::TimedOut,
            NoticeKind::Failed,
            NoticeKind::ProgressRequest,
            NoticeKind::Progress { milliseconds: 77 },
        ];
        for event in others.into_iter().chain(places) {
            let notice = Notice { sequence: u64::MAX - 1, kind: event };
            assert_eq!(Notice::decode(&notice.encode(), 4), Some(notice));
        }
        let notice = Notice { sequence: 6, kind: mismatch };
        assert_eq!(Notice::decode(&notice.encode(), 3), None, "a rank outside of the group");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), NOTICE_BYTES),
            tag in 0..13_u8,
            world_size in 1..300_usize,
        ) {
            let mut bytes: [u8; NOTICE_BYTES] = bytes.try_into().expect("as many bytes as a notice");
            bytes[..8].copy_from_slice(&[tag, 0, 0, 0, 0, 0, 0, 0]);
            if let Some(notice) = Notice::decode(&bytes, world_size) {
                prop_assert_eq!(Notice::decode(&notice.encode(), world_size), Some(notice));
            }
        }
    }
}
