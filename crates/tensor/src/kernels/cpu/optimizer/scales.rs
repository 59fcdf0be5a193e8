//! Factors of learning rates, from sums over whole parameters.

use crate::parameter_table::leaf_sum;
use std::ops::Range;

/// Pieces of one parameter that are leaves of its unit's canonical tree, or parts of leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafRun {
    /// The pieces, one for each leaf.
    pub pieces: Range<usize>,
    /// Leaf of the first piece.
    pub first_leaf: usize,
}

impl LeafRun {
    /// The sum of one of the two sums of each piece, of neighbours first; 0 without pieces.
    pub(crate) fn sum(&self, of_pieces: &[[f64; 2]], which: usize) -> f64 {
        let leaves = self.first_leaf..self.first_leaf + self.pieces.len();
        let mut leaf = |leaf: usize| of_pieces[self.pieces.start + leaf - self.first_leaf][which];
        leaf_sum(leaves, 0.0, &mut leaf, &|left, right| left + right)
    }
}

/// What the learning rate of a whole parameter is multiplied by, from the squares of its elements and of those of its update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum StepScale {
    /// The norm of the parameter over that of its update (LARS, LAMB); 1 where one of them is zero or not finite, for then it says nothing.
    TrustRatio {
        /// What the norm of the parameter counts as part of the update's.
        weight_decay: f32,
    },
    /// The learning rate itself, where the one that is multiplied is 1, as Adafactor derives it (Shazeer, Stern, "Adafactor", 2018, algorithm 6).
    Adafactor {
        /// Learning rate, of a parameter whose root mean square is 1 if it is relative.
        lr: f64,
        /// Whether it grows with the parameter.
        is_relative: bool,
        /// Updates of a larger root mean square are scaled down to it.
        clip_threshold: f32,
        /// Of the whole parameter.
        num_elements: usize,
    },
}

impl StepScale {
    pub(crate) fn of(self, parameter: f64, update: f64) -> f32 {
        /// Parameters count as no smaller: zeros could not begin to move.
        const SIZE_MIN: f64 = 1e-3;
        match self {
            StepScale::TrustRatio { weight_decay } => {
                let norm = parameter.sqrt();
                let of_update = update.sqrt() + f64::from(weight_decay) * norm;
                let ratio = (norm / of_update) as f32;
                if norm > 0.0 && of_update > 0.0 && ratio.is_finite() { ratio } else { 1.0 }
            }
            StepScale::Adafactor { lr, is_relative, clip_threshold, num_elements } => {
                let root_mean_square = |squares: f64| (squares / num_elements as f64).sqrt();
                let size = if is_relative { root_mean_square(parameter).max(SIZE_MIN) * lr } else { lr };
                let excess = (root_mean_square(update) / f64::from(clip_threshold)).max(1.0);
                (size / excess) as f32
            }
        }
    }
}
