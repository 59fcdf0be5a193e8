//! Learning rates over the steps of a run.

/// How the rate falls after warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// It stays.
    Constant,
    /// Along half a cosine (Loshchilov, Hutter: "SGDR", 2017).
    Cosine,
    /// Along a line.
    Linear,
    /// It stays, then falls along a line over the last `decay_steps` (warm-up, stable, decay: Hu et al., "MiniCPM", 2024).
    WarmupStableDecay {
        /// Steps of the fall.
        decay_steps: u64,
    },
}

/// The rate of every step, as a factor of the peak: a line up over `warmup_steps`, then `decay` down to `min_factor` at the
/// last step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrSchedule {
    /// Highest rate.
    pub peak: f64,
    /// Steps until the peak is reached.
    pub warmup_steps: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// How the rate falls.
    pub decay: Decay,
    /// Fraction of the peak that is left at the last step.
    pub min_factor: f64,
}

impl LrSchedule {
    /// The rate of step `step`, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        self.peak * self.factor(step)
    }

    fn factor(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return step as f64 / self.warmup_steps as f64;
        }
        let from = match self.decay {
            Decay::Constant => return 1.0,
            Decay::WarmupStableDecay { decay_steps } => {
                self.warmup_steps.max(self.total_steps.saturating_sub(decay_steps))
            }
            Decay::Cosine | Decay::Linear => self.warmup_steps,
        };
        let span = self.total_steps.saturating_sub(from).max(1);
        let progress = (step.saturating_sub(from) as f64 / span as f64).min(1.0);
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

    fn rates(decay: Decay) -> Vec<f64> {
        let schedule = LrSchedule { peak: 2.0, warmup_steps: 2, total_steps: 10, decay, min_factor: 0.1 };
        (1..=11).map(|step| (schedule.lr(step) * 1000.0).round() / 1000.0).collect()
    }

    #[test]
    fn rates_rise_then_fall_as_named() {
        assert_eq!(rates(Decay::Constant)[..3], [1.0, 2.0, 2.0]);
        assert_eq!(rates(Decay::Linear), [1.0, 2.0, 1.775, 1.55, 1.325, 1.1, 0.875, 0.65, 0.425, 0.2, 0.2]);
        let cosine = rates(Decay::Cosine);
        assert_eq!((cosine[1], cosine[5], cosine[9]), (2.0, 1.1, 0.2));
        let stable = rates(Decay::WarmupStableDecay { decay_steps: 4 });
        assert_eq!(stable, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.55, 1.1, 0.65, 0.2, 0.2]);
    }

    #[test]
    fn no_warmup_and_a_run_of_one_step_are_fine() {
        let schedule =
            LrSchedule { peak: 1.0, warmup_steps: 0, total_steps: 1, decay: Decay::Cosine, min_factor: 0.5 };
        assert_eq!(schedule.lr(1), 0.5);
        let warming = LrSchedule { warmup_steps: 5, ..schedule };
        assert_eq!(warming.lr(1), 0.2);
    }
}
