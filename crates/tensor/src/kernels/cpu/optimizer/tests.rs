mod low_precision_state;

use super::rules::{AdafactorVectorStep, AdamWStep, LarsStep, LionStep, MomentumStep, MuonStep};
use super::*;
use crate::kernels::cpu::test_support::{
    Exact, assert_close, cases, cases_for_miri, not_finite, random, run, to_f64,
};
use crate::kernels::cpu::{Cpu, SharedSlice};
use proptest::prelude::*;

/// Numbers of elements: none, one, around register widths, two tasks and a remainder.
const LENGTHS: [usize; 9] = [1, 0, 15, 16, 17, 33, 65, 16 * 1024, 33 * 1024 + 5];

const ADAMW: AdamWStep = AdamWStep {
    lr: 0.01,
    beta2: 0.95,
    weight_decay: 0.1,
    grad_scale: 0.5,
    step: 3,
    num_second_updates: 3,
    ..AdamWStep::DEFAULT
};

const MOMENTUM: MomentumStep =
    MomentumStep { lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 0.1, grad_scale: 0.5, step: 3 };

/// Parameters, gradients, and the optimizer state before a step.
#[derive(Clone, Debug)]
struct Inputs {
    parameters: Vec<f32>,
    grads: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Inputs {
    /// Creates gradients of magnitude `grad_size`, and moments of such gradients.
    fn new(len: usize, grad_size: f32) -> Self {
        let scaled = |name| random(len, name).iter().map(|x| grad_size * x).collect::<Vec<f32>>();
        Inputs {
            parameters: random(len, "parameters"),
            grads: scaled("grads"),
            first: scaled("first"),
            second: scaled("second").iter().map(|x| x * x).collect(),
        }
    }

    fn adamw(&self, step: AdamWStep) -> [Vec<f32>; 3] {
        run(|cpu| {
            let Inputs { mut parameters, grads, mut first, mut second } = self.clone();
            let states = [
                StateSlice::F32(SharedSlice::new(&mut first)),
                StateSlice::F32(SharedSlice::new(&mut second)),
            ];
            update(cpu, Update::AdamW(step), &mut parameters, &grads, states);
            [parameters, first, second]
        })
    }

    /// Runs SGD with the first moments as velocities.
    fn momentum(&self, step: MomentumStep) -> [Vec<f32>; 2] {
        run(|cpu| {
            let Inputs { mut parameters, grads, mut first, .. } = self.clone();
            let states = [StateSlice::F32(SharedSlice::new(&mut first)), StateSlice::Absent];
            update(cpu, Update::Momentum(step), &mut parameters, &grads, states);
            [parameters, first]
        })
    }
}

/// Runs one update of all elements. Returns its sums.
fn update(
    cpu: &Cpu,
    update: Update,
    parameters: &mut [f32],
    grads: &[f32],
    states: [StateSlice<'_>; 2],
) -> Vec<[f64; 2]> {
    let pieces = Pieces::whole(grads.len());
    let mut sums = vec![[0.0; 2]; pieces.as_slice().len()];
    let pass = PieceUpdates {
        pieces: &pieces,
        updates: &[update],
        scales: &[],
        rounding_seed: 7,
        sums: Some(&mut sums[..]),
    };
    cpu.update(pass, parameters, grads, states);
    sums
}

/// Returns the sum of `terms`, with its error magnitude.
fn sum(terms: &[f64]) -> Exact {
    Exact::new(terms.iter().sum(), terms.iter().map(|term| term.abs()).sum())
}

/// Computes algorithm 2 of the paper with QHAdam's `nu1`, in f64: parameter, first and second moment.
fn adamw_f64(s: AdamWStep, parameter: f64, grad: f64, first: f64, second: f64) -> [Exact; 3] {
    let [lr, beta1, beta2, epsilon, decay, scale] =
        [s.lr, s.beta1, s.beta2, s.epsilon, s.weight_decay, s.grad_scale].map(f64::from);
    let grad = scale * grad;
    let first = sum(&[beta1 * first, (1.0 - beta1) * grad]);
    let second = sum(&[beta2 * second, (1.0 - beta2) * grad * grad]);
    let corrected = second.value / (1.0 - beta2.powf(s.num_second_updates as f64));
    let factor = lr / (corrected.sqrt() + epsilon);
    let (nu, mean) = (f64::from(s.nu), 1.0 / (1.0 - beta1.powf(s.step as f64)));
    let direction = nu * mean * first.value + (1.0 - nu) * grad;
    let value = parameter - lr * decay * parameter - factor * direction;
    let magnitude = parameter.abs() * (1.0 + lr * decay)
        + factor * (nu * mean * first.f32_magnitude + (1.0 - nu) * grad.abs());
    [Exact::new(value, magnitude), first, second]
}

/// Computes SGD as PyTorch documents it, in f64: parameter and velocity.
fn momentum_f64(s: MomentumStep, parameter: f64, grad: f64, velocity: f64) -> [Exact; 2] {
    let [lr, momentum, decay, scale] = [s.lr, s.momentum, s.weight_decay, s.grad_scale].map(f64::from);
    let grad = sum(&[scale * grad, decay * parameter]);
    let kept = if s.step == 1 { 0.0 } else { momentum * velocity };
    let velocity = Exact::new(grad.value + kept, grad.f32_magnitude + kept.abs());
    let along = if s.nesterov {
        Exact::new(
            grad.value + momentum * velocity.value,
            grad.f32_magnitude + momentum * velocity.f32_magnitude,
        )
    } else {
        velocity
    };
    [Exact::new(parameter - lr * along.value, parameter.abs() + lr * along.f32_magnitude), velocity]
}

fn check_adamw(inputs: &Inputs, step: AdamWStep) {
    let found = inputs.adamw(step);
    let [parameters, grads, first, second] =
        [&inputs.parameters, &inputs.grads, &inputs.first, &inputs.second].map(|values| to_f64(values));
    let exact = |index: usize| adamw_f64(step, parameters[index], grads[index], first[index], second[index]);
    for (output, what) in ["parameter", "first moment", "second moment"].into_iter().enumerate() {
        let exact = (0..grads.len()).map(|index| exact(index)[output]);
        assert_close::<f32>(&(what, step), &found[output], exact, 0);
    }
}

fn check_momentum(inputs: &Inputs, step: MomentumStep) {
    let found = inputs.momentum(step);
    let [parameters, grads, velocity] =
        [&inputs.parameters, &inputs.grads, &inputs.first].map(|values| to_f64(values));
    let exact = |index: usize| momentum_f64(step, parameters[index], grads[index], velocity[index]);
    for (output, what) in ["parameter", "velocity"].into_iter().enumerate() {
        let exact = (0..grads.len()).map(|index| exact(index)[output]);
        assert_close::<f32>(&(what, step), &found[output], exact, 0);
    }
}

#[test]
fn steps_match_f64() {
    for &len in cases_for_miri(&LENGTHS, 6) {
        // From vanishing squares through subnormal ones to squares near the largest f32.
        for grad_size in [0.0, 1e-30, 1e-20, 1e-8, 1.0, 1e18] {
            let inputs = Inputs::new(len, grad_size);
            check_adamw(&inputs, ADAMW);
            check_adamw(&inputs, AdamWStep { nu: 0.75, ..ADAMW });
            check_momentum(&inputs, MOMENTUM);
        }
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn steps_of_any_settings_match_f64(
        len in 0_usize..70,
        range in -60_i32..40,
        (lr, beta1, beta2) in (1e-6_f32..1.0, 0.0_f32..0.99, 0.5_f32..0.999),
        (weight_decay, grad_scale) in (0.0_f32..0.5, 1e-4_f32..2.0),
        (nesterov, step) in (any::<bool>(), prop_oneof![1_u64..20, 1_u64..2000]),
        nu in prop_oneof![Just(1.0), 0.0_f32..1.0],
    ) {
        let inputs = Inputs::new(len, 2.0_f32.powi(range));
        let adamw = AdamWStep { lr, beta1, beta2, nu, weight_decay, grad_scale, step, num_second_updates: step, ..ADAMW };
        check_adamw(&inputs, adamw);
        check_momentum(&inputs, MomentumStep { lr, momentum: beta1, nesterov, weight_decay, grad_scale, step });
    }
}

#[test]
fn the_first_step_of_adamw_has_the_size_of_the_learning_rate() {
    let mut inputs = Inputs { first: vec![0.0; 40], second: vec![0.0; 40], ..Inputs::new(40, 1.0) };
    inputs.parameters.fill(0.0);
    let [parameters, ..] =
        inputs.adamw(AdamWStep { weight_decay: 0.0, step: 1, num_second_updates: 1, ..ADAMW });
    for (parameter, grad) in parameters.iter().zip(&inputs.grads) {
        let expected = -ADAMW.lr * grad.signum();
        assert!((parameter - expected).abs() < 1e-3 * ADAMW.lr, "{grad}: {parameter}");
    }
}

#[test]
fn the_first_velocity_is_the_gradient_whatever_was_there() {
    let mut inputs = Inputs::new(40, 1.0);
    inputs.first.fill(f32::NAN);
    let [parameters, velocity] = inputs.momentum(MomentumStep { weight_decay: 0.0, step: 1, ..MOMENTUM });
    assert!(parameters.iter().all(|parameter| parameter.is_finite()));
    assert!(velocity.iter().zip(&inputs.grads).all(|(velocity, grad)| *velocity == 0.5 * grad));
}

#[test]
fn without_gradient_decay_and_moments_parameters_keep_their_bits() {
    let mut inputs = Inputs::new(100, 0.0);
    inputs.parameters[..4].copy_from_slice(&[1e-40, -1e-40, f32::MAX, f32::MIN_POSITIVE]);
    let [parameters, first, second] = inputs.adamw(AdamWStep { weight_decay: 0.0, ..ADAMW });
    assert_eq!(parameters, inputs.parameters);
    assert!(first.iter().chain(&second).all(|&moment| moment == 0.0));
    let [parameters, _] = inputs.momentum(MomentumStep { weight_decay: 0.0, ..MOMENTUM });
    assert_eq!(parameters, inputs.parameters);
}

#[test]
fn a_gradient_whose_square_overflows_moves_nothing() {
    let mut inputs = Inputs::new(3, 1.0);
    inputs.grads[1] = 1e25;
    let [parameters, first, second] = inputs.adamw(AdamWStep { weight_decay: 0.0, ..ADAMW });
    assert_eq!((parameters[1], second[1]), (inputs.parameters[1], f32::INFINITY));
    assert!(first[1].is_finite());
}

#[test]
fn non_finite_values_reach_their_parameter_only() {
    let len = 16 * 1024 + 37;
    let clean = Inputs::new(len, 1.0);
    let (clean_adamw, clean_momentum) = (clean.adamw(ADAMW), clean.momentum(MOMENTUM));
    for place in [0, 15, 16, 16 * 1024, len - 1] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut inputs = clean.clone();
            inputs.grads[place] = value;
            let found = inputs.adamw(ADAMW);
            let spoilt = [0, 1, 2].map(|output| not_finite(&clean_adamw[output], &found[output]));
            assert_eq!(spoilt, [vec![place], vec![place], vec![place]], "{value} as a gradient");
            assert!(found[0][place].is_nan(), "an infinite gradient does not pass for a step");
            let found = inputs.momentum(MOMENTUM);
            let spoilt = [0, 1].map(|output| not_finite(&clean_momentum[output], &found[output]));
            assert_eq!(spoilt, [vec![place], vec![place]], "{value} as a gradient");

            let mut inputs = clean.clone();
            inputs.parameters[place] = value;
            let found = inputs.adamw(ADAMW);
            let spoilt = [0, 1, 2].map(|output| not_finite(&clean_adamw[output], &found[output]));
            assert_eq!(spoilt, [vec![place], vec![], vec![]], "{value} as a parameter");
        }
    }
}

#[test]
fn elements_without_a_frozen_second_moment_stay() {
    let adam = AdamWStep { weight_decay: 0.0, num_second_updates: 2, ..ADAMW };
    for rule in [Update::FrozenAdam(adam), Update::FrozenAdamFromMomentum(adam)] {
        let Inputs { parameters: before, grads, mut first, mut second } = Inputs::new(40, 1.0);
        (second[7], first[7]) = (0.0, 0.0);
        run(|cpu| {
            let (mut parameters, mut first, mut second) = (before.clone(), first.clone(), second.clone());
            let states = [
                StateSlice::F32(SharedSlice::new(&mut first)),
                StateSlice::F32(SharedSlice::new(&mut second)),
            ];
            update(cpu, rule, &mut parameters, &grads, states);
            let moved = |index: usize| parameters[index] != before[index];
            assert!((0..40).all(|index| moved(index) == (index != 7)), "{rule:?}: {parameters:?}");
            [parameters, first, second, Vec::new()]
        });
    }
}

/// Returns every update, with options that other tests do not cover.
fn updates() -> [Update; 17] {
    let adam = AdamWStep { num_second_updates: 2, ..ADAMW };
    let rms = AdafactorVectorStep { lr: 0.01, mixing: 0.1, parameter_factor: 0.99, grad_scale: 0.5 };
    [
        Update::AdamW(ADAMW),
        Update::Adam(ADAMW),
        Update::AdamW(adam),
        Update::FrozenAdam(adam),
        Update::FrozenAdamFromMomentum(adam),
        Update::FrozenAdamMomentum(ADAMW),
        Update::Momentum(MOMENTUM),
        Update::Lion(LionStep { lr: 0.01, beta1: 0.9, beta2: 0.95, weight_decay: 0.1, grad_scale: 0.5 }),
        Update::Norms { grad_scale: 0.5 },
        Update::Lars(LarsStep { lr: 0.01, momentum: 0.9, weight_decay: 0.1, grad_scale: 0.5 }),
        Update::LambMoments(ADAMW),
        Update::Lamb(ADAMW),
        Update::AdafactorVectorMoment(rms),
        Update::AdafactorVector(rms),
        Update::MuonMomentum(MuonStep { momentum: 0.95, nesterov: true, grad_scale: 0.5 }),
        Update::Descend { lr: 0.1, parameter_factor: 0.9 },
        Update::Sign { lr: 0.1 },
    ]
}

#[test]
fn updates_have_the_same_bits_at_any_level_and_number_of_threads() {
    for &len in cases_for_miri(&LENGTHS, 6) {
        let inputs = Inputs::new(len, 1.0);
        for rule in updates() {
            let [_, _, _, sums] = run(|cpu| {
                let Inputs { mut parameters, grads, mut first, mut second } = inputs.clone();
                // The second moment of Adafactor's vectors is the first state and must not be negative.
                first.iter_mut().for_each(|x| *x = x.abs());
                let states = [
                    StateSlice::F32(SharedSlice::new(&mut first)),
                    StateSlice::F32(SharedSlice::new(&mut second)),
                ];
                let sums = update(cpu, rule, &mut parameters, &grads, states);
                [parameters, first, second, sums.concat().iter().map(|&sum| sum as f32).collect()]
            });
            assert!(sums.iter().all(|sum| sum.is_finite()), "{rule:?}");
        }
    }
}

#[test]
fn factored_kernels_match_f64() {
    // Leaves that split rows, and rows that split leaves. The shard starts and ends within a row.
    for (rows, cols, leaf_len) in [(1, 1, 1), (5, 7, 3), (70, 130, 50), (9, 200, 450)] {
        let (offset, len) = (11, rows * cols);
        let held = offset + len / 5..offset + len - len / 7;
        let matrix =
            FactoredMatrix { cols, offset, stored: held.clone(), buffer_start: held.start, leaf_len };
        let grads = random(held.len(), "grads");
        let (parameters, factors) = (random(held.len(), "parameters"), random(rows + cols, "factors"));
        let factors: Vec<f32> = factors.iter().map(|x| 0.1 + x.abs()).collect();
        let pieces: Vec<Piece> = (held.clone())
            .step_by(16)
            .map(|position| {
                let len = 16.min(held.end - position);
                let start = position - held.start;
                Piece { position, start, state: start, len, update: 0 }
            })
            .collect();
        let pieces = Pieces::new(pieces);
        let (row_moments, col_moments) = factors.split_at(rows);
        let step = FactoredStep { offset, parameter_factor: 0.9, grad_scale: 0.5 };
        let factors = MomentFactors { rows: row_moments, cols: col_moments, row_mean: &[0.5] };
        let [row_sums, col_sums, squares, after] = run(|cpu| {
            let (mut row_sums, mut col_sums) = (vec![0.0; rows], vec![0.0; cols]);
            cpu.row_squares(&matrix, &grads, 0.5, &mut row_sums);
            cpu.column_squares(&matrix, &grads, 0.5, &mut col_sums);
            let mut squares = vec![[0.0; 2]; pieces.as_slice().len()];
            cpu.factored_squares(&pieces, step, factors, &grads, &mut squares);
            let mut parameters = parameters.clone();
            cpu.factored_update(&pieces, step, &[0.1], factors, &mut parameters, &grads);
            let narrow = |sums: &[f64]| sums.iter().map(|&sum| sum as f32).collect();
            [narrow(&row_sums), narrow(&col_sums), narrow(squares.as_flattened()), parameters]
        });
        let (mut expected_rows, mut expected_cols) = (vec![0.0; rows], vec![0.0; cols]);
        let mut expected_square = 0.0;
        for (index, &grad) in grads.iter().enumerate() {
            let place = index + held.start - offset;
            let (row, col) = (place / cols, place % cols);
            let grad = 0.5 * f64::from(grad);
            expected_rows[row] += grad * grad;
            expected_cols[col] += grad * grad;
            let update = grad / f64::from(row_moments[row] / 0.5 * col_moments[col]).sqrt();
            expected_square += update * update;
            let expected = 0.9 * f64::from(parameters[index]) - 0.1 * update;
            assert!((f64::from(after[index]) - expected).abs() < 1e-5, "{rows}x{cols}, element {index}");
        }
        let close =
            |found: f32, expected: f64| (f64::from(found) - expected).abs() <= 1e-5 * (1.0 + expected);
        assert!(row_sums.iter().zip(&expected_rows).all(|(&found, &expected)| close(found, expected)));
        assert!(col_sums.iter().zip(&expected_cols).all(|(&found, &expected)| close(found, expected)));
        assert!(close(squares.iter().sum(), expected_square), "{rows}x{cols}");
    }
}

#[test]
fn pieces_that_overlap_are_refused() {
    let piece = |start, state| Piece { position: start, start, state, len: 4, update: 0 };
    let new = |pieces: [Piece; 2]| std::panic::catch_unwind(|| Pieces::new(pieces.into()));
    assert!(new([piece(0, 0), piece(4, 4)]).is_ok());
    // Overlaps of parameters and of state, and pieces that are not in the order of memory.
    for (start, state) in [(3, 4), (4, 3), (3, 3)] {
        assert!(new([piece(0, 0), piece(start, state)]).is_err(), "{start}, {state}");
    }
    assert!(new([piece(4, 4), piece(0, 0)]).is_err());
}
