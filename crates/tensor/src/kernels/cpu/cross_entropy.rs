//! Softmax cross-entropy over rows of logits, a chunk of the vocabulary at a time.

use super::element::Element;
use super::simd::{exp, for_each_simd_level, max_of, sum_map};
use super::{Cpu, SharedSlice};

/// What is known of a row after some chunks, in this order: the largest logit, the sum of `exp(logit - largest)`, and
/// the target's logit (Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018).
pub(crate) const STATISTICS: usize = 3;

/// Columns of the logits that a chunk holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VocabularyChunk {
    pub(crate) first: usize,
    pub(crate) len: usize,
}

impl VocabularyChunk {
    /// Column of a target within the chunk.
    fn column(&self, target: u32) -> Option<usize> {
        (target as usize).checked_sub(self.first).filter(|&column| column < self.len)
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
    /// Takes a chunk of logits (`targets.len() x chunk.len`) into the rows' `statistics`, [`STATISTICS`] a row; the first chunk
    /// begins them.
    pub(crate) fn softmax_statistics(
        &self,
        logits: &[f32],
        targets: &[u32],
        chunk: VocabularyChunk,
        statistics: &mut [f32],
    ) {
        let (rows, cols) = (targets.len(), chunk.len);
        assert!(logits.len() == rows * cols && statistics.len() == rows * STATISTICS);
        let statistics = SharedSlice::new(statistics);
        self.for_row_blocks(rows, cols, |first, num_rows| {
            for (row, &target) in targets.iter().enumerate().skip(first).take(num_rows) {
                let logits = &logits[row * cols..(row + 1) * cols];
                // SAFETY: rows do not overlap.
                let saved = unsafe { statistics.range(row * STATISTICS, STATISTICS) };
                if chunk.first == 0 {
                    saved.copy_from_slice(&[f32::NEG_INFINITY, 0.0, 0.0]);
                }
                (saved[0], saved[1]) = row_statistics(self.features, logits, saved[0], saved[1]);
                if let Some(column) = chunk.column(target) {
                    saved[2] = logits[column];
                }
            }
        });
    }

    /// Gradient of the rows' losses with respect to a chunk of logits, for the statistics of all chunks:
    /// `(softmax - one_hot(target)) * scale`.
    pub(crate) fn cross_entropy_gradient<T: Element>(
        &self,
        logits: &[f32],
        targets: &[u32],
        chunk: VocabularyChunk,
        statistics: &[f32],
        scale: f32,
        gradient: &mut [T],
    ) {
        let (rows, cols) = (targets.len(), chunk.len);
        assert!(logits.len() == rows * cols && gradient.len() == logits.len());
        assert_eq!(statistics.len(), rows * STATISTICS);
        let gradient = SharedSlice::new(gradient);
        self.for_row_blocks(rows, cols, |first, num_rows| {
            for (row, &target) in targets.iter().enumerate().skip(first).take(num_rows) {
                let (max, sum) = (statistics[row * STATISTICS], statistics[row * STATISTICS + 1]);
                let logits = &logits[row * cols..(row + 1) * cols];
                // SAFETY: rows do not overlap.
                let gradient = unsafe { gradient.range(row * cols, cols) };
                row_gradient(self.features, logits, max, scale / sum, gradient);
                if let Some(column) = chunk.column(target) {
                    let weight = exp(logits[column] - max) * (scale / sum);
                    gradient[column] = T::from_f32(weight - scale);
                }
            }
        });
    }
}

/// Loss of a row in nats, for the statistics of all chunks.
pub(crate) fn row_loss(statistics: &[f32]) -> f32 {
    (statistics[0] - statistics[2]) + statistics[1].ln()
}

#[cfg(test)]
mod tests {
    use super::super::simd::CpuFeatures;
    use super::super::threads::ThreadPool;
    use super::*;

    /// Losses, and gradients by column, with the logits in chunks of `width`.
    fn run(logits: &[f32], targets: &[u32], width: usize) -> (Vec<f32>, Vec<f32>) {
        let cpu = Cpu { threads: ThreadPool::new(2).unwrap(), features: CpuFeatures::detect() };
        let (rows, cols) = (targets.len(), logits.len() / targets.len());
        let mut statistics = vec![f32::NAN; rows * STATISTICS];
        let chunks: Vec<(VocabularyChunk, Vec<f32>)> = (0..cols)
            .step_by(width)
            .map(|first| {
                let chunk = VocabularyChunk { first, len: width.min(cols - first) };
                let part = |row: usize| &logits[row * cols + first..row * cols + first + chunk.len];
                (chunk, (0..rows).flat_map(part).copied().collect())
            })
            .collect();
        for (chunk, logits) in &chunks {
            cpu.softmax_statistics(logits, targets, *chunk, &mut statistics);
        }
        let mut gradients = vec![0.0; logits.len()];
        for (chunk, logits) in &chunks {
            let mut part = vec![f32::NAN; logits.len()];
            cpu.cross_entropy_gradient(logits, targets, *chunk, &statistics, 0.5, &mut part);
            for row in 0..rows {
                gradients[row * cols + chunk.first..][..chunk.len]
                    .copy_from_slice(&part[row * chunk.len..(row + 1) * chunk.len]);
            }
        }
        (statistics.chunks(STATISTICS).map(row_loss).collect(), gradients)
    }

    #[test]
    fn losses_and_gradients_match_f64_however_the_vocabulary_is_cut() {
        for (cols, width) in [(1, 1), (5, 5), (37, 37), (37, 10), (37, 1)] {
            let targets = [0_u32, cols as u32 - 1, cols as u32 / 2];
            let mut logits = vec![0.0; 3 * cols];
            trireme_base::RandomKey::new(4, "logits").fill_normal(&mut logits, 3.0);
            let (losses, gradients) = run(&logits, &targets, width);
            for row in 0..3 {
                let logits: Vec<f64> =
                    logits[row * cols..(row + 1) * cols].iter().map(|&x| f64::from(x)).collect();
                let sum: f64 = logits.iter().map(|x| x.exp()).sum();
                let loss = sum.ln() - logits[targets[row] as usize];
                assert!((f64::from(losses[row]) - loss).abs() < 1e-5);
                for col in 0..cols {
                    let hit = if col == targets[row] as usize { 1.0 } else { 0.0 };
                    let expected = 0.5 * (logits[col].exp() / sum - hit);
                    assert!((f64::from(gradients[row * cols + col]) - expected).abs() < 1e-6);
                }
            }
        }
    }

    #[test]
    fn huge_logits_stay_finite_and_nan_is_not_hidden() {
        for width in [1, 2, 3] {
            assert_eq!(run(&[1e4, -1e4, 0.0], &[0], width).0, [0.0]);
            assert!(run(&[1.0, f32::NAN, 0.0], &[0], width).0[0].is_nan());
            assert!(run(&[f32::INFINITY, 0.0, 0.0], &[0], width).0[0].is_nan());
        }
    }
}
