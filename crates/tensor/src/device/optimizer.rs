//! Optimizer updates on a device.

use super::{Device, DeviceError};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::optimizer::{Factors, OrthogonalizeScratch};
use crate::kernels::{Access, FactoredStep, Piece, Pieces, Place, StateDType, StateSlice, Update};
use crate::optimizer::{FactoredMatrix, OptimizerState};
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use std::ops::Add;
use std::sync::Arc;
use trireme_base::{Cost, DType};

impl Device {
    /// Goes over the elements of `pieces`, each by that of `updates` which it names, and takes two sums over each piece into `sums`,
    /// f64 `[pieces, 2]`, if they are wanted.
    ///
    /// `states` are those that the updates speak of, at most two; where they are narrower than f32, `noise` decides with the
    /// position of an element how they are rounded. `grads` may be empty where no update reads it.
    ///
    /// # Panics
    /// If there are not sums for each piece, or a piece lies outside of a buffer.
    pub fn update(
        &self,
        (pieces, updates): (&Arc<Pieces>, &Arc<Vec<Update>>),
        parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
        noise: u32,
        sums: Option<ViewMut<'_>>,
    ) {
        assert!(states.len() <= 2, "an update has at most two states");
        let cost = update_cost(pieces, updates, states);
        let mut places = [const { None }; 2];
        places.iter_mut().zip(states).for_each(|(place, state)| *place = Some(state.places()));
        let (pieces, updates) = (Arc::clone(pieces), Arc::clone(updates));
        let (mut parameters, grads) = (parameters.into_place(), grads.place());
        let mut sums = sums.map(ViewMut::into_place);
        self.issue("update", cost, move |cpu| {
            let states = places.each_mut().map(|place| match place {
                Some(place) => place.slice(cpu),
                None => StateSlice::Absent,
            });
            let sums = sums.as_mut().map(|sums| bytemuck::cast_slice_mut(sums.f64s(cpu)));
            let (parameters, grads) = (parameters.f32s(cpu), grads.f32s(cpu));
            cpu.update((&pieces, &updates), parameters, grads, states, noise, sums);
        });
    }

    /// Sums of the squares of what is here of a matrix' gradient in the order of [`leaf_sum`](crate::leaf_sum): over each of its rows, and
    /// then over each of its columns, in f64.
    ///
    /// # Panics
    /// If there are not as many sums as rows and columns.
    pub fn factored_sums(&self, matrix: &FactoredMatrix, grads: View<'_>, scale: f32, sums: ViewMut<'_>) {
        let part = matrix.part.clone();
        let (num_sums, num_elements) = (sums.shape().num_elements(), part.held.len());
        let num_rows = num_sums.checked_sub(part.cols).expect("sums for all columns");
        let cost = Cost::others(&[4, num_elements]).reads(2 * DType::F32.size() * num_elements);
        let (grads, mut sums) = (grads.place(), sums.into_place());
        self.issue("factored_sums", cost, move |cpu| {
            let (rows, cols) = sums.f64s(cpu).split_at_mut(num_rows);
            cpu.row_squares(&part, grads.f32s(cpu), scale, rows);
            cpu.column_squares(&part, grads.f32s(cpu), scale, cols);
        });
    }

    /// For each piece of a matrix, the sum of the squares of the update that [`Device::factored_update`] makes with a learning
    /// rate of 1, as [`update`](Device::update) takes its sums.
    pub fn factored_squares(
        &self,
        pieces: &Arc<Pieces>,
        step: FactoredStep,
        moments: [View<'_>; 2],
        grads: View<'_>,
        sums: ViewMut<'_>,
    ) {
        let (cost, pieces) = (factored_cost(pieces), Arc::clone(pieces));
        let (moments, grads, mut sums) =
            (moments.map(|moments| moments.place()), grads.place(), sums.into_place());
        self.issue("factored_squares", cost, move |cpu| {
            let sums = bytemuck::cast_slice_mut(sums.f64s(cpu));
            cpu.factored_squares(&pieces, step, factors(moments, cpu), grads.f32s(cpu), sums);
        });
    }

    /// Adafactor's update of a matrix: each gradient is divided by the root of its second moment, which is the product of its row's,
    /// divided by their mean, and its column's.
    pub fn factored_update(
        &self,
        pieces: &Arc<Pieces>,
        step: FactoredStep,
        moments: [View<'_>; 2],
        parameters: ViewMut<'_>,
        grads: View<'_>,
    ) {
        let cost = factored_cost(pieces).updates(DType::F32.size() * pieces.num_elements());
        let (pieces, moments) = (Arc::clone(pieces), moments.map(|moments| moments.place()));
        let (mut parameters, grads) = (parameters.into_place(), grads.place());
        self.issue("factored_update", cost, move |cpu| {
            let (parameters, grads) = (parameters.f32s(cpu), grads.f32s(cpu));
            cpu.factored_update(&pieces, step, factors(moments, cpu), parameters, grads);
        });
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
        matrix: ViewMut<'_>,
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
        let cost = (products + others).updates(matrix.num_bytes());
        let mut gram = self.activation([side, side])?;
        let mut polynomial = self.activation([side, side])?;
        let mut product = self.activation([rows, cols])?;
        let num_words = self.cpu.orthogonalize_scratch(precision, [rows, cols]);
        let mut words = self.activation_of([num_words], DType::U32)?;
        let mut matrix = matrix.into_place();
        let [mut gram, mut polynomial, mut product, mut words] =
            [&mut gram, &mut polynomial, &mut product, &mut words]
                .map(|tensor| tensor.view_mut().into_place());
        self.issue("orthogonalize", cost, move |cpu| {
            let scratch = OrthogonalizeScratch {
                gram: gram.f32s(cpu),
                polynomial: polynomial.f32s(cpu),
                product: product.f32s(cpu),
                words: words.u32s(cpu),
            };
            cpu.orthogonalize((matrix.f32s(cpu), [rows, cols]), num_steps, precision, scratch);
        });
        Ok(())
    }
}

fn factors([rows, cols]: [Place; 2], cpu: &Cpu) -> Factors<'_> {
    Factors { rows: rows.f32s(cpu), cols: cols.f32s(cpu) }
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
