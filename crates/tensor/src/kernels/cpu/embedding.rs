//! Embedding tables: rows gathered by id.

use super::element::Element;
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};
use crate::parameter_table::SpanShard;
use trireme_base::Positions;

/// Ids in bags of equal length, each possibly padded at its end. `V` is a view, an operand or a slice of u32.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bags<V> {
    /// One row per bag.
    pub(crate) ids: V,
    pub(crate) bag_len: usize,
    /// Number of ids of each bag that are not padding; `None` if there is no padding.
    pub(crate) lens: Option<V>,
    /// Whether sums are divided by the number of ids.
    pub(crate) is_mean: bool,
    /// First row and number of rows of this rank's shard of the table; ids of other rows contribute zeros. `None` if the table is not
    /// sharded.
    pub(crate) shard: Option<(usize, usize)>,
}

impl<V> Bags<V> {
    /// Creates bags of one id each.
    pub(crate) fn of_single_ids(ids: V) -> Self {
        Bags { ids, bag_len: 1, lens: None, is_mean: false, shard: None }
    }

    /// Restricts the ids to the shard of a table that a rank of the tensor axis stores. Panics if the table is not sharded by its rows.
    pub(crate) fn with_shard(self, part: Option<SpanShard>) -> Self {
        assert!(part.is_none_or(|part| part.dim == 0), "a table is cut by its rows");
        Bags { shard: part.map(|part| (part.start, part.len)), ..self }
    }

    /// Applies a function to each array.
    pub(crate) fn map<U>(self, mut array: impl FnMut(V) -> U) -> Bags<U> {
        let Bags { bag_len, is_mean, shard: part, .. } = self;
        Bags { ids: array(self.ids), lens: self.lens.map(array), bag_len, is_mean, shard: part }
    }
}

impl<'a> Bags<&'a [u32]> {
    /// Returns the ids of a bag, and the factor of their rows.
    fn bag(&self, index: usize) -> (&'a [u32], f32) {
        let len = self.lens.map_or(self.bag_len, |lens| (lens[index] as usize).min(self.bag_len));
        let factor = if self.is_mean { 1.0 / len.max(1) as f32 } else { 1.0 };
        (&self.ids[index * self.bag_len..][..len], factor)
    }

    /// Returns the table row of an id; `None` if another rank stores it.
    #[inline]
    fn row(&self, id: u32) -> Option<usize> {
        match self.shard {
            None => Some(id as usize),
            Some((first, len)) => (id as usize).checked_sub(first).filter(|&row| row < len),
        }
    }
}

/// Number of columns of the table's gradient per task.
const COLUMNS_PER_TASK: usize = 64;

for_each_simd_level! {
    fn gather_rows<T: Element, P: Element>(ids: &[u32], table: &[T], positions: Option<&[T]>, at: Positions, out: &mut [f32], cols: usize) {
        let round = |value: T| P::from_f32(value.to_f32()).to_f32();
        for (offset, (&id, out)) in ids.iter().zip(out.chunks_exact_mut(cols)).enumerate() {
            let row = &table[id as usize * cols..(id as usize + 1) * cols];
            out.iter_mut().zip(row).for_each(|(out, &row)| *out = round(row));
            if let Some(positions) = positions {
                let start = at.at(offset) * cols;
                let row = &positions[start..start + cols];
                out.iter_mut().zip(row).for_each(|(out, &row)| *out += round(row));
            }
        }
    }

    fn sum_bag<T: Element, P: Element>(bags: Bags<&[u32]>, index: usize, table: &[T], out: &mut [f32]) {
        out.fill(0.0);
        let (cols, (ids, factor)) = (out.len(), bags.bag(index));
        for row in ids.iter().filter_map(|&id| bags.row(id)) {
            let row = &table[row * cols..(row + 1) * cols];
            out.iter_mut().zip(row).for_each(|(out, row)| *out += P::from_f32(row.to_f32()).to_f32());
        }
        if factor != 1.0 {
            out.iter_mut().for_each(|out| *out *= factor);
        }
    }

    fn scatter_columns(bags: Bags<&[u32]>, dy: &[f32], d_table: &SharedSlice<'_, f32>, cols: usize, first: usize, width: usize) {
        for (row, dy) in dy.chunks_exact(cols).enumerate() {
            let dy = &dy[first..first + width];
            let (ids, factor) = bags.bag(row);
            for row in ids.iter().filter_map(|&id| bags.row(id)) {
                // SAFETY: no other task accesses these columns.
                let out = unsafe { d_table.range(row * cols + first, width) };
                out.iter_mut().zip(dy).for_each(|(out, &dy)| *out += factor * dy);
            }
        }
    }
}

impl Cpu {
    /// Computes `out[i] = x[i] + table[at.at((first_row + i) % at.len())]` for rows. Panics if a position is not the index of a row of the
    /// table.
    pub(crate) fn add_positions(
        &self,
        x: &[f32],
        table: &[f32],
        cols: usize,
        first_row: usize,
        at: Positions,
        out: &mut [f32],
    ) {
        self.for_each_row(out, cols, |row, out| {
            let position = at.at((first_row + row) % at.len());
            let terms = x[row * cols..].iter().zip(&table[position * cols..][..cols]);
            out.iter_mut().zip(terms).for_each(|(out, (x, term))| *out = x + term);
        });
    }

    /// Computes `out[i]`: the sum of the rows `table[id]` of bag `i`, each rounded to `P`, times the bag's factor. Panics if an id is not
    /// the index of a row of the table.
    pub(crate) fn embedding_bag<T: Element, P: Element>(
        &self,
        bags: Bags<&[u32]>,
        table: &[T],
        cols: usize,
        out: &mut [f32],
    ) {
        self.for_each_row(out, cols, |row, out| {
            sum_bag::<T, P>(self.simd_level, bags, row, table, out);
        });
    }

    /// Computes `d_table[id] += dy[i] * factor` for the ids of each bag `i`, in order. Tasks split the columns. Panics if the number of
    /// rows is not the number of bags, or if an id is not the index of a row of the table.
    pub(crate) fn embedding_bag_backward(
        &self,
        bags: Bags<&[u32]>,
        dy: &[f32],
        cols: usize,
        d_table: &mut [f32],
    ) {
        assert_eq!(dy.len() * bags.bag_len, bags.ids.len() * cols, "bags and rows of {cols}");
        let shared = SharedSlice::new(d_table);
        self.threads.run(cols.div_ceil(COLUMNS_PER_TASK), &|block| {
            let first = block * COLUMNS_PER_TASK;
            let width = COLUMNS_PER_TASK.min(cols - first);
            scatter_columns(self.simd_level, bags, dy, &shared, cols, first, width);
        });
    }

    /// Computes `out[i] = table[ids[i]] + positions[at.at(i % at.len())]` for sequences of length `at.len()`. Both rows are rounded to `P`
    /// first. `out` is `ids.len() x cols`. Panics if there are no ids, or if an id or a position is not the index of a row of its table.
    pub(crate) fn embedding<T: Element, P: Element>(
        &self,
        ids: &[u32],
        table: &[T],
        positions: Option<&[T]>,
        at: Positions,
        out: &mut [f32],
    ) {
        let (cols, seq_len) = (out.len() / ids.len(), at.len());
        let shared = SharedSlice::new(out);
        self.threads.run(ids.len() / seq_len, &|sequence| {
            let first = sequence * seq_len;
            // SAFETY: sequences do not overlap.
            let out = unsafe { shared.range(first * cols, seq_len * cols) };
            gather_rows::<T, P>(
                self.simd_level,
                &ids[first..first + seq_len],
                table,
                positions,
                at,
                out,
                cols,
            );
        });
    }

    pub(crate) fn position_backward(&self, dy: &[f32], at: Positions, cols: usize, d_positions: &mut [f32]) {
        for (start, run) in at.runs() {
            let shared = SharedSlice::new(&mut d_positions[run.start * cols..run.end * cols]);
            self.for_row_blocks(run.len(), cols, |first, rows| {
                // SAFETY: blocks of rows do not overlap.
                let out = unsafe { shared.range(first * cols, rows * cols) };
                for sequence in dy.chunks_exact(at.len() * cols) {
                    let dy = &sequence[(start + first) * cols..(start + first + rows) * cols];
                    out.iter_mut().zip(dy).for_each(|(out, &dy)| *out += dy);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests;
