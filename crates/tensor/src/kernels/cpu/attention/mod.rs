//! Causal attention in blocks, never holding all scores (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", 2022, and
//! "FlashAttention-2", 2023), with rotary position embedding (Su et al., "RoFormer", 2021).
//!
//! A row of `qkv` holds the query heads, then the key heads, then the value heads. With fewer key-value heads
//! than query heads, consecutive query heads share one (Ainslie et al., "GQA", 2023).

mod head;

use super::matmul::{Matrix, Product, Tile};
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};
use head::{Head, HeadGrads, OutputRows, QUERY_BLOCK};

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
    fn rotate_row(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], direction: f32) {
        for head in row.chunks_exact_mut(head_dim) {
            let (a, b) = head.split_at_mut(head_dim / 2);
            for (((a, b), &cos), &sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                let sin = sin * direction;
                let (x, y) = (*a, *b);
                *a = x * cos - y * sin;
                *b = y * cos + x * sin;
            }
        }
    }
}

impl Cpu {
    /// Rotates the query and key heads of `qkv` in place; `inverse` turns the other way, which is the gradient.
    pub(crate) fn rotary(&self, qkv: &mut [f32], shape: AttentionShape, rotary: Rotary<'_>, inverse: bool) {
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

    /// Causal attention within each sequence: `y` has [`AttentionShape::output_cols`] a row, `log_sums` one value
    /// a head and row (`batch x num_heads x seq_len`).
    pub(crate) fn attention(&self, qkv: &[f32], shape: AttentionShape, y: &mut [f32], log_sums: &mut [f32]) {
        let cols = shape.qkv_cols();
        assert!(qkv.len() == shape.rows() * cols && log_sums.len() == shape.rows() * shape.num_heads);
        let rows = Matrix::row_major(qkv, cols, false);
        self.attend(shape, y, log_sums, &|sequence, head| {
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
    ) {
        let (cols, kv_cols, capacity) = (shape.qkv_cols(), shape.kv_cols(), cache.capacity);
        assert!(cache.len + shape.seq_len <= capacity, "the cache has room for {capacity} positions");
        for (row, qkv) in qkv.chunks_exact(cols).enumerate() {
            let position = row / shape.seq_len * capacity + cache.len + row % shape.seq_len;
            let range = position * kv_cols..(position + 1) * kv_cols;
            cache.keys[range.clone()].copy_from_slice(&qkv[shape.key_col(0)..][..kv_cols]);
            cache.values[range].copy_from_slice(&qkv[shape.value_col(0)..][..kv_cols]);
        }
        let queries = Matrix::row_major(qkv, cols, false);
        let keys = Matrix::row_major(cache.keys, kv_cols, false);
        let values = Matrix::row_major(cache.values, kv_cols, false);
        self.attend(shape, y, log_sums, &|sequence, head| {
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

    fn attend<'a>(
        &self,
        shape: AttentionShape,
        y: &mut [f32],
        log_sums: &mut [f32],
        head_of: &(dyn Fn(usize, usize) -> Head<'a> + Sync),
    ) {
        let blocks = shape.seq_len.div_ceil(QUERY_BLOCK);
        let out_cols = shape.output_cols();
        let (y, log_sums) = (SharedSlice::new(y), SharedSlice::new(log_sums));
        self.threads.run(shape.batch * shape.num_heads * blocks, &|task| {
            let (sequence_head, first) = (task / blocks, task % blocks * QUERY_BLOCK);
            let (sequence, head) = (sequence_head / shape.num_heads, sequence_head % shape.num_heads);
            let num_queries = QUERY_BLOCK.min(shape.seq_len - first);
            let start = (sequence * shape.seq_len + first) * out_cols + head * shape.head_dim;
            let size = Product { rows: num_queries, cols: shape.head_dim, inner: 0 };
            // SAFETY: this task alone has these rows of this head.
            let (out, log_sums) = unsafe {
                let log_sums = log_sums.range(sequence_head * shape.seq_len + first, num_queries);
                (Tile::new(&y, start, out_cols, size), log_sums)
            };
            head_of(sequence, head).forward(self, first, &out, log_sums);
        });
    }

    /// Gradient of [`Cpu::attention`] with respect to `qkv`.
    pub(crate) fn attention_backward(
        &self,
        qkv: &[f32],
        shape: AttentionShape,
        y: &[f32],
        log_sums: &[f32],
        dy: &[f32],
        d_qkv: &mut [f32],
    ) {
        let (cols, out_cols, seq_len) = (shape.qkv_cols(), shape.output_cols(), shape.seq_len);
        assert!(qkv.len() == d_qkv.len() && y.len() == dy.len() && y.len() == shape.rows() * out_cols);
        let rows = Matrix::row_major(qkv, cols, false);
        let d_qkv = SharedSlice::new(d_qkv);
        self.threads.run(shape.batch * shape.num_kv_heads, &|task| {
            let (sequence, kv_head) = (task / shape.num_kv_heads, task % shape.num_kv_heads);
            let first = sequence * seq_len;
            for row in first..first + seq_len {
                for col in [shape.key_col(kv_head), shape.value_col(kv_head)] {
                    // SAFETY: this task alone has the columns of this key-value head in this sequence.
                    unsafe { d_qkv.range(row * cols + col, shape.head_dim).fill(0.0) };
                }
            }
            let per_kv_head = shape.heads_per_kv_head();
            for head in kv_head * per_kv_head..(kv_head + 1) * per_kv_head {
                let parts = Head {
                    queries: rows.from(first, head * shape.head_dim),
                    keys: rows.from(first, shape.key_col(kv_head)),
                    values: rows.from(first, shape.value_col(kv_head)),
                    num_earlier: 0,
                    head_dim: shape.head_dim,
                    scale: shape.scale(),
                };
                let grads = HeadGrads {
                    d_qkv: &d_qkv,
                    cols,
                    query: first * cols + head * shape.head_dim,
                    key: first * cols + shape.key_col(kv_head),
                    value: first * cols + shape.value_col(kv_head),
                };
                for query in (0..seq_len).step_by(QUERY_BLOCK) {
                    let row = |data| {
                        Matrix::row_major(data, out_cols, false).from(first + query, head * shape.head_dim)
                    };
                    let saved = (sequence * shape.num_heads + head) * seq_len + query;
                    let log_sums = &log_sums[saved..saved + QUERY_BLOCK.min(seq_len - query)];
                    let output = OutputRows { y: row(y), dy: row(dy), log_sums };
                    parts.backward(self, query, output, &grads);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests;
