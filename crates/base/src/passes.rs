//! What passes of units take.

use crate::Cost;

/// Bytes of activations that passes of one unit over one microbatch take, with what the device's memory rounds them up to, and
/// what they compute. The tensors of the microbatch are not among them: they are there before and after.
///
/// Each peak is of all that the pass works with, so what it begins with is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitPasses {
    /// What the unit before it has passed on, for forward to read; 0 for the first unit.
    pub input: usize,
    /// What forward passes on; 0 for the last unit.
    pub output: usize,
    /// The gradient that backward passes on; 0 for the first unit.
    pub input_grad: usize,
    /// What backward needs of forward, the input among it.
    pub record: usize,
    /// What of that stays if only results of products and attention are kept.
    pub products: usize,
    /// At most during forward, from the input to the record and the output.
    pub forward_peak: usize,
    /// At most while the record is made again from the products.
    pub renewal_peak: usize,
    /// At most during backward, from the record and the output's gradient to the input's gradient.
    pub backward_peak: usize,
    /// What stays between the halves of backward, where they run apart.
    pub halved: usize,
    /// What forward costs.
    pub forward_cost: Cost,
    /// What backward costs.
    pub backward_cost: Cost,
    /// What its input half costs.
    pub input_half_cost: Cost,
    /// What its weight half costs. It may compute again what a whole backward still has.
    pub weight_half_cost: Cost,
    /// What making the record from the products costs.
    pub renewal_cost: Cost,
}

impl UnitPasses {
    /// Whether forward keeps activations for a later backward. Backward of a unit that passes nothing on follows at once.
    pub fn keeps(&self) -> bool {
        self.record > 0 && self.output > 0
    }
}
