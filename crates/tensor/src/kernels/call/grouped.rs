//! Grouped matmuls.

use super::{kernel_calls, num_bytes, per_element_cost, plain_arguments, with_output_traffic};
use crate::kernels::{GroupLimit, Operand};
use crate::precision::Precision;
use crate::view::{View, ViewMut};
use trireme_base::Cost;

kernel_calls! {
    /// Grouped matmuls, and the sort of rows by group.
    GroupedCall {
        /// Sorts rows by group, stably. `groups` (`[rows]`, u32) is the group of each row. Writes the first position of each group to
        /// `starts` (`[num_groups + 1]`), and to `order_and_positions` (`[rows]` each) the row at each position and the position of each
        /// row. Rows beyond the limit, and rows of group `num_groups`, belong to no group and come last.
        ///
        /// # Panics
        /// If the shapes do not match, or a group exceeds `num_groups`.
        pub fn group_rows => GroupRows {
            groups: View, limit: GroupLimit, starts: ViewMut, order_and_positions: [ViewMut; 2];
            let num_rows = groups.shape().num_elements();
            for rows in &order_and_positions {
                assert_eq!(rows.shape().num_elements(), num_rows, "{num_rows} rows");
            }
        }

        /// Counts the choices that belong to no group, because their positions in `positions` (`[.., k]`, u32) are after the last group.
        /// Writes the count to `out` (`[1]`, f64). A choice counts as the weight of its token in `weights` (`[..]`, f32), or as 1 without
        /// weights.
        ///
        /// # Panics
        /// If there is not one weight for each token.
        pub fn ungrouped_rows => UngroupedRows {
            starts: View, positions: View, weights: Option<View>, out: ViewMut;
            let has_token = |weights: Operand| weights.shape().num_elements() == positions.shape().rows();
            assert!(weights.is_none_or(has_token), "{weights:?} for {:?}", positions.shape());
        }
    }
    {
        grouped_matmul => GroupedMatmul {
            starts: View, left: View, right: View, out: ViewMut, scratch: ViewMut, precision: Precision, is_transposed: bool
        }
        /// `transpose(left) right` over the rows of each group. Each group has `num_parts` parts, whose partial sums are stored in `sums`.
        grouped_transposed_matmul => GroupedTransposedMatmul {
            starts: View, left: View, right: View, out: ViewMut, scratch: ViewMut, sums: ViewMut,
            precision: Precision, num_parts: usize, accumulate: bool
        }
    }
}

plain_arguments! { GroupLimit }

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
                let cost =
                    with_output_traffic(cost.reads(left.num_bytes() + right.num_bytes()), out, *accumulate);
                cost.updates(2 * (num_parts - 1) * out.num_bytes())
            }
            Self::GroupRows { groups, starts, .. } => {
                Cost::ZERO.reads(3 * groups.num_bytes()).writes(3 * groups.num_bytes() + starts.num_bytes())
            }
            Self::UngroupedRows { starts, positions, weights, out } => {
                let read = starts.num_bytes() + positions.num_bytes() + num_bytes(weights);
                per_element_cost(positions.shape(), 1).reads(read).writes(out.num_bytes())
            }
        }
    }
}
