use super::Cpu;
use crate::kernels::call::ExpressionCall;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::expression::FunctionInputs;

impl Cpu {
    pub(super) fn run_expression(&self, call: ExpressionCall) {
        let ExpressionCall { program, reads_output, inputs, cols, mut output, .. } = call;
        let out_cols = output.shape().cols();
        let others = inputs.iter().map(|input| (input.operand.floats(self), input.layout)).collect();
        let inputs = FunctionInputs { reads_output, others, cols };
        with_element!(output.dtype() => |T| {
            self.function::<T>(&program, &inputs, output.elements(self), out_cols);
        });
    }
}
