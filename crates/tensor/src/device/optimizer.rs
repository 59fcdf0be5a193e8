//! Optimizer update kernels.

use super::{Device, Result};
use crate::kernels::call::OptimizerCall;
use crate::kernels::{FactoredStep, LeafRun, Operand, Pieces, StepScale, Update};
use crate::optimizer::{FactoredMatrix, OptimizerState};
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use std::sync::Arc;
use trireme_base::DType;

/// One pass of optimizer updates over pieces.
pub struct UpdatePass<'a> {
    /// The elements to update.
    pub pieces: &'a Arc<Pieces>,
    /// The update rules. Each piece has the index of its rule.
    pub updates: &'a Arc<Vec<Update>>,
    /// Factors of the updates' learning rates, f32 `[updates]`, from [`Device::step_scales`].
    pub scales: Option<View<'a>>,
    /// Seed of the stochastic rounding of states narrower than f32, combined with the element's position.
    pub rounding_seed: u32,
    /// Receives the two sums that the [`Update`] of each piece computes, f64 `[pieces, 2]`.
    pub sums: Option<ViewMut<'a>>,
}

/// The factored second moment of a matrix. The moment of an element is its row moment, divided by the mean of all row moments, times its
/// column moment.
#[derive(Debug, Clone, Copy)]
pub struct FactoredMoments<'a> {
    /// Row moments, f32 `[rows]`.
    pub rows: View<'a>,
    /// Column moments, f32 `[cols]`.
    pub cols: View<'a>,
    /// Mean of the row moments, one f64.
    pub row_mean: View<'a>,
}

impl Device {
    /// Updates `parameters` and at most two `states` from `grads`. `grads` may be empty if no update reads them.
    ///
    /// # Panics
    /// If `sums` or `scales` have the wrong length, or a piece exceeds a buffer.
    pub fn update(
        &self,
        pass: UpdatePass<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
    ) {
        assert!(states.len() <= 2, "an update has at most two states");
        let UpdatePass { pieces, updates, scales, rounding_seed: noise, sums } = pass;
        let is_for_each = |scales: View<'_>| scales.shape().num_elements() == updates.len();
        assert!(scales.is_none_or(is_for_each), "a scale for each");
        let mut operands = [const { None }; 2];
        operands.iter_mut().zip(states).for_each(|(operands, state)| *operands = Some(state.operands()));
        self.issue(OptimizerCall::Update {
            parameters: parameters.into_operand(),
            grads: grads.operand(),
            scales: scales.map(View::operand),
            sums: sums.map(ViewMut::into_operand),
            states: operands,
            pieces: Arc::clone(pieces),
            updates: Arc::clone(updates),
            noise,
        });
    }

    /// Adds the sums of pieces, f64 `[pieces, 2]`, over each of `runs`. Writes all first sums, followed by all second sums if `out` (f64)
    /// has room for both.
    ///
    /// # Panics
    /// If `out` has room for neither one nor two sums per run.
    pub fn leaf_sums(&self, sums: View<'_>, runs: &Arc<Vec<LeafRun>>, out: ViewMut<'_>) {
        let (num_runs, num_sums) = (runs.len(), out.shape().num_elements());
        assert!([num_runs, 2 * num_runs].contains(&num_sums), "{num_sums} sums of {num_runs} runs");
        let (sums, out, runs) = (sums.operand(), out.into_operand(), Arc::clone(runs));
        self.issue(OptimizerCall::LeafSums { sums, out, runs });
    }

    /// Computes the f32 scale of each parameter's step from the sums of squares of the parameter and of its update, f64.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn step_scales(
        &self,
        scales: &Arc<Vec<StepScale>>,
        [of_parameter, of_update]: [View<'_>; 2],
        out: ViewMut<'_>,
    ) {
        let len = scales.len();
        let lens = [of_parameter.shape(), of_update.shape(), out.shape()].map(|shape| shape.num_elements());
        assert_eq!(lens, [len; 3], "sums and scales of {len} parameters");
        let [of_parameter, of_update] = [of_parameter, of_update].map(View::operand);
        let (out, scales) = (out.into_operand(), Arc::clone(scales));
        self.issue(OptimizerCall::StepScales { of_parameter, of_update, out, scales });
    }

    /// Sums the squares of the stored part of a matrix gradient, over each row and then over each column, into `sums`, f64 `[rows + cols]`.
    /// The order of the sum follows the unit's [leaves](crate::NUM_LEAVES).
    ///
    /// # Panics
    /// If `sums` has fewer elements than the matrix has columns.
    pub fn factored_sums(&self, matrix: &FactoredMatrix, grads: View<'_>, scale: f32, sums: ViewMut<'_>) {
        let part = matrix.part.clone();
        assert!(sums.shape().num_elements() >= part.cols, "sums for all columns");
        let (grads, sums) = (grads.operand(), sums.into_operand());
        self.issue(OptimizerCall::FactoredSums { grads, sums, part, scale });
    }

    /// Moves row or column moments by the fraction `mixing` towards the mean squared gradient. `sums` holds the f64 sums of `num_terms`
    /// squared gradients per moment.
    ///
    /// # Panics
    /// If there is not one sum per moment.
    pub fn factored_moments(&self, sums: View<'_>, num_terms: usize, mixing: f32, moments: ViewMut<'_>) {
        let (sums, moments) = (sums.operand(), moments.into_operand());
        self.issue(OptimizerCall::FactoredMoments { sums, moments, num_terms, mixing });
    }

    /// Computes, for each piece of a matrix, the sum of squares of the update of [`Device::factored_update`] at learning rate 1. Writes it
    /// as the first of the piece's two sums; the second one is 0.
    pub fn factored_squares(
        &self,
        pieces: &Arc<Pieces>,
        step: FactoredStep,
        moments: FactoredMoments<'_>,
        grads: View<'_>,
        sums: ViewMut<'_>,
    ) {
        let (moments, grads, sums) = (moments.operands(), grads.operand(), sums.into_operand());
        let pieces = Arc::clone(pieces);
        self.issue(OptimizerCall::FactoredSquares { moments, grads, sums, pieces, step });
    }

    /// Applies Adafactor's update to a matrix: each gradient is divided by the root of its second moment. `lr` is one f32 from
    /// [`step_scales`](Device::step_scales).
    pub fn factored_update(
        &self,
        pieces: &Arc<Pieces>,
        step: FactoredStep,
        lr: View<'_>,
        moments: FactoredMoments<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
    ) {
        let (moments, lr, grads) = (moments.operands(), lr.operand(), grads.operand());
        let (parameters, pieces) = (parameters.into_operand(), Arc::clone(pieces));
        self.issue(OptimizerCall::FactoredUpdate { moments, lr, parameters, grads, pieces, step });
    }

    /// Replaces a matrix by one with the same singular vectors and singular values between about 0.7 and 1.2: divides by the Frobenius
    /// norm, then applies `num_steps` Newton–Schulz iterations `X ← aX + (bA + cA²)X` with `A = X Xᵀ`. A zero matrix stays zero.
    ///
    /// Cost: `num_steps (4 m² n + 2 m³)` floating-point operations for sides `m <= n`, in matmuls of `precision`.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub fn orthogonalize(&self, matrix: ViewMut<'_>, num_steps: usize, precision: Precision) -> Result<()> {
        let shape = matrix.shape();
        let (rows, cols) = (shape.rows(), shape.cols());
        let side = rows.min(cols);
        let mut gram = self.activation([side, side])?;
        let mut polynomial = self.activation([side, side])?;
        let mut product = self.activation([rows, cols])?;
        let num_words = self.cpu.orthogonalize_scratch(precision, [rows, cols]);
        let mut words = self.activation_of([num_words], DType::U32)?;
        let [gram, polynomial, product, words] = [&mut gram, &mut polynomial, &mut product, &mut words]
            .map(|tensor| tensor.view_mut().into_operand());
        let matrix = matrix.into_operand();
        self.issue(OptimizerCall::Orthogonalize {
            matrix,
            gram,
            polynomial,
            product,
            words,
            num_steps,
            precision,
        });
        Ok(())
    }
}

impl FactoredMoments<'_> {
    fn operands(self) -> [Operand; 3] {
        [self.rows, self.cols, self.row_mean].map(View::operand)
    }
}

#[cfg(test)]
mod tests;
