//! Products of groups of rows on a device.

use super::{Device, Result, Transpose};
use crate::kernels::GroupLimit;
use crate::kernels::call::GroupedCall;
use crate::kernels::cpu::matmul::ProductSizes;
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use trireme_base::DType;

impl Device {
    /// For each group its rows of `left` (`[rows, inner]`), times its block of `right`, as `out` (`[rows, cols]`); factors are rounded to
    /// `precision`, sums are in f32. The blocks of all groups are one matrix, one below the other, each read transposed or not.
    /// `starts` (`[num_groups + 1]`, u32) holds where the rows of each group begin, and at last where they end. Only their differences matter: the first group begins at the
    /// first row. Rows after the last group are of none, and become zeros.
    ///
    /// Cost: `2 rows cols inner` floating-point operations. Groups have the bits of products of their own, and no padding.
    ///
    /// # Errors
    /// If there is no memory to pack factors.
    ///
    /// # Panics
    /// If the shapes do not fit, or a factor is not of floats.
    pub fn grouped_matmul(
        &self,
        precision: Precision,
        starts: View<'_>,
        left: View<'_>,
        (right, transpose): (View<'_>, Transpose),
        out: ViewMut<'_>,
    ) -> Result<()> {
        let (rows, inner, cols) = (left.shape().rows(), left.shape().cols(), out.shape().cols());
        let (num_groups, all) = (num_groups(starts), right.shape().rows());
        assert!(all.is_multiple_of(num_groups), "{num_groups} groups of {all} rows");
        let block = all / num_groups;
        let is_transposed = transpose == Transpose::Yes;
        let expected = if is_transposed { [cols, inner] } else { [inner, cols] };
        assert_eq!([block, right.shape().cols()], expected, "a block of {:?}", right.shape());
        assert_eq!(out.shape().rows(), rows, "{:?}", out.shape());
        let size = ProductSizes { rows, cols, inner };
        let mut scratch = self.product_scratch(precision, size, &(left, Transpose::No))?;
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

    /// For each group the transpose of its rows of `left` (`[rows, m]`), times its rows of `right` (`[rows, n]`), as its block of `out`
    /// (`[num_groups * m, n]`, f32), or added to it; the rest as [`grouped_matmul`](Device::grouped_matmul). A group without rows gives
    /// zeros. If `starts` has several parts of each group, a block is the sum of the products of its parts, in the order in which
    /// as many ranks add up: a tree over the largest power of two of terms, of which the first ones are sums of two parts.
    ///
    /// Cost: `2 rows m n` floating-point operations; `num_groups m n` more for each part of a group but the first.
    ///
    /// Fails and panics as [`grouped_matmul`](Device::grouped_matmul).
    pub fn grouped_transposed_matmul(
        &self,
        precision: Precision,
        (starts, num_groups): (View<'_>, usize),
        (left, right): (View<'_>, View<'_>),
        out: ViewMut<'_>,
        accumulate: bool,
    ) -> Result<()> {
        let (inner, rows, cols) = (left.shape().rows(), left.shape().cols(), right.shape().cols());
        assert_eq!(right.shape().rows(), inner, "{:?}", right.shape());
        assert_eq!(out.shape(), [num_groups * rows, cols].into(), "blocks of groups");
        let num_parts = self::num_groups(starts);
        assert!(num_parts.is_multiple_of(num_groups), "{num_parts} parts of {num_groups} groups");
        let num_parts = num_parts / num_groups;
        let size = ProductSizes { rows, cols, inner };
        // Whether a factor of one column is packed depends on whether it has an odd number of rows.
        let shorter = ProductSizes { inner: inner.saturating_sub(1), ..size };
        let factor = (left, Transpose::Yes);
        let words = [size, shorter].map(|size| self.product_scratch_words(precision, size, &factor));
        let mut scratch = self.activation_of([words[0].max(words[1])], DType::U32)?;
        // Blocks of parts that wait for their neighbours.
        let num_sums = if num_parts == 1 { 0 } else { num_parts.ilog2() as usize + 1 };
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

    /// Orders rows by group, and those of a group as they were: `groups` (`[rows]`, u32) is that of each row, `starts` (`[num_groups + 1]`)
    /// becomes where the rows of each group begin, `order` (`[rows]`) the row at each place, and `places` (`[rows]`) the place of each row. Rows
    /// beyond the limit, and rows of the group `num_groups`, are of no group, and come last.
    ///
    /// # Panics
    /// If the shapes do not fit, or a row is of a later group.
    pub fn group_rows(
        &self,
        (groups, limit): (View<'_>, GroupLimit),
        starts: ViewMut<'_>,
        [order, places]: [ViewMut<'_>; 2],
    ) {
        let num_rows = groups.shape().num_elements();
        for rows in [&order, &places] {
            assert_eq!(rows.shape().num_elements(), num_rows, "{num_rows} rows");
        }
        let [starts, order, places] = [starts, order, places].map(ViewMut::into_operand);
        self.issue(GroupedCall::GroupRows { groups: groups.operand(), starts, order, places, limit });
    }

    /// Counts the choices that are of no group by their `places` (`[.., k]`, u32), as `out` (`[1]`, f64): each by the weight of its token in `weights` (`[..]`,
    /// f32), or as 1 without weights.
    ///
    /// # Panics
    /// If there is not one weight for each token.
    pub fn rows_of_no_group(
        &self,
        starts: View<'_>,
        places: View<'_>,
        weights: Option<View<'_>>,
        out: ViewMut<'_>,
    ) {
        let has_token = |weights: View<'_>| weights.shape().num_elements() == places.shape().rows();
        assert!(weights.is_none_or(has_token), "{weights:?} for {:?}", places.shape());
        let (starts, places, out) = (starts.operand(), places.operand(), out.into_operand());
        let weights = weights.map(View::operand);
        self.issue(GroupedCall::RowsOfNoGroup { starts, places, weights, out });
    }
}

fn num_groups(starts: View<'_>) -> usize {
    let num_groups = starts.shape().num_elements().checked_sub(1).filter(|number| *number > 0);
    num_groups.expect("starts of groups, and the end of the last one")
}
