//! Causal attention in blocks, never holding all scores (Dao, Fu, Ermon, Rudra, Ré: "FlashAttention", 2022, and
//! "FlashAttention-2", 2023), with rotary position embedding (Su et al., "RoFormer", 2021).
//!
//! A row of `qkv` holds the query heads, then the key heads, then the value heads. With fewer key-value heads
//! than query heads, consecutive query heads share one (Ainslie et al., "GQA", 2023).

use super::matmul::{Matrix, Product, Tile};
use super::simd::{exp, for_each_simd_level, max_of, sum_map, sum_zip};
use super::{Cpu, SharedSlice};

/// Queries and keys in a block of scores: 64 KiB, which stays in the second-level cache.
const QUERY_BLOCK: usize = 64;
const KEY_BLOCK: usize = 256;

type Scores = [f32; QUERY_BLOCK * KEY_BLOCK];

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

    /// Turns one row of raw scores into weights; returns the new maximum, the factor for what was summed
    /// under the old one, and the sum of the weights.
    fn soften_row(scores: &mut [f32], visible: usize, old_max: f32, scale: f32) -> (f32, f32, f32) {
        let (seen, hidden) = scores.split_at_mut(visible);
        hidden.fill(0.0);
        let block_max = max_of(seen);
        let max = if block_max > old_max { block_max } else { old_max };
        for score in seen.iter_mut() {
            *score = exp((*score - max) * scale);
        }
        (max, exp((old_max - max) * scale), sum_map(seen, |weight| weight))
    }

    fn scale_row(row: &mut [f32], factor: f32) {
        row.iter_mut().for_each(|x| *x *= factor);
    }

    fn dot(x: &[f32], y: &[f32]) -> f32 {
        sum_zip(x, y, y, |x, y, _| x * y)
    }

    /// `weights` holds raw scores and becomes weights; `d_weights` becomes the gradient of the raw scores.
    fn backward_row(weights: &mut [f32], d_weights: &mut [f32], visible: usize, log_sum: f32, delta: f32, scale: f32) {
        let (seen, hidden) = weights.split_at_mut(visible);
        hidden.fill(0.0);
        d_weights[visible..].fill(0.0);
        for (weight, d_weight) in seen.iter_mut().zip(d_weights) {
            *weight = exp(*weight * scale - log_sum);
            *d_weight = *weight * (*d_weight - delta) * scale;
        }
    }
}

/// Queries of one head and sequence, with the keys and values they may see.
struct Head<'a> {
    queries: Matrix<'a>,
    keys: Matrix<'a>,
    values: Matrix<'a>,
    /// Keys before the first query.
    num_earlier: usize,
    head_dim: usize,
    scale: f32,
}

/// A block of queries against a block of keys.
#[derive(Clone, Copy)]
struct BlockPair {
    first_query: usize,
    num_queries: usize,
    first_key: usize,
    num_keys: usize,
}

impl Head<'_> {
    /// Blocks of keys that queries `first..first + num_queries` see.
    fn key_blocks(&self, first_query: usize, num_queries: usize) -> impl Iterator<Item = BlockPair> {
        let num_visible = self.num_earlier + first_query + num_queries;
        (0..num_visible.div_ceil(KEY_BLOCK)).map(move |block| {
            let first_key = block * KEY_BLOCK;
            BlockPair {
                first_query,
                num_queries,
                first_key,
                num_keys: KEY_BLOCK.min(num_visible - first_key),
            }
        })
    }

    /// Number of keys of the pair that its query `row` sees.
    fn num_visible(&self, pair: BlockPair, row: usize) -> usize {
        (self.num_earlier + pair.first_query + row + 1).saturating_sub(pair.first_key).min(pair.num_keys)
    }

    /// Raw scores of a pair, rows of `num_keys`.
    fn scores(&self, cpu: &Cpu, pair: BlockPair, scores: &mut Scores) {
        let size = Product { rows: pair.num_queries, cols: pair.num_keys, inner: self.head_dim };
        let queries = self.queries.from(pair.first_query, 0);
        let keys = self.keys.from(pair.first_key, 0).transposed();
        Tile::whole(&mut scores[..size.rows * size.cols], size).multiply(cpu.features, queries, keys, false);
    }

    /// Output rows of one block of queries, and the logarithm of each row's sum of exponentials.
    fn forward(&self, cpu: &Cpu, first_query: usize, out: &Tile, log_sums: &mut [f32]) {
        let num_queries = log_sums.len();
        let mut scores: Scores = [0.0; QUERY_BLOCK * KEY_BLOCK];
        let mut maxima = [f32::NEG_INFINITY; QUERY_BLOCK];
        let mut sums = [0.0_f32; QUERY_BLOCK];
        for pair in self.key_blocks(first_query, num_queries) {
            self.scores(cpu, pair, &mut scores);
            for (row, weights) in scores.chunks_exact_mut(pair.num_keys).take(num_queries).enumerate() {
                let visible = self.num_visible(pair, row);
                let (max, factor, sum) = soften_row(cpu.features, weights, visible, maxima[row], self.scale);
                maxima[row] = max;
                sums[row] = sums[row] * factor + sum;
                if pair.first_key > 0 {
                    scale_row(cpu.features, out.row(row), factor);
                }
            }
            let weights = Matrix::row_major(&scores, pair.num_keys, false);
            let size = Product { rows: num_queries, cols: self.head_dim, inner: pair.num_keys };
            out.with_size(size).multiply(
                cpu.features,
                weights,
                self.values.from(pair.first_key, 0),
                pair.first_key > 0,
            );
        }
        for (row, log_sum) in log_sums.iter_mut().enumerate() {
            scale_row(cpu.features, out.row(row), 1.0 / sums[row]);
            *log_sum = maxima[row] * self.scale + sums[row].ln();
        }
    }

    /// Adds one block of queries' share to the gradients of keys and values, and writes its own.
    fn backward(&self, cpu: &Cpu, first_query: usize, output: OutputRows<'_>, grads: &HeadGrads<'_>) {
        let num_queries = output.log_sums.len();
        let mut weights: Scores = [0.0; QUERY_BLOCK * KEY_BLOCK];
        let mut d_weights: Scores = [0.0; QUERY_BLOCK * KEY_BLOCK];
        let mut deltas = [0.0_f32; QUERY_BLOCK];
        for (row, delta) in deltas.iter_mut().enumerate().take(num_queries) {
            let row = |matrix: Matrix<'_>| -> std::ops::Range<usize> {
                let start = row * matrix.row_stride;
                start..start + self.head_dim
            };
            let (y, dy) = (&output.y.data[row(output.y)], &output.dy.data[row(output.dy)]);
            *delta = dot(cpu.features, y, dy);
        }
        for pair in self.key_blocks(first_query, num_queries) {
            let BlockPair { first_key, num_keys, .. } = pair;
            self.scores(cpu, pair, &mut weights);
            let size = Product { rows: num_queries, cols: num_keys, inner: self.head_dim };
            let values = self.values.from(first_key, 0).transposed();
            Tile::whole(&mut d_weights[..size.rows * size.cols], size).multiply(
                cpu.features,
                output.dy,
                values,
                false,
            );
            let rows = weights.chunks_exact_mut(num_keys).zip(d_weights.chunks_exact_mut(num_keys));
            for (row, (weights, d_weights)) in rows.take(num_queries).enumerate() {
                let visible = self.num_visible(pair, row);
                let (log_sum, delta) = (output.log_sums[row], deltas[row]);
                backward_row(cpu.features, weights, d_weights, visible, log_sum, delta, self.scale);
            }
            let weights = Matrix::row_major(&weights, num_keys, false);
            let d_scores = Matrix::row_major(&d_weights, num_keys, false);
            let to_keys = Product { rows: num_keys, cols: self.head_dim, inner: num_queries };
            let to_queries = Product { rows: num_queries, cols: self.head_dim, inner: num_keys };
            let queries = self.queries.from(first_query, 0);
            grads.values(first_key, to_keys).multiply(cpu.features, weights.transposed(), output.dy, true);
            grads.keys(first_key, to_keys).multiply(cpu.features, d_scores.transposed(), queries, true);
            let d_queries = grads.queries(first_query, to_queries);
            d_queries.multiply(cpu.features, d_scores, self.keys.from(first_key, 0), first_key > 0);
        }
    }
}

/// What backward knows about one block of output rows.
#[derive(Clone, Copy)]
struct OutputRows<'a> {
    y: Matrix<'a>,
    dy: Matrix<'a>,
    log_sums: &'a [f32],
}

/// Where the gradients of one head go within the gradient of `qkv`.
struct HeadGrads<'a> {
    d_qkv: &'a SharedSlice<'a, f32>,
    cols: usize,
    query: usize,
    key: usize,
    value: usize,
}

impl HeadGrads<'_> {
    fn tile(&self, start: usize, row: usize, size: Product) -> Tile {
        // SAFETY: one task owns this sequence's columns of the head and of its key-value head, and holds
        // one tile at a time.
        unsafe { Tile::new(self.d_qkv, start + row * self.cols, self.cols, size) }
    }

    fn queries(&self, row: usize, size: Product) -> Tile {
        self.tile(self.query, row, size)
    }

    fn keys(&self, row: usize, size: Product) -> Tile {
        self.tile(self.key, row, size)
    }

    fn values(&self, row: usize, size: Product) -> Tile {
        self.tile(self.value, row, size)
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
#[path = "attention_tests.rs"]
mod tests;
