//! Memory and cost of the passes of one unit.

use crate::Cost;

/// Bytes of activations, and cost of computation, of the passes of one unit over one microbatch.
///
/// Bytes are as the device allocates them, rounded up to its granularity. They do not include the tensors of the microbatch, which exist
/// before and after the passes. A peak includes everything that the pass uses, including its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitPasses {
    /// Bytes of the previous unit's output, which forward reads; 0 for the first unit.
    pub input: usize,
    /// Bytes of the output of forward; 0 for the last unit.
    pub output: usize,
    /// Bytes of the gradient of the input, which backward returns; 0 for the first unit.
    pub input_grad: usize,
    /// Bytes that backward needs from forward, including the input: the unit's saved activations.
    pub saved: usize,
    /// Bytes of the results of matrix products and attention, and of the input: the part of `saved` that selective recomputation keeps.
    pub products: usize,
    /// Peak of forward, which starts with `input` in memory and ends with `saved` and `output`.
    pub forward_peak: usize,
    /// Peak of recomputing `saved` from `products`.
    pub recompute_peak: usize,
    /// Peak of backward, which starts with `saved` and the gradient of the output in memory, and ends with `input_grad`.
    pub backward_peak: usize,
    /// Bytes that stay in memory between the halves of backward, if the halves run separately.
    pub between_halves: usize,
    /// Cost of forward.
    pub forward_cost: Cost,
    /// Cost of backward, if it runs as a whole.
    pub backward_cost: Cost,
    /// Cost of the half of backward that computes gradients of the inputs.
    pub input_half_cost: Cost,
    /// Cost of the half of backward that computes gradients of the weights. It may recompute values that a full backward still has.
    pub weight_half_cost: Cost,
    /// Cost of recomputing `saved` from `products`.
    pub recompute_cost: Cost,
}

impl UnitPasses {
    /// Returns whether forward keeps activations for a later backward. A unit without output keeps none, because its backward follows
    /// immediately.
    pub fn keeps_activations(&self) -> bool {
        self.saved > 0 && self.output > 0
    }
}
