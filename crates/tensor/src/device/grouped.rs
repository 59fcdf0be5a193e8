//! Grouped matmul kernels.

use super::{Device, Result, Transposition};
use crate::kernels::call::GroupedCall;
use crate::kernels::cpu::matmul::MatmulSizes;
use crate::precision::Precision;
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use trireme_base::DType;

/// Groups of rows, each of which is split into an equal number of parts.
#[derive(Debug, Clone, Copy)]
pub struct RowGroups<'a> {
    /// The first row of each part, and the end of the last part: u32 `[num_groups * parts + 1]`.
    pub starts: View<'a>,
    /// Number of groups.
    pub num_groups: usize,
}

impl Device {
    /// Multiplies the rows of each group in `left` (`[rows, inner]`) by the group's block of `right` and writes the results to the same
    /// rows of `out` (`[rows, cols]`). Operands are rounded to `precision`; sums are f32. `right` stacks the blocks of all groups
    /// vertically; `transpose` applies to each block. `starts` (`[num_groups + 1]`, u32) holds the first row of each group and the end of
    /// the last group. Rows are counted from `starts[0]`, so the first group always begins at row 0. Rows after the last group belong to no
    /// group, and their outputs are zeros.
    ///
    /// Groups are not padded, and their results have the same bits as separate matmuls. Cost: `2 rows cols inner` floating-point
    /// operations.
    ///
    /// # Errors
    /// If there is no memory to pack operands.
    ///
    /// # Panics
    /// If the shapes do not match, or an operand is not a float type.
    pub fn grouped_matmul(
        &self,
        precision: Precision,
        starts: View<'_>,
        left: View<'_>,
        (right, transpose): (View<'_>, Transposition),
        out: ViewMut<'_>,
    ) -> Result<()> {
        let (rows, inner, cols) = (left.shape().rows(), left.shape().cols(), out.shape().cols());
        let (num_groups, all) = (num_groups(starts), right.shape().rows());
        assert!(all.is_multiple_of(num_groups), "{num_groups} groups of {all} rows");
        let block = all / num_groups;
        let is_transposed = transpose == Transposition::Yes;
        let expected = if is_transposed { [cols, inner] } else { [inner, cols] };
        assert_eq!([block, right.shape().cols()], expected, "a block of {:?}", right.shape());
        assert_eq!(out.shape().rows(), rows, "{:?}", out.shape());
        let size = MatmulSizes { rows, cols, inner };
        let mut scratch = self.grouped_scratch(precision, &[size], &(left, Transposition::No))?;
        let [starts, left, right] = [starts, left, right].map(View::operand);
        let (out, scratch) = (out.into_operand(), scratch.view_mut().into_operand());
        self.issue(GroupedCall::GroupedMatmul {
            starts,
            left,
            right,
            out,
            scratch,
            precision,
            is_transposed,
        });
        Ok(())
    }

    /// Computes `transpose(left) right` over the rows of each group, where `left` is `[rows, m]` and `right` is `[rows, n]`. Writes the
    /// product to the group's block of `out` (`[num_groups * m, n]`, f32), or adds it. Precision and `starts` are as for
    /// [`grouped_matmul`](Device::grouped_matmul). A group without rows gives zeros. If `groups` splits each group into `k` parts, the
    /// products of the parts are added in the canonical order of a reduction over `k` ranks: with `p` the largest power of two up to `k`,
    /// the first `k - p` pairs of neighbors are added first, and a binary tree then adds the remaining `p` partial sums.
    ///
    /// Cost: `2 rows m n` floating-point operations; `num_groups m n` more for each part of a group after the first.
    ///
    /// # Errors
    /// If there is no memory to pack operands, or for partial sums.
    ///
    /// # Panics
    /// If the shapes do not match, if an operand is not a float type, or if the number of parts in `groups` is not a multiple of the number
    /// of groups.
    pub fn grouped_transposed_matmul(
        &self,
        precision: Precision,
        groups: RowGroups<'_>,
        left: View<'_>,
        right: View<'_>,
        out: ViewMut<'_>,
        accumulate: bool,
    ) -> Result<()> {
        let RowGroups { starts, num_groups } = groups;
        let (inner, rows, cols) = (left.shape().rows(), left.shape().cols(), right.shape().cols());
        assert_eq!(right.shape().rows(), inner, "{:?}", right.shape());
        assert_eq!(out.shape(), [num_groups * rows, cols].into(), "blocks of groups");
        let num_parts = self::num_groups(starts);
        assert!(num_parts.is_multiple_of(num_groups), "{num_parts} parts of {num_groups} groups");
        let num_parts = num_parts / num_groups;
        let size = MatmulSizes { rows, cols, inner };
        // A left operand of one column may be read in place if it has `inner` rows, but must be packed if it has one row fewer. A smaller
        // group may therefore need more scratch memory.
        let shorter = MatmulSizes { inner: inner.saturating_sub(1), ..size };
        let factor = (left, Transposition::Yes);
        let mut scratch = self.grouped_scratch(precision, &[size, shorter], &factor)?;
        // Partial sums of parts that wait for their sibling in the tree. On a GPU, each thread keeps its own.
        let num_sums = if num_parts == 1 || self.is_gpu { 0 } else { num_parts.ilog2() as usize + 1 };
        let mut sums = self.activation([num_sums * rows * cols])?;
        let [starts, left, right] = [starts, left, right].map(View::operand);
        let [out, scratch, sums] = [out, scratch.view_mut(), sums.view_mut()].map(ViewMut::into_operand);
        self.issue(GroupedCall::GroupedTransposedMatmul {
            starts,
            left,
            right,
            out,
            scratch,
            sums,
            precision,
            num_parts,
            accumulate,
        });
        Ok(())
    }

    /// Allocates scratch memory to pack the operands of matmuls of these sizes on the CPU. A GPU needs none.
    fn grouped_scratch(
        &self,
        precision: Precision,
        sizes: &[MatmulSizes],
        left: &(View<'_>, Transposition),
    ) -> Result<Tensor> {
        let num_words = |&size| self.matmul_scratch_words(precision, size, left);
        let num_words = if self.is_gpu { 0 } else { sizes.iter().map(num_words).max().unwrap_or(0) };
        self.activation_of([num_words], DType::U32)
    }
}

fn num_groups(starts: View<'_>) -> usize {
    let num_groups = starts.shape().num_elements().checked_sub(1).filter(|number| *number > 0);
    num_groups.expect("starts of groups, and the end of the last one")
}
