//! Optimizer updates. The pieces of a pass, its updates and similar tables are arguments of kernels, so that they need no memory on the
//! device; a pass takes as many launches as its tables need.

use super::super::Cuda;
use super::super::launch::{Argument, BLOCK_THREADS, Words, pair};
use crate::kernels::call::{MatmulCall, OptimizerCall};
use crate::kernels::cpu::optimizer::rules::{AdamCoefficients, AdamWStep};
use crate::kernels::cpu::optimizer::{NORM_EPSILON, NewtonSchulzMatmuls, QUINTIC};
use crate::kernels::{
    ElementAccess, FactoredMatrix, FactoredMoments, FactoredStep, LeafRun, Operand, OperandMut, Pieces,
    StateDType, StepScale, Update,
};
use crate::optimizer::StateOperands;
use crate::shape::Shape;
use std::ops::Range;
use trireme_base::DType;

/// Sizes of tables; `PIECES`, `UPDATES`, `RUNS` and `SCALES` in `sources/optimizer.cu`.
const NUM_PIECES: usize = 48;
const NUM_UPDATES: usize = 8;
const NUM_RUNS: usize = 128;
const NUM_SCALES: usize = 64;

/// Blocks per piece of kernels without sums: as many as a piece of [`Pieces::LEN_MAX`] elements has blocks of elements.
const BLOCKS_PER_PIECE: u32 = 64;

/// Largest number of blocks whose results one block combines: its number of threads.
const REDUCTION_BLOCKS: usize = BLOCK_THREADS as usize;

/// Returns a word with two numbers.
fn float_pair(low: f32, high: f32) -> u64 {
    pair(low.to_bits(), high.to_bits())
}

/// A table of `len` rows of words, of which the first ones are given.
struct Table<const WORDS: usize> {
    rows: Vec<[u64; WORDS]>,
    len: usize,
}

impl<const WORDS: usize> Argument for Table<WORDS> {
    fn append(&self, to: &mut Words) -> usize {
        let num_words = self.len * WORDS;
        to.extend(self.rows.iter().flatten().copied());
        to.resize(num_words, 0);
        num_words * size_of::<u64>()
    }
}

/// A launch's part of a pass of updates.
struct Batch {
    pieces: Range<usize>,
    /// The updates of these pieces, as indices of the pass's updates.
    updates: Vec<usize>,
}

/// Splits a pass into launches whose tables have room for their pieces and updates.
fn batches(pieces: &Pieces) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for (index, piece) in pieces.as_slice().iter().enumerate() {
        let has_room = |batch: &Batch| {
            let has_update = batch.updates.len() < NUM_UPDATES || batch.updates.contains(&piece.update);
            batch.pieces.len() < NUM_PIECES && has_update
        };
        if !batches.last().is_some_and(has_room) {
            batches.push(Batch { pieces: index..index, updates: Vec::new() });
        }
        let batch = batches.last_mut().expect("one was pushed");
        batch.pieces.end += 1;
        if !batch.updates.contains(&piece.update) {
            batch.updates.push(piece.update);
        }
    }
    batches
}

/// Returns the table of a launch's pieces.
fn piece_table(pieces: &Pieces, Batch { pieces: range, updates }: &Batch) -> Table<5> {
    let row = |index: usize| {
        let piece = &pieces.as_slice()[index];
        let update = updates.iter().position(|&update| update == piece.update);
        let update = update.expect("the batch has the update of each of its pieces");
        let [position, start, state, block] =
            [piece.position, piece.start, piece.state, pieces.first_block(index)].map(|number| number as u64);
        let len = u32::try_from(piece.len).expect("a piece has at most `Pieces::LEN_MAX` elements");
        [position, start, state, block, pair(len, update as u32)]
    };
    Table { rows: range.clone().map(row).collect(), len: NUM_PIECES }
}

/// `Kind` of `sources/optimizer.cu`: the kinds of [`Update`].
#[derive(Clone, Copy, Default)]
#[repr(u32)]
enum Kind {
    #[default]
    AdamW,
    Adam,
    FrozenAdam,
    FrozenAdamFromMomentum,
    FrozenAdamMomentum,
    Momentum,
    Lion,
    Norms,
    Lars,
    LambMoments,
    Lamb,
    AdafactorVectorMoment,
    AdafactorVector,
    MuonMomentum,
    Descend,
    Sign,
}

/// Flags of `sources/optimizer.cu`.
const WRITES_PARAMETER: u32 = 1;
const READS_GRADIENT: u32 = 2;
const WRITES_FIRST: u32 = 4;
const WRITES_SECOND: u32 = 8;
const IS_NESTEROV: u32 = 16;
const IS_FIRST_STEP: u32 = 32;

/// `Update` of `sources/optimizer.cu`, without the number of the update.
#[derive(Default)]
struct UpdateArgument {
    kind: Kind,
    flags: u32,
    lr: f32,
    step_size: f32,
    parameter_factor: f32,
    momentum: f32,
    beta2: f32,
    nu: f32,
    epsilon: f32,
    weight_decay: f32,
    grad_scale: f32,
    gradient_share: f32,
    inverse_correction1: f32,
    inverse_root_correction2: f32,
    mixing: f32,
}

fn flag(is_set: bool, bit: u32) -> u32 {
    if is_set { bit } else { 0 }
}

impl UpdateArgument {
    fn of_adam(kind: Kind, step: AdamWStep) -> Self {
        let c = AdamCoefficients::new(step);
        UpdateArgument {
            kind,
            lr: step.lr,
            step_size: c.step_size,
            parameter_factor: c.parameter_factor,
            momentum: step.beta1,
            beta2: step.beta2,
            nu: step.nu,
            epsilon: step.epsilon,
            weight_decay: step.weight_decay,
            grad_scale: step.grad_scale,
            gradient_share: c.gradient_share,
            inverse_correction1: c.inverse_correction1,
            inverse_root_correction2: c.inverse_root_correction2,
            ..UpdateArgument::default()
        }
    }

    fn new(update: Update) -> Self {
        let rest = UpdateArgument::default();
        let mut argument = match update {
            Update::AdamW(step) => UpdateArgument::of_adam(Kind::AdamW, step),
            Update::Adam(step) => UpdateArgument::of_adam(Kind::Adam, step),
            Update::FrozenAdam(step) => UpdateArgument::of_adam(Kind::FrozenAdam, step),
            Update::FrozenAdamFromMomentum(step) => {
                UpdateArgument::of_adam(Kind::FrozenAdamFromMomentum, step)
            }
            Update::FrozenAdamMomentum(step) => UpdateArgument::of_adam(Kind::FrozenAdamMomentum, step),
            Update::Momentum(s) => UpdateArgument {
                kind: Kind::Momentum,
                flags: flag(s.nesterov, IS_NESTEROV) | flag(s.step == 1, IS_FIRST_STEP),
                lr: s.lr,
                momentum: s.momentum,
                weight_decay: s.weight_decay,
                grad_scale: s.grad_scale,
                ..rest
            },
            Update::Lion(s) => UpdateArgument {
                kind: Kind::Lion,
                lr: s.lr,
                parameter_factor: 1.0 - s.lr * s.weight_decay,
                momentum: s.beta1,
                beta2: s.beta2,
                grad_scale: s.grad_scale,
                ..rest
            },
            Update::Norms { grad_scale } => UpdateArgument { kind: Kind::Norms, grad_scale, ..rest },
            Update::Lars(s) => UpdateArgument {
                kind: Kind::Lars,
                lr: s.lr,
                momentum: s.momentum,
                weight_decay: s.weight_decay,
                grad_scale: s.grad_scale,
                ..rest
            },
            Update::LambMoments(step) => UpdateArgument::of_adam(Kind::LambMoments, step),
            Update::Lamb(step) => UpdateArgument::of_adam(Kind::Lamb, step),
            Update::AdafactorVectorMoment(s) => UpdateArgument {
                kind: Kind::AdafactorVectorMoment,
                mixing: s.mixing,
                grad_scale: s.grad_scale,
                ..rest
            },
            Update::AdafactorVector(s) => UpdateArgument {
                kind: Kind::AdafactorVector,
                lr: s.lr,
                parameter_factor: s.parameter_factor,
                grad_scale: s.grad_scale,
                ..rest
            },
            Update::MuonMomentum(s) => UpdateArgument {
                kind: Kind::MuonMomentum,
                flags: flag(s.nesterov, IS_NESTEROV),
                momentum: s.momentum,
                grad_scale: s.grad_scale,
                ..rest
            },
            Update::Descend { lr, parameter_factor } => {
                UpdateArgument { kind: Kind::Descend, lr, parameter_factor, ..rest }
            }
            Update::Sign { lr } => UpdateArgument { kind: Kind::Sign, lr, ..rest },
        };
        let cost = update.cost();
        let changes = |access: ElementAccess, bit| flag(access == ElementAccess::Change, bit);
        argument.flags |= changes(cost.parameter, WRITES_PARAMETER)
            | flag(cost.gradient == ElementAccess::Read, READS_GRADIENT)
            | changes(cost.states[0], WRITES_FIRST)
            | changes(cost.states[1], WRITES_SECOND);
        argument
    }

    /// Returns the words of the update with this index in the pass.
    fn words(&self, index: usize) -> [u64; 8] {
        [
            pair(self.kind as u32, self.flags),
            pair(index as u32, self.lr.to_bits()),
            float_pair(self.step_size, self.parameter_factor),
            float_pair(self.momentum, self.beta2),
            float_pair(self.nu, self.epsilon),
            float_pair(self.weight_decay, self.grad_scale),
            float_pair(self.gradient_share, self.inverse_correction1),
            float_pair(self.inverse_root_correction2, self.mixing),
        ]
    }
}

/// `State` of `sources/optimizer.cu`.
impl Argument for Option<&StateOperands> {
    fn append(&self, to: &mut Words) -> usize {
        let Some(state) = self else { return [0; 3].append(to) };
        let dtype = match state.dtype {
            StateDType::F32 => 0,
            StateDType::Bf16 => 1,
            StateDType::Int8 => 2,
        };
        let flags = pair(dtype, state.is_second_moment.into());
        state.values.append(to) + state.steps.append(to) + flags.append(to)
    }
}

/// `Factored` of `sources/optimizer.cu`.
impl Argument for (&FactoredMoments<Operand>, FactoredStep) {
    fn append(&self, to: &mut Words) -> usize {
        let (FactoredMoments { rows, cols, row_mean }, step) = self;
        let num_bytes = [rows, cols, row_mean].map(|moments| moments.append(to)).iter().sum::<usize>();
        let factors = float_pair(step.parameter_factor, step.grad_scale);
        num_bytes + [cols.shape().num_elements(), step.offset].append(to) + factors.append(to)
    }
}

/// `FactoredMatrix` of `sources/optimizer.cu`.
impl Argument for FactoredMatrix {
    fn append(&self, to: &mut Words) -> usize {
        let FactoredMatrix { cols, offset, stored, buffer_start, leaf_len } = self;
        // A unit without elements has leaves of no elements.
        [*cols, *offset, stored.start, stored.end, *buffer_start, (*leaf_len).max(1)].append(to)
    }
}

fn run_row(run: &LeafRun) -> [u64; 2] {
    [run.pieces.start as u64, pair(run.pieces.len() as u32, run.first_leaf as u32)]
}

fn scale_row(scale: &StepScale) -> [u64; 4] {
    match *scale {
        StepScale::TrustRatio { weight_decay } => [0, 0, float_pair(weight_decay, 0.0), pair(1, 0)],
        StepScale::Adafactor { lr, is_relative, clip_threshold, num_elements } => {
            [lr.to_bits(), num_elements as u64, float_pair(0.0, clip_threshold), pair(0, is_relative.into())]
        }
    }
}

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
                let arguments: Vec<UpdateArgument> =
                    updates.iter().map(|&update| UpdateArgument::new(update)).collect();
                if scales.is_some() {
                    // Panics for an update that has no scale.
                    pieces.as_slice().iter().for_each(|piece| _ = updates[piece.update].scaled(1.0));
                }
                for batch in batches(pieces) {
                    let rows = batch.updates.iter().map(|&update| arguments[update].words(update)).collect();
                    let sums =
                        sums.as_ref().map(|sums| from_element(sums.as_operand(), 2 * batch.pieces.start));
                    let blocks_per_piece = if sums.is_some() { 1 } else { BLOCKS_PER_PIECE };
                    let launch = self.kernel("update", &[]).arg(piece_table(pieces, &batch));
                    let launch = launch.arg(Table { rows, len: NUM_UPDATES }).arg(parameters);
                    let launch = launch.arg(if_any(grads)).arg(states[0].as_ref()).arg(states[1].as_ref());
                    let launch = launch.arg(scales).arg(*rounding_seed).arg(sums).arg(blocks_per_piece);
                    launch.run(batch.pieces.len() as u32 * blocks_per_piece);
                }
            }
            OptimizerCall::LeafSums { sums, out, runs } => {
                for which in 0..out.shape().num_elements() / runs.len().max(1) {
                    for (index, batch) in runs.chunks(NUM_RUNS).enumerate() {
                        let rows = batch.iter().map(run_row).collect();
                        let launch = self.kernel("leaf_sums", &[]).arg(Table { rows, len: NUM_RUNS });
                        let first = which * runs.len() + index * NUM_RUNS;
                        let launch = launch.arg(sums).arg(which as u32);
                        launch.arg(from_element(out.as_operand(), first)).run(batch.len() as u32);
                    }
                }
            }
            OptimizerCall::StepScales { scales, squares, out } => {
                for (index, batch) in scales.chunks(NUM_SCALES).enumerate() {
                    let rows = batch.iter().map(scale_row).collect();
                    let first = index * NUM_SCALES;
                    let launch = self.kernel("step_scales", &[]).arg(Table { rows, len: NUM_SCALES });
                    let launch =
                        launch.arg(from_element(squares[0], first)).arg(from_element(squares[1], first));
                    let launch = launch.arg(from_element(out.as_operand(), first));
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
                launch.arg(moments).over_elements(moments.shape());
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
                let is_tall = NewtonSchulzMatmuls::new(matrix.shape()).is_tall();
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
