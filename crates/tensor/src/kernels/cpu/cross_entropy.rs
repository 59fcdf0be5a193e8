//! Softmax cross-entropy over rows of logits.

use super::simd::{exp, for_each_simd_level, max_of, sum_map};
use super::{Cpu, SharedSlice};

for_each_simd_level! {
    fn row_loss(logits: &[f32], target: usize) -> (f32, f32, f32) {
        let max = max_of(logits);
        let sum = sum_map(logits, |logit| exp(logit - max));
        (max, sum, (max - logits[target]) + sum.ln())
    }

    fn row_gradient(logits: &mut [f32], max: f32, factor: f32) {
        for logit in logits {
            *logit = exp(*logit - max) * factor;
        }
    }
}

impl Cpu {
    /// Losses of the rows of `logits` (`targets.len()` rows), in nats. With a `gradient_scale` the
    /// logits become their own gradient, `(softmax - one_hot(target)) * gradient_scale`.
    ///
    /// # Panics
    /// If a target is no column of the logits.
    pub(crate) fn cross_entropy(
        &self,
        logits: &mut [f32],
        targets: &[u32],
        losses: &mut [f32],
        gradient_scale: Option<f32>,
    ) {
        let (rows, cols) = (targets.len(), logits.len() / targets.len());
        assert!(logits.len() == rows * cols && losses.len() == rows);
        let (logits, losses) = (SharedSlice::new(logits), SharedSlice::new(losses));
        self.for_row_blocks(rows, cols, |first, num_rows| {
            for (row, &target) in targets.iter().enumerate().skip(first).take(num_rows) {
                // SAFETY: rows do not overlap.
                let (logits, loss) = unsafe { (logits.range(row * cols, cols), losses.range(row, 1)) };
                let (max, sum, value) = row_loss(self.features, logits, target as usize);
                loss[0] = value;
                if let Some(scale) = gradient_scale {
                    row_gradient(self.features, logits, max, scale / sum);
                    logits[target as usize] -= scale;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::simd::CpuFeatures;
    use super::super::threads::ThreadPool;
    use super::*;

    #[test]
    fn losses_and_gradients_match_f64() {
        let cpu = Cpu { threads: ThreadPool::new(2).unwrap(), features: CpuFeatures::detect() };
        for cols in [1, 5, 37] {
            let targets = [0_u32, cols as u32 - 1, cols as u32 / 2];
            let mut logits = vec![0.0; 3 * cols];
            trireme_base::RandomKey::new(4, "logits").fill_normal(&mut logits, 3.0);
            let original = logits.clone();
            let mut losses = [0.0; 3];
            cpu.cross_entropy(&mut logits, &targets, &mut losses, None);
            assert_eq!(logits, original, "without a scale the logits stay");
            cpu.cross_entropy(&mut logits, &targets, &mut losses, Some(0.5));
            for row in 0..3 {
                let logits64: Vec<f64> =
                    original[row * cols..(row + 1) * cols].iter().map(|&x| f64::from(x)).collect();
                let sum: f64 = logits64.iter().map(|x| x.exp()).sum();
                let loss = sum.ln() - logits64[targets[row] as usize];
                assert!((f64::from(losses[row]) - loss).abs() < 1e-5);
                for col in 0..cols {
                    let hit = if col == targets[row] as usize { 1.0 } else { 0.0 };
                    let expected = 0.5 * (logits64[col].exp() / sum - hit);
                    assert!((f64::from(logits[row * cols + col]) - expected).abs() < 1e-6);
                }
            }
        }
    }

    #[test]
    fn huge_logits_stay_finite_and_nan_is_not_hidden() {
        let cpu = Cpu { threads: ThreadPool::new(1).unwrap(), features: CpuFeatures::detect() };
        let mut losses = [0.0];
        cpu.cross_entropy(&mut [1e4, -1e4, 0.0], &[0], &mut losses, None);
        assert_eq!(losses, [0.0]);
        cpu.cross_entropy(&mut [1.0, f32::NAN, 0.0], &[0], &mut losses, None);
        assert!(losses[0].is_nan());
    }
}
