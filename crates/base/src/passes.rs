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
    pub record: usize,
    /// Bytes that remain of `record` if only the results of matrix products and attention are kept (selective recomputation).
    pub products: usize,
    /// Peak of forward, which starts with the input and ends with the record and the output.
    pub forward_peak: usize,
    /// Peak of recomputing the record from the kept products.
    pub recompute_peak: usize,
    /// Peak of backward, which starts with the record and the gradient of the output, and ends with the gradient of the input.
    pub backward_peak: usize,
    /// Bytes that remain between the halves of backward, if the halves run separately.
    pub halved: usize,
    /// Cost of forward.
    pub forward_cost: Cost,
    /// Cost of backward, if it runs as a whole.
    pub backward_cost: Cost,
    /// Cost of the half of backward that computes gradients of the inputs.
    pub input_half_cost: Cost,
    /// Cost of the half of backward that computes gradients of the weights. It may recompute values that a full backward still has.
    pub weight_half_cost: Cost,
    /// Cost of recomputing the record from the kept products.
    pub recompute_cost: Cost,
}

impl UnitPasses {
    /// Returns whether forward keeps activations for a later backward. A unit without output keeps none, because its backward follows at
    /// once.
    pub fn keeps(&self) -> bool {
        self.record > 0 && self.output > 0
    }
}
