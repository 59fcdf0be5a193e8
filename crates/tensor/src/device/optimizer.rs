//! Optimizer update kernels.

use super::{Device, Result};
use crate::kernels::call::OptimizerCall;
use crate::kernels::cpu::optimizer::NewtonSchulzMatmuls;
use crate::kernels::cuda::matmul_scratch_words;
use crate::kernels::{Pieces, Update};
use crate::optimizer::OptimizerState;
use crate::precision::Precision;
use crate::view::{View, ViewMut};
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
        let UpdatePass { pieces, updates, scales, rounding_seed, sums } = pass;
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
            rounding_seed,
        });
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
        let num_words = if self.is_gpu {
            let sizes = NewtonSchulzMatmuls::new([rows, cols]).sizes();
            sizes.into_iter().map(|sizes| matmul_scratch_words(precision, sizes)).max().unwrap_or(0)
        } else {
            self.cpu.orthogonalize_scratch(precision, [rows, cols])
        };
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

#[cfg(test)]
mod tests;
