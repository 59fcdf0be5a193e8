use crate::kernels::cpu::threads::ThreadPool;
use crate::kernels::cuda::CudaError;
use crate::memory::OverBudget;
use crate::shape::Shape;
use trireme_base::{Category, DType};

/// A result whose default error is [`DeviceError`].
pub(crate) type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// An error of a device or of an operation on its tensors.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum DeviceError {
    /// Address space for the device's memory could not be reserved.
    #[error(
        "cannot reserve addresses for the memory of the CPU device: {0}; see whether `ulimit -v`, `ulimit -d` or the setting \
         vm.overcommit_memory = 2 keeps them back"
    )]
    Reserve(#[source] std::io::Error),
    /// Address space for 2 MiB pages could not be reserved.
    #[error("cannot reserve addresses for huge pages of 2 MiB: {0}")]
    ReserveHuge(#[source] std::io::Error),
    /// The number of threads exceeds the maximum of a device.
    #[error("{num_threads} threads exceed the maximum of {} for a device", ThreadPool::SIZE_MAX)]
    TooManyThreads { num_threads: usize },
    /// The device's threads could not be started.
    #[error("cannot start {num_threads} kernel threads: {source}; use fewer")]
    Threads { num_threads: usize, source: std::io::Error },
    /// A tensor would have more bytes than a process can address.
    #[error(
        "a tensor of shape {shape:?} in {dtype} for {category} exceeds the address space; use smaller \
         batches, shorter sequences or a smaller model"
    )]
    Unaddressable { shape: Shape, dtype: DType, category: Category },
    /// A kernel that is a Rust function was issued to a GPU.
    #[error(
        "the Rust function in {name} cannot run on a GPU; express it with `Device::map_rows` or other kernels, or train on \
         the CPU"
    )]
    RustFunction { name: &'static str },
    /// The device has failed, for example because a GPU was lost. It runs no more kernels and copies.
    #[error("the device failed: {0}")]
    Failed(String),
    /// A GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// No memory is left.
    #[error("{0}")]
    OutOfMemory(String),
    /// The host's pool of huge pages is exhausted.
    #[error("{0}")]
    HugePages(String),
    /// The rows of a value cannot be sharded equally over the ranks of the tensor axis.
    #[error(
        "{degree} ranks of the tensor axis cannot have equal parts of dim {dim} of {shape:?}; use a length \
         that {degree} divides, or no sequence parallelism"
    )]
    IndivisibleRows { shape: Shape, dim: usize, degree: usize },
    /// The number of heads is not divisible by the number of ranks that exchange heads.
    #[error(
        "{degree} ranks cannot have equal parts of {num_heads} heads; use a divisor of {num_heads} and of the degree of the \
         context axis, such as 1"
    )]
    IndivisibleHeads { num_heads: usize, degree: usize },
    /// An operation whose result would be wrong when positions are sharded along the context axis.
    #[error(
        "{operation} mixes positions of a sequence, of which the ranks of the context axis have parts, or works on floats of fewer dims than \
         [samples, positions, cols]; do this by attention, or without a context axis"
    )]
    NeedsAllPositions { operation: String },
    /// An exchange of values with other ranks failed.
    #[error(transparent)]
    Exchange(Box<dyn std::error::Error + Send + Sync>),
    /// The memory budget is exhausted.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
}
