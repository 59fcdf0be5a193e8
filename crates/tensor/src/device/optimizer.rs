//! Optimizer updates on a device.

use super::{Device, DeviceError, Transpose};
use crate::kernels::cpu::optimizer::Factors;
use crate::kernels::{Access, FactoredStep, MatmulEpilogue, Piece, Pieces, StateDType, StateSlice, Update};
use crate::optimizer::{FactoredMatrix, OptimizerState};
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use std::ops::{Add, Range};
use trireme_base::{Cost, DType};

/// Coefficients of the iteration of [`Device::orthogonalize`]: odd polynomials whose repetition brings singular values from 0 to
/// 1 near 1, the small ones fast (Jordan, "Muon", 2024).
const QUINTIC: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Added to the norm of a matrix, which may be zero.
const NORM_EPSILON: f32 = 1e-7;

impl Device {
    /// Goes over the elements of `pieces`, each by that of `updates` which it names, and takes two sums over each piece.
    ///
    /// `states` are those that the updates speak of, at most two; where they are narrower than f32, `noise` decides with the
    /// position of an element how they are rounded. `grads` may be empty where no update reads it.
    ///
    /// # Panics
    /// If there are not sums for each piece, or a piece lies outside of a buffer.
    pub fn update(
        &self,
        (pieces, updates): (&Pieces, &[Update]),
        mut parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
        noise: u32,
        sums: &mut [[f64; 2]],
    ) {
        assert!(states.len() <= 2, "an update has at most two states");
        self.count("update", update_cost(pieces, updates, states));
        let mut slices = [StateSlice::Absent; 2];
        slices.iter_mut().zip(states).for_each(|(slice, state)| *slice = state.slice());
        self.cpu.update((pieces, updates), parameters.f32s(), grads.f32s(), slices, noise, sums);
    }

    /// The values of a state of the pieces `range`, one after another, exactly.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn read_state(&self, pieces: &Pieces, range: Range<usize>, state: &OptimizerState, out: &mut [f32]) {
        self.cpu.read_state((pieces, range), state.as_ref(), out);
    }

    /// Sets a state of the pieces `range`. What [`Device::read_state`] gave of a state of the same dtype leaves it as it was.
    ///
    /// # Panics
    /// If there are too few values.
    pub fn write_state(
        &self,
        pieces: &Pieces,
        range: Range<usize>,
        state: &mut OptimizerState,
        values: &[f32],
    ) {
        self.cpu.write_state((pieces, range), state.slice(), values);
    }

    /// Sums of the squares of what is here of a matrix' gradient, over each of its rows and each of its columns, in the order of
    /// [`leaf_sum`](crate::leaf_sum).
    ///
    /// # Panics
    /// If the lengths are not the matrix' numbers of rows and columns.
    pub fn factored_sums(
        &self,
        matrix: &FactoredMatrix,
        grads: View<'_>,
        scale: f32,
        rows: &mut [f64],
        cols: &mut [f64],
    ) {
        assert_eq!(cols.len(), matrix.part.cols);
        self.count(
            "factored_sums",
            Cost::others(&[4, matrix.part.held.len()]).reads(2 * DType::F32.size() * matrix.part.held.len()),
        );
        self.cpu.row_squares(&matrix.part, grads.f32s(), scale, rows);
        self.cpu.column_squares(&matrix.part, grads.f32s(), scale, cols);
    }

    /// For each piece of a matrix, the sum of the squares of the update that [`Device::factored_update`] makes with a learning
    /// rate of 1.
    pub fn factored_squares(
        &self,
        pieces: &Pieces,
        step: FactoredStep,
        moments: [View<'_>; 2],
        grads: View<'_>,
        sums: &mut [[f64; 2]],
    ) {
        self.count("factored_squares", factored_cost(pieces));
        self.cpu.factored_squares(pieces, step, elements(moments), grads.f32s(), sums);
    }

    /// Adafactor's update of a matrix: each gradient is divided by the root of its second moment, which is the product of its row's,
    /// divided by their mean, and its column's.
    pub fn factored_update(
        &self,
        pieces: &Pieces,
        step: FactoredStep,
        moments: [View<'_>; 2],
        mut parameters: ViewMut<'_>,
        grads: View<'_>,
    ) {
        self.count(
            "factored_update",
            factored_cost(pieces).updates(DType::F32.size() * pieces.num_elements()),
        );
        self.cpu.factored_update(pieces, step, elements(moments), parameters.f32s(), grads.f32s());
    }

    /// Replaces a matrix by one with the same singular vectors whose singular values are about 1, from 0.7 to 1.2: `num_steps`
    /// rounds of `X ← aX + (bA + cA²)X` with `A = X Xᵀ`, after division by the Frobenius norm; 0 stays 0.
    ///
    /// Cost: `num_steps (4 m² n + 2 m³)` floating-point operations for sides `m <= n`, in products of `precision`.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub fn orthogonalize(
        &self,
        mut matrix: ViewMut<'_>,
        num_steps: usize,
        precision: Precision,
    ) -> Result<(), DeviceError> {
        let shape = matrix.shape();
        let (rows, cols) = (shape.rows(), shape.cols());
        let side = rows.min(cols);
        // As one kernel: what lies between its products is its own.
        let products = Cost::products(&[num_steps, 2 * side, side, 2 * rows.max(cols) + side]);
        let others =
            Cost::others(&[2 * num_steps + 5, rows, cols]) + Cost::others(&[3 * num_steps, side, side]);
        self.count("orthogonalize", (products + others).updates(matrix.num_bytes()));
        let mut gram = self.activation([side, side])?;
        let mut polynomial = self.activation([side, side])?;
        let mut product = self.activation([rows, cols])?;
        // Not `sum_of_squares` of large elements: their squares must not overflow.
        let largest = matrix.f32s().iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let inverse = if largest > 0.0 { 1.0 / largest } else { 0.0 };
        self.cpu.scale(matrix.f32s(), inverse);
        let norm = self.cpu.sum_of_squares(matrix.f32s(), (rows * cols).div_ceil(crate::LEAVES)).sqrt();
        self.cpu.scale(matrix.f32s(), 1.0 / (norm as f32 + NORM_EPSILON));
        let [a, b, c] = QUINTIC;
        // The shorter side is multiplied out: `X Xᵀ` of wide matrices, `Xᵀ X` of tall ones.
        let is_tall = rows > cols;
        let overwrite = MatmulEpilogue::Overwrite;
        for _ in 0..num_steps {
            let x = View::from_f32s(matrix.f32s(), shape);
            let (left, right) =
                if is_tall { (Transpose::Yes, Transpose::No) } else { (Transpose::No, Transpose::Yes) };
            self.uncounted_matmul(precision, (x, left), (x, right), gram.view_mut(), overwrite)?;
            let square = ((gram.view(), Transpose::No), (gram.view(), Transpose::No));
            self.uncounted_matmul(precision, square.0, square.1, polynomial.view_mut(), overwrite)?;
            self.cpu.combine(polynomial.view_mut().f32s(), c, gram.view().f32s(), b);
            let (x, polynomial) = ((x, Transpose::No), (polynomial.view(), Transpose::No));
            let (left, right) = if is_tall { (x, polynomial) } else { (polynomial, x) };
            self.uncounted_matmul(precision, left, right, product.view_mut(), overwrite)?;
            self.cpu.combine(matrix.f32s(), a, product.view().f32s(), 1.0);
        }
        Ok(())
    }
}

fn elements([rows, cols]: [View<'_>; 2]) -> Factors<'_> {
    Factors { rows: rows.f32s(), cols: cols.f32s() }
}

/// The update of each element of Adafactor's matrices, from the gradients.
fn factored_cost(pieces: &Pieces) -> Cost {
    let num_elements = pieces.num_elements();
    Cost::others(&[9, num_elements]).reads(DType::F32.size() * num_elements)
}

/// What rounding of the elements of a state to its type, and back, adds to the operations of an update.
fn rounding_operations(dtype: StateDType) -> usize {
    match dtype {
        StateDType::F32 => 0,
        StateDType::Bf16 => 10,
        StateDType::Int8 => 17,
    }
}

/// What updates of pieces cost.
fn update_cost(pieces: &Pieces, updates: &[Update], states: &[OptimizerState]) -> Cost {
    let access = |cost: Cost, access, num_bytes| match access {
        Access::Skip => cost,
        Access::Read => cost.reads(num_bytes),
        Access::Change => cost.updates(num_bytes),
    };
    let piece_cost = |piece: &Piece| {
        let element = updates[piece.update].cost();
        let mut num_operations = element.num_operations;
        let mut cost = access(Cost::ZERO, element.parameter, DType::F32.size() * piece.len);
        cost = access(cost, element.gradient, DType::F32.size() * piece.len);
        for (state, kind) in states.iter().zip(element.states) {
            let rounding = if kind == Access::Skip { 0 } else { rounding_operations(state.dtype()) };
            num_operations += rounding;
            cost = access(cost, kind, state.dtype().num_bytes(piece.len));
        }
        cost + Cost::others(&[num_operations, piece.len])
    };
    pieces.as_slice().iter().map(piece_cost).fold(Cost::ZERO, Cost::add)
}

#[cfg(test)]
mod tests;
