//! Attention of one head of one sequence, block by block.

use super::operands::{BackwardOperands, ForwardOperands, KEY_BLOCK};
use super::rule::{AttentionRule, SequenceMask, seen_by_any};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::Element;
use crate::kernels::cpu::matmul::{LeftOperand, MatmulSizes, Matrix, MicroKernel, RightPanels, Tile};
use crate::kernels::cpu::simd::{LANES, exp, for_each_simd_level, max_of, sum_into, sum_zip, tanh};
use std::ops::Range;

/// Number of queries per block of scores. With [`KEY_BLOCK`] keys, a block takes 64 KiB in f32 and fits into the L2 cache.
pub(super) const QUERY_BLOCK: usize = 64;

const NUM_SCORES: usize = QUERY_BLOCK * KEY_BLOCK;

/// Scratch memory of a thread, reused for each block of queries.
pub(super) struct Scratch<'a, T> {
    scores: &'a mut [f32],
    weights: &'a mut [T],
    d_weights: &'a mut [f32],
    d_scores: &'a mut [T],
    /// Packed queries and packed output gradients.
    query_panels: &'a mut [u32],
}

impl<'a, T: Element> Scratch<'a, T> {
    /// Returns the f32 elements of scratch memory for heads with the given dims of keys and values.
    pub(super) fn num_elements(micro: MicroKernel, dims: [usize; 2], backward: bool) -> usize {
        let num_words = |dim: usize| RightPanels::num_words(micro, QUERY_BLOCK, dim);
        if backward { 4 * NUM_SCORES + dims.map(num_words).iter().sum::<usize>() } else { 2 * NUM_SCORES }
    }

    pub(super) fn new(memory: &'a mut [f32]) -> Self {
        let (scores, memory) = memory.split_at_mut(NUM_SCORES);
        let (weights, memory) = memory.split_at_mut(NUM_SCORES);
        let weights = bytemuck::cast_slice_mut(weights);
        // Empty in forward, which does not need it.
        let (d_weights, memory) = memory.split_at_mut(NUM_SCORES.min(memory.len()));
        let (d_scores, memory) = memory.split_at_mut(NUM_SCORES.min(memory.len()));
        let (d_scores, query_panels) = (bytemuck::cast_slice_mut(d_scores), bytemuck::cast_slice_mut(memory));
        Scratch { scores, weights, d_weights, d_scores, query_panels }
    }
}

for_each_simd_level! {
    /// Computes the softmax `weights` of raw or capped `scores`, both in rows of `num_keys`. Updates the softmax state `rows`.
    fn softmax_block<T: Element>(scores: &mut [f32], pair: BlockPair<'_>, scale: f32, rows: &mut [OnlineSoftmaxRow], weights: &mut [T]) {
        // Two passes, so that a row does not wait for results of the previous row.
        for (index, (row, scores)) in rows.iter_mut().zip(scores.chunks_exact_mut(pair.num_keys)).enumerate() {
            let seen = pair.pad_visible(index, scores);
            let block_max = max_of(seen);
            let max = if block_max > row.max { block_max } else { row.max };
            // A row that has seen no key yet has no earlier sums to scale.
            row.factor = if row.max > f32::NEG_INFINITY { exp((row.max - max) * scale) } else { 0.0 };
            row.max = max;
        }
        let scores = scores.chunks_exact(pair.num_keys);
        for (index, ((row, scores), weights)) in rows.iter_mut().zip(scores).zip(weights.chunks_exact_mut(pair.num_keys)).enumerate() {
            let padded = pair.padded(index);
            weights[..padded.start].fill(T::zeroed());
            weights[padded.end..].fill(T::zeroed());
            let sum = sum_into(&scores[padded.clone()], &mut weights[padded], |score| exp((score - row.max) * scale));
            row.sum = row.sum * row.factor + sum;
        }
    }

    /// Applies the soft cap to raw scores.
    fn cap_scores(scores: &mut [f32], scale: f32, cap: f32) {
        scores.iter_mut().for_each(|score| *score = cap * tanh(*score * scale / cap));
    }

    /// Multiplies each row of `out` by its factor.
    fn scale_rows(out: &mut [f32], rows: &[OnlineSoftmaxRow], factor: fn(&OnlineSoftmaxRow) -> f32) {
        let cols = out.len() / rows.len();
        for (out, row) in out.chunks_exact_mut(cols).zip(rows) {
            let factor = factor(row);
            out.iter_mut().for_each(|x| *x *= factor);
        }
    }

    fn dot<T: Element>(x: &[T], y: &[T]) -> f32 {
        sum_zip(x, y, y, |x, y, _| x.to_f32() * y.to_f32())
    }

    /// Computes `weights` and `d_scores` from `scores` and `d_weights`. All are rows of `num_keys`. `scores` are raw or, with a soft cap,
    /// capped; `d_scores` are the gradients of raw scores.
    fn softmax_block_backward<T: Element>(scores: &[f32], d_weights: &[f32], pair: BlockPair<'_>, rule: AttentionRule, rows: &[SavedRow], weights: &mut [T], d_scores: &mut [T]) {
        let AttentionRule { scale, soft_cap, .. } = rule;
        let raw = scores.chunks_exact(pair.num_keys).zip(d_weights.chunks_exact(pair.num_keys));
        let out = weights.chunks_exact_mut(pair.num_keys).zip(d_scores.chunks_exact_mut(pair.num_keys));
        for (index, ((row, (scores, d_weights)), (weights, d_scores))) in rows.iter().zip(raw).zip(out).enumerate() {
            // Values for masked scores are overwritten below.
            let (padded, visible) = (pair.padded(index), pair.visible(index));
            let seen = scores[padded.clone()].iter().zip(&d_weights[padded.clone()]);
            let results = weights[padded.clone()].iter_mut().zip(&mut d_scores[padded]);
            match soft_cap {
                None => for ((weight, d_score), (&score, &d_weight)) in results.zip(seen) {
                    let value = exp(score * scale - row.log_sum);
                    *weight = T::from_f32(value);
                    *d_score = T::from_f32(value * (d_weight - row.delta) * scale);
                },
                Some(cap) => for ((weight, d_score), (&score, &d_weight)) in results.zip(seen) {
                    let (value, tanh_value) = (exp(score - row.log_sum), score / cap);
                    *weight = T::from_f32(value);
                    *d_score = T::from_f32(value * (d_weight - row.delta) * (1.0 - tanh_value * tanh_value) * scale);
                },
            }
            for out in [weights, d_scores] {
                out[..visible.start].fill(T::zeroed());
                out[visible.end..].fill(T::zeroed());
            }
        }
    }
}

/// Online softmax state of a row of scores.
#[derive(Clone, Copy)]
struct OnlineSoftmaxRow {
    max: f32,
    /// Sum of the exponentials.
    sum: f32,
    /// Factor that rescales the sums over earlier blocks to the current maximum.
    factor: f32,
}

/// Values of a row of scores for backward.
#[derive(Clone, Copy)]
struct SavedRow {
    log_sum: f32,
    /// Dot product of the row's output and its gradient.
    delta: f32,
}

/// The queries of one head in one sequence, with the keys that they see.
pub(super) struct Head<'a> {
    pub(super) queries: Matrix<'a>,
    pub(super) mask: SequenceMask<'a>,
    /// First packed key; a multiple of [`KEY_BLOCK`].
    pub(super) first_packed: usize,
    /// Dims of a query or key, and of a value.
    pub(super) dims: [usize; 2],
}

/// The keys that each query of a block sees. Used for several blocks of keys.
type SeenKeys = [Range<usize>; QUERY_BLOCK];

/// A block of queries and a block of keys.
#[derive(Clone, Copy)]
struct BlockPair<'a> {
    first_query: usize,
    first_key: usize,
    num_keys: usize,
    /// The keys that each query of the block sees.
    seen: &'a [Range<usize>],
}

impl BlockPair<'_> {
    /// Returns the keys of the pair that its query `row` sees.
    fn visible(self, row: usize) -> Range<usize> {
        let within = |key: usize| key.saturating_sub(self.first_key).min(self.num_keys);
        within(self.seen[row].start)..within(self.seen[row].end)
    }

    /// Returns the visible keys, extended to full registers within the pair, because remainder loops are slow. Empty if no key is visible.
    fn padded(self, row: usize) -> Range<usize> {
        let Range { start, end } = self.visible(row);
        if start >= end {
            return 0..0;
        }
        start / LANES * LANES..end.next_multiple_of(LANES).min(self.num_keys)
    }

    /// Returns the padded scores, with masked ones set to negative infinity, so that their weights are 0.
    fn pad_visible(self, row: usize, scores: &mut [f32]) -> &[f32] {
        let (padded, visible) = (self.padded(row), self.visible(row));
        if padded.is_empty() {
            return &[];
        }
        scores[padded.start..visible.start].fill(f32::NEG_INFINITY);
        scores[visible.end..padded.end].fill(f32::NEG_INFINITY);
        &scores[padded]
    }
}

impl Head<'_> {
    /// Returns the keys that each of the queries `first..first + num_queries` sees.
    fn seen_keys(&self, first: usize, num_queries: usize) -> SeenKeys {
        std::array::from_fn(|row| if row < num_queries { self.mask.keys_of_query(first + row) } else { 0..0 })
    }

    /// Returns the blocks of keys that the queries from `first_query` on see.
    fn key_blocks(first_query: usize, seen: &[Range<usize>]) -> impl Iterator<Item = BlockPair<'_>> {
        let all = seen_by_any(seen);
        (all.start / KEY_BLOCK..all.end.div_ceil(KEY_BLOCK)).map(move |block| {
            let first_key = block * KEY_BLOCK;
            BlockPair { first_query, first_key, num_keys: KEY_BLOCK.min(all.end - first_key), seen }
        })
    }

    /// Returns the factor of scores in the softmax: the rule's scale, or 1 with a soft cap, because [`cap`](Head::cap) applies the scale.
    fn scale(&self) -> f32 {
        let AttentionRule { scale, soft_cap, .. } = self.mask.scope.rule;
        if soft_cap.is_some() { 1.0 } else { scale }
    }

    /// Applies the rule's soft cap to raw scores, if there is one.
    fn cap(&self, cpu: &Cpu, scores: &mut [f32]) {
        let AttentionRule { scale, soft_cap, .. } = self.mask.scope.rule;
        if let Some(cap) = soft_cap {
            cap_scores(cpu.simd_level, scores, scale, cap);
        }
    }

    /// Computes the output rows of one block of queries, and the logarithm of each row's sum of exponentials.
    pub(super) fn forward<T: Element>(
        &self,
        cpu: &Cpu,
        first_query: usize,
        operands: ForwardOperands<'_>,
        scratch: &mut Scratch<'_, T>,
        results: ForwardRows<'_>,
    ) {
        let ForwardRows { out, log_sums, has_earlier_keys } = results;
        let num_queries = log_sums.len();
        let mut rows = [OnlineSoftmaxRow { max: f32::NEG_INFINITY, sum: 0.0, factor: 0.0 }; QUERY_BLOCK];
        let rows = &mut rows[..num_queries];
        if has_earlier_keys {
            // The earlier result counts as one key with the score `log_sum` and the earlier output as its value.
            for (row, &log_sum) in rows.iter_mut().zip(&*log_sums) {
                row.max = log_sum / self.scale();
                row.sum = if log_sum > f32::NEG_INFINITY { 1.0 } else { 0.0 };
            }
        }
        let mut is_first = !has_earlier_keys;
        let seen = self.seen_keys(first_query, num_queries);
        for pair in Self::key_blocks(first_query, &seen[..num_queries]) {
            let len = num_queries * pair.num_keys;
            let (scores, weights) = (&mut scratch.scores[..len], &mut scratch.weights[..len]);
            self.scores(pair, operands.keys_transposed, scores);
            self.cap(cpu, scores);
            softmax_block(cpu.simd_level, scores, pair, self.scale(), rows, weights);
            if !is_first {
                scale_rows(cpu.simd_level, out, rows, |row| row.factor);
            }
            let weights = LeftOperand::InMemory(as_matrix(weights, pair.num_keys));
            let size = MatmulSizes { rows: num_queries, cols: self.dims[1], inner: pair.num_keys };
            let values = operands.values.block(pair.first_key - self.first_packed);
            Tile::whole(out, size).multiply(weights, values, !is_first);
            is_first = false;
        }
        if is_first {
            out.fill(0.0);
        }
        // A query that sees no key has output 0.
        scale_rows(cpu.simd_level, out, rows, |row| if row.sum == 0.0 { 0.0 } else { 1.0 / row.sum });
        for (row, log_sum) in rows.iter().zip(log_sums) {
            *log_sum = row.max * self.scale() + row.sum.ln();
        }
    }

    /// Computes the raw scores of a pair, rows of `num_keys`.
    fn scores(&self, pair: BlockPair<'_>, keys_transposed: RightPanels<'_>, scores: &mut [f32]) {
        let size = MatmulSizes { rows: pair.seen.len(), cols: pair.num_keys, inner: self.dims[0] };
        let queries = LeftOperand::InMemory(self.queries.submatrix(pair.first_query, 0));
        let keys = keys_transposed.columns_from(pair.first_key - self.first_packed);
        Tile::whole(scores, size).multiply(queries, keys, false);
    }

    /// Adds the contribution of one block of queries to the gradients of keys and values. Writes the gradient of the queries, or adds to it
    /// if `grads.has_earlier_keys`.
    pub(super) fn backward<T: Element>(
        &self,
        cpu: &Cpu,
        first_query: usize,
        operands: BackwardOperands<'_>,
        scratch: &mut Scratch<'_, T>,
        output: OutputBlock<'_, T>,
        grads: &mut HeadGrads<'_>,
    ) {
        let (num_queries, [dim, value_dim]) = (output.log_sums.len(), self.dims);
        let micro = MicroKernel::new(cpu.simd_level, T::PRECISION);
        let mut rows = [SavedRow { log_sum: 0.0, delta: 0.0 }; QUERY_BLOCK];
        let rows = &mut rows[..num_queries];
        for (index, (row, &log_sum)) in rows.iter_mut().zip(output.log_sums).enumerate() {
            let range = index * output.cols..index * output.cols + value_dim;
            let delta = dot(cpu.simd_level, &output.y[range.clone()], &output.dy[range]);
            *row = SavedRow { log_sum, delta };
        }
        let dy = as_matrix(output.dy, output.cols);
        let query_words = RightPanels::num_words(micro, QUERY_BLOCK, dim);
        let (query_words, dy_words) = scratch.query_panels.split_at_mut(query_words);
        let queries = self.queries.submatrix(first_query, 0);
        let queries = RightPanels::pack(micro, (num_queries, dim), queries, query_words);
        let dy_panels = RightPanels::pack(micro, (num_queries, value_dim), dy, dy_words);
        let mut is_first = !grads.has_earlier_keys;
        let seen = self.seen_keys(first_query, num_queries);
        for pair in Self::key_blocks(first_query, &seen[..num_queries]) {
            let BlockPair { first_key, num_keys, .. } = pair;
            let len = num_queries * num_keys;
            let (scores, d_weights) = (&mut scratch.scores[..len], &mut scratch.d_weights[..len]);
            let (weights, d_scores) = (&mut scratch.weights[..len], &mut scratch.d_scores[..len]);
            self.scores(pair, operands.keys_transposed, scores);
            self.cap(cpu, scores);
            let size = MatmulSizes { rows: num_queries, cols: num_keys, inner: value_dim };
            let values = operands.values_transposed.columns_from(first_key);
            Tile::whole(d_weights, size).multiply(LeftOperand::InMemory(dy), values, false);
            let rule = self.mask.scope.rule;
            softmax_block_backward(cpu.simd_level, scores, d_weights, pair, rule, rows, weights, d_scores);
            let (weights, d_scores) = (as_matrix(weights, num_keys), as_matrix(d_scores, num_keys));
            for (grads, left, right, cols) in [
                (&mut *grads.values, weights, dy_panels, value_dim),
                (&mut *grads.keys, d_scores, queries, dim),
            ] {
                let size = MatmulSizes { rows: num_keys, cols, inner: num_queries };
                let rows = first_key * cols..(first_key + num_keys) * cols;
                let left = LeftOperand::InMemory(left.transposed());
                Tile::whole(&mut grads[rows], size).multiply(left, right, true);
            }
            let to_queries = MatmulSizes { rows: num_queries, cols: dim, inner: num_keys };
            let (left, right) = (LeftOperand::InMemory(d_scores), operands.keys.block(first_key));
            Tile::whole(&mut grads.queries[..num_queries * dim], to_queries).multiply(left, right, !is_first);
            is_first = false;
        }
        if is_first {
            grads.queries[..num_queries * dim].fill(0.0);
        }
    }
}

/// Wraps rows of `cols` elements as a matmul operand.
fn as_matrix<T: Element>(values: &[T], cols: usize) -> Matrix<'_> {
    Matrix::row_major(T::floats(values), cols, false)
}

/// The results of forward for one block of queries.
pub(super) struct ForwardRows<'a> {
    /// Output rows, as long as a value.
    pub(super) out: &'a mut [f32],
    /// The logarithm of each row's sum of exponentials.
    pub(super) log_sums: &'a mut [f32],
    /// Whether `out` and `log_sums` hold the results for earlier keys, and become the results for all keys.
    pub(super) has_earlier_keys: bool,
}

/// The outputs of one block of queries and their gradients.
#[derive(Clone, Copy)]
pub(super) struct OutputBlock<'a, T> {
    /// Rows of the head, `cols` elements apart.
    pub(super) y: &'a [T],
    /// Gradient of `y`.
    pub(super) dy: &'a [T],
    pub(super) cols: usize,
    pub(super) log_sums: &'a [f32],
}

/// Gradient sums of a block of queries, and of the keys and values of a head.
pub(super) struct HeadGrads<'a> {
    pub(super) queries: &'a mut [f32],
    pub(super) keys: &'a mut [f32],
    pub(super) values: &'a mut [f32],
    /// Whether `queries` holds a gradient to add to.
    pub(super) has_earlier_keys: bool,
}
