use crate::recorder::OperationFields;
use serde::{Deserialize, Serialize};
use std::fmt;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_schedule::collective::Collective;

/// One operation of a group, as all ranks must issue it: what differs between ranks is a mismatch.
///
/// `len` is the number of elements of the whole vector, which is cut into one block a rank where blocks matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "OperationFields", try_from = "OperationFields")]
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
    /// The root gets the reduction of all ranks' vectors.
    Reduce {
        /// How two elements become one.
        op: ReduceOp,
        /// Who gets it.
        root: Rank,
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
    /// Every rank gets every rank's block.
    AllGather {
        /// Type of the elements.
        dtype: DType,
        /// Number of elements of all blocks.
        len: usize,
    },
    /// Every rank gets its block of the reduction of all ranks' vectors.
    ReduceScatter {
        /// How two elements become one.
        op: ReduceOp,
        /// Type of the elements.
        dtype: DType,
        /// Number of elements of all blocks.
        len: usize,
    },
    /// The root gets every rank's block.
    Gather {
        /// Who gets them.
        root: Rank,
        /// Type of the elements.
        dtype: DType,
        /// Number of elements of all blocks.
        len: usize,
    },
    /// Every rank gets its block of the root's vector.
    Scatter {
        /// Whose vector.
        root: Rank,
        /// Type of the elements.
        dtype: DType,
        /// Number of elements of all blocks.
        len: usize,
    },
    /// Every rank gets, from every rank, the block that is for it.
    AllToAll {
        /// Type of the elements.
        dtype: DType,
        /// Number of elements of all blocks of a rank.
        len: usize,
    },
    /// As [`AllToAll`](Operation::AllToAll), with blocks of any lengths.
    AllToAllVariable {
        /// Type of the elements.
        dtype: DType,
    },
    /// As [`AllToAllVariable`](Operation::AllToAllVariable), by way of a rank of the same host where blocks go to another one.
    AllToAllVariableByHosts {
        /// Type of the elements.
        dtype: DType,
        /// Number of elements of all blocks of all ranks: what a rank has of them differs.
        len: usize,
    },
    /// Every rank gets the bytes of all ranks; their lengths may differ.
    AllGatherBytes,
    /// Nobody goes on before everybody has come.
    Barrier,
    /// One rank's vector goes to one other.
    Message {
        /// Type of the elements.
        dtype: DType,
        /// Number of elements.
        len: usize,
    },
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
    /// The word for the operation, as users call it.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce { .. } => "all_reduce",
            Operation::Reduce { .. } => "reduce",
            Operation::Broadcast { .. } => "broadcast",
            Operation::AllGather { .. } => "all_gather",
            Operation::ReduceScatter { .. } => "reduce_scatter",
            Operation::Gather { .. } => "gather",
            Operation::Scatter { .. } => "scatter",
            Operation::AllToAll { .. } => "all_to_all",
            Operation::AllToAllVariable { .. } => "all_to_all_variable",
            Operation::AllToAllVariableByHosts { .. } => "all_to_all_variable_by_hosts",
            Operation::AllGatherBytes => "all_gather_bytes",
            Operation::Barrier => "barrier",
            Operation::Message { .. } => "message",
        }
    }

    /// Type and number of the elements; bytes where there are none.
    pub fn elements(self) -> (DType, usize) {
        match self {
            Operation::AllReduce { dtype, len, .. }
            | Operation::Reduce { dtype, len, .. }
            | Operation::Broadcast { dtype, len, .. }
            | Operation::AllGather { dtype, len }
            | Operation::ReduceScatter { dtype, len, .. }
            | Operation::Gather { dtype, len, .. }
            | Operation::Scatter { dtype, len, .. }
            | Operation::AllToAll { dtype, len }
            | Operation::AllToAllVariableByHosts { dtype, len }
            | Operation::Message { dtype, len } => (dtype, len),
            Operation::AllToAllVariable { dtype } => (dtype, 0),
            Operation::AllGatherBytes | Operation::Barrier => (DType::U8, 0),
        }
    }

    /// Bytes of the elements; 0 where their number differs between ranks.
    pub fn bytes(self) -> u64 {
        let (dtype, len) = self.elements();
        (len as u64).saturating_mul(dtype.size() as u64)
    }

    /// How elements are reduced, if they are.
    pub fn reduction(self) -> Option<ReduceOp> {
        match self {
            Operation::AllReduce { op, .. }
            | Operation::Reduce { op, .. }
            | Operation::ReduceScatter { op, .. } => Some(op),
            _ => None,
        }
    }

    /// The one rank that differs from the others, if there is one.
    pub fn root(self) -> Option<Rank> {
        match self {
            Operation::Reduce { root, .. }
            | Operation::Broadcast { root, .. }
            | Operation::Gather { root, .. }
            | Operation::Scatter { root, .. } => Some(root),
            _ => None,
        }
    }

    /// The operation as algorithms know it, if they do.
    pub(crate) fn collective(self) -> Option<Collective> {
        Some(match self {
            Operation::AllReduce { len, .. } => Collective::AllReduce { len },
            Operation::Reduce { root, len, .. } => Collective::Reduce { root, len },
            Operation::Broadcast { root, len, .. } => Collective::Broadcast { root, len },
            Operation::AllGather { len, .. } => Collective::AllGather { len },
            Operation::ReduceScatter { len, .. } => Collective::ReduceScatter { len },
            Operation::Gather { root, len, .. } => Collective::Gather { root, len },
            Operation::Scatter { root, len, .. } => Collective::Scatter { root, len },
            Operation::AllToAll { len, .. } => Collective::AllToAll { len },
            Operation::Barrier => Collective::Barrier,
            Operation::AllToAllVariable { .. }
            | Operation::AllToAllVariableByHosts { .. }
            | Operation::AllGatherBytes
            | Operation::Message { .. } => return None,
        })
    }

    /// A part of the operation: `collective`, on elements of the same type and reduced the same way. A mean is a sum until
    /// all parts are done.
    pub(crate) fn part(self, collective: Collective) -> Operation {
        let (dtype, _) = self.elements();
        let op = match self.reduction() {
            Some(ReduceOp::Mean) | None => ReduceOp::Sum,
            Some(op) => op,
        };
        match collective {
            Collective::AllReduce { len } => Operation::AllReduce { op, dtype, len },
            Collective::Reduce { root, len } => Operation::Reduce { op, root, dtype, len },
            Collective::Broadcast { root, len } => Operation::Broadcast { root, dtype, len },
            Collective::AllGather { len } => Operation::AllGather { dtype, len },
            Collective::ReduceScatter { len } => Operation::ReduceScatter { op, dtype, len },
            Collective::Gather { root, len } => Operation::Gather { root, dtype, len },
            Collective::Scatter { root, len } => Operation::Scatter { root, dtype, len },
            Collective::AllToAll { len } => Operation::AllToAll { dtype, len },
            Collective::Barrier => Operation::Barrier,
        }
    }

    fn tag(self) -> u64 {
        match self {
            Operation::AllReduce { .. } => 1,
            Operation::Broadcast { .. } => 2,
            Operation::AllGatherBytes => 3,
            Operation::Barrier => 4,
            Operation::Reduce { .. } => 5,
            Operation::AllGather { .. } => 6,
            Operation::ReduceScatter { .. } => 7,
            Operation::Gather { .. } => 8,
            Operation::Scatter { .. } => 9,
            Operation::AllToAll { .. } => 10,
            Operation::AllToAllVariable { .. } => 11,
            Operation::Message { .. } => 12,
            Operation::AllToAllVariableByHosts { .. } => 13,
        }
    }

    /// The operation in two words; equal operations give equal words.
    pub(crate) fn encode(self) -> [u64; OPERATION_WORDS] {
        let (dtype, len) = self.elements();
        let op = self.reduction().map_or(0, |op| position(&REDUCE_OPS, op));
        let dtype = position(&DTYPES, dtype);
        let root = self.root().map_or(0, |root| root.0);
        [self.tag() | (op as u64) << 8 | (dtype as u64) << 16 | (root as u64) << 32, len as u64]
    }

    /// Reads what [`encode`](Operation::encode) wrote; `None` if the words come from something else.
    pub(crate) fn decode(words: [u64; OPERATION_WORDS]) -> Option<Self> {
        let field = |shift: u32| usize::from((words[0] >> shift) as u8);
        let (op, dtype) = (*REDUCE_OPS.get(field(8))?, *DTYPES.get(field(16))?);
        let root = Rank((words[0] >> 32) as usize);
        let len = usize::try_from(words[1]).ok()?;
        let operation = match field(0) {
            1 => Operation::AllReduce { op, dtype, len },
            2 => Operation::Broadcast { root, dtype, len },
            3 => Operation::AllGatherBytes,
            4 => Operation::Barrier,
            5 => Operation::Reduce { op, root, dtype, len },
            6 => Operation::AllGather { dtype, len },
            7 => Operation::ReduceScatter { op, dtype, len },
            8 => Operation::Gather { root, dtype, len },
            9 => Operation::Scatter { root, dtype, len },
            10 => Operation::AllToAll { dtype, len },
            11 => Operation::AllToAllVariable { dtype },
            12 => Operation::Message { dtype, len },
            13 => Operation::AllToAllVariableByHosts { dtype, len },
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
        let (dtype, len) = self.elements();
        f.write_str(self.name())?;
        match self {
            Operation::AllGatherBytes | Operation::Barrier => return Ok(()),
            Operation::AllToAllVariable { .. } => return write!(f, "({dtype})"),
            _ => f.write_str("(")?,
        }
        if let Some(op) = self.reduction() {
            write!(f, "{op}, ")?;
        }
        match self {
            Operation::Broadcast { root, .. } | Operation::Scatter { root, .. } => {
                write!(f, "from rank {root}, ")?;
            }
            Operation::Reduce { root, .. } | Operation::Gather { root, .. } => write!(f, "to rank {root}, ")?,
            _ => {}
        }
        write!(f, "{dtype} x {len})")
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
            all.push(Operation::AllToAllVariable { dtype });
            for len in [0, 1, usize::MAX] {
                all.extend([
                    Operation::AllGather { dtype, len },
                    Operation::AllToAll { dtype, len },
                    Operation::AllToAllVariableByHosts { dtype, len },
                    Operation::Message { dtype, len },
                ]);
                for op in REDUCE_OPS {
                    all.extend([
                        Operation::AllReduce { op, dtype, len },
                        Operation::ReduceScatter { op, dtype, len },
                        Operation::Reduce { op, root: Rank(3), dtype, len },
                    ]);
                }
                for root in [0, 1, 70_000].map(Rank) {
                    all.extend([
                        Operation::Broadcast { root, dtype, len },
                        Operation::Gather { root, dtype, len },
                        Operation::Scatter { root, dtype, len },
                    ]);
                }
            }
        }
        for (index, operation) in all.iter().enumerate() {
            assert_eq!(Operation::decode(operation.encode()), Some(*operation));
            assert!(all[..index].iter().all(|earlier| earlier.encode() != operation.encode()));
        }
    }

    #[test]
    fn an_operation_reads_as_users_write_it() {
        let (op, dtype, root) = (ReduceOp::Sum, DType::F32, Rank(2));
        let shown = [
            Operation::AllReduce { op, dtype, len: 7 },
            Operation::Reduce { op, root, dtype, len: 7 },
            Operation::Scatter { root, dtype, len: 7 },
            Operation::AllToAllVariable { dtype },
            Operation::Barrier,
        ]
        .map(|operation| operation.to_string());
        assert_eq!(
            shown,
            [
                "all_reduce(sum, f32 x 7)",
                "reduce(sum, to rank 2, f32 x 7)",
                "scatter(from rank 2, f32 x 7)",
                "all_to_all_variable(f32)",
                "barrier"
            ]
        );
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same_words(words in any::<[u64; 2]>(), tag in 0..15_u64) {
            for words in [words, [words[0] & 0xffff_ffff_0007_0300 | tag, words[1]], [tag, 0]] {
                if let Some(operation) = Operation::decode(words) {
                    prop_assert_eq!(operation.encode(), words);
                }
            }
        }
    }
}
