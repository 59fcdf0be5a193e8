//! What is told of a kernel.

use super::Timing;
use crate::kernels::AttentionShape;
use std::fmt;
use trireme_base::Cost;

/// What determines the kernels of a training step of one microbatch, and how often each is called.
#[derive(Debug, Clone, Copy)]
pub struct StepSizes {
    /// Sequences, their length, and the heads.
    pub attention: AttentionShape,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Width between the two linear layers of a block's feed-forward part.
    pub intermediate: usize,
    /// Tokens that can be predicted.
    pub vocabulary: usize,
    /// SwiGLU, RMS normalisation, rotary positions and weights of `[outputs, inputs]`, as llama has them; otherwise
    /// GELU, layer normalisation, learned positions and `[inputs, outputs]`, as gpt2 has them.
    pub is_llama: bool,
    /// Whether the attention's projections have biases.
    pub attention_bias: bool,
    /// Whether those of the feed-forward part have.
    pub mlp_bias: bool,
    /// Whether the output layer is the token embedding.
    pub is_tied: bool,
}

/// Floating-point operations a second of the units that a step runs on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peaks {
    /// Of the unit that makes products.
    pub products: f64,
    /// Of the unit for all other arithmetic, if that is fused multiply-adds.
    pub arithmetic: f64,
}

/// What bounds a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// The unit that makes products.
    Products,
    /// The unit that makes other f32 arithmetic.
    Arithmetic,
    /// Memory, as far from the processor as the operands are.
    Memory,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Limit::Products => "products",
            Limit::Arithmetic => "arithmetic",
            Limit::Memory => "memory",
        })
    }
}

/// One kernel, measured.
#[derive(Debug, Clone)]
pub struct KernelFigure {
    /// What it is, such as `qkv: input gradient`.
    pub name: String,
    /// Sizes of what it works on.
    pub shape: String,
    /// How often a step calls it: a fraction where the last call has less to do, 0 if only steps with other settings
    /// have any.
    pub num_calls: f64,
    /// What it has to do at least.
    pub cost: Cost,
    /// Seconds that this takes on units that never wait, or that the loops of [`Probe::stream`](super::Probe::stream)
    /// take which move as many bytes, whichever is more.
    pub bound: f64,
    /// Which of them it is.
    pub limit: Limit,
    /// Seconds that the kernel takes.
    pub timing: Timing,
}
