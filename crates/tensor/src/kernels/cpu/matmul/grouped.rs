//! Products of groups of rows, each with a matrix of its own.
//!
//! Groups are as long as they are: nothing is padded, and the product of a group has the bits that it has alone (Gale et al.,
//! "MegaBlocks", 2023, section 5, computes them at once on a GPU; a core of a CPU is filled by one).
//!
//! A device that only counts has no numbers in the starts of groups: nothing is done on it.

use super::{Epilogue, Matrix, Product};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::FloatsMut;
use crate::precision::Precision;
use std::ops::Range;

/// The rows of each group: `starts` holds where groups begin, and where the last one ends.
///
/// # Panics
/// If they are not `num_rows` in all, in order.
fn groups(starts: &[u32], num_rows: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let is_ordered = starts.is_sorted() && starts.first() == Some(&0);
    assert!(is_ordered && starts.last() == Some(&(num_rows as u32)), "groups of {num_rows} rows: {starts:?}");
    starts.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).enumerate()
}

impl Cpu {
    /// For each group its rows of `left`, times its block of `right`, into its rows of `out`. A block begins `block_rows` rows of the matrix
    /// in memory after the one before. `size` is the product of all rows with one block.
    ///
    /// Cost: that of `size`.
    ///
    /// # Panics
    /// As [`Cpu::matmul`], and if `starts` are not those of groups of so many rows.
    pub(crate) fn grouped_matmul(
        &self,
        (precision, size): (Precision, Product),
        starts: &[u32],
        (left, right, block_len): (Matrix<'_>, Matrix<'_>, usize),
        mut out: FloatsMut<'_>,
        scratch: &mut [u32],
    ) {
        if self.threads.is_idle() {
            return;
        }
        for (group, rows) in groups(starts, size.rows).filter(|(_, rows)| !rows.is_empty()) {
            let size = Product { rows: rows.len(), ..size };
            let block = Matrix { values: right.values.from(group * block_len), ..right };
            let out = out.range(rows.start * size.cols..rows.end * size.cols);
            self.matmul(
                precision,
                size,
                (left.from(rows.start, 0), block),
                out,
                Epilogue::Overwrite,
                scratch,
            );
        }
    }

    /// For each group the transpose of its rows of `left`, times its rows of `right`, into its block of `out`, which is as large as `size`
    /// without its inner dim, or added to it. A group without rows gives zeros.
    ///
    /// Cost: that of `size`, whose inner dim is that of all rows.
    ///
    /// # Panics
    /// As [`grouped_matmul`](Cpu::grouped_matmul).
    pub(crate) fn grouped_transposed_matmul(
        &self,
        (precision, size): (Precision, Product),
        starts: &[u32],
        (left, right): (Matrix<'_>, Matrix<'_>),
        (out, accumulate): (&mut [f32], bool),
        scratch: &mut [u32],
    ) {
        if self.threads.is_idle() {
            return;
        }
        let epilogue = if accumulate { Epilogue::Accumulate } else { Epilogue::Overwrite };
        let block_len = size.rows * size.cols;
        for (group, rows) in groups(starts, size.inner) {
            let out = &mut out[group * block_len..(group + 1) * block_len];
            if rows.is_empty() {
                if !accumulate {
                    out.fill(0.0);
                }
                continue;
            }
            let size = Product { inner: rows.len(), ..size };
            let factors = (left.from(0, rows.start), right.from(rows.start, 0));
            self.matmul(precision, size, factors, FloatsMut::F32(out), epilogue, scratch);
        }
    }

    /// Orders rows by their group, and those of a group as they were (a counting sort): `starts[g]` is where the rows of group `g`
    /// begin, `order[i]` the row at place `i`, and `places[row]` its place.
    ///
    /// # Panics
    /// If a row is of no group.
    pub(crate) fn group_rows(
        &self,
        groups: &[u32],
        (starts, order, places): (&mut [u32], &mut [u32], &mut [u32]),
    ) {
        if self.threads.is_idle() {
            return;
        }
        starts.fill(0);
        let num_groups = starts.len() - 1;
        for &group in groups {
            assert!((group as usize) < num_groups, "group {group} of {num_groups}");
            starts[group as usize + 1] += 1;
        }
        for group in 1..starts.len() {
            starts[group] += starts[group - 1];
        }
        for (row, &group) in groups.iter().enumerate() {
            let place = starts[group as usize];
            starts[group as usize] += 1;
            order[place as usize] = row as u32;
            places[row] = place;
        }
        // Each group ends where the next one begins.
        starts.copy_within(..num_groups, 1);
        starts[0] = 0;
    }
}
