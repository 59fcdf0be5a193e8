//! Grouped matmuls.

use super::{each, kernel_calls, num_bytes, written};
use crate::kernels::{GroupLimit, Operand, OperandMut};
use crate::precision::Precision;
use trireme_base::Cost;

kernel_calls! {
    /// Grouped matmuls, and the sort of rows by group.
    GroupedCall {
        "grouped_matmul" => GroupedMatmul {
            starts: Operand, left: Operand, right: Operand, out: OperandMut, scratch: OperandMut; precision: Precision, is_transposed: bool
        }
        /// `transpose(left) right` over the rows of each group. Each group has `num_parts` parts, whose partial sums are stored in `sums`.
        "grouped_transposed_matmul" => GroupedTransposedMatmul {
            starts: Operand, left: Operand, right: Operand, out: OperandMut, scratch: OperandMut, sums: OperandMut;
            precision: Precision, num_parts: usize, accumulate: bool
        }
        "group_rows" => GroupRows { groups: Operand, starts: OperandMut, order: OperandMut, places: OperandMut; limit: GroupLimit }
        "ungrouped_rows" => UngroupedRows { starts: Operand, places: Operand, weights: Option<Operand>, out: OperandMut }
    }
}

impl GroupedCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::GroupedMatmul { left, right, out, .. } => {
                let cost = Cost::products(&[2, left.shape().rows(), out.shape().cols(), left.shape().cols()]);
                cost.reads(left.num_bytes() + right.num_bytes()).writes(out.num_bytes())
            }
            Self::GroupedTransposedMatmul { left, right, out, num_parts, accumulate, .. } => {
                let (rows, cols, inner) = (left.shape().cols(), right.shape().cols(), left.shape().rows());
                let cost = Cost::products(&[2, rows, cols, inner]);
                let cost = written(cost.reads(left.num_bytes() + right.num_bytes()), out, *accumulate);
                cost.updates(2 * (num_parts - 1) * out.num_bytes())
            }
            Self::GroupRows { groups, starts, .. } => {
                Cost::ZERO.reads(3 * groups.num_bytes()).writes(3 * groups.num_bytes() + starts.num_bytes())
            }
            Self::UngroupedRows { starts, places, weights, out } => {
                let read = starts.num_bytes() + places.num_bytes() + num_bytes(weights);
                each(places.shape(), 1).reads(read).writes(out.num_bytes())
            }
        }
    }
}
