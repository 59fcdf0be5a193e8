//! Learning rate factors from sums over full parameters.

use crate::parameter_table::leaf_sum;
use std::ops::Range;

/// Consecutive pieces of one parameter. Each is a leaf of its unit's summation tree (see [`NUM_LEAVES`](crate::NUM_LEAVES)) or a part of a
/// leaf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafRun {
    /// The pieces, one for each leaf.
    pub pieces: Range<usize>,
    /// Leaf of the first piece.
    pub first_leaf: usize,
}

impl LeafRun {
    /// Returns the total of sum `which` (0 or 1) of each piece, added in the order of the tree; 0 without pieces.
    pub(crate) fn sum(&self, of_pieces: &[[f64; 2]], which: usize) -> f64 {
        let leaves = self.first_leaf..self.first_leaf + self.pieces.len();
        let mut leaf = |leaf: usize| of_pieces[self.pieces.start + leaf - self.first_leaf][which];
        leaf_sum(leaves, 0.0, &mut leaf, &|left, right| left + right)
    }
}

/// The learning rate factor of a parameter, from the sums of squares of its elements and of its update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StepScale {
    /// The norm of the parameter divided by the norm of its update (LARS, LAMB); 1 if a norm is zero or not finite.
    TrustRatio {
        /// Fraction of the parameter's norm that is added to the norm of the update.
        weight_decay: f32,
    },
    /// Adafactor's learning rate (Shazeer, Stern, "Adafactor", 2018, algorithm 6). The update's own rate must be 1.
    Adafactor {
        /// Learning rate. If relative, the rate of a parameter whose root mean square is 1.
        lr: f64,
        /// Whether the rate is proportional to the parameter's root mean square.
        is_relative: bool,
        /// Updates with a larger root mean square are scaled down to this.
        clip_threshold: f32,
        /// Number of elements of the full parameter.
        num_elements: usize,
    },
}

impl StepScale {
    pub(crate) fn factor(self, parameter: f64, update: f64) -> f32 {
        /// Minimum root mean square of a parameter. Zeros could not be updated otherwise.
        const RMS_MIN: f64 = 1e-3;
        match self {
            StepScale::TrustRatio { weight_decay } => {
                let norm = parameter.sqrt();
                let of_update = update.sqrt() + f64::from(weight_decay) * norm;
                let ratio = (norm / of_update) as f32;
                if norm > 0.0 && of_update > 0.0 && ratio.is_finite() { ratio } else { 1.0 }
            }
            StepScale::Adafactor { lr, is_relative, clip_threshold, num_elements } => {
                let root_mean_square = |squares: f64| (squares / num_elements as f64).sqrt();
                let size = if is_relative { root_mean_square(parameter).max(RMS_MIN) * lr } else { lr };
                let excess = (root_mean_square(update) / f64::from(clip_threshold)).max(1.0);
                (size / excess) as f32
            }
        }
    }
}
