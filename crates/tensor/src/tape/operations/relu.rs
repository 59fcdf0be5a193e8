use crate::tape::Pointwise;

/// `max(x, 0)`, with derivative 0 at 0. NaN stays NaN.
#[derive(Debug, Clone, Copy)]
pub struct Relu;

impl Pointwise for Relu {
    const OPERATIONS: usize = 1;
    const DERIVATIVE_OF_OUTPUT: bool = true;

    #[inline(always)]
    fn value(&self, x: f32) -> f32 {
        if x < 0.0 { 0.0 } else { x }
    }

    #[inline(always)]
    fn derivative(&self, y: f32) -> f32 {
        if y > 0.0 { 1.0 } else { 0.0 }
    }
}
