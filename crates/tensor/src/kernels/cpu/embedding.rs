//! Rows of a table, gathered by token id.

use super::element::Element;
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};

/// Columns of the table's gradient that one task owns.
const COLUMNS_PER_TASK: usize = 64;

for_each_simd_level! {
    fn gather_rows<T: Element, P: Element>(ids: &[u32], table: &[T], positions: Option<&[T]>, first_position: usize, out: &mut [f32], cols: usize) {
        let round = |value: T| P::from_f32(value.to_f32()).to_f32();
        for (offset, (&id, out)) in ids.iter().zip(out.chunks_exact_mut(cols)).enumerate() {
            let row = &table[id as usize * cols..(id as usize + 1) * cols];
            out.iter_mut().zip(row).for_each(|(out, &row)| *out = round(row));
            if let Some(positions) = positions {
                let start = (first_position + offset) * cols;
                let row = &positions[start..start + cols];
                out.iter_mut().zip(row).for_each(|(out, &row)| *out += round(row));
            }
        }
    }

    fn scatter_columns(ids: &[u32], dy: &[f32], d_table: &SharedSlice<'_, f32>, cols: usize, first: usize, width: usize) {
        for (row, &id) in ids.iter().enumerate() {
            let dy = &dy[row * cols + first..row * cols + first + width];
            // SAFETY: this task alone has these columns.
            let out = unsafe { d_table.range(id as usize * cols + first, width) };
            out.iter_mut().zip(dy).for_each(|(out, &dy)| *out += dy);
        }
    }
}

impl Cpu {
    /// `out[i] = P(table[ids[i]]) + P(positions[first_position + i % seq_len])`; `out` is `ids.len() x cols`.
    ///
    /// # Panics
    /// If there are no ids, an id lies outside of the table or a position outside of `positions`.
    pub(crate) fn embedding<T: Element, P: Element>(
        &self,
        ids: &[u32],
        table: &[T],
        positions: Option<&[T]>,
        (seq_len, first_position): (usize, usize),
        out: &mut [f32],
    ) {
        let cols = out.len() / ids.len();
        let shared = SharedSlice::new(out);
        self.threads.run(ids.len() / seq_len, &|sequence| {
            let first = sequence * seq_len;
            // SAFETY: sequences do not overlap.
            let out = unsafe { shared.range(first * cols, seq_len * cols) };
            gather_rows::<T, P>(
                self.features,
                &ids[first..first + seq_len],
                table,
                positions,
                first_position,
                out,
                cols,
            );
        });
    }

    /// `d_table[ids[i]] += dy[i]`, the rows of `dy` in order; columns are divided among tasks.
    ///
    /// # Panics
    /// If there are not as many rows as ids, or an id lies outside of the table.
    pub(crate) fn embedding_backward(&self, ids: &[u32], dy: &[f32], cols: usize, d_table: &mut [f32]) {
        assert_eq!(dy.len(), ids.len() * cols, "{} rows of {cols}", ids.len());
        let shared = SharedSlice::new(d_table);
        self.threads.run(cols.div_ceil(COLUMNS_PER_TASK), &|block| {
            let first = block * COLUMNS_PER_TASK;
            scatter_columns(self.features, ids, dy, &shared, cols, first, COLUMNS_PER_TASK.min(cols - first));
        });
    }

    /// `d_positions[t] += sum over sequences of dy[sequence, t]`.
    pub(crate) fn position_backward(&self, dy: &[f32], seq_len: usize, cols: usize, d_positions: &mut [f32]) {
        let shared = SharedSlice::new(&mut d_positions[..seq_len * cols]);
        self.for_row_blocks(seq_len, cols, |first, rows| {
            // SAFETY: blocks of rows do not overlap.
            let out = unsafe { shared.range(first * cols, rows * cols) };
            for sequence in dy.chunks_exact(seq_len * cols) {
                let dy = &sequence[first * cols..(first + rows) * cols];
                out.iter_mut().zip(dy).for_each(|(out, &dy)| *out += dy);
            }
        });
    }
}

#[cfg(test)]
mod tests;
