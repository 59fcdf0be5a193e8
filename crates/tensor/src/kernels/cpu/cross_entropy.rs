//! Softmax cross-entropy over rows of logits, one chunk of the vocabulary at a time.

use super::Cpu;
use super::element::Element;
use super::simd::{exp, for_each_simd_level, max_of, sum_map};

/// Number of statistics per row, which are accumulated over chunks: the largest logit, the sum of `exp(logit - largest)`, and the target's
/// logit, in this order (Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018).
pub(crate) const NUM_STATISTICS: usize = 3;

/// The vocabulary columns of a chunk of logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VocabularyChunk {
    /// First column, relative to this rank's shard of the vocabulary.
    pub(crate) first: usize,
    pub(crate) len: usize,
    /// Start of this rank's shard within the full vocabulary.
    pub(crate) vocabulary_start: usize,
}

impl VocabularyChunk {
    /// Returns the column of a target within the chunk, if the chunk contains it.
    fn column(&self, target: u32) -> Option<usize> {
        (target as usize).checked_sub(self.vocabulary_start + self.first).filter(|&column| column < self.len)
    }
}

for_each_simd_level! {
    fn row_statistics(logits: &[f32], old_max: f32, old_sum: f32) -> (f32, f32) {
        let chunk_max = max_of(logits);
        let max = if chunk_max > old_max { chunk_max } else { old_max };
        (max, old_sum * exp(old_max - max) + sum_map(logits, |logit| exp(logit - max)))
    }

    fn row_gradient<T: Element>(logits: &[f32], max: f32, factor: f32, gradient: &mut [T]) {
        for (gradient, &logit) in gradient.iter_mut().zip(logits) {
            *gradient = T::from_f32(exp(logit - max) * factor);
        }
    }
}

impl Cpu {
    /// Accumulates a chunk of logits (`targets.len() x chunk.len`) into the rows' `statistics`, [`NUM_STATISTICS`] per row. The first chunk
    /// initializes them.
    pub(crate) fn softmax_statistics(
        &self,
        logits: &[f32],
        targets: &[u32],
        chunk: VocabularyChunk,
        statistics: &mut [f32],
    ) {
        let (rows, cols) = (targets.len(), chunk.len);
        assert!(logits.len() == rows * cols && statistics.len() == rows * NUM_STATISTICS);
        self.for_each_reduced_row(statistics, NUM_STATISTICS, cols, |row, saved| {
            let logits = &logits[row * cols..(row + 1) * cols];
            if chunk.first == 0 {
                // Not negative infinity: a chunk whose logits are all negative infinity would give NaN.
                saved.copy_from_slice(&[f32::MIN, 0.0, 0.0]);
            }
            (saved[0], saved[1]) = row_statistics(self.simd_level, logits, saved[0], saved[1]);
            if let Some(column) = chunk.column(targets[row]) {
                saved[2] = logits[column];
            }
        });
    }

    pub(crate) fn merge_statistics(&self, parts: &[f32], statistics: &mut [f32]) {
        let len = statistics.len();
        assert!(len > 0 && parts.len().is_multiple_of(len));
        self.for_each_row(statistics, NUM_STATISTICS, |row, merged| {
            let parts =
                || parts.chunks_exact(len).map(|part| &part[row * NUM_STATISTICS..][..NUM_STATISTICS]);
            let max =
                parts().map(|part| part[0]).fold(f32::MIN, |max, part| if part > max { part } else { max });
            let (mut sum, mut target) = (0.0, 0.0);
            for part in parts() {
                sum += part[1] * exp(part[0] - max);
                // The target's logit is 0 in all other parts.
                target += part[2];
            }
            merged.copy_from_slice(&[max, sum, target]);
        });
    }

    /// Computes the gradient of the rows' losses with respect to a chunk of logits, given the statistics over all chunks: `softmax -
    /// one_hot(target)`, times the row's `factors`.
    pub(crate) fn cross_entropy_gradient<T: Element>(
        &self,
        logits: &[f32],
        targets: &[u32],
        chunk: VocabularyChunk,
        statistics: &[f32],
        factors: RowFactors<&[f32]>,
        gradient: &mut [T],
    ) {
        let RowFactors { scale, weights } = factors;
        let (rows, cols) = (targets.len(), chunk.len);
        assert!(logits.len() == rows * cols && gradient.len() == logits.len());
        assert_eq!(statistics.len(), rows * NUM_STATISTICS);
        assert!(weights.is_none_or(|weights| weights.len() == rows));
        self.for_each_row(gradient, cols, |row, gradient| {
            let (max, sum) = (statistics[row * NUM_STATISTICS], statistics[row * NUM_STATISTICS + 1]);
            let logits = &logits[row * cols..(row + 1) * cols];
            let scale = match weights.map(|weights| weights[row]) {
                // The gradient is 0 even if logits are not finite.
                Some(0.0) => return gradient.fill(T::from_f32(0.0)),
                Some(weight) => scale * weight,
                None => scale,
            };
            row_gradient(self.simd_level, logits, max, scale / sum, gradient);
            if let Some(column) = chunk.column(targets[row]) {
                let weight = exp(logits[column] - max) * (scale / sum);
                gradient[column] = T::from_f32(weight - scale);
            }
        });
    }
}

/// Factors of the gradients of the rows' losses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowFactors<V> {
    /// The factor of all rows.
    pub(crate) scale: f32,
    /// A further factor per row; `None` for 1. A row of weight 0 has gradient 0.
    pub(crate) weights: Option<V>,
}

impl<V> RowFactors<V> {
    /// Applies a function to the weights.
    pub(crate) fn map<U>(self, array: impl FnMut(V) -> U) -> RowFactors<U> {
        RowFactors { scale: self.scale, weights: self.weights.map(array) }
    }
}

/// Returns the loss of a row in nats, given its statistics over all chunks.
pub(crate) fn row_loss(statistics: &[f32]) -> f32 {
    (statistics[0] - statistics[2]) + statistics[1].ln()
}

#[cfg(test)]
mod tests;
