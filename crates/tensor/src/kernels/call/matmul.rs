//! Matmuls.

use super::{kernel_calls, num_bytes, with_output_traffic};
use crate::fp8::Fp8Scaling;
use crate::precision::Precision;
use trireme_base::Cost;

kernel_calls! {
    /// Matmuls.
    MatmulCall {}
    {
        /// `out = op(left) op(right) + bias + residual`, or added to `out`. `transposed` says whether each operand is transposed. Operands
        /// are packed in `scratch`. With `fp8`, the operands are codes.
        matmul => Matmul {
            left: View, right: View, bias: Option<View>, residual: Option<View>, out: ViewMut, scratch: ViewMut,
            precision: Precision, fp8: Option<[Fp8Scaling<View>; 2]>, transposed: [bool; 2], accumulate: bool
        }
    }
}

impl MatmulCall {
    pub(crate) fn cost(&self) -> Cost {
        let Self::Matmul { left, right, residual, out, transposed, accumulate, .. } = self;
        let inner = if transposed[0] { left.shape().rows() } else { left.shape().cols() };
        let cost = Cost::products(&[2, out.shape().num_elements(), inner]);
        let cost = cost.reads(left.num_bytes() + right.num_bytes() + num_bytes(residual));
        with_output_traffic(cost, out, *accumulate)
    }
}
