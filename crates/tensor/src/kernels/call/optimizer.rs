//! Optimizer updates.

use super::{Operands, Replace, kernel_calls};
use crate::kernels::{
    ElementAccess, FactoredPart, FactoredStep, LeafRun, Operand, OperandMut, Piece, Pieces, StateDType,
    StepScale, Update,
};
use crate::optimizer::StateOperands;
use crate::precision::Precision;
use std::ops::Add;
use std::sync::Arc;
use trireme_base::{Cost, DType};

kernel_calls! {
    /// Optimizer updates. The moments of a factored matrix are its row moments, its column moments and the mean of its row moments.
    OptimizerCall {
        "update" => Update {
            parameters: OperandMut, grads: Operand, scales: Option<Operand>, sums: Option<OperandMut>, states: [Option<StateOperands>; 2];
            pieces: Arc<Pieces>, updates: Arc<Vec<Update>>, noise: u32
        }
        "leaf_sums" => LeafSums { sums: Operand, out: OperandMut; runs: Arc<Vec<LeafRun>> }
        "step_scales" => StepScales { of_parameter: Operand, of_update: Operand, out: OperandMut; scales: Arc<Vec<StepScale>> }
        "factored_sums" => FactoredSums { grads: Operand, sums: OperandMut; part: FactoredPart, scale: f32 }
        "factored_moments" => FactoredMoments { sums: Operand, moments: OperandMut; num_terms: usize, mixing: f32 }
        "factored_squares" => FactoredSquares {
            moments: [Operand; 3], grads: Operand, sums: OperandMut; pieces: Arc<Pieces>, step: FactoredStep
        }
        "factored_update" => FactoredUpdate {
            moments: [Operand; 3], lr: Operand, parameters: OperandMut, grads: Operand; pieces: Arc<Pieces>, step: FactoredStep
        }
        /// Makes the singular values of a matrix about 1. The call includes the scratch tensors of intermediate results.
        "orthogonalize" => Orthogonalize {
            matrix: OperandMut, gram: OperandMut, polynomial: OperandMut, product: OperandMut, words: OperandMut;
            num_steps: usize, precision: Precision
        }
    }
}

impl OptimizerCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Update { pieces, updates, states, .. } => update_cost(pieces, updates, states),
            Self::LeafSums { sums, out, .. } => {
                let cost = Cost::others(&[sums.shape().num_elements()]);
                cost.reads(sums.num_bytes()).writes(out.num_bytes())
            }
            Self::StepScales { of_parameter, out, scales, .. } => {
                let cost = Cost::others(&[8, scales.len()]);
                cost.reads(2 * of_parameter.num_bytes()).writes(out.num_bytes())
            }
            Self::FactoredSums { part, .. } => {
                let num_elements = part.stored.len();
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
