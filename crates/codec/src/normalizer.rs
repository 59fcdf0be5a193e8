//! Normalization before compression: each element of the gradient is divided by the square root of its second moment on
//! this rank, as in Adam (Kingma, Ba: "Adam", 2015, algorithm 1, without the first moment).
//!
//! A bucket has elements of many magnitudes, and a codec preserves the large ones best. Adam, however, gives small
//! elements the same weight as large ones. After normalization all elements have similar magnitudes, so the compression
//! error is small relative to each of them. The second moment is computed from the gradient itself, before the residual is
//! added, because a residual releases delayed elements in bursts. Each rank has its own second moment (Chen, Shen,
//! Huang, Liu: "Quantized Adam with error feedback", 2021).

/// The second moment of one bucket's gradient on this rank.
#[derive(Debug)]
pub(super) struct Normalizer {
    decay: f32,
    pub(super) second_moment: Vec<f32>,
}

impl Normalizer {
    pub(super) fn new(decay: f32, len: usize) -> Self {
        Normalizer { decay, second_moment: vec![0.0; len] }
    }

    /// Divides the gradient of step `step`, counted from 0. The results are at most `1 / sqrt(1 - decay)` in magnitude,
    /// unless a square overflows or underflows. An element whose square overflows is divided by the root of its earlier
    /// second moment. An element whose second moment underflows is not divided. Infinity and NaN stay infinity and NaN.
    /// Infinity, NaN and overflowing squares do not change the second moment.
    ///
    /// There is no epsilon, so scaling all gradients by a power of two does not change the result.
    pub(super) fn divide(&mut self, step: u64, gradient: &mut [f32]) {
        let correction = 1.0 - f64::from(self.decay).powf(step as f64 + 1.0);
        let inverse_root_correction = (1.0 / correction.sqrt()) as f32;
        for (value, moment) in gradient.iter_mut().zip(&mut self.second_moment) {
            let new_moment = self.decay * *moment + (1.0 - self.decay) * *value * *value;
            *moment = if new_moment.is_finite() { new_moment } else { *moment };
            *value /=
                if *moment >= f32::MIN_POSITIVE { moment.sqrt() * inverse_root_correction } else { 1.0 };
        }
    }

    /// Adapts the second moment to gradients that are `factor` times larger from now on.
    pub(super) fn rescale(&mut self, factor: f32) {
        self.second_moment.iter_mut().for_each(|moment| *moment = (*moment * factor * factor).min(f32::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(normalizer: &mut Normalizer, step: u64, gradient: [f32; 4]) -> [f32; 4] {
        let mut gradient = gradient;
        normalizer.divide(step, &mut gradient);
        gradient
    }

    fn assert_close(found: [f32; 4], expected: [f32; 4]) {
        assert!(found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6), "{found:?}, not {expected:?}");
    }

    #[test]
    fn elements_of_all_sizes_become_alike() {
        let mut normalizer = Normalizer::new(0.75, 4);
        // In the first step, the second moment is the square of the gradient.
        assert_close(divided(&mut normalizer, 0, [3.0, -1e-9, 0.0, 1e-30]), [1.0, -1.0, 0.0, 0.0]);
        // Second moment of the first element after bias correction: (0.75 * 9 + 1) / 1.75. A factor of 0.25 cancels.
        let root = (7.75_f32 / 1.75).sqrt();
        let found = divided(&mut normalizer, 1, [1.0, 0.0, 2.0, 0.0]);
        assert_close(found, [1.0 / root, 0.0, (1.75_f32).sqrt(), 0.0]);
    }

    #[test]
    fn no_burst_is_larger_than_the_bound() {
        let mut normalizer = Normalizer::new(0.75, 4);
        for step in 0..200 {
            divided(&mut normalizer, step, [1e-3; 4]);
        }
        assert_close(divided(&mut normalizer, 200, [1e6, -1e9, 1e-3, 0.0]), [2.0, -2.0, 1.0, 0.0]);
    }

    #[test]
    fn non_finite_values_stay_non_finite_and_do_not_change_the_moment() {
        let mut normalizer = Normalizer::new(0.5, 4);
        divided(&mut normalizer, 0, [1.0; 4]);
        let found = divided(&mut normalizer, 1, [f32::NAN, f32::INFINITY, f32::MIN, 1.0]);
        assert!(found[0].is_nan() && found[1] == f32::INFINITY && found[2] < -1e38, "{found:?}");
        assert_eq!(normalizer.second_moment, [0.5, 0.5, 0.5, 0.75]);
        let found = divided(&mut Normalizer::new(0.5, 4), 0, [f32::NAN, f32::NEG_INFINITY, 0.0, -0.0]);
        assert!(found[0].is_nan() && found[1] == f32::NEG_INFINITY && found[2..] == [0.0, 0.0], "{found:?}");
    }

    #[test]
    fn another_loss_scale_changes_no_bits() {
        let steps = [[0.3, -7.0, 1e-9, 0.0], [0.1, 2.0, 3e-9, 0.0], [-0.7, 0.1, 1e-9, 5.0]];
        let run = |scales: [f32; 3]| {
            let mut normalizer = Normalizer::new(0.95, 4);
            let mut before = scales[0];
            std::array::from_fn::<_, 3, _>(|step| {
                normalizer.rescale(scales[step] / before);
                before = scales[step];
                divided(&mut normalizer, step as u64, steps[step].map(|value| value * scales[step]))
            })
        };
        assert_eq!(run([1.0; 3]), run([1024.0, 512.0, 2048.0]));
    }
}
