use crate::operation::{OPERATION_WORDS, Operation};
use crate::words;
use trireme_base::Rank;

/// What a rank tells its peers over its control connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Notice {
    /// The sender's operation that this is about.
    pub(crate) sequence: u64,
    pub(crate) event: Event,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The sender has been in the operation for a while.
    Waiting,
    /// The sender leaves in good order before the operation.
    Goodbye,
    /// The operation failed on the sender because `rank` was lost.
    Lost { rank: Rank },
    /// The operation failed on the sender because `rank` had left.
    Left { rank: Rank },
    /// The operation failed on the sender because two ranks issued different ones as number `sequence`.
    Mismatch { sequence: u64, first: (Rank, Operation), second: (Rank, Operation) },
    /// The operation did not end in time on the sender.
    TimedOut,
    /// The operation failed on the sender for another reason.
    GaveUp,
}

const WORDS: usize = 5 + 2 * OPERATION_WORDS;

/// Bytes of a notice on the wire: nine little-endian words (tag, sequence; sequence, ranks and operations of
/// a mismatch; a lost rank stands where the first rank does).
pub(crate) const NOTICE_BYTES: usize = 8 * WORDS;

impl Notice {
    pub(crate) fn encode(self) -> [u8; NOTICE_BYTES] {
        let mut words = [0; WORDS];
        words[1] = self.sequence;
        words[0] = match self.event {
            Event::Waiting => 1,
            Event::Goodbye => 2,
            Event::Lost { rank } => {
                words[3] = rank.0 as u64;
                3
            }
            Event::Left { rank } => {
                words[3] = rank.0 as u64;
                4
            }
            Event::Mismatch { sequence, first, second } => {
                words[2..5].copy_from_slice(&[sequence, first.0.0 as u64, second.0.0 as u64]);
                words[5..7].copy_from_slice(&first.1.encode());
                words[7..9].copy_from_slice(&second.1.encode());
                5
            }
            Event::TimedOut => 6,
            Event::GaveUp => 7,
        };
        words::to_bytes(words)
    }

    /// Reads a notice of a group of `world_size` ranks; `None` if it is none.
    pub(crate) fn decode(bytes: &[u8; NOTICE_BYTES], world_size: usize) -> Option<Self> {
        let words: [u64; WORDS] = words::from_bytes(bytes);
        let rank =
            |index: usize| usize::try_from(words[index]).ok().filter(|&rank| rank < world_size).map(Rank);
        let operation = |first: usize| Operation::decode([words[first], words[first + 1]]);
        let event = match words[0] {
            1 => Event::Waiting,
            2 => Event::Goodbye,
            3 => Event::Lost { rank: rank(3)? },
            4 => Event::Left { rank: rank(3)? },
            5 => Event::Mismatch {
                sequence: words[2],
                first: (rank(3)?, operation(5)?),
                second: (rank(4)?, operation(7)?),
            },
            6 => Event::TimedOut,
            7 => Event::GaveUp,
            _ => return None,
        };
        Some(Notice { sequence: words[1], event })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn notices_read_back() {
        let operation = Operation::Broadcast { root: Rank(2), dtype: trireme_base::DType::F64, len: 9 };
        let mismatch = Event::Mismatch {
            sequence: 5,
            first: (Rank(0), Operation::Barrier),
            second: (Rank(3), operation),
        };
        let lost = Event::Lost { rank: Rank(1) };
        let left = Event::Left { rank: Rank(2) };
        for event in [Event::Waiting, Event::Goodbye, lost, left, mismatch, Event::TimedOut, Event::GaveUp] {
            let notice = Notice { sequence: u64::MAX - 1, event };
            assert_eq!(Notice::decode(&notice.encode(), 4), Some(notice));
        }
        let notice = Notice { sequence: 6, event: mismatch };
        assert_eq!(Notice::decode(&notice.encode(), 3), None, "a rank outside of the group");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), NOTICE_BYTES),
            tag in 0..9_u8,
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
