//! Learning-rate schedules.

trireme_base::named! {
    /// The decay of the learning rate after warm-up.
    pub enum Decay {
        /// Half a cosine (Loshchilov, Hutter: "SGDR", 2017).
        Cosine = "cosine",
        /// Linear.
        Linear = "linear",
        /// Constant, then linear at the end of the run (warm-up, stable, decay: Hu et al., "MiniCPM", 2024).
        WarmupStableDecay = "wsd",
        /// No decay.
        Constant = "constant",
    }
}

/// The learning rate of every step: linear warm-up over `warmup_steps`, then `decay` over `decay_steps`.
///
/// Cosine and linear decay start right after the warm-up, and the rate then stays at its minimum. Warm-up-stable-decay falls at the end of
/// the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    /// Highest learning rate.
    pub peak: f64,
    /// Steps until the peak is reached.
    pub warmup_steps: u64,
    /// Form of the decay.
    pub decay: Decay,
    /// Length of the decay in steps.
    pub decay_steps: u64,
    /// Length of the run in steps.
    pub total_steps: u64,
    /// Minimum learning rate, as a fraction of the peak.
    pub min_factor: f64,
}

impl LrSchedule {
    /// Returns the learning rate of step `step`, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak * self.factor(step)
    }

    fn factor(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let from = match self.decay {
            Decay::Constant => return 1.0,
            Decay::Cosine | Decay::Linear => self.warmup_steps,
            Decay::WarmupStableDecay => {
                self.warmup_steps.max(self.total_steps.saturating_sub(self.decay_steps))
            }
        };
        let progress = (step.saturating_sub(from) as f64 / self.decay_steps.max(1) as f64).min(1.0);
        let left = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            _ => 1.0 - progress,
        };
        self.min_factor + (1.0 - self.min_factor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, decay_steps: u64) -> Vec<f64> {
        let schedule =
            LrSchedule { peak: 2.0, warmup_steps: 2, decay, decay_steps, total_steps: 10, min_factor: 0.1 };
        (1..=11).map(|step| (schedule.lr(step) * 1000.0).round() / 1000.0).collect()
    }

    #[test]
    fn rates_rise_then_fall_as_named() {
        assert_eq!(rates(Decay::Constant, 0)[..3], [1.0, 2.0, 2.0]);
        assert_eq!(
            rates(Decay::Linear, 8),
            [1.0, 2.0, 1.775, 1.55, 1.325, 1.1, 0.875, 0.65, 0.425, 0.2, 0.2]
        );
        assert_eq!(rates(Decay::Linear, 2), [1.0, 2.0, 1.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]);
        let cosine = rates(Decay::Cosine, 8);
        assert_eq!((cosine[1], cosine[5], cosine[9]), (2.0, 1.1, 0.2));
        let stable = rates(Decay::WarmupStableDecay, 4);
        assert_eq!(stable, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.55, 1.1, 0.65, 0.2, 0.2]);
    }

    #[test]
    fn no_warmup_and_a_run_of_one_step_are_fine() {
        let schedule = LrSchedule {
            peak: 1.0,
            warmup_steps: 0,
            decay: Decay::Cosine,
            decay_steps: 1,
            total_steps: 1,
            min_factor: 0.5,
        };
        assert_eq!(schedule.lr(1), 0.5);
        let warming = LrSchedule { warmup_steps: 5, ..schedule };
        assert_eq!(warming.lr(1), 0.2);
    }
}
