//! Optimizer updates. The pieces of a pass, its updates and similar tables are arguments of kernels, so that they need no memory on the
//! device; a pass takes as many launches as its tables need.

mod tables;

use super::super::Cuda;
use super::super::launch::BLOCK_THREADS;
use crate::kernels::call::{MatmulCall, OptimizerCall};
use crate::kernels::cpu::optimizer::{NORM_EPSILON, NewtonSchulzMatmuls, QUINTIC};
use crate::kernels::{ElementAccess, Operand, OperandMut, Pieces, Update};
use crate::optimizer::StateOperands;
use crate::shape::Shape;
use tables::{NUM_RUNS, NUM_SCALES, batches, piece_table, run_table, scale_table, update_table};
use trireme_base::DType;

/// Blocks per piece of kernels without sums: as many as a piece of [`Pieces::LEN_MAX`] elements has blocks of elements.
const BLOCKS_PER_PIECE: u32 = 64;

/// Largest number of blocks whose results one block combines: its number of threads.
const REDUCTION_BLOCKS: usize = BLOCK_THREADS as usize;

/// Returns an array's elements from `start` on.
fn from_element(array: Operand, start: usize) -> Operand {
    let size = array.dtype().size();
    let len = array.shape().num_elements() - start;
    array.part(start * size..(start + len) * size, (Shape::from([len]), array.dtype()))
}

/// Returns the array if it has elements.
fn if_any(array: &Operand) -> Option<Operand> {
    (array.num_bytes() > 0).then_some(*array)
}

impl Cuda {
    pub(super) fn run_optimizer(&self, call: &OptimizerCall) {
        match call {
            OptimizerCall::Update {
                parameters,
                grads,
                scales,
                sums,
                states,
                pieces,
                updates,
                rounding_seed,
            } => {
                check_pieces(pieces, parameters, grads);
                check_states(pieces, updates, grads, states);
                if scales.is_some() {
                    // Panics for an update that has no scale.
                    pieces.as_slice().iter().for_each(|piece| _ = updates[piece.update].scaled(1.0));
                }
                for batch in batches(pieces) {
                    let sums =
                        sums.as_ref().map(|sums| from_element(sums.as_operand(), 2 * batch.pieces.start));
                    let blocks_per_piece = if sums.is_some() { 1 } else { BLOCKS_PER_PIECE };
                    let launch = self.kernel("update", &[]).arg(piece_table(pieces, &batch));
                    let launch = launch.arg(update_table(updates, &batch)).arg(parameters);
                    let launch = launch.arg(if_any(grads)).arg(states[0].as_ref()).arg(states[1].as_ref());
                    let launch = launch.arg(scales).arg(*rounding_seed).arg(sums).arg(blocks_per_piece);
                    launch.changing().run(batch.pieces.len() as u32 * blocks_per_piece);
                }
            }
            OptimizerCall::LeafSums { sums, out, runs } => {
                for sum_index in 0..out.shape().num_elements() / runs.len().max(1) {
                    for (index, batch) in runs.chunks(NUM_RUNS).enumerate() {
                        let launch = self.kernel("leaf_sums", &[]).arg(run_table(batch));
                        let first = sum_index * runs.len() + index * NUM_RUNS;
                        let launch = launch.arg(sums).arg(sum_index as u32);
                        launch.arg(from_element(out.as_operand(), first)).run(batch.len() as u32);
                    }
                }
            }
            OptimizerCall::StepScales { scales, squares, out } => {
                for (index, batch) in scales.chunks(NUM_SCALES).enumerate() {
                    let first = index * NUM_SCALES;
                    let launch = self.kernel("step_scales", &[]).arg(scale_table(batch));
                    let launch =
                        launch.arg(from_element(squares[0], first)).arg(from_element(squares[1], first));
                    let launch = launch.arg(from_element(out.as_operand(), first)).changing();
                    launch.over_elements(Shape::from([batch.len()]));
                }
            }
            OptimizerCall::FactoredSums { matrix, grads, scale, sums } => {
                let num_rows = sums.shape().num_elements() - matrix.cols;
                let launch = |name| self.kernel(name, &[]).arg(matrix.clone()).arg(grads).arg(scale);
                launch("row_squares").arg(sums).over_rows(num_rows);
                let of_columns = from_element(sums.as_operand(), num_rows);
                launch("column_squares").arg(of_columns).over_columns(matrix.cols);
            }
            OptimizerCall::FactoredMoments { sums, moments, num_terms, mixing } => {
                assert_eq!(
                    sums.shape().num_elements(),
                    moments.shape().num_elements(),
                    "a sum for each moment"
                );
                let launch = self.kernel("factored_moments", &[]).arg(sums).arg(num_terms).arg(mixing);
                launch.arg(moments).changing().over_elements(moments.shape());
            }
            OptimizerCall::FactoredSquares { moments, grads, sums, pieces, step } => {
                assert_eq!(sums.shape().num_elements(), 2 * pieces.as_slice().len(), "sums for each piece");
                for batch in batches(pieces) {
                    let launch = self.kernel("factored_squares", &[]).arg(piece_table(pieces, &batch));
                    let launch = launch.arg((moments, *step)).arg(grads);
                    launch
                        .arg(from_element(sums.as_operand(), 2 * batch.pieces.start))
                        .run(batch.pieces.len() as u32);
                }
            }
            OptimizerCall::FactoredUpdate { moments, lr, parameters, grads, pieces, step } => {
                check_pieces(pieces, parameters, grads);
                for batch in batches(pieces) {
                    let launch = self.kernel("factored_update", &[]).arg(piece_table(pieces, &batch));
                    let launch = launch.arg((moments, *step)).arg(lr).arg(parameters).arg(grads);
                    launch.arg(BLOCKS_PER_PIECE).run(batch.pieces.len() as u32 * BLOCKS_PER_PIECE);
                }
            }
            OptimizerCall::Orthogonalize {
                matrix,
                gram,
                polynomial,
                product,
                words,
                num_steps,
                precision,
            } => {
                self.divide_by_norm(matrix, product);
                let shape = [matrix.shape().rows(), matrix.shape().cols()];
                let is_tall = NewtonSchulzMatmuls::new(shape).is_tall();
                let multiply = |[left, right]: [Operand; 2], transposed, out: &OperandMut| {
                    let of = |array: &OperandMut| OperandMut::new(array.as_operand());
                    self.run_matmul(&MatmulCall::Matmul {
                        left,
                        right,
                        bias: None,
                        residual: None,
                        out: of(out),
                        scratch: of(words),
                        precision: *precision,
                        fp8: None,
                        transposed,
                        accumulate: false,
                    });
                };
                let [a, b, c] = QUINTIC;
                let [x, gram_matrix] = [matrix, gram].map(OperandMut::as_operand);
                for _ in 0..*num_steps {
                    multiply([x, x], [is_tall, !is_tall], gram);
                    multiply([gram_matrix; 2], [false; 2], polynomial);
                    self.axpby(polynomial, c, gram, b);
                    let polynomial = polynomial.as_operand();
                    let factors = if is_tall { [x, polynomial] } else { [polynomial, x] };
                    multiply(factors, [false; 2], product);
                    self.axpby(matrix, a, product, 1.0);
                }
            }
        }
    }

    /// Divides a matrix by its norm, in two steps, so that squares do not overflow. `scratch` has the matrix's size.
    fn divide_by_norm(&self, matrix: &OperandMut, scratch: &OperandMut) {
        let len = matrix.shape().num_elements();
        let num_parts = len.div_ceil(REDUCTION_BLOCKS).min(REDUCTION_BLOCKS) as u32;
        let reduce = |name| self.kernel(name, &[]).arg(matrix).arg(scratch).arg(len).run(num_parts);
        let divide = |name| self.kernel(name, &[]).arg(scratch).arg(num_parts);
        reduce("block_magnitudes");
        divide("divide_by_largest").arg(matrix).over_elements(matrix.shape());
        reduce("block_squares");
        divide("divide_by_norm").arg(NORM_EPSILON).arg(matrix).over_elements(matrix.shape());
    }

    /// Computes `x = a x + b y`.
    fn axpby(&self, x: &OperandMut, a: f32, y: &OperandMut, b: f32) {
        self.kernel("axpby", &[]).arg(x).arg(a).arg(y).arg(b).over_elements(x.shape());
    }
}

/// Panics if a piece exceeds a buffer, which the device does not notice.
fn check_pieces(pieces: &Pieces, parameters: &OperandMut, grads: &Operand) {
    let end = pieces.as_slice().last().map_or(0, |piece| piece.start + piece.len);
    let (num_parameters, num_grads) = (parameters.shape().num_elements(), grads.shape().num_elements());
    assert!(
        end <= num_parameters && (num_grads == 0 || end <= num_grads),
        "pieces up to {end} of {num_parameters} parameters and {num_grads} gradients"
    );
    let dtypes = [parameters.dtype(), grads.dtype()];
    assert_eq!(dtypes, [DType::F32; 2], "dtypes of parameters and gradients");
}

/// Panics if a piece exceeds a state, or if an update reads gradients that are not there.
fn check_states(pieces: &Pieces, updates: &[Update], grads: &Operand, states: &[Option<StateOperands>; 2]) {
    let end = pieces.as_slice().last().map_or(0, |piece| piece.state + piece.len);
    for state in states.iter().flatten() {
        assert!(
            end <= state.values.shape().num_elements(),
            "pieces up to {end} of {:?}",
            state.values.shape()
        );
    }
    let reads = |update: &Update| update.cost().gradient == ElementAccess::Read;
    assert!(grads.num_bytes() > 0 || end == 0 || !updates.iter().any(reads), "no gradients for {updates:?}");
}
