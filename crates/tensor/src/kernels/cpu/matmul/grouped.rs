//! Grouped matmuls: groups of rows, each with its own matrix.
//!
//! Groups may have any length, without padding, and the result of each has the same bits as a separate matmul. Groups are computed one
//! after another. (Gale et al., "MegaBlocks", 2023, section 5, computes all groups at once on a GPU.)
//!
//! These kernels do not run on counting devices, where the starts of groups have no values.

use super::{Epilogue, MatmulSizes, Matrix};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::FloatsMut;
use crate::precision::Precision;
use std::ops::Range;

/// A limit on the number of rows per group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupLimit {
    /// Number of consecutive rows that share a capacity.
    pub rows_per_capacity: usize,
    /// Capacity of a group, as a multiple of an even share of these rows.
    pub factor: f64,
}

impl GroupLimit {
    /// No limit.
    pub const NONE: GroupLimit = GroupLimit { rows_per_capacity: usize::MAX, factor: f64::INFINITY };

    /// Returns the capacity of each of `num_groups` groups for `num_rows` rows; at least one.
    pub fn capacity(self, num_rows: usize, num_groups: usize) -> usize {
        ((self.factor * num_rows as f64 / num_groups as f64).ceil() as usize).max(1)
    }
}

/// Returns the rows of each group. `starts` holds the first row of each group and the end of the last group. Only the differences matter:
/// the first group begins at row 0. Rows after the last group belong to no group. Panics if the groups have more than `num_rows` rows, or
/// if `starts` is not sorted.
fn groups(starts: &[u32], num_rows: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    assert!(starts.is_sorted() && end_of(starts) <= num_rows, "groups of {num_rows} rows: {starts:?}");
    let first = starts[0];
    starts.windows(2).map(move |pair| (pair[0] - first) as usize..(pair[1] - first) as usize).enumerate()
}

/// Returns the end of the last group.
fn end_of(starts: &[u32]) -> usize {
    (starts[starts.len() - 1] - starts[0]) as usize
}

/// The operands of a grouped matmul.
#[derive(Clone, Copy)]
pub(crate) struct GroupedOperands<'a> {
    pub(crate) precision: Precision,
    /// The size of the matmul of all rows.
    pub(crate) size: MatmulSizes,
    /// The first row of each group, and the end of the last group.
    pub(crate) starts: &'a [u32],
    pub(crate) left: Matrix<'a>,
    pub(crate) right: Matrix<'a>,
}

impl Cpu {
    /// Multiplies the rows of each group in `left` by the group's block of `right`, into its rows of `out`. A block begins `block_len`
    /// elements after the previous one. `size` is the size of the matmul of all rows with one block. Rows of no group become zeros.
    ///
    /// Cost: as for a matmul of `size`. Panics like [`Cpu::matmul`], and if `starts` are not valid starts of groups.
    pub(crate) fn grouped_matmul(
        &self,
        operands: GroupedOperands<'_>,
        block_len: usize,
        mut out: FloatsMut<'_>,
        scratch: &mut [u32],
    ) {
        let GroupedOperands { precision, size, starts, left, right } = operands;
        for (group, rows) in groups(starts, size.rows).filter(|(_, rows)| !rows.is_empty()) {
            let size = MatmulSizes { rows: rows.len(), ..size };
            let block = Matrix { values: right.values.tail(group * block_len), ..right };
            let out = out.range(rows.start * size.cols..rows.end * size.cols);
            let factors = (left.submatrix(rows.start, 0), block);
            self.matmul(precision, size, factors, out, Epilogue::OVERWRITE, scratch);
        }
        out.range(end_of(starts) * size.cols..size.rows * size.cols).zero();
    }

    /// Computes `transpose(left) right` over the rows of each group and writes or adds it to the group's block of `out`, which has the rows
    /// and columns of `size`. A group without rows gives zeros. If a group has several parts, its block is the sum of the products of its
    /// parts, in the canonical order of a reduction over that many ranks. `sums` has room for the pending partial sums, at most one more
    /// than the binary logarithm of the number of parts.
    ///
    /// Cost: as for a matmul of `size`, whose inner dim is the number of all rows. Panics like [`grouped_matmul`](Cpu::grouped_matmul).
    pub(crate) fn grouped_transposed_matmul(
        &self,
        operands: GroupedOperands<'_>,
        num_parts: usize,
        sums: &mut [f32],
        out: &mut [f32],
        accumulate: bool,
        scratch: &mut [u32],
    ) {
        let GroupedOperands { precision, size, starts, left, right } = operands;
        let block_len = size.rows * size.cols;
        let mut product = |rows: Range<usize>, out: &mut [f32], accumulate: bool| {
            if rows.is_empty() {
                if !accumulate {
                    out.fill(0.0);
                }
                return;
            }
            let epilogue = Epilogue { accumulate, ..Epilogue::OVERWRITE };
            let size = MatmulSizes { inner: rows.len(), ..size };
            let factors = (left.submatrix(0, rows.start), right.submatrix(rows.start, 0));
            self.matmul(precision, size, factors, FloatsMut::F32(out), epilogue, scratch);
        };
        let mut parts = groups(starts, size.inner).map(|(_, rows)| rows);
        for out in out.chunks_exact_mut(block_len.max(1)) {
            if num_parts == 1 {
                let rows = parts.next().expect("each group has a part");
                product(rows, out, accumulate);
                continue;
            }
            // Adds the terms in a binary tree. The first terms are sums of two parts each, so that the number of terms is a power of two.
            // The pending partial sums correspond to the set bits of a binary counter of terms.
            let num_terms = 1 << num_parts.ilog2();
            let mut num_waiting = 0;
            for term in 0..num_terms {
                let is_pair = term < num_parts - num_terms;
                for _ in 0..1 + usize::from(is_pair) {
                    let rows = parts.next().expect("each group has its parts");
                    product(rows, &mut sums[num_waiting * block_len..][..block_len], false);
                    num_waiting += 1;
                }
                for _ in 0..usize::from(is_pair) + (term + 1).trailing_zeros() as usize {
                    self.add_last(&mut sums[..num_waiting * block_len], block_len);
                    num_waiting -= 1;
                }
            }
            let sum = &sums[..block_len];
            if accumulate {
                self.zip_in_place::<f32, f32>(out, sum, |out, sum| out + sum);
            } else {
                self.zip_in_place::<f32, f32>(out, sum, |_, sum| sum);
            }
        }
    }

    /// Adds the last block to the one before it.
    fn add_last(&self, blocks: &mut [f32], block_len: usize) {
        let (blocks, last) = blocks.split_at_mut(blocks.len() - block_len);
        let first = blocks.len() - block_len;
        self.zip_in_place::<f32, f32>(&mut blocks[first..], last, |left, right| left + right);
    }

    /// Sorts rows by group with a stable counting sort: `starts[g]` is the first position of group `g`, `order[i]` the row at position `i`,
    /// and `positions[row]` its position. From each `limit.rows_per_capacity` consecutive rows, a group takes the first ones, up to its
    /// [capacity](GroupLimit::capacity). The others belong to no group and come last, as do rows of the group `num_groups`, which do not
    /// count in the capacity. Panics if a group exceeds `num_groups`.
    pub(crate) fn group_rows(
        &self,
        groups: &[u32],
        limit: GroupLimit,
        starts: &mut [u32],
        order: &mut [u32],
        positions: &mut [u32],
    ) {
        let num_groups = starts.len() - 1;
        // At first, `positions[row]` is the group that takes the row.
        let together = groups
            .chunks(limit.rows_per_capacity.max(1))
            .zip(positions.chunks_mut(limit.rows_per_capacity.max(1)));
        for (groups, taken_by) in together {
            let num_rows = groups.iter().filter(|group| (**group as usize) < num_groups).count();
            let capacity = limit.capacity(num_rows, num_groups);
            starts.fill(0);
            for (&group, taken_by) in groups.iter().zip(taken_by) {
                let num_before = &mut starts[group as usize];
                let is_taken = (*num_before as usize) < capacity;
                *taken_by = if is_taken { group } else { num_groups as u32 };
                *num_before += 1;
            }
        }
        starts.fill(0);
        for &group in positions.iter().filter(|group| (**group as usize) < num_groups) {
            starts[group as usize + 1] += 1;
        }
        for group in 1..starts.len() {
            starts[group] += starts[group - 1];
        }
        // The last start is the first position of rows of no group.
        for (row, place) in positions.iter_mut().enumerate() {
            let next = &mut starts[*place as usize];
            *place = *next;
            *next += 1;
            order[*place as usize] = row as u32;
        }
        // The end of each group is the start of the next one.
        starts.copy_within(..num_groups, 1);
        starts[0] = 0;
    }

    pub(crate) fn ungrouped_rows(
        &self,
        starts: &[u32],
        positions: &[u32],
        num_choices: usize,
        weights: Option<&[f32]>,
        out: &mut [f64],
    ) {
        let end = end_of(starts) as u32;
        let dropped = positions.iter().enumerate().filter(|(_, place)| **place >= end);
        out[0] = dropped
            .map(|(row, _)| weights.map_or(1.0, |weights| f64::from(weights[row / num_choices])))
            .sum();
    }
}
