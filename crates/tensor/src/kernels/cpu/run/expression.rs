use super::Cpu;
use crate::kernels::call::ExpressionCall;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::expression::ExpressionInputs;

impl Cpu {
    pub(super) fn run_expression(&self, call: ExpressionCall) {
        let is_flat = call.is_flat();
        let ExpressionCall { expression, reads_output, inputs, cols, mut output, .. } = call;
        let out_cols = output.shape().cols();
        let others = inputs.iter().map(|input| (input.operand.floats(self), input.layout)).collect();
        let inputs = ExpressionInputs { reads_output, others, cols, is_flat };
        with_element!(output.dtype() => |T| {
            self.evaluate::<T>(&expression, &inputs, output.elements(self), out_cols);
        });
    }
}
