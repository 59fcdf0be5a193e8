//! Memory, tensors, kernels and the autograd tape.
//!
//! A [`Device`] owns memory and runs kernels; [`Tensor`]s reside on it. A [`Tape`] records operations and differentiates them. It passes
//! each parameter gradient to a [`GradSink`] as soon as the gradient is complete. The crates `model` and `parallel` use only the device and
//! the tape: which hardware runs a kernel is decided inside [`Device`].

mod cow_tensor;
mod declaration;
mod device;
mod exchange_memory;
mod fp8;
mod kernels;
mod lent_memory;
mod memory;
mod optimizer;
mod parameter_table;
mod parameters;
mod precision;
pub mod probe;
mod shape;
pub mod tape;
mod tensor;
mod timing;
pub mod verification;
mod view;

pub use cow_tensor::CowTensor;
pub use declaration::{Initial, Parameter, ParameterClass};
pub use device::{
    BackendKind, CallTimer, CudaError, CudaFolders, CudaInstallation, CudaOptions, CudaReport,
    DetachedOptions, Device, DeviceError, DeviceOptions, Expr, FoundLibrary, Gpu, GpuInstant,
    LIBRARY_VARIABLE, MatmulEpilogue, MatmulOperand, PageSource, PinnedMemory, RecordedCalls, Replay,
    RowGroups, RowInput, TimedCall, Transposition, UpdatePass, WaitSite,
};
pub use fp8::{Fp8Formats, Fp8Recipe, Fp8Scales, Fp8State, Fp8View};
pub use kernels::{
    Activation, AttentionRule, AttentionShape, ExactSum, ExpertGroups, FactoredMatrix, FactoredMoments,
    FactoredStep, GroupLimit, IntegerFormat, LatentHeadShape, LeafRun, Piece, Pieces, RoutingRule, SimdLevel,
    StateDType, StepScale, updates,
};
pub use lent_memory::{LentMemory, OverflowAllocator};
pub use memory::{GpuMemory, MemoryCounter, MemoryUsage, OverBudget};
pub use optimizer::OptimizerState;
pub use parameter_table::{
    ExpertDegreeError, ModelRank, NUM_LEAVES, ParameterId, ParameterInfo, ParameterSpan, ParameterTable,
    SpanShard, Tie, UnitInfo, UnsplittableError,
};
pub use parameters::{ParameterSource, Parameters};
pub use precision::Precision;
pub use shape::Shape;
pub use tape::{GradSink, GradTarget, PassState, Tape, Var};
pub use tensor::Tensor;
pub use trireme_base::{AxisRank, AxisSplit, Category};
pub use view::{View, ViewMut};
