use super::super::Cuda;
use super::super::expression::{generate, kernel_name};
use super::super::launch::{Argument, Words, pair};
use crate::kernels::call::ExpressionCall;

/// `Constants` of a generated kernel: at least one number.
struct Constants(Vec<f32>);

impl Argument for Constants {
    fn append(&self, to: &mut Words) -> usize {
        let of_two = |numbers: &[f32]| {
            let high = numbers.get(1).map_or(0, |number| number.to_bits());
            pair(numbers[0].to_bits(), high)
        };
        to.extend(self.0.chunks(2).map(of_two));
        if self.0.is_empty() {
            to.push(0);
        }
        self.0.len().max(1) * size_of::<f32>()
    }
}

impl Cuda {
    pub(super) fn run_expression(&self, call: &ExpressionCall) {
        if call.output.num_bytes() == 0 {
            return;
        }
        let (name, is_flat) = (kernel_name(call), call.is_flat());
        self.issue(|| self.context.load_generated(&name, || generate(call)));
        let ExpressionCall { expression, inputs, cols, output, .. } = call;
        let mut launch = self.kernel(&name, &[]);
        for input in inputs {
            launch = launch.arg(input.operand);
            if !is_flat {
                launch = launch.arg(input.layout.row_stride).arg(input.layout.col_stride);
            }
        }
        let launch = launch.arg(output).arg(Constants(expression.constants().collect()));
        if is_flat {
            return launch.over_elements(output.shape());
        }
        let out_cols = output.shape().cols();
        launch.arg(*cols).arg(out_cols).over_rows(output.shape().num_elements() / out_cols.max(1));
    }
}
