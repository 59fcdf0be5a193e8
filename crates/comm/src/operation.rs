use std::fmt;
use trireme_base::{DType, Rank, ReduceOp};

/// One collective operation, as all ranks must issue it: what differs between ranks is a mismatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Every rank gets the reduction of all ranks' vectors.
    AllReduce {
        /// How two elements become one.
        op: ReduceOp,
        /// Type of the elements.
        dtype: DType,
        /// Number of elements.
        len: usize,
    },
    /// Every rank gets the root's vector.
    Broadcast {
        /// Whose vector.
        root: Rank,
        /// Type of the elements.
        dtype: DType,
        /// Number of elements.
        len: usize,
    },
    /// Every rank gets the bytes of all ranks; their lengths may differ.
    AllGatherBytes,
    /// Nobody goes on before everybody has come.
    Barrier,
}

/// The encoding of an operation: tag, reduction, dtype, root, length.
pub(crate) const OPERATION_WORDS: usize = 2;

const DTYPES: [DType; 10] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::Bf16,
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::I32,
    DType::I64,
];
const REDUCE_OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];

impl Operation {
    /// The operation in two words; equal operations give equal words.
    pub(crate) fn encode(self) -> [u64; OPERATION_WORDS] {
        let word = |tag: u64, op: usize, dtype: usize, root: usize| {
            tag | (op as u64) << 8 | (dtype as u64) << 16 | (root as u64) << 32
        };
        match self {
            Operation::AllReduce { op, dtype, len } => {
                [word(1, position(&REDUCE_OPS, op), position(&DTYPES, dtype), 0), len as u64]
            }
            Operation::Broadcast { root, dtype, len } => {
                [word(2, 0, position(&DTYPES, dtype), root.0), len as u64]
            }
            Operation::AllGatherBytes => [word(3, 0, 0, 0), 0],
            Operation::Barrier => [word(4, 0, 0, 0), 0],
        }
    }

    /// Reads what [`encode`](Operation::encode) wrote; `None` if the words come from something else.
    pub(crate) fn decode(words: [u64; OPERATION_WORDS]) -> Option<Self> {
        let field = |shift: u32| usize::from((words[0] >> shift) as u8);
        let (op, dtype) = (REDUCE_OPS.get(field(8)), DTYPES.get(field(16)));
        let len = usize::try_from(words[1]).ok()?;
        let operation = match field(0) {
            1 => Operation::AllReduce { op: *op?, dtype: *dtype?, len },
            2 => Operation::Broadcast { root: Rank((words[0] >> 32) as usize), dtype: *dtype?, len },
            3 => Operation::AllGatherBytes,
            4 => Operation::Barrier,
            _ => return None,
        };
        (operation.encode() == words).then_some(operation)
    }
}

fn position<T: PartialEq>(all: &[T], one: T) -> usize {
    all.iter().position(|candidate| *candidate == one).expect("every variant is in the table")
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::AllReduce { op, dtype, len } => write!(f, "all_reduce({op}, {dtype} x {len})"),
            Operation::Broadcast { root, dtype, len } => {
                write!(f, "broadcast(from rank {root}, {dtype} x {len})")
            }
            Operation::AllGatherBytes => f.write_str("all_gather_bytes"),
            Operation::Barrier => f.write_str("barrier"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn encodings_are_distinct_and_read_back() {
        let mut all = vec![Operation::AllGatherBytes, Operation::Barrier];
        for dtype in DTYPES {
            for len in [0, 1, usize::MAX] {
                all.extend(REDUCE_OPS.map(|op| Operation::AllReduce { op, dtype, len }));
                all.extend([0, 1, 70_000].map(|root| Operation::Broadcast { root: Rank(root), dtype, len }));
            }
        }
        for (index, operation) in all.iter().enumerate() {
            assert_eq!(Operation::decode(operation.encode()), Some(*operation));
            assert!(all[..index].iter().all(|earlier| earlier.encode() != operation.encode()));
        }
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same_words(words in any::<[u64; 2]>(), tag in 0..6_u64) {
            for words in [words, [words[0] & 0xffff_ffff_0007_0300 | tag, words[1]], [tag, 0]] {
                if let Some(operation) = Operation::decode(words) {
                    prop_assert_eq!(operation.encode(), words);
                }
            }
        }
    }
}
