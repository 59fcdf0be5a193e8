//! Loss scaling: a factor of the loss that keeps gradients of an f16 backward pass in range (Micikevicius et al., "Mixed precision
//! training", 2018, section 3.2).
//!
//! Without it, gradients below 6e-8 would become zero in f16. A dynamic scale adapts to the gradients: it halves when they overflow, and
//! that step is skipped; it doubles after many steps without an overflow. PyTorch's `GradScaler` and Megatron-LM's `DynamicGradScaler` do
//! the same.

use crate::error::OptimError;
use serde::{Deserialize, Serialize};

/// How the loss is scaled. Scales are powers of two up to [`SCALE_MAX`](LossScaling::SCALE_MAX), so scaling is exact for values in range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossScaling {
    /// No scaling: f32 and bf16 have enough range for gradients.
    Off,
    /// A constant scale. No step is skipped for an overflow, because the next one would overflow again.
    Static(u32),
    /// A scale that adapts to the gradients.
    Dynamic {
        /// The initial scale.
        initial: u32,
        /// Steps without an overflow after which the scale doubles; at least 1.
        growth_interval: u64,
    },
}

impl LossScaling {
    /// The largest scale. At this scale, f16 can represent gradients down to 2^-48, so a larger scale is not needed.
    pub const SCALE_MAX: u32 = 1 << 24;

    /// Dynamic scaling with PyTorch's defaults: initially 2^16, doubled after 2000 steps.
    pub const DYNAMIC: LossScaling = LossScaling::Dynamic { initial: 1 << 16, growth_interval: 2000 };
}

/// The state of a [`LossScaler`] that a run must save to resume with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LossScalerState {
    /// The scale of the next step, if it is dynamic.
    pub scale: Option<u32>,
    /// Steps without an overflow since the scale last changed.
    pub good_steps: u64,
    /// Steps skipped since the start of the run.
    pub skipped_steps: u64,
}

/// The loss scale of a run. It is a pure function of the outcomes of steps, so ranks that see the same outcomes have the same scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LossScaler {
    scaling: LossScaling,
    scale: u32,
    good_steps: u64,
    skipped_steps: u64,
}

impl LossScaler {
    /// Creates a scaler for the start of a run.
    ///
    /// # Panics
    /// If a scale is not a power of two from 1 to [`LossScaling::SCALE_MAX`], or if the growth interval is 0.
    pub fn new(scaling: LossScaling) -> Self {
        let scale = match scaling {
            LossScaling::Off => 1,
            LossScaling::Static(scale) => scale,
            LossScaling::Dynamic { initial, growth_interval } => {
                assert!(growth_interval > 0, "the scale grows after some steps");
                initial
            }
        };
        assert!(is_scale(scale), "{scale} is no loss scale");
        LossScaler { scaling, scale, good_steps: 0, skipped_steps: 0 }
    }

    /// Returns how the loss is scaled.
    pub fn scaling(&self) -> LossScaling {
        self.scaling
    }

    /// Returns the scale of the next step.
    pub fn scale(&self) -> u32 {
        self.scale
    }

    /// Returns the number of steps skipped since the start of the run.
    pub fn skipped_steps(&self) -> u64 {
        self.skipped_steps
    }

    /// Records a step with finite gradients.
    pub fn succeed(&mut self) {
        let LossScaling::Dynamic { growth_interval, .. } = self.scaling else { return };
        self.good_steps = self.good_steps.saturating_add(1);
        if self.good_steps >= growth_interval {
            self.good_steps = 0;
            self.scale = (2 * self.scale).min(LossScaling::SCALE_MAX);
        }
    }

    /// Records a step that is skipped because of an overflow, halves the scale, and returns the new scale. Returns `None` and changes
    /// nothing if the scale cannot fall: it is 1, or not dynamic.
    #[must_use = "a scale that cannot fall is an error"]
    pub fn back_off(&mut self) -> Option<u32> {
        if !self.is_dynamic() || self.scale == 1 {
            return None;
        }
        self.scale /= 2;
        self.good_steps = 0;
        self.skipped_steps += 1;
        Some(self.scale)
    }

    /// Records a step that is skipped for a reason other than an overflow. The scale does not change.
    pub fn skip(&mut self) {
        self.skipped_steps += 1;
    }

    /// Returns the state to save.
    pub fn state(&self) -> LossScalerState {
        let scale = self.is_dynamic().then_some(self.scale);
        LossScalerState { scale, good_steps: self.good_steps, skipped_steps: self.skipped_steps }
    }

    /// Continues from a saved state. The saved scale is used only if this scaler is dynamic; the number of skipped steps is always used.
    ///
    /// # Errors
    /// [`OptimError::LossScale`] if the saved scale is invalid. Nothing changes then.
    pub fn restore(&mut self, state: LossScalerState) -> Result<(), OptimError> {
        if let Some(scale) = state.scale.filter(|&scale| !is_scale(scale)) {
            return Err(OptimError::LossScale { scale });
        }
        self.skipped_steps = state.skipped_steps;
        if let (true, Some(scale)) = (self.is_dynamic(), state.scale) {
            (self.scale, self.good_steps) = (scale, state.good_steps);
        }
        Ok(())
    }

    fn is_dynamic(&self) -> bool {
        matches!(self.scaling, LossScaling::Dynamic { .. })
    }
}

fn is_scale(scale: u32) -> bool {
    scale.is_power_of_two() && scale <= LossScaling::SCALE_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scaler(initial: u32, growth_interval: u64) -> LossScaler {
        LossScaler::new(LossScaling::Dynamic { initial, growth_interval })
    }

    #[test]
    fn the_scale_doubles_after_good_steps_in_a_row() {
        let mut scaler = scaler(1 << 16, 3);
        let mut scales = Vec::new();
        for overflows in [false, false, true, false, false, false, false] {
            if overflows {
                assert_eq!(scaler.back_off(), Some(1 << 15));
            } else {
                scaler.succeed();
            }
            scales.push(scaler.scale().ilog2());
        }
        assert_eq!(scales, [16, 16, 15, 15, 15, 16, 16]);
        assert_eq!(scaler.state(), LossScalerState { scale: Some(1 << 16), good_steps: 1, skipped_steps: 1 });
    }

    #[test]
    fn the_default_grows_after_two_thousand_steps() {
        let mut scaler = LossScaler::new(LossScaling::DYNAMIC);
        (0..1999).for_each(|_| scaler.succeed());
        assert_eq!(scaler.scale(), 65_536);
        scaler.succeed();
        assert_eq!(scaler.scale(), 131_072);
    }

    #[test]
    fn a_scale_that_cannot_fall_says_so() {
        let mut scaler = scaler(4, 1);
        assert_eq!((scaler.back_off(), scaler.back_off()), (Some(2), Some(1)));
        let before = scaler.clone();
        assert_eq!(scaler.back_off(), None);
        assert_eq!(scaler, before);
        assert_eq!(scaler.skipped_steps(), 2);
        for scaling in [LossScaling::Off, LossScaling::Static(8)] {
            let mut fixed = LossScaler::new(scaling);
            let scale = fixed.scale();
            fixed.succeed();
            assert_eq!((fixed.back_off(), fixed.scale(), fixed.skipped_steps()), (None, scale, 0));
        }
    }

    #[test]
    fn a_state_is_restored_as_far_as_it_applies() {
        let state = LossScalerState { scale: Some(32), good_steps: 4, skipped_steps: 7 };
        let mut dynamic = scaler(1 << 16, 5);
        dynamic.restore(state).unwrap();
        assert_eq!(dynamic.state(), state);
        dynamic.succeed();
        assert_eq!(dynamic.scale(), 64);
        // A bf16 run has no scale to restore; a run that changes to bf16 keeps its number of skipped steps.
        let mut fixed = LossScaler::new(LossScaling::Off);
        fixed.restore(state).unwrap();
        assert_eq!((fixed.scale(), fixed.skipped_steps()), (1, 7));
        let mut dynamic = scaler(1 << 16, 5);
        dynamic.restore(fixed.state()).unwrap();
        assert_eq!((dynamic.scale(), dynamic.skipped_steps()), (1 << 16, 7));
        dynamic.restore(LossScalerState { good_steps: u64::MAX, ..state }).unwrap();
        dynamic.succeed();
        assert_eq!(dynamic.scale(), 64);
    }

    #[test]
    fn a_state_with_an_invalid_scale_is_refused() {
        for scale in [0, 3, LossScaling::SCALE_MAX * 2, u32::MAX] {
            let state = LossScalerState { scale: Some(scale), ..LossScalerState::default() };
            for mut scaler in [scaler(8, 5), LossScaler::new(LossScaling::Off)] {
                let before = scaler.clone();
                let error = scaler.restore(state).unwrap_err().to_string();
                assert!(error.contains(&scale.to_string()), "{error}");
                assert_eq!(scaler, before);
            }
        }
    }

    proptest! {
        #[test]
        fn the_scale_stays_a_power_of_two_within_its_bounds(
            exponent in 0_u32..=24,
            growth_interval in 1_u64..4,
            overflows in proptest::collection::vec(proptest::bool::weighted(0.3), 0..200),
        ) {
            let mut scaler = scaler(1 << exponent, growth_interval);
            let (mut skipped, mut before) = (0, scaler.scale());
            for overflows in overflows {
                if overflows {
                    skipped += u64::from(scaler.back_off().is_some());
                    prop_assert_eq!(scaler.scale(), (before / 2).max(1));
                } else {
                    scaler.succeed();
                    prop_assert!([before, 2 * before].contains(&scaler.scale()));
                }
                prop_assert!(is_scale(scaler.scale()));
                prop_assert!(scaler.state().good_steps < growth_interval);
                prop_assert_eq!(scaler.skipped_steps(), skipped);
                before = scaler.scale();
                let mut resumed = LossScaler::new(scaler.scaling());
                resumed.restore(scaler.state()).unwrap();
                prop_assert_eq!(&resumed, &scaler);
            }
        }
    }
}
