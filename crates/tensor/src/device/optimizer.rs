//! Optimizer updates on a device.

use super::{Device, Result};
use crate::kernels::call::OptimizerCall;
use crate::kernels::{FactoredStep, LeafRun, Operand, Pieces, StepScale, Update};
use crate::optimizer::{FactoredMatrix, OptimizerState};
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use std::sync::Arc;
use trireme_base::DType;

/// One pass of updates over pieces.
pub struct UpdatePass<'a> {
    /// What is updated.
    pub pieces: &'a Arc<Pieces>,
    /// Each piece names the one that goes over it.
    pub updates: &'a Arc<Vec<Update>>,
    /// Factors of the updates' learning rates, f32 `[updates]`, as [`Device::step_scales`] makes them.
    pub scales: Option<View<'a>>,
    /// Decides with the position of an element how states are rounded that are narrower than f32.
    pub noise: u32,
    /// Takes the two sums of each piece, f64 `[pieces, 2]`.
    pub sums: Option<ViewMut<'a>>,
}

/// The second moment of a matrix: that of an element is its row's, divided by the mean of all rows, times its column's.
#[derive(Debug, Clone, Copy)]
pub struct FactoredMoments<'a> {
    /// Of rows, f32 `[rows]`.
    pub rows: View<'a>,
    /// Of columns, f32 `[cols]`.
    pub cols: View<'a>,
    /// Mean of those of rows, one f64.
    pub row_mean: View<'a>,
}

impl Device {
    /// Updates `parameters` and `states`, at most two, by `grads`, which may be empty where no update reads them.
    ///
    /// # Panics
    /// If there are not sums for each piece or a scale for each update, or a piece lies outside of a buffer.
    pub fn update(
        &self,
        pass: UpdatePass<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
    ) {
        assert!(states.len() <= 2, "an update has at most two states");
        let UpdatePass { pieces, updates, scales, noise, sums } = pass;
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

    /// Adds up the sums of pieces, f64 `[pieces, 2]`, over each of `runs`: all first sums, and then all second ones if `out`, f64, has room
    /// for both.
    ///
    /// # Panics
    /// If `out` has room for something else.
    pub fn leaf_sums(&self, sums: View<'_>, runs: &Arc<Vec<LeafRun>>, out: ViewMut<'_>) {
        let (num_runs, num_sums) = (runs.len(), out.shape().num_elements());
        assert!([num_runs, 2 * num_runs].contains(&num_sums), "{num_sums} sums of {num_runs} runs");
        let (sums, out, runs) = (sums.operand(), out.into_operand(), Arc::clone(runs));
        self.issue(OptimizerCall::LeafSums { sums, out, runs });
    }

    /// The scale of each parameter in f32, from the sums of its squares and of those of its update, f64.
    ///
    /// # Panics
    /// If there are not as many of each.
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

    /// Sums of the squares of what is here of a matrix' gradient in the order of the unit's [leaves](crate::LEAVES): over each of its rows, and
    /// then over each of its columns, in f64.
    ///
    /// # Panics
    /// If there are not as many sums as rows and columns.
    pub fn factored_sums(&self, matrix: &FactoredMatrix, grads: View<'_>, scale: f32, sums: ViewMut<'_>) {
        let part = matrix.part.clone();
        assert!(sums.shape().num_elements() >= part.cols, "sums for all columns");
        let (grads, sums) = (grads.operand(), sums.into_operand());
        self.issue(OptimizerCall::FactoredSums { grads, sums, part, scale });
    }

    /// Moves the second moments of rows, or of columns, by the share `mixing` towards the mean of the squares of `num_terms` gradients each, of
    /// which `sums` has the sums in f64.
    ///
    /// # Panics
    /// If there is not a sum for each moment.
    pub fn factored_moments(&self, sums: View<'_>, num_terms: usize, mixing: f32, moments: ViewMut<'_>) {
        let (sums, moments) = (sums.operand(), moments.into_operand());
        self.issue(OptimizerCall::FactoredMoments { sums, moments, num_terms, mixing });
    }

    /// For each piece of a matrix, the sum of the squares of the update that [`Device::factored_update`] makes with a learning
    /// rate of 1: the first of two sums of each piece, of which the second is 0.
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

    /// Adafactor's update of a matrix: each gradient is divided by the root of its second moment. `lr` is one f32, as
    /// [`step_scales`](Device::step_scales) makes it.
    pub fn factored_update(
        &self,
        pieces: &Arc<Pieces>,
        (step, lr): (FactoredStep, View<'_>),
        moments: FactoredMoments<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
    ) {
        let (moments, lr, grads) = (moments.operands(), lr.operand(), grads.operand());
        let (parameters, pieces) = (parameters.into_operand(), Arc::clone(pieces));
        self.issue(OptimizerCall::FactoredUpdate { moments, lr, parameters, grads, pieces, step });
    }

    /// Replaces a matrix by one with the same singular vectors whose singular values are about 1, from 0.7 to 1.2: `num_steps`
    /// rounds of `X ← aX + (bA + cA²)X` with `A = X Xᵀ`, after division by the Frobenius norm; 0 stays 0.
    ///
    /// Cost: `num_steps (4 m² n + 2 m³)` floating-point operations for sides `m <= n`, in products of `precision`.
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
