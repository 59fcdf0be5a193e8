//! Causal attention in blocks, never holding all scores (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", 2022, and
//! "FlashAttention-2", 2023), with rotary position embedding (Su et al., "RoFormer", 2021).
//!
//! A row of `qkv` holds the query heads, then the key heads, then the value heads. With fewer key-value heads
//! than query heads, consecutive query heads share one (Ainslie et al., "GQA", 2023).

mod head;

use super::element::Element;
use super::matmul::Matrix;
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};
use head::{Head, HeadGrads, OutputRows, QUERY_BLOCK, Scratch};

/// Sizes of an attention operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seq_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Elements of a row of `qkv`.
    pub fn qkv_cols(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Elements of a row of the output.
    pub fn output_cols(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements of the keys, or of the values, of one position.
    pub fn kv_cols(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Rows of `qkv` and of the output.
    pub fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    fn key_col(&self, kv_head: usize) -> usize {
        (self.num_heads + kv_head) * self.head_dim
    }

    fn value_col(&self, kv_head: usize) -> usize {
        (self.num_heads + self.num_kv_heads + kv_head) * self.head_dim
    }

    fn heads_per_kv_head(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Cosines and sines of a rotary embedding: row `p` holds `head_dim / 2` values for position `p`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rotary<'a> {
    /// Cosines.
    pub(crate) cos: &'a [f32],
    /// Sines.
    pub(crate) sin: &'a [f32],
    /// Position of the first row of each sequence.
    pub(crate) first_position: usize,
}

/// Keys and values of earlier positions, `batch x capacity x kv_cols` each.
#[derive(Debug)]
pub(crate) struct CacheSpan<'a> {
    /// Keys, after rotation.
    pub(crate) keys: &'a mut [f32],
    /// Values.
    pub(crate) values: &'a mut [f32],
    /// Positions there is room for.
    pub(crate) capacity: usize,
    /// Positions already held.
    pub(crate) len: usize,
}

for_each_simd_level! {
    fn rotate_row<T: Element>(row: &mut [T], head_dim: usize, cos: &[f32], sin: &[f32], direction: f32) {
        for head in row.chunks_exact_mut(head_dim) {
            let (a, b) = head.split_at_mut(head_dim / 2);
            for (((a, b), &cos), &sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                let sin = sin * direction;
                let (x, y) = (a.to_f32(), b.to_f32());
                *a = T::from_f32(x * cos - y * sin);
                *b = T::from_f32(y * cos + x * sin);
            }
        }
    }
}

for_each_simd_level! {
    fn round_row<T: Element>(sums: &[f32], out: &mut [T]) {
        out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = T::from_f32(sum));
    }
}

impl Cpu {
    /// Rotates the query and key heads of `qkv` in place; `inverse` turns the other way, which is the gradient.
    pub(crate) fn rotary<T: Element>(
        &self,
        qkv: &mut [T],
        shape: AttentionShape,
        rotary: Rotary<'_>,
        inverse: bool,
    ) {
        let cols = shape.qkv_cols();
        let rotated = shape.value_col(0);
        let half = shape.head_dim / 2;
        let direction = if inverse { -1.0 } else { 1.0 };
        let qkv = SharedSlice::new(qkv);
        self.for_row_blocks(shape.rows(), cols, |first, num_rows| {
            for row in first..first + num_rows {
                let start = (rotary.first_position + row % shape.seq_len) * half;
                let (cos, sin) = (&rotary.cos[start..start + half], &rotary.sin[start..start + half]);
                // SAFETY: rows do not overlap.
                let row = unsafe { qkv.range(row * cols, rotated) };
                rotate_row(self.features, row, shape.head_dim, cos, sin, direction);
            }
        });
    }

    /// f32 elements of scratch memory that attention needs: for each thread blocks of scores, a block of outputs, and in backward
    /// the sums of a key-value head's gradients.
    pub(crate) fn attention_scratch(&self, shape: AttentionShape, backward: bool) -> usize {
        self.threads.num_threads() * scratch_len(shape, backward)
    }

    /// Causal attention within each sequence: `y` has [`AttentionShape::output_cols`] a row, `log_sums` one value
    /// a head and row (`batch x num_heads x seq_len`).
    pub(crate) fn attention<T: Element>(
        &self,
        qkv: &[T],
        shape: AttentionShape,
        y: &mut [T],
        log_sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let cols = shape.qkv_cols();
        assert!(qkv.len() == shape.rows() * cols && log_sums.len() == shape.rows() * shape.num_heads);
        let rows = Matrix::row_major(T::floats(qkv), cols, false);
        self.attend(shape, y, log_sums, scratch, &|sequence, head| {
            let (first, kv_head) = (sequence * shape.seq_len, head / shape.heads_per_kv_head());
            Head {
                queries: rows.from(first, head * shape.head_dim),
                keys: rows.from(first, shape.key_col(kv_head)),
                values: rows.from(first, shape.value_col(kv_head)),
                num_earlier: 0,
                head_dim: shape.head_dim,
                scale: shape.scale(),
            }
        });
    }

    /// As [`Cpu::attention`] for queries that follow the positions of `cache`, to which their own keys
    /// and values are added; nothing is saved for backward.
    pub(crate) fn attention_cached(
        &self,
        qkv: &[f32],
        shape: AttentionShape,
        cache: &mut CacheSpan<'_>,
        y: &mut [f32],
        log_sums: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (cols, kv_cols, capacity) = (shape.qkv_cols(), shape.kv_cols(), cache.capacity);
        assert!(cache.len + shape.seq_len <= capacity, "the cache has room for {capacity} positions");
        for (row, qkv) in qkv.chunks_exact(cols).enumerate() {
            let position = row / shape.seq_len * capacity + cache.len + row % shape.seq_len;
            let range = position * kv_cols..(position + 1) * kv_cols;
            cache.keys[range.clone()].copy_from_slice(&qkv[shape.key_col(0)..][..kv_cols]);
            cache.values[range].copy_from_slice(&qkv[shape.value_col(0)..][..kv_cols]);
        }
        let queries = Matrix::row_major(f32::floats(qkv), cols, false);
        let keys = Matrix::row_major(f32::floats(cache.keys), kv_cols, false);
        let values = Matrix::row_major(f32::floats(cache.values), kv_cols, false);
        self.attend(shape, y, log_sums, scratch, &|sequence, head| {
            let kv_col = head / shape.heads_per_kv_head() * shape.head_dim;
            Head {
                queries: queries.from(sequence * shape.seq_len, head * shape.head_dim),
                keys: keys.from(sequence * capacity, kv_col),
                values: values.from(sequence * capacity, kv_col),
                num_earlier: cache.len,
                head_dim: shape.head_dim,
                scale: shape.scale(),
            }
        });
    }

    fn attend<'a, T: Element>(
        &self,
        shape: AttentionShape,
        y: &mut [T],
        log_sums: &mut [f32],
        scratch: &mut [f32],
        head_of: &(dyn Fn(usize, usize) -> Head<'a> + Sync),
    ) {
        let blocks = shape.seq_len.div_ceil(QUERY_BLOCK);
        let (out_cols, dim, scratch_len) = (shape.output_cols(), shape.head_dim, scratch_len(shape, false));
        let (y, log_sums, scratch) =
            (SharedSlice::new(y), SharedSlice::new(log_sums), SharedSlice::new(scratch));
        self.threads.run_on_threads(shape.batch * shape.num_heads * blocks, &|thread, task| {
            let (sequence_head, first) = (task / blocks, task % blocks * QUERY_BLOCK);
            let (sequence, head) = (sequence_head / shape.num_heads, sequence_head % shape.num_heads);
            let num_queries = QUERY_BLOCK.min(shape.seq_len - first);
            let start = (sequence * shape.seq_len + first) * out_cols + head * dim;
            // SAFETY: this task alone has these rows of this head, and this thread its part of the scratch memory.
            let (log_sums, scratch) = unsafe {
                let log_sums = log_sums.range(sequence_head * shape.seq_len + first, num_queries);
                (log_sums, scratch.range(thread * scratch_len, scratch_len))
            };
            let (sums, blocks) = scratch.split_at_mut(QUERY_BLOCK * dim);
            let sums = &mut sums[..num_queries * dim];
            head_of(sequence, head).forward::<T>(self, first, &mut Scratch::new(blocks), sums, log_sums);
            // SAFETY: as above.
            unsafe { self.put_rows(sums, &y, (start, out_cols), dim) };
        });
    }

    /// Rounds rows of `dim` sums to rows of `out` that begin at `start` and are `stride` apart.
    ///
    /// # Safety
    /// No one else reaches these rows.
    unsafe fn put_rows<T: Element>(
        &self,
        sums: &[f32],
        out: &SharedSlice<'_, T>,
        (start, stride): (usize, usize),
        dim: usize,
    ) {
        for (row, sums) in sums.chunks_exact(dim).enumerate() {
            // SAFETY: the caller has the row.
            round_row(self.features, sums, unsafe { out.range(start + row * stride, dim) });
        }
    }

    /// Gradient of [`Cpu::attention`] with respect to `qkv`.
    pub(crate) fn attention_backward<T: Element>(
        &self,
        qkv: &[T],
        shape: AttentionShape,
        (y, log_sums, dy): (&[T], &[f32], &[T]),
        d_qkv: &mut [T],
        scratch: &mut [f32],
    ) {
        let (cols, out_cols, seq_len, dim) =
            (shape.qkv_cols(), shape.output_cols(), shape.seq_len, shape.head_dim);
        assert!(qkv.len() == d_qkv.len() && y.len() == dy.len() && y.len() == shape.rows() * out_cols);
        let rows = Matrix::row_major(T::floats(qkv), cols, false);
        let (d_qkv, scratch) = (SharedSlice::new(d_qkv), SharedSlice::new(scratch));
        let scratch_len = scratch_len(shape, true);
        self.threads.run_on_threads(shape.batch * shape.num_kv_heads, &|thread, task| {
            let (sequence, kv_head) = (task / shape.num_kv_heads, task % shape.num_kv_heads);
            let first = sequence * seq_len;
            // SAFETY: each thread has its own part.
            let sums = unsafe { scratch.range(thread * scratch_len, scratch_len) };
            let (sums, blocks) = sums.split_at_mut((QUERY_BLOCK + 2 * seq_len) * dim);
            let mut blocks = Scratch::new(blocks);
            let (queries, keys_values) = sums.split_at_mut(QUERY_BLOCK * dim);
            keys_values.fill(0.0);
            let (keys, values) = keys_values.split_at_mut(seq_len * dim);
            let mut grads = HeadGrads { queries, keys, values };
            let per_kv_head = shape.heads_per_kv_head();
            for head in kv_head * per_kv_head..(kv_head + 1) * per_kv_head {
                let parts = Head {
                    queries: rows.from(first, head * dim),
                    keys: rows.from(first, shape.key_col(kv_head)),
                    values: rows.from(first, shape.value_col(kv_head)),
                    num_earlier: 0,
                    head_dim: dim,
                    scale: shape.scale(),
                };
                for query in (0..seq_len).step_by(QUERY_BLOCK) {
                    let num_queries = QUERY_BLOCK.min(seq_len - query);
                    let saved = (sequence * shape.num_heads + head) * seq_len + query;
                    let offset = (first + query) * out_cols + head * dim;
                    let output = OutputRows {
                        y: &y[offset..],
                        dy: &dy[offset..],
                        cols: out_cols,
                        log_sums: &log_sums[saved..saved + num_queries],
                    };
                    parts.backward(self, query, &mut blocks, output, &mut grads);
                    let place = ((first + query) * cols + head * dim, cols);
                    // SAFETY: this task alone has the query heads of its key-value head in this sequence.
                    unsafe { self.put_rows(&grads.queries[..num_queries * dim], &d_qkv, place, dim) };
                }
            }
            // SAFETY: this task alone has the columns of this key-value head in this sequence.
            unsafe {
                self.put_rows(grads.keys, &d_qkv, (first * cols + shape.key_col(kv_head), cols), dim);
                self.put_rows(grads.values, &d_qkv, (first * cols + shape.value_col(kv_head), cols), dim);
            }
        });
    }
}

/// f32 elements of scratch memory of one thread.
fn scratch_len(shape: AttentionShape, backward: bool) -> usize {
    match backward {
        false => Scratch::<f32>::LEN / 2 + QUERY_BLOCK * shape.head_dim,
        true => Scratch::<f32>::LEN + (QUERY_BLOCK + 2 * shape.seq_len) * shape.head_dim,
    }
}

#[cfg(test)]
mod tests;
