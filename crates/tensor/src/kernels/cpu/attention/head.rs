//! One head of one sequence, block by block.

use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::Element;
use crate::kernels::cpu::matmul::{Matrix, Micro, Product, Tile, Workspace};
use crate::kernels::cpu::simd::{exp, for_each_simd_level, max_of, sum_map, sum_zip};

/// Queries and keys in a block of scores: 64 KiB in f32, which stays in the second-level cache.
pub(super) const QUERY_BLOCK: usize = 64;
const KEY_BLOCK: usize = 256;

/// Scores of a block.
const NUM_SCORES: usize = QUERY_BLOCK * KEY_BLOCK;

/// Blocks of scores of a thread.
pub(super) struct Scratch<'a, T> {
    scores: &'a mut [f32],
    weights: &'a mut [T],
    d_weights: &'a mut [f32],
    d_scores: &'a mut [T],
}

impl<'a, T: Element> Scratch<'a, T> {
    /// f32 elements of its memory; forward needs the first half.
    pub(super) const LEN: usize = 4 * NUM_SCORES;

    pub(super) fn new(memory: &'a mut [f32]) -> Self {
        let mut blocks = memory.chunks_mut(NUM_SCORES);
        let mut block = || blocks.next().unwrap_or_default();
        let (scores, weights, d_weights, d_scores) = (block(), block(), block(), block());
        let (weights, d_scores) = (bytemuck::cast_slice_mut(weights), bytemuck::cast_slice_mut(d_scores));
        Scratch { scores, weights, d_weights, d_scores }
    }
}

for_each_simd_level! {
    /// Turns one row of raw scores into `weights`; returns the new maximum, the factor for what was summed
    /// under the old one, and the sum of the weights.
    fn soften_row<T: Element>(scores: &mut [f32], visible: usize, old_max: f32, scale: f32, weights: &mut [T]) -> (f32, f32, f32) {
        let seen = &mut scores[..visible];
        let block_max = max_of(seen);
        let max = if block_max > old_max { block_max } else { old_max };
        for score in seen.iter_mut() {
            *score = exp((*score - max) * scale);
        }
        let (seen_weights, hidden) = weights.split_at_mut(visible);
        seen_weights.iter_mut().zip(&*seen).for_each(|(weight, &score)| *weight = T::from_f32(score));
        hidden.fill(T::zeroed());
        (max, exp((old_max - max) * scale), sum_map(seen, |weight| weight))
    }

    fn scale_row(row: &mut [f32], factor: f32) {
        row.iter_mut().for_each(|x| *x *= factor);
    }

    fn dot<T: Element>(x: &[T], y: &[T]) -> f32 {
        sum_zip(x, y, y, |x, y, _| x.to_f32() * y.to_f32())
    }

    /// From raw scores and the gradient of the weights: weights, and the gradient of the raw scores.
    fn backward_row<T: Element>(scores: &[f32], d_weights: &[f32], visible: usize, row: RowFacts, weights: &mut [T], d_scores: &mut [T]) {
        let rows = weights.iter_mut().zip(d_scores.iter_mut()).zip(scores).zip(d_weights).take(visible);
        for (((weight, d_score), &score), &d_weight) in rows {
            let value = exp(score * row.scale - row.log_sum);
            *weight = T::from_f32(value);
            *d_score = T::from_f32(value * (d_weight - row.delta) * row.scale);
        }
        weights[visible..].fill(T::zeroed());
        d_scores[visible..].fill(T::zeroed());
    }
}

/// What backward needs of a row of scores.
#[derive(Clone, Copy)]
struct RowFacts {
    /// Logarithm of the sum of exponentials.
    log_sum: f32,
    /// The row's output times its gradient.
    delta: f32,
    scale: f32,
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

    /// Output rows of one block of queries (`log_sums.len() x head_dim`), and the logarithm of each row's sum of exponentials.
    pub(super) fn forward<T: Element>(
        &self,
        cpu: &Cpu,
        first_query: usize,
        scratch: &mut Scratch<'_, T>,
        out: &mut [f32],
        log_sums: &mut [f32],
    ) {
        let num_queries = log_sums.len();
        let micro = Micro::new(cpu.features, T::PRECISION);
        let mut workspace = Workspace::new();
        let mut maxima = [f32::NEG_INFINITY; QUERY_BLOCK];
        let mut sums = [0.0_f32; QUERY_BLOCK];
        for pair in self.key_blocks(first_query, num_queries) {
            let len = num_queries * pair.num_keys;
            let (scores, weights) = (&mut scratch.scores[..len], &mut scratch.weights[..len]);
            self.scores(micro, &mut workspace, pair, scores);
            let rows = scores.chunks_exact_mut(pair.num_keys).zip(weights.chunks_exact_mut(pair.num_keys));
            for (row, (scores, weights)) in rows.enumerate() {
                let visible = self.num_visible(pair, row);
                let (max, factor, sum) =
                    soften_row(cpu.features, scores, visible, maxima[row], self.scale, weights);
                maxima[row] = max;
                sums[row] = sums[row] * factor + sum;
                if pair.first_key > 0 {
                    scale_row(cpu.features, &mut out[row * self.head_dim..][..self.head_dim], factor);
                }
            }
            let factors = (block(weights, pair.num_keys), self.values.from(pair.first_key, 0));
            let size = Product { rows: num_queries, cols: self.head_dim, inner: pair.num_keys };
            Tile::whole(out, size).multiply(micro, &mut workspace, factors, pair.first_key > 0);
        }
        for (row, log_sum) in log_sums.iter_mut().enumerate() {
            scale_row(cpu.features, &mut out[row * self.head_dim..][..self.head_dim], 1.0 / sums[row]);
            *log_sum = maxima[row] * self.scale + sums[row].ln();
        }
    }

    /// Raw scores of a pair, rows of `num_keys`.
    fn scores(&self, micro: Micro, workspace: &mut Workspace, pair: BlockPair, scores: &mut [f32]) {
        let size = Product { rows: pair.num_queries, cols: pair.num_keys, inner: self.head_dim };
        let queries = self.queries.from(pair.first_query, 0);
        let keys = self.keys.from(pair.first_key, 0).transposed();
        Tile::whole(scores, size).multiply(micro, workspace, (queries, keys), false);
    }

    /// Adds one block of queries' share to the gradients of keys and values, and writes its own.
    pub(super) fn backward<T: Element>(
        &self,
        cpu: &Cpu,
        first_query: usize,
        scratch: &mut Scratch<'_, T>,
        output: OutputRows<'_, T>,
        grads: &mut HeadGrads<'_>,
    ) {
        let (num_queries, dim) = (output.log_sums.len(), self.head_dim);
        let micro = Micro::new(cpu.features, T::PRECISION);
        let mut workspace = Workspace::new();
        let mut deltas = [0.0_f32; QUERY_BLOCK];
        for (row, delta) in deltas.iter_mut().enumerate().take(num_queries) {
            let start = row * output.cols;
            *delta = dot(cpu.features, &output.y[start..start + dim], &output.dy[start..start + dim]);
        }
        let queries = self.queries.from(first_query, 0);
        let dy = block(output.dy, output.cols);
        for pair in self.key_blocks(first_query, num_queries) {
            let BlockPair { first_key, num_keys, .. } = pair;
            let len = num_queries * num_keys;
            let (scores, d_weights) = (&mut scratch.scores[..len], &mut scratch.d_weights[..len]);
            let (weights, d_scores) = (&mut scratch.weights[..len], &mut scratch.d_scores[..len]);
            self.scores(micro, &mut workspace, pair, scores);
            let size = Product { rows: num_queries, cols: num_keys, inner: dim };
            let values = self.values.from(first_key, 0).transposed();
            Tile::whole(d_weights, size).multiply(micro, &mut workspace, (dy, values), false);
            for (row, &delta) in deltas.iter().enumerate().take(num_queries) {
                let range = row * num_keys..(row + 1) * num_keys;
                backward_row(
                    cpu.features,
                    &scores[range.clone()],
                    &d_weights[range.clone()],
                    self.num_visible(pair, row),
                    RowFacts { log_sum: output.log_sums[row], delta, scale: self.scale },
                    &mut weights[range.clone()],
                    &mut d_scores[range],
                );
            }
            let (weights, d_scores) = (block(weights, num_keys), block(d_scores, num_keys));
            let to_keys = Product { rows: num_keys, cols: dim, inner: num_queries };
            let rows = first_key * dim..(first_key + num_keys) * dim;
            Tile::whole(&mut grads.values[rows.clone()], to_keys).multiply(
                micro,
                &mut workspace,
                (weights.transposed(), dy),
                true,
            );
            Tile::whole(&mut grads.keys[rows], to_keys).multiply(
                micro,
                &mut workspace,
                (d_scores.transposed(), queries),
                true,
            );
            let to_queries = Product { rows: num_queries, cols: dim, inner: num_keys };
            Tile::whole(&mut grads.queries[..num_queries * dim], to_queries).multiply(
                micro,
                &mut workspace,
                (d_scores, self.keys.from(first_key, 0)),
                first_key > 0,
            );
        }
    }
}

/// Rows of `cols` elements as a factor.
fn block<T: Element>(values: &[T], cols: usize) -> Matrix<'_> {
    Matrix::row_major(T::floats(values), cols, false)
}

/// What backward knows about one block of output rows.
#[derive(Clone, Copy)]
pub(super) struct OutputRows<'a, T> {
    /// Rows of the head, `cols` apart.
    pub(super) y: &'a [T],
    /// Their gradient.
    pub(super) dy: &'a [T],
    pub(super) cols: usize,
    pub(super) log_sums: &'a [f32],
}

/// Sums of the gradients of a block of queries, and of a key-value head, in rows of the head's width.
pub(super) struct HeadGrads<'a> {
    pub(super) queries: &'a mut [f32],
    pub(super) keys: &'a mut [f32],
    pub(super) values: &'a mut [f32],
}
