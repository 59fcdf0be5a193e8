//! Arguments of the kernels of optimizers: tables and structs of `sources/optimizer.cu`.

use super::super::super::launch::{Argument, Words, pair};
use crate::kernels::cpu::optimizer::rules::{AdamCoefficients, AdamWStep};
use crate::kernels::{
    ElementAccess, FactoredMatrix, FactoredMoments, FactoredStep, LeafRun, Operand, Pieces, StateDType,
    StepScale, Update,
};
use crate::optimizer::StateOperands;
use std::ops::Range;

/// Sizes of tables; `PIECES`, `UPDATES`, `RUNS` and `SCALES` in `sources/optimizer.cu`.
const NUM_PIECES: usize = 48;
const NUM_UPDATES: usize = 8;
pub(super) const NUM_RUNS: usize = 128;
pub(super) const NUM_SCALES: usize = 64;

/// Returns a word with two numbers.
fn float_pair(low: f32, high: f32) -> u64 {
    pair(low.to_bits(), high.to_bits())
}

/// A table of `len` rows of words, of which the first ones are given.
pub(super) struct Table<const WORDS: usize> {
    rows: Vec<[u64; WORDS]>,
    len: usize,
}

impl<const WORDS: usize> Argument for Table<WORDS> {
    fn append(&self, to: &mut Words) -> usize {
        let (first, num_words) = (to.len(), self.len * WORDS);
        to.extend(self.rows.iter().flatten().copied());
        to.resize(first + num_words, 0);
        num_words * size_of::<u64>()
    }
}

/// A launch's part of a pass of updates.
pub(super) struct Batch {
    pub(super) pieces: Range<usize>,
    /// The updates of these pieces, as indices of the pass's updates.
    updates: Vec<usize>,
}

/// Splits a pass into launches whose tables have room for their pieces and updates.
pub(super) fn batches(pieces: &Pieces) -> Vec<Batch> {
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
pub(super) fn piece_table(pieces: &Pieces, Batch { pieces: range, updates }: &Batch) -> Table<5> {
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

/// Returns the table of a launch's updates.
pub(super) fn update_table(updates: &[Update], batch: &Batch) -> Table<8> {
    let row = |&index: &usize| UpdateArgument::new(updates[index]).words(index);
    Table { rows: batch.updates.iter().map(row).collect(), len: NUM_UPDATES }
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
    const CHANGES: bool = true;

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

/// Returns the table of at most [`NUM_RUNS`] runs.
pub(super) fn run_table(runs: &[LeafRun]) -> Table<2> {
    let row = |run: &LeafRun| [run.pieces.start as u64, pair(run.pieces.len() as u32, run.first_leaf as u32)];
    Table { rows: runs.iter().map(row).collect(), len: NUM_RUNS }
}

/// Returns the table of at most [`NUM_SCALES`] scales.
pub(super) fn scale_table(scales: &[StepScale]) -> Table<4> {
    let row = |scale: &StepScale| match *scale {
        StepScale::TrustRatio { weight_decay } => [0, 0, float_pair(weight_decay, 0.0), pair(1, 0)],
        StepScale::Adafactor { lr, is_relative, clip_threshold, num_elements } => {
            [lr.to_bits(), num_elements as u64, float_pair(0.0, clip_threshold), pair(0, is_relative.into())]
        }
    };
    Table { rows: scales.iter().map(row).collect(), len: NUM_SCALES }
}
