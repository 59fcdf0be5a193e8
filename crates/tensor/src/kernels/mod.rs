//! Kernels. The only module of this crate with `unsafe` code: memory, threads, SIMD and machine code.
#![allow(unsafe_code)]

pub(crate) mod backend;
pub(crate) mod call;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod expression;
pub(crate) mod host_pinning;
mod operand;

pub(crate) use cpu::SharedSlice;
pub use cpu::activation::Activation;
pub(crate) use cpu::attention::{
    AttentionGrads, AttentionInputs, AttentionOutput, AttentionScope, ForwardResults, LayerKvCache, Rotary,
    RowDestination,
};
pub use cpu::attention::{AttentionRule, AttentionShape, LatentHeadShape};
pub(crate) use cpu::blocks::StridedBlocks;
pub(crate) use cpu::embedding::Bags;
pub use cpu::exact_sum::ExactSum;
pub use cpu::experts::{ExpertGroups, RoutingRule};
pub use cpu::matmul::{GroupLimit, MatmulSizes};
pub(crate) use cpu::optimizer::{ElementAccess, StateSlice, Update};
pub use cpu::optimizer::{
    FactoredMatrix, FactoredMoments, FactoredStep, LeafRun, Piece, Pieces, StateDType, StepScale,
    rules as updates,
};
pub use cpu::peak::ExecutionUnit;
pub use cpu::quantized::IntegerFormat;
pub use cpu::simd::SimdLevel;
pub(crate) use cpu::simd::{exp, sigmoid, tanh};
pub(crate) use operand::{Operand, OperandMut};
