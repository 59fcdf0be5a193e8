use super::super::Cuda;
use super::super::launch::{Argument, Words};
use crate::kernels::Operand;
use crate::kernels::call::GroupedCall;
use trireme_base::DType;

/// Rows of a block's tile; `TILE_ROWS` in `sources/grouped.cuh`.
const TILE_ROWS: usize = 128;

/// Columns of a block's tile; `TILE_COLS` in `sources/grouped.cuh`.
const TILE_COLS: usize = 64;

/// The header of the kernels of matmuls.
const HEADER: &str = "grouped.cuh";

/// `FloatDType` of `sources/grouped.cuh`.
fn dtype_code(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
        dtype => panic!("a matrix of {dtype:?}"),
    }
}

/// `Floats` of `sources/grouped.cuh`.
struct Floats(Operand);

impl Argument for Floats {
    fn append(&self, to: &mut Words) -> usize {
        self.0.append(to) + u64::from(dtype_code(self.0.dtype())).append(to)
    }
}

fn num_blocks(num: usize) -> u32 {
    u32::try_from(num).expect("a result has at most 2^32 tiles")
}

impl Cuda {
    pub(super) fn run_grouped(&self, call: &GroupedCall) {
        match call {
            GroupedCall::GroupedMatmul { starts, left, right, out, precision, is_transposed, .. } => {
                let (rows, inner, cols) = (left.shape().rows(), left.shape().cols(), out.shape().cols());
                let num_groups = starts.shape().num_elements() - 1;
                // The last tile of each group, and of the rows of no group, may be incomplete.
                let num_slots = rows / TILE_ROWS + num_groups + 1;
                let parameters = [precision.dtype().name(), &is_transposed.to_string()];
                let launch = self.instance(HEADER, "grouped_matmul", &parameters).arg(starts).arg(num_groups);
                let launch = launch.arg(Floats(*left)).arg(Floats(*right)).arg(Floats(out.as_operand()));
                let launch = launch.arg(rows).arg(cols).arg(inner).arg(num_slots);
                launch.run(num_blocks(num_slots * cols.div_ceil(TILE_COLS)));
            }
            GroupedCall::GroupedTransposedMatmul {
                starts,
                left,
                right,
                out,
                precision,
                num_parts,
                accumulate,
                ..
            } => {
                let (inner, rows, cols) = (left.shape().rows(), left.shape().cols(), right.shape().cols());
                let num_groups = (starts.shape().num_elements() - 1) / num_parts;
                let tiles_per_row = cols.div_ceil(TILE_COLS);
                let tiles_per_block = tiles_per_row * rows.div_ceil(TILE_ROWS);
                // The most sums of parts that wait for others to be added to.
                let height = num_parts.ilog2().max(1);
                let parameters = [precision.dtype().name(), &height.to_string()];
                let launch = self.instance(HEADER, "grouped_transposed_matmul", &parameters);
                let launch = launch
                    .arg(starts)
                    .arg(num_groups)
                    .arg(*num_parts as u32)
                    .arg(Floats(*left))
                    .arg(Floats(*right))
                    .arg(out);
                let launch = launch.arg(*accumulate).arg(rows).arg(cols).arg(inner);
                let launch = launch.arg(tiles_per_row).arg(tiles_per_block);
                launch.run(num_blocks(num_groups * tiles_per_block));
            }
            GroupedCall::GroupRows { groups, limit, starts, order_and_positions: [order, positions] } => {
                let num_groups = starts.shape().num_elements() - 1;
                let num_rows = groups.shape().num_elements();
                let launch = self.kernel("rank_in_groups", &[]).arg(groups).arg(num_rows);
                let launch = launch.arg(limit.rows_per_capacity.max(1)).arg(limit.factor);
                launch.arg(starts).arg(positions).arg(num_groups).run(num_blocks(num_groups + 1));
                let launch = self.kernel("start_groups", &[]).arg(num_rows).arg(num_groups);
                launch.arg(starts).arg(order).arg(positions).run(1);
                let launch = self.kernel("place_rows", &[]).arg(groups).arg(starts).arg(order).arg(positions);
                launch.over_elements(groups.shape());
                let launch = self.kernel("place_others", &[]).arg(starts).arg(num_groups);
                launch.arg(order).arg(positions).over_elements(groups.shape());
            }
            GroupedCall::UngroupedRows { starts, positions, weights, out } => {
                let launch = self.kernel("ungrouped_rows", &[]).arg(starts);
                let launch = launch.arg(starts.shape().num_elements() - 1).arg(positions);
                let launch = launch.arg(positions.shape().cols()).arg(weights).arg(out);
                launch.arg(positions.shape().num_elements()).run(1);
            }
        }
    }
}
