//! One head of one sequence, block by block.

use crate::kernels::cpu::matmul::{Matrix, Product, Tile};
use crate::kernels::cpu::simd::{exp, for_each_simd_level, max_of, sum_map, sum_zip};
use crate::kernels::cpu::{Cpu, SharedSlice};

/// Queries and keys in a block of scores: 64 KiB, which stays in the second-level cache.
pub(super) const QUERY_BLOCK: usize = 64;
const KEY_BLOCK: usize = 256;

type Scores = [f32; QUERY_BLOCK * KEY_BLOCK];

for_each_simd_level! {
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
pub(super) struct Head<'a> {
    pub(super) queries: Matrix<'a>,
    pub(super) keys: Matrix<'a>,
    pub(super) values: Matrix<'a>,
    /// Keys before the first query.
    pub(super) num_earlier: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
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
    pub(super) fn forward(&self, cpu: &Cpu, first_query: usize, out: &Tile, log_sums: &mut [f32]) {
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
    pub(super) fn backward(
        &self,
        cpu: &Cpu,
        first_query: usize,
        output: OutputRows<'_>,
        grads: &HeadGrads<'_>,
    ) {
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
pub(super) struct OutputRows<'a> {
    pub(super) y: Matrix<'a>,
    pub(super) dy: Matrix<'a>,
    pub(super) log_sums: &'a [f32],
}

/// Where the gradients of one head go within the gradient of `qkv`.
pub(super) struct HeadGrads<'a> {
    pub(super) d_qkv: &'a SharedSlice<'a, f32>,
    pub(super) cols: usize,
    pub(super) query: usize,
    pub(super) key: usize,
    pub(super) value: usize,
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
