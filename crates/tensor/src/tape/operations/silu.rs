use crate::kernels::sigmoid;
use crate::tape::Pointwise;
use trireme_base::Cost;

/// `x / (1 + e^-x)` (Elfwing, Uchibe, Doya 2017), also called swish.
#[derive(Debug, Clone, Copy)]
pub struct Silu;

impl Pointwise for Silu {
    const OPERATIONS: usize = Cost::EXP + 3;
    const DERIVATIVE_OF_OUTPUT: bool = false;

    #[inline(always)]
    fn value(&self, x: f32) -> f32 {
        x * sigmoid(x)
    }

    #[inline(always)]
    fn derivative(&self, x: f32) -> f32 {
        let s = sigmoid(x);
        s + x * s * (1.0 - s)
    }
}
