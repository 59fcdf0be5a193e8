use crate::kernels::cpu::threads::ThreadPool;
use crate::memory::OverBudget;
use crate::shape::Shape;
use trireme_base::{Category, DType};

/// A result whose error is a [`DeviceError`], unless another one is given.
pub(crate) type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// A device refused.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum DeviceError {
    /// Its memory could not be reserved.
    #[error(
        "cannot reserve addresses for the memory of the CPU device: {0}; see whether `ulimit -v`, `ulimit -d` or the setting \
         vm.overcommit_memory = 2 keeps them back"
    )]
    Reserve(#[source] std::io::Error),
    /// The system has no huge pages of 2 MiB.
    #[error("cannot reserve addresses for huge pages of 2 MiB: {0}")]
    ReserveHuge(#[source] std::io::Error),
    /// More threads than a device may have.
    #[error("{num_threads} threads exceed the maximum of {} for a device", ThreadPool::SIZE_MAX)]
    TooManyThreads { num_threads: usize },
    /// Its threads could not be started.
    #[error("cannot start {num_threads} kernel threads: {source}; use fewer")]
    Threads { num_threads: usize, source: std::io::Error },
    /// A tensor would have more bytes than a process can address.
    #[error(
        "a tensor of shape {shape:?} in {dtype} for {category} exceeds the address space; use smaller \
         batches, shorter sequences or a smaller model"
    )]
    Unaddressable { shape: Shape, dtype: DType, category: Category },
    /// Its memory is used up.
    #[error("{0}")]
    OutOfMemory(String),
    /// The host's pool of huge pages is used up.
    #[error("{0}")]
    HugePages(String),
    /// Rows that the ranks of the tensor axis cannot have equal parts of.
    #[error(
        "{degree} ranks of the tensor axis cannot have equal parts of dim {dim} of {shape:?}; use a length \
         that {degree} divides, or no sequence parallelism"
    )]
    UnequalRows { shape: Shape, dim: usize, degree: usize },
    /// Heads that the ranks which exchange them cannot have equal parts of.
    #[error(
        "{degree} ranks cannot have equal parts of {num_heads} heads; use a divisor of {num_heads} and of the degree of the \
         context axis, such as 1"
    )]
    UnequalHeads { num_heads: usize, degree: usize },
    /// An operation that is wrong where ranks have parts of the positions.
    #[error(
        "{operation} mixes positions of a sequence, of which the ranks of the context axis have parts, or works on floats of fewer dims than \
         [samples, positions, cols]; do this by attention, or without a context axis"
    )]
    NeedsAllPositions { operation: String },
    /// A rank could not exchange values with the others.
    #[error(transparent)]
    Exchange(Box<dyn std::error::Error + Send + Sync>),
    /// Its budget is used up.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
}
