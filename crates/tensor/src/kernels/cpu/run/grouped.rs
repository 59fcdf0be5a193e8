use super::Cpu;
use crate::kernels::call::GroupedCall;
use crate::kernels::cpu::matmul::{GroupedOperands, MatmulSizes, Matrix};

impl Cpu {
    pub(super) fn run_grouped(&self, call: GroupedCall) {
        match call {
            GroupedCall::GroupedMatmul {
                starts,
                left,
                right,
                mut out,
                mut scratch,
                precision,
                is_transposed,
            } => {
                let (rows, inner, cols) = (left.shape().rows(), left.shape().cols(), out.shape().cols());
                let size = MatmulSizes { rows, cols, inner };
                let left = Matrix::row_major(left.floats(self), inner, false);
                let row_len = if is_transposed { inner } else { cols };
                let right = Matrix::row_major(right.floats(self), row_len, is_transposed);
                let operands = GroupedOperands { precision, size, starts: starts.u32s(self), left, right };
                self.grouped_matmul(operands, inner * cols, out.floats(self), scratch.u32s(self));
            }
            GroupedCall::GroupedTransposedMatmul {
                starts,
                left,
                right,
                mut out,
                mut scratch,
                mut sums,
                precision,
                num_parts,
                accumulate,
            } => {
                let (inner, rows, cols) = (left.shape().rows(), left.shape().cols(), right.shape().cols());
                let size = MatmulSizes { rows, cols, inner };
                let left = Matrix::row_major(left.floats(self), rows, true);
                let right = Matrix::row_major(right.floats(self), cols, false);
                let operands = GroupedOperands { precision, size, starts: starts.u32s(self), left, right };
                let (sums, out, scratch) = (sums.f32s(self), out.f32s(self), scratch.u32s(self));
                self.grouped_transposed_matmul(operands, num_parts, sums, out, accumulate, scratch);
            }
            GroupedCall::GroupRows {
                groups,
                limit,
                mut starts,
                order_and_positions: [mut order, mut places],
            } => {
                let (starts, order, places) = (starts.u32s(self), order.u32s(self), places.u32s(self));
                self.group_rows(groups.u32s(self), limit, starts, order, places);
            }
            GroupedCall::UngroupedRows { starts, positions, weights, mut out } => {
                let (places, num_choices) = (positions.u32s(self), positions.shape().cols());
                let weights = self.optional_f32s(weights);
                self.ungrouped_rows(starts.u32s(self), places, num_choices, weights, out.f64s(self));
            }
        }
    }
}
