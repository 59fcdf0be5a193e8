//! The precision of a run.
//!
//! With a 16-bit precision, these remain f32: master weights, the residual stream and its gradient, statistics of norms and softmax, logits
//! and losses, sums of products, gradients of parameters, and the optimizer's arithmetic. The optimizer's state is f32 unless `state_dtype`
//! selects fewer bits.
//!
//! A rank that holds all weights has no 16-bit copy of them: a matmul rounds its operand while it packs it. A copy would take 2 bytes per
//! parameter; the optimizer would have to write it, and matmuls to read it. ZeRO gathers weights in 16 bits, which halves messages and
//! memory. Every operation, including norms, biases and embeddings, rounds the parameters that it reads, so that all parallel layouts
//! compute the same bits.

use trireme_base::DType;

trireme_base::named! {
    /// The dtype of activations and of matmul operands.
    ///
    /// The residual stream, statistics, sums, losses, parameters and their gradients are f32 at every precision, as in Micikevicius et al.
    /// ("Mixed precision training", 2018).
    #[derive(Default)]
    pub enum Precision {
        /// All f32.
        #[default]
        F32 = "f32",
        /// bfloat16: the range of f32, 8 significant bits.
        Bf16 = "bf16",
        /// IEEE half: 11 significant bits, values from 6e-8 to 65504, so that gradients need loss scaling.
        F16 = "f16",
    }
}

impl Precision {
    /// Returns the dtype of activations.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }
}
