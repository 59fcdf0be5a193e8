use crate::recorder::OperationFields;
use serde::{Deserialize, Serialize};
use std::fmt;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_schedule::collective::{Collective, CollectiveKind, Data, RootRole};

/// The kind of an operation: a collective of all ranks of a group, or a message between two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum OperationKind {
    /// A collective for which [`trireme_schedule::collective`] has algorithms.
    Collective(CollectiveKind),
    /// An all-to-all with blocks of different lengths.
    AllToAllVariable,
    /// The hierarchical variant of `AllToAllVariable`: a block for another host goes through a rank of the sender's host. Its length is the
    /// sum over the blocks of all ranks.
    AllToAllVariableByHosts,
    /// Gathers a few bytes of every rank on all ranks. Lengths may differ.
    AllGatherBytes,
    /// One rank sends a vector to another.
    Message,
}

impl OperationKind {
    const OTHERS: [OperationKind; 4] = [
        OperationKind::AllToAllVariable,
        OperationKind::AllToAllVariableByHosts,
        OperationKind::AllGatherBytes,
        OperationKind::Message,
    ];

    fn all() -> impl Iterator<Item = OperationKind> {
        CollectiveKind::ALL.into_iter().map(OperationKind::Collective).chain(Self::OTHERS)
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::all().find(|kind| kind.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            OperationKind::Collective(kind) => kind.name(),
            OperationKind::AllToAllVariable => "all_to_all_variable",
            OperationKind::AllToAllVariableByHosts => "all_to_all_variable_by_hosts",
            OperationKind::AllGatherBytes => "all_gather_bytes",
            OperationKind::Message => "message",
        }
    }

    /// The role of the root, if the kind has one.
    fn root_role(self) -> Option<RootRole> {
        self.collective().and_then(|kind| kind.data_flow().root)
    }

    fn reduces(self) -> bool {
        self.collective().is_some_and(|kind| kind.data_flow().reduces)
    }

    fn has_dtype(self) -> bool {
        !matches!(self, OperationKind::AllGatherBytes | OperationKind::Collective(CollectiveKind::Barrier))
    }

    fn has_len(self) -> bool {
        self.has_dtype() && self != OperationKind::AllToAllVariable
    }

    fn collective(self) -> Option<CollectiveKind> {
        match self {
            OperationKind::Collective(kind) => Some(kind),
            _ => None,
        }
    }
}

/// One operation of a group. All ranks must issue equal operations; any difference is reported as a mismatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "OperationFields", try_from = "OperationFields")]
pub struct Operation {
    kind: OperationKind,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    /// [`DType::U8`] for kinds without elements.
    dtype: DType,
    len: usize,
}

/// Number of words of an encoded operation: kind, reduction, dtype, root, length.
pub(crate) const OPERATION_WORDS: usize = 2;

impl Operation {
    /// A barrier: no rank leaves it before every rank has entered.
    pub const BARRIER: Operation = Operation::of(CollectiveKind::Barrier.with_len(0), DType::U8);

    /// A gather of a few bytes of every rank on all ranks.
    pub const ALL_GATHER_BYTES: Operation = Operation::other(OperationKind::AllGatherBytes, DType::U8, 0);

    /// Creates an operation from a collective that does not reduce.
    ///
    /// # Panics
    /// If the collective reduces.
    pub const fn of(collective: Collective, dtype: DType) -> Self {
        assert!(!collective.kind.data_flow().reduces, "the collective reduces");
        Operation::new(collective, None, dtype)
    }

    /// Creates an operation from a collective that reduces elements by `op`.
    ///
    /// # Panics
    /// If the collective does not reduce.
    pub const fn reduction_of(collective: Collective, op: ReduceOp, dtype: DType) -> Self {
        assert!(collective.kind.data_flow().reduces, "the collective does not reduce");
        Operation::new(collective, Some(op), dtype)
    }

    pub(crate) const fn new(collective: Collective, op: Option<ReduceOp>, dtype: DType) -> Self {
        let (kind, root) = (OperationKind::Collective(collective.kind), collective.root());
        Operation { kind, op, root, dtype, len: collective.len }
    }

    /// Creates the operation that sends or receives a message of `len` elements.
    pub const fn message(dtype: DType, len: usize) -> Self {
        Operation::other(OperationKind::Message, dtype, len)
    }

    /// Creates an all-to-all with blocks of different lengths.
    pub const fn all_to_all_variable(dtype: DType) -> Self {
        Operation::other(OperationKind::AllToAllVariable, dtype, 0)
    }

    /// Creates a hierarchical all-to-all with blocks of different lengths; `len` is the sum over all blocks of all ranks.
    pub const fn all_to_all_variable_by_hosts(dtype: DType, len: usize) -> Self {
        Operation::other(OperationKind::AllToAllVariableByHosts, dtype, len)
    }

    const fn other(kind: OperationKind, dtype: DType, len: usize) -> Self {
        Operation { kind, op: None, root: None, dtype, len }
    }

    /// Returns the operation with these fields, or `None` if a field is missing that the kind needs.
    pub(crate) fn from_fields(
        kind: OperationKind,
        op: Option<ReduceOp>,
        root: Option<Rank>,
        dtype: DType,
        len: usize,
    ) -> Option<Self> {
        Some(Operation {
            kind,
            op: if kind.reduces() { Some(op?) } else { None },
            root: if kind.root_role().is_some() { Some(root?) } else { None },
            dtype: if kind.has_dtype() { dtype } else { DType::U8 },
            len: if kind.has_len() { len } else { 0 },
        })
    }

    /// The name of the [`Group`](crate::Group) method that issues the operation; `message` for messages.
    pub fn name(self) -> &'static str {
        self.kind.name()
    }

    /// The element type, and the number of elements of the full vector. [`DType::U8`] and 0 for kinds without elements.
    pub fn elements(self) -> (DType, usize) {
        (self.dtype, self.len)
    }

    /// Bytes of the full vector. 0 if its length differs between ranks.
    pub fn bytes(self) -> u64 {
        (self.len as u64).saturating_mul(self.dtype.size() as u64)
    }

    /// The reduction, if the operation reduces.
    pub fn reduction(self) -> Option<ReduceOp> {
        self.op
    }

    /// The root, if the operation has one.
    pub fn root(self) -> Option<Rank> {
        self.root
    }

    pub(crate) fn input_is_block(self) -> bool {
        self.kind.collective().is_some_and(|kind| kind.data_flow().input == Data::Block)
    }

    pub(crate) fn output_is_block(self) -> bool {
        self.kind.collective().is_some_and(|kind| kind.data_flow().output == Data::Block)
    }

    pub(crate) fn is(self, kind: CollectiveKind) -> bool {
        self.kind == OperationKind::Collective(kind)
    }

    /// The collective with its root and length, if the operation has algorithms.
    pub(crate) fn collective(self) -> Option<Collective> {
        Some(self.kind.collective()?.with_root(self.root.unwrap_or(Rank::ROOT), self.len))
    }

    /// One phase of the operation, with the same elements and reduction. A mean is a sum until all phases are done.
    pub(crate) fn phase(self, collective: Collective) -> Operation {
        let op = match self.op {
            Some(ReduceOp::Mean) | None => ReduceOp::Sum,
            Some(op) => op,
        };
        Operation::new(collective, collective.reduces().then_some(op), self.dtype)
    }

    /// Encodes the operation. Equal operations have equal words.
    pub(crate) fn encode(self) -> [u64; OPERATION_WORDS] {
        let kind = OperationKind::all().position(|kind| kind == self.kind).expect("every kind is listed");
        let (op, root) = (self.op.map_or(0, |op| op as u64), self.root.map_or(0, |root| root.0));
        // An encoding is never all zeros.
        let kind = kind as u64 + 1;
        [kind | op << 8 | (self.dtype as u64) << 16 | (root as u64) << 32, self.len as u64]
    }

    /// Decodes the words of [`encode`](Operation::encode). `None` if they encode no operation.
    pub(crate) fn decode(words: [u64; OPERATION_WORDS]) -> Option<Self> {
        let field = |shift: u32| usize::from((words[0] >> shift) as u8);
        let kind = OperationKind::all().nth(field(0).checked_sub(1)?)?;
        let (op, dtype) = (*ReduceOp::ALL.get(field(8))?, *DType::ALL.get(field(16))?);
        let root = Rank((words[0] >> 32) as usize);
        let len = usize::try_from(words[1]).ok()?;
        let operation = Operation::from_fields(kind, Some(op), Some(root), dtype, len)?;
        (operation.encode() == words).then_some(operation)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Operation { kind, op, root, dtype, len } = self;
        f.write_str(self.name())?;
        if !kind.has_dtype() {
            return Ok(());
        }
        f.write_str("(")?;
        if let Some(op) = op {
            write!(f, "{op}, ")?;
        }
        if let Some(root) = root {
            let way = if kind.root_role() == Some(RootRole::Source) { "from" } else { "to" };
            write!(f, "{way} rank {root}, ")?;
        }
        write!(f, "{dtype}")?;
        if kind.has_len() {
            write!(f, " x {len}")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn encodings_are_distinct_and_read_back() {
        let mut all = vec![Operation::ALL_GATHER_BYTES, Operation::BARRIER];
        for dtype in DType::ALL {
            all.push(Operation::all_to_all_variable(dtype));
            for len in [0, 1, usize::MAX] {
                all.extend([
                    Operation::of(CollectiveKind::AllGather.with_len(len), dtype),
                    Operation::of(CollectiveKind::AllToAll.with_len(len), dtype),
                    Operation::all_to_all_variable_by_hosts(dtype, len),
                    Operation::message(dtype, len),
                ]);
                for op in ReduceOp::ALL {
                    all.extend([
                        Operation::reduction_of(CollectiveKind::AllReduce.with_len(len), op, dtype),
                        Operation::reduction_of(CollectiveKind::ReduceScatter.with_len(len), op, dtype),
                        Operation::reduction_of(CollectiveKind::Reduce.with_root(Rank(3), len), op, dtype),
                    ]);
                }
                for root in [0, 1, 70_000].map(Rank) {
                    all.extend([
                        Operation::of(CollectiveKind::Broadcast.with_root(root, len), dtype),
                        Operation::of(CollectiveKind::Gather.with_root(root, len), dtype),
                        Operation::of(CollectiveKind::Scatter.with_root(root, len), dtype),
                    ]);
                }
            }
        }
        for (index, operation) in all.iter().enumerate() {
            assert_eq!(Operation::decode(operation.encode()), Some(*operation));
            assert!(all[..index].iter().all(|earlier| earlier.encode() != operation.encode()));
        }
    }

    /// Ranks of different builds compare these numbers.
    #[test]
    fn wire_numbers_are_stable() {
        let kinds = [
            (1, "all_reduce"),
            (2, "reduce"),
            (3, "broadcast"),
            (4, "all_gather"),
            (5, "reduce_scatter"),
            (6, "gather"),
            (7, "scatter"),
            (8, "all_to_all"),
            (9, "barrier"),
            (10, "all_to_all_variable"),
            (11, "all_to_all_variable_by_hosts"),
            (12, "all_gather_bytes"),
            (13, "message"),
        ];
        let found = OperationKind::all().map(|kind| {
            let operation = Operation::from_fields(kind, Some(ReduceOp::Sum), Some(Rank(0)), DType::U8, 0);
            (operation.expect("all fields").encode()[0] & 0xff, kind.name())
        });
        assert_eq!(Vec::from_iter(found), kinds);
        let collective = CollectiveKind::AllReduce.with_len(7);
        let word = |op, dtype| Operation::reduction_of(collective, op, dtype).encode()[0];
        let reductions = [
            (ReduceOp::Sum, 0),
            (ReduceOp::Mean, 1),
            (ReduceOp::Prod, 2),
            (ReduceOp::Max, 3),
            (ReduceOp::Min, 4),
        ];
        assert_eq!(reductions.map(|(op, _)| op), ReduceOp::ALL);
        assert!(reductions.iter().all(|&(op, number)| word(op, DType::F32) == 1 | number << 8));
        let dtypes = [
            (DType::F32, 0),
            (DType::F64, 1),
            (DType::F16, 2),
            (DType::Bf16, 3),
            (DType::U8, 4),
            (DType::U16, 5),
            (DType::U32, 6),
            (DType::U64, 7),
            (DType::I32, 8),
            (DType::I64, 9),
        ];
        assert_eq!(dtypes.map(|(dtype, _)| dtype), DType::ALL);
        assert!(dtypes.iter().all(|&(dtype, number)| word(ReduceOp::Sum, dtype) == 1 | number << 16));
    }

    #[test]
    fn an_operation_reads_as_users_write_it() {
        let (op, dtype, root) = (ReduceOp::Sum, DType::F32, Rank(2));
        let shown = [
            Operation::reduction_of(CollectiveKind::AllReduce.with_len(7), op, dtype),
            Operation::reduction_of(CollectiveKind::Reduce.with_root(root, 7), op, dtype),
            Operation::of(CollectiveKind::Scatter.with_root(root, 7), dtype),
            Operation::all_to_all_variable(dtype),
            Operation::BARRIER,
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
        fn decoded_operations_encode_to_the_same_words(words in any::<[u64; 2]>(), tag in 0..15_u64) {
            for words in [words, [words[0] & 0xffff_ffff_0007_0300 | tag, words[1]], [tag, 0]] {
                if let Some(operation) = Operation::decode(words) {
                    prop_assert_eq!(operation.encode(), words);
                }
            }
        }
    }
}
