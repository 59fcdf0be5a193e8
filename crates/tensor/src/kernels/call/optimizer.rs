//! Optimizer updates.

use super::{Operands, Replace, array_structs, kernel_calls, plain_arguments};
use crate::kernels::{
    ElementAccess, FactoredMatrix, FactoredMoments, FactoredStep, LeafRun, Piece, Pieces, StateDType,
    StepScale, Update,
};
use crate::optimizer::StateOperands;
use crate::precision::Precision;
use crate::view::{View, ViewMut};
use std::ops::Add;
use std::sync::Arc;
use trireme_base::{Cost, DType};

kernel_calls! {
    /// Optimizer updates.
    OptimizerCall {
        /// Reduces the two sums of each piece (`sums`, f64 `[pieces, 2]`) to two sums per run. Writes the first sums of all runs to `out`
        /// (f64), followed by their second sums if `out` has room for both.
        ///
        /// # Panics
        /// If `out` has room for neither one nor two sums per run.
        pub fn leaf_sums => LeafSums {
            sums: View, runs: Arc<Vec<LeafRun>>, out: ViewMut;
            let (num_runs, num_sums) = (runs.len(), out.shape().num_elements());
            assert!([num_runs, 2 * num_runs].contains(&num_sums), "{num_sums} sums of {num_runs} runs");
        }

        /// Computes the f32 scale of each parameter's step from the sums of squares of the parameter and of its update, f64.
        ///
        /// # Panics
        /// If the lengths differ.
        pub fn step_scales => StepScales {
            scales: Arc<Vec<StepScale>>, squares: [View; 2], out: ViewMut;
            let lens = [squares[0].shape(), squares[1].shape(), out.shape()].map(|shape| shape.num_elements());
            assert_eq!(lens, [scales.len(); 3], "sums and scales of {} parameters", scales.len());
        }

        /// Sums the squares of the stored part of a matrix gradient, after multiplying it by `scale`. `sums`, f64 `[rows + cols]`, receives
        /// the sum of each row, followed by the sum of each column. Terms are added in the order of the unit's summation tree (see
        /// [`NUM_LEAVES`](crate::NUM_LEAVES)).
        ///
        /// # Panics
        /// If `sums` has fewer elements than the matrix has columns.
        pub fn factored_sums => FactoredSums {
            matrix: FactoredMatrix, grads: View, scale: f32, sums: ViewMut;
            assert!(sums.shape().num_elements() >= matrix.cols, "sums for all columns");
        }

        /// Moves row or column moments by the fraction `mixing` towards the mean squared gradient. `sums` holds the f64 sums of
        /// `num_terms` squared gradients per moment.
        ///
        /// # Panics
        /// If there is not one sum per moment.
        pub fn factored_moments => FactoredMoments { sums: View, num_terms: usize, mixing: f32, moments: ViewMut }

        /// Computes, for each piece of a matrix, the sum of squares of the update of [`factored_update`](crate::Device::factored_update) at
        /// learning rate 1. Writes it as the first of the piece's two sums; the second one is 0.
        pub fn factored_squares => FactoredSquares {
            pieces: Arc<Pieces>, step: FactoredStep, moments: FactoredMoments<View>, grads: View, sums: ViewMut
        }

        /// Applies Adafactor's update to a matrix: each gradient is divided by the root of its second moment. `lr` is one f32 from
        /// [`step_scales`](crate::Device::step_scales).
        pub fn factored_update => FactoredUpdate {
            pieces: Arc<Pieces>, step: FactoredStep, lr: View, moments: FactoredMoments<View>, parameters: ViewMut, grads: View
        }
    }
    {
        update => Update {
            parameters: ViewMut, grads: View, scales: Option<View>, sums: Option<ViewMut>, states: [Option<StateOperands>; 2],
            pieces: Arc<Pieces>, updates: Arc<Vec<Update>>, rounding_seed: u32
        }
        /// Makes the singular values of a matrix about 1. The call includes the scratch tensors of intermediate results.
        orthogonalize => Orthogonalize {
            matrix: ViewMut, gram: ViewMut, polynomial: ViewMut, product: ViewMut, words: ViewMut,
            num_steps: usize, precision: Precision
        }
    }
}

plain_arguments! { Arc<Pieces>, Arc<Vec<LeafRun>>, Arc<Vec<StepScale>>, Arc<Vec<Update>>, FactoredMatrix, FactoredStep }

array_structs!(FactoredMoments);

impl OptimizerCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Update { pieces, updates, states, .. } => update_cost(pieces, updates, states),
            Self::LeafSums { sums, out, .. } => {
                let cost = Cost::others(&[sums.shape().num_elements()]);
                cost.reads(sums.num_bytes()).writes(out.num_bytes())
            }
            Self::StepScales { scales, squares, out } => {
                let cost = Cost::others(&[8, scales.len()]);
                cost.reads(2 * squares[0].num_bytes()).writes(out.num_bytes())
            }
            Self::FactoredSums { matrix, .. } => {
                let num_elements = matrix.stored.len();
                Cost::others(&[4, num_elements]).reads(2 * DType::F32.size() * num_elements)
            }
            Self::FactoredMoments { sums, moments, .. } => {
                let cost = Cost::others(&[6, moments.shape().num_elements()]);
                cost.reads(sums.num_bytes()).updates(moments.num_bytes())
            }
            Self::FactoredSquares { pieces, .. } => factored_cost(pieces),
            Self::FactoredUpdate { pieces, .. } => {
                factored_cost(pieces).updates(DType::F32.size() * pieces.num_elements())
            }
            Self::Orthogonalize { matrix, num_steps, .. } => {
                let (rows, cols) = (matrix.shape().rows(), matrix.shape().cols());
                let side = rows.min(cols);
                let products = Cost::products(&[*num_steps, 2 * side, side, 2 * rows.max(cols) + side]);
                let others = Cost::others(&[2 * num_steps + 5, rows, cols])
                    + Cost::others(&[3 * num_steps, side, side]);
                (products + others).updates(matrix.num_bytes())
            }
        }
    }
}

impl Operands for StateOperands {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        let (values, steps) = (self.values.with_operands(replace), self.steps.with_operands(replace));
        StateOperands { values, steps, ..*self }
    }
}

/// Returns the cost of the elementwise part of Adafactor's update.
fn factored_cost(pieces: &Pieces) -> Cost {
    let num_elements = pieces.num_elements();
    Cost::others(&[9, num_elements]).reads(DType::F32.size() * num_elements)
}

/// Returns the operations per element that conversion to and from a state's dtype adds to an update.
fn rounding_operations(dtype: StateDType) -> usize {
    match dtype {
        StateDType::F32 => 0,
        StateDType::Bf16 => 10,
        StateDType::Int8 => 17,
    }
}

fn update_cost(pieces: &Pieces, updates: &[Update], states: &[Option<StateOperands>]) -> Cost {
    let access = |cost: Cost, access, num_bytes| match access {
        ElementAccess::Skip => cost,
        ElementAccess::Read => cost.reads(num_bytes),
        ElementAccess::Change => cost.updates(num_bytes),
    };
    let piece_cost = |piece: &Piece| {
        let element = updates[piece.update].cost();
        let mut num_operations = element.num_operations;
        let mut cost = access(Cost::ZERO, element.parameter, DType::F32.size() * piece.len);
        cost = access(cost, element.gradient, DType::F32.size() * piece.len);
        for (state, kind) in states.iter().flatten().zip(element.states) {
            let rounding = if kind == ElementAccess::Skip { 0 } else { rounding_operations(state.dtype) };
            num_operations += rounding;
            cost = access(cost, kind, state.dtype.num_bytes(piece.len));
        }
        cost + Cost::others(&[num_operations, piece.len])
    };
    pieces.as_slice().iter().map(piece_cost).fold(Cost::ZERO, Cost::add)
}
