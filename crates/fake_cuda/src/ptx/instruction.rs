//! Kernels, their instructions and operands.

/// Type of operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    /// Bits, or an unsigned integer, of a number of bytes.
    Bits(u8),
    /// A signed integer of a number of bytes.
    Signed(u8),
    F32,
    F64,
    Predicate,
}

impl Type {
    /// Reads the suffix of an instruction.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "f32" => Type::F32,
            "f64" => Type::F64,
            "pred" => Type::Predicate,
            _ => {
                let bytes = name.get(1..)?.parse::<u8>().ok()? / 8;
                match name.as_bytes()[0] {
                    b's' => Type::Signed(bytes),
                    b'u' | b'b' => Type::Bits(bytes),
                    _ => return None,
                }
            }
        })
    }

    pub(crate) fn num_bytes(self) -> usize {
        match self {
            Type::Bits(bytes) | Type::Signed(bytes) => bytes.into(),
            Type::F32 => 4,
            Type::F64 => 8,
            Type::Predicate => 1,
        }
    }
}

/// A value of a thread that is not in its registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    ThreadId(usize),
    BlockSize(usize),
    BlockId(usize),
    GridSize(usize),
}

/// An operand with one value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Register(usize),
    Constant(u64),
    Special(Special),
}

/// An operand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand {
    Value(Value),
    Vector(Vec<Value>),
    /// An address: a base and an offset.
    Address(Value, i64),
    /// An instruction to continue at.
    Target(usize),
}

/// Memory that an instruction accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Parameter,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unary {
    Move,
    Not,
    Neg,
    Abs,
    Clz,
    Popc,
    Sqrt,
    Reciprocal,
    Exp2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    /// A sum that is rounded towards zero.
    AddToZero,
    Sub,
    Mul,
    /// A product of twice the width.
    MulWide,
    /// The high half of such a product.
    MulHigh,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    CopySign,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    /// Towards zero, to an integer.
    Zero,
    /// Towards minus infinity. Conversions round to an integer.
    Down,
    /// Towards plus infinity, to an integer.
    Up,
}

/// A comparison, and whether it holds if an operand is NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Comparison {
    Less(bool),
    LessOrEqual(bool),
    Equal(bool),
    NotEqual(bool),
    GreaterOrEqual(bool),
    Greater(bool),
    IsNan,
}

/// The operations of a warp, for which its lanes wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WarpOperation {
    Barrier,
    /// Lane `lane ^ operand` if true, otherwise lane `operand`.
    Shuffle(bool),
    Ballot,
    LoadMatrices {
        is_transposed: bool,
    },
    /// `mma.m16n8k16` in bf16 or in f16.
    MultiplyMatrices {
        is_bf16: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Operation {
    Unary(Unary, Type),
    Binary(Binary, Type),
    MultiplyAdd(Type, Rounding),
    /// To the first type from the second.
    Convert {
        to: Type,
        from: Type,
        rounding: Rounding,
        saturates: bool,
    },
    Compare(Comparison, Type),
    Select,
    PermuteBytes,
    InsertBits,
    Load(Space, Type),
    Store(Space, Type),
    /// Stores the second operand if the memory has the first; returns what it had.
    CompareAndSwap(Type),
    AtomicMax(Type),
    Branch,
    Return,
    Trap,
    BlockBarrier,
    Warp(WarpOperation),
}

/// An instruction.
#[derive(Debug)]
pub(crate) struct Instruction {
    /// Its text.
    pub(crate) text: String,
    /// The register that must be true, or false.
    pub(crate) guard: Option<(usize, bool)>,
    pub(crate) operation: Operation,
    /// The destination, if there is one, and the other operands.
    pub(crate) operands: Vec<Operand>,
}

/// First address of shared memory, of local memory and of parameters. Lower addresses stay unused, so that null pointers are found.
pub(super) const FIRST_ADDRESS: u64 = 256;

/// A kernel.
#[derive(Debug)]
pub struct PtxKernel {
    /// Its name.
    pub(crate) name: String,
    /// The size of each argument in bytes.
    pub(crate) sizes: Vec<usize>,
    /// The offset of each argument in the memory of parameters.
    pub(super) parameter_offsets: Vec<usize>,
    pub(super) instructions: Vec<Instruction>,
    pub(super) num_registers: usize,
    /// Bytes of static shared memory, and of local memory.
    pub(super) shared_bytes: usize,
    pub(super) local_bytes: usize,
}
