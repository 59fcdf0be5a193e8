//! Optimizer updates on a device.

use super::{Device, DeviceError};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::optimizer::{Factors, OrthogonalizeScratch};
use crate::kernels::{
    Access, FactoredStep, LeafRun, Piece, Pieces, Place, StateDType, StateSlice, StepScale, Update,
};
use crate::optimizer::{FactoredMatrix, OptimizerState};
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use std::ops::Add;
use std::sync::Arc;
use trireme_base::{Cost, DType};

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
        assert!(
            scales.is_none_or(|scales| scales.shape().num_elements() == updates.len()),
            "a scale for each"
        );
        let cost = update_cost(pieces, updates, states);
        let mut places = [const { None }; 2];
        places.iter_mut().zip(states).for_each(|(place, state)| *place = Some(state.places()));
        let (pieces, updates) = (Arc::clone(pieces), Arc::clone(updates));
        let (mut parameters, grads) = (parameters.into_place(), grads.place());
        let (scales, mut sums) = (scales.map(|scales| scales.place()), sums.map(ViewMut::into_place));
        self.issue("update", cost, move |cpu| {
            let states = places.each_mut().map(|place| match place {
                Some(place) => place.slice(cpu),
                None => StateSlice::Absent,
            });
            let sums = sums.as_mut().map(|sums| bytemuck::cast_slice_mut(sums.f64s(cpu)));
            let scales = scales.map_or(&[][..], |scales| scales.f32s(cpu));
            let (parameters, grads) = (parameters.f32s(cpu), grads.f32s(cpu));
            cpu.update((&pieces, &updates, scales), parameters, grads, states, noise, sums);
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
        let cost = Cost::others(&[sums.shape().num_elements()]).reads(sums.num_bytes());
        let cost = cost.writes(out.num_bytes());
        let (sums, runs, mut out) = (sums.place(), Arc::clone(runs), out.into_place());
        self.issue("leaf_sums", cost, move |cpu| {
            if !cpu.threads.is_idle() {
                let of_pieces = bytemuck::cast_slice(sums.f64s(cpu));
                for (index, sum) in out.f64s(cpu).iter_mut().enumerate() {
                    *sum = runs[index % num_runs].sum(of_pieces, index / num_runs);
                }
            }
        });
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
        let cost = Cost::others(&[8, len]).reads(2 * of_parameter.num_bytes()).writes(out.num_bytes());
        let (scales, mut out) = (Arc::clone(scales), out.into_place());
        let (of_parameter, of_update) = (of_parameter.place(), of_update.place());
        self.issue("step_scales", cost, move |cpu| {
            if !cpu.threads.is_idle() {
                let sums = of_parameter.f64s(cpu).iter().zip(of_update.f64s(cpu));
                for ((out, scale), (&parameter, &update)) in out.f32s(cpu).iter_mut().zip(&*scales).zip(sums)
                {
                    *out = scale.of(parameter, update);
                }
            }
        });
    }

    /// Sums of the squares of what is here of a matrix' gradient in the order of the unit's [leaves](crate::LEAVES): over each of its rows, and
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

    /// Moves the second moments of rows, or of columns, by the share `mixing` towards the mean of the squares of `num_terms` gradients each, of
    /// which `sums` has the sums in f64.
    ///
    /// # Panics
    /// If there is not a sum for each moment.
    pub fn factored_moments(&self, sums: View<'_>, num_terms: usize, mixing: f32, moments: ViewMut<'_>) {
        let cost = Cost::others(&[6, moments.shape().num_elements()]).reads(sums.num_bytes());
        let cost = cost.updates(moments.num_bytes());
        let (sums, mut moments) = (sums.place(), moments.into_place());
        self.issue("factored_moments", cost, move |cpu| {
            cpu.factored_moments(sums.f64s(cpu), num_terms, mixing, moments.f32s(cpu));
        });
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
        let (cost, pieces) = (factored_cost(pieces), Arc::clone(pieces));
        let (moments, grads, mut sums) = (moments.places(), grads.place(), sums.into_place());
        self.issue("factored_squares", cost, move |cpu| {
            let sums = bytemuck::cast_slice_mut(sums.f64s(cpu));
            cpu.factored_squares(&pieces, step, factors(moments, cpu), grads.f32s(cpu), sums);
        });
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
        let cost = factored_cost(pieces).updates(DType::F32.size() * pieces.num_elements());
        let (pieces, lr, moments) = (Arc::clone(pieces), lr.place(), moments.places());
        let (mut parameters, grads) = (parameters.into_place(), grads.place());
        self.issue("factored_update", cost, move |cpu| {
            let (step, factors) = ((step, lr.f32s(cpu)), factors(moments, cpu));
            cpu.factored_update(&pieces, step, factors, parameters.f32s(cpu), grads.f32s(cpu));
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

impl FactoredMoments<'_> {
    fn places(self) -> [Place; 3] {
        [self.rows, self.cols, self.row_mean].map(|moments| moments.place())
    }
}

fn factors([rows, cols, row_mean]: [Place; 3], cpu: &Cpu) -> Factors<'_> {
    Factors { rows: rows.f32s(cpu), cols: cols.f32s(cpu), row_mean: row_mean.f64s(cpu) }
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
