use crate::operation::{OPERATION_WORDS, Operation};
use trireme_base::Rank;

/// What ranks tell each other over their control connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The sender waits in operation `sequence` and has been for a while.
    Reached { sequence: u64 },
    /// The sender leaves in good order; `sequence` would have been its next operation.
    Goodbye { sequence: u64 },
    /// The sender failed because `rank` was lost.
    Lost { rank: Rank },
    /// The sender failed because two ranks issued different operations.
    Mismatch { sequence: u64, first: (Rank, Operation), second: (Rank, Operation) },
    /// The sender's operation `sequence` did not end in time.
    TimedOut { sequence: u64 },
    /// The sender failed for another reason.
    GaveUp,
}

const WORDS: usize = 4 + 2 * OPERATION_WORDS;

/// Bytes of a notice on the wire: eight little-endian words (tag, sequence, ranks, operations).
pub(crate) const NOTICE_BYTES: usize = 8 * WORDS;

impl Notice {
    pub(crate) fn encode(self) -> [u8; NOTICE_BYTES] {
        let mut words = [0; WORDS];
        match self {
            Notice::Reached { sequence } => words[..2].copy_from_slice(&[1, sequence]),
            Notice::Goodbye { sequence } => words[..2].copy_from_slice(&[2, sequence]),
            Notice::Lost { rank } => words[..3].copy_from_slice(&[3, 0, rank.0 as u64]),
            Notice::Mismatch { sequence, first, second } => {
                words[..4].copy_from_slice(&[4, sequence, first.0.0 as u64, second.0.0 as u64]);
                words[4..6].copy_from_slice(&first.1.encode());
                words[6..].copy_from_slice(&second.1.encode());
            }
            Notice::TimedOut { sequence } => words[..2].copy_from_slice(&[5, sequence]),
            Notice::GaveUp => words[0] = 6,
        }
        let mut bytes = [0; NOTICE_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a notice of a group of `world_size` ranks; `None` if it is none.
    pub(crate) fn decode(bytes: &[u8; NOTICE_BYTES], world_size: usize) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().expect("the chunks have eight bytes"));
        }
        let [tag, sequence, ..] = words;
        let rank = |word: u64| usize::try_from(word).ok().filter(|&rank| rank < world_size).map(Rank);
        let operation = |first: usize| Operation::decode([words[first], words[first + 1]]);
        match tag {
            1 => Some(Notice::Reached { sequence }),
            2 => Some(Notice::Goodbye { sequence }),
            3 => Some(Notice::Lost { rank: rank(words[2])? }),
            4 => Some(Notice::Mismatch {
                sequence,
                first: (rank(words[2])?, operation(4)?),
                second: (rank(words[3])?, operation(6)?),
            }),
            5 => Some(Notice::TimedOut { sequence }),
            6 => Some(Notice::GaveUp),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn notices_read_back() {
        let operation = Operation::Broadcast { root: Rank(2), dtype: trireme_base::DType::F64, len: 9 };
        let mismatch = Notice::Mismatch {
            sequence: u64::MAX,
            first: (Rank(0), Operation::Barrier),
            second: (Rank(3), operation),
        };
        let notices = [
            Notice::Reached { sequence: 7 },
            Notice::Goodbye { sequence: 8 },
            Notice::Lost { rank: Rank(1) },
            mismatch,
            Notice::TimedOut { sequence: 9 },
            Notice::GaveUp,
        ];
        for notice in notices {
            assert_eq!(Notice::decode(&notice.encode(), 4), Some(notice));
        }
        assert_eq!(Notice::decode(&mismatch.encode(), 3), None, "a rank outside of the group");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in any::<[u8; NOTICE_BYTES]>(), tag in 0..8_u8, world_size in 1..300_usize) {
            let mut tagged = bytes;
            tagged[..8].copy_from_slice(&[tag, 0, 0, 0, 0, 0, 0, 0]);
            for bytes in [bytes, tagged] {
                if let Some(notice) = Notice::decode(&bytes, world_size) {
                    prop_assert_eq!(Notice::decode(&notice.encode(), world_size), Some(notice));
                }
            }
        }
    }
}
