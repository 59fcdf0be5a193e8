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
    /// At most during the input half, as for backward.
    pub input_half_peak: usize,
    /// At most during the weight half, from what stays.
    pub weight_half_peak: usize,
    /// Floating-point operations of forward: those of products, attention and normalisations.
    pub forward_operations: u64,
    /// The same of backward.
    pub backward_operations: u64,
    /// The same of its input half.
    pub input_half_operations: u64,
    /// The same of its weight half, which may make again what backward in one has at hand.
    pub weight_half_operations: u64,
    /// The same for making the record from the products.
    pub renewal_operations: u64,
}

impl UnitPasses {
    /// Whether forward keeps activations for a later backward. Backward of a unit that passes nothing on follows at once.
    pub fn keeps(&self) -> bool {
        self.record > 0 && self.output > 0
    }
}
