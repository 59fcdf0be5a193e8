use crate::kernels::sigmoid;
use crate::tape::Pointwise;
use trireme_base::Cost;

/// `1 / (1 + e^-x)`.
#[derive(Debug, Clone, Copy)]
pub struct Sigmoid;

impl Pointwise for Sigmoid {
    const OPERATIONS: usize = Cost::EXP + 2;
    const DERIVATIVE_OF_OUTPUT: bool = true;

    #[inline(always)]
    fn value(&self, x: f32) -> f32 {
        sigmoid(x)
    }

    #[inline(always)]
    fn derivative(&self, y: f32) -> f32 {
        y * (1.0 - y)
    }
}
