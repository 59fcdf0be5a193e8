use super::*;
use crate::kernels::cpu::test_support::{
    Exact, affordable, assert_close, cases, exactly, not_finite, random, run,
};
use crate::kernels::cpu::{Cpu, SharedSlice};
use proptest::prelude::*;
use trireme_base::Bf16;

/// Numbers of elements: none, one, about the widths of registers, two tasks and a rest.
const LENGTHS: [usize; 9] = [1, 0, 15, 16, 17, 33, 65, 16 * 1024, 33 * 1024 + 5];

const ADAMW: AdamWStep = AdamWStep {
    lr: 0.01,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    grad_scale: 0.5,
    step: 3,
};

const MOMENTUM: MomentumStep =
    MomentumStep { lr: 0.05, momentum: 0.9, nesterov: true, weight_decay: 0.1, grad_scale: 0.5, step: 3 };

/// Parameters, gradients, and the optimizer's state before a step.
#[derive(Clone, Debug)]
struct Inputs {
    parameters: Vec<f32>,
    grads: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Inputs {
    /// Gradients of some size, and moments of gradients of that size.
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

    /// With the first moments as velocities.
    fn momentum(&self, step: MomentumStep) -> [Vec<f32>; 2] {
        run(|cpu| {
            let Inputs { mut parameters, grads, mut first, .. } = self.clone();
            let states = [StateSlice::F32(SharedSlice::new(&mut first)), StateSlice::Absent];
            update(cpu, Update::Momentum(step), &mut parameters, &grads, states);
            [parameters, first]
        })
    }
}

/// One update of all elements; its sums.
fn update(
    cpu: &Cpu,
    update: Update,
    parameters: &mut [f32],
    grads: &[f32],
    states: [StateSlice<'_>; 2],
) -> Vec<[f64; 2]> {
    let pieces = Pieces::whole(grads.len());
    let mut sums = vec![[0.0; 2]; pieces.as_slice().len()];
    cpu.update((&pieces, &[update]), parameters, grads, states, 7, &mut sums);
    sums
}

/// A sum of terms.
fn sum(terms: &[f64]) -> Exact {
    Exact::new(terms.iter().sum(), terms.iter().map(|term| term.abs()).sum())
}

/// Algorithm 2 of the paper, in f64: parameter, first and second moment.
fn adamw_f64(s: AdamWStep, (parameter, grad, first, second): (f64, f64, f64, f64)) -> [Exact; 3] {
    let [lr, beta1, beta2, epsilon, decay, scale] =
        [s.lr, s.beta1, s.beta2, s.epsilon, s.weight_decay, s.grad_scale].map(f64::from);
    let grad = scale * grad;
    let first = sum(&[beta1 * first, (1.0 - beta1) * grad]);
    let second = sum(&[beta2 * second, (1.0 - beta2) * grad * grad]);
    let corrected = second.value / (1.0 - beta2.powf(s.step as f64));
    let factor = lr / (1.0 - beta1.powf(s.step as f64)) / (corrected.sqrt() + epsilon);
    let value = parameter - lr * decay * parameter - factor * first.value;
    let magnitude = parameter.abs() * (1.0 + lr * decay) + factor * first.in_f32;
    [Exact::new(value, magnitude), first, second]
}

/// As PyTorch documents its `SGD`, in f64: parameter and velocity.
fn momentum_f64(s: MomentumStep, (parameter, grad, velocity): (f64, f64, f64)) -> [Exact; 2] {
    let [lr, momentum, decay, scale] = [s.lr, s.momentum, s.weight_decay, s.grad_scale].map(f64::from);
    let grad = sum(&[scale * grad, decay * parameter]);
    let kept = if s.step == 1 { 0.0 } else { momentum * velocity };
    let velocity = Exact::new(grad.value + kept, grad.in_f32 + kept.abs());
    let along = if s.nesterov {
        Exact::new(grad.value + momentum * velocity.value, grad.in_f32 + momentum * velocity.in_f32)
    } else {
        velocity
    };
    [Exact::new(parameter - lr * along.value, parameter.abs() + lr * along.in_f32), velocity]
}

fn check_adamw(inputs: &Inputs, step: AdamWStep) {
    let found = inputs.adamw(step);
    let [parameters, grads, first, second] =
        [&inputs.parameters, &inputs.grads, &inputs.first, &inputs.second].map(|values| exactly(values));
    let exact =
        |index: usize| adamw_f64(step, (parameters[index], grads[index], first[index], second[index]));
    for (output, what) in ["parameter", "first moment", "second moment"].into_iter().enumerate() {
        let exact = (0..grads.len()).map(|index| exact(index)[output]);
        assert_close::<f32>(&(what, step), &found[output], exact, 0);
    }
}

fn check_momentum(inputs: &Inputs, step: MomentumStep) {
    let found = inputs.momentum(step);
    let [parameters, grads, velocity] =
        [&inputs.parameters, &inputs.grads, &inputs.first].map(|values| exactly(values));
    let exact = |index: usize| momentum_f64(step, (parameters[index], grads[index], velocity[index]));
    for (output, what) in ["parameter", "velocity"].into_iter().enumerate() {
        let exact = (0..grads.len()).map(|index| exact(index)[output]);
        assert_close::<f32>(&(what, step), &found[output], exact, 0);
    }
}

#[test]
fn steps_match_f64() {
    for &len in affordable(&LENGTHS, 6) {
        // From squares that vanish, by way of subnormal ones, to some near the largest.
        for grad_size in [0.0, 1e-30, 1e-20, 1e-8, 1.0, 1e18] {
            let inputs = Inputs::new(len, grad_size);
            check_adamw(&inputs, ADAMW);
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
        (nesterov, step) in (any::<bool>(), 1_u64..2000),
    ) {
        let inputs = Inputs::new(len, 2.0_f32.powi(range));
        let adamw = AdamWStep { lr, beta1, beta2, weight_decay, grad_scale, step, ..ADAMW };
        check_adamw(&inputs, adamw);
        check_momentum(&inputs, MomentumStep { lr, momentum: beta1, nesterov, weight_decay, grad_scale, step });
    }
}

#[test]
fn the_first_step_of_adamw_has_the_size_of_the_learning_rate() {
    let mut inputs = Inputs { first: vec![0.0; 40], second: vec![0.0; 40], ..Inputs::new(40, 1.0) };
    inputs.parameters.fill(0.0);
    let [parameters, ..] = inputs.adamw(AdamWStep { weight_decay: 0.0, step: 1, ..ADAMW });
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
fn what_is_not_finite_reaches_its_own_parameter_only() {
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

/// A state of one piece.
struct Kept {
    dtype: StateDType,
    is_square: bool,
    narrow: Vec<Bf16>,
    codes: Vec<u8>,
    steps: Vec<f32>,
}

impl Kept {
    fn new(dtype: StateDType, is_square: bool, len: usize) -> Self {
        let steps = vec![0.0; len.div_ceil(256)];
        Kept { dtype, is_square, narrow: vec![Bf16::default(); len], codes: vec![0; len], steps }
    }

    fn slice(&mut self) -> StateSlice<'_> {
        match self.dtype {
            StateDType::F32 => unreachable!("f32 is no narrow state"),
            StateDType::Bf16 => StateSlice::Bf16(SharedSlice::new(&mut self.narrow)),
            StateDType::Int8 => StateSlice::Int8 {
                codes: SharedSlice::new(&mut self.codes),
                steps: SharedSlice::new(&mut self.steps),
                is_square: self.is_square,
            },
        }
    }

    fn as_ref(&self) -> StateRef<'_> {
        match self.dtype {
            StateDType::F32 => unreachable!("f32 is no narrow state"),
            StateDType::Bf16 => StateRef::Bf16(&self.narrow),
            StateDType::Int8 => {
                StateRef::Int8 { codes: &self.codes, steps: &self.steps, is_square: self.is_square }
            }
        }
    }

    fn read(&self, cpu: &Cpu, pieces: &Pieces, len: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; len];
        cpu.read_state((pieces, 0..pieces.as_slice().len()), self.as_ref(), &mut values);
        values
    }
}

/// What a state keeps of values.
fn kept(dtype: StateDType, is_square: bool, values: &[f32]) -> Vec<f32> {
    let [found] = run(|cpu| {
        let pieces = Pieces::whole(values.len());
        let all = 0..pieces.as_slice().len();
        let mut kept = Kept::new(dtype, is_square, values.len());
        cpu.write_state((&pieces, all.clone()), kept.slice(), values);
        let found = kept.read(cpu, &pieces, values.len());
        cpu.write_state((&pieces, all), kept.slice(), &found);
        assert_eq!(kept.read(cpu, &pieces, values.len()), found, "what was kept once stays as it is");
        [found]
    });
    found
}

#[test]
fn narrow_states_are_as_near_as_they_say() {
    for &len in affordable(&LENGTHS, 6) {
        for size in [0.0, 1e-25, 1e-8, 1.0, 1e15] {
            let values: Vec<f32> = random(len, "values").iter().map(|x| size * x).collect();
            let squares: Vec<f32> = values.iter().map(|x| x * x).collect();
            for (&x, found) in values.iter().zip(kept(StateDType::Bf16, false, &values)) {
                assert!((x - found).abs() <= x.abs() / 128.0, "{x} {found}");
            }
            for (values, found) in values.chunks(256).zip(kept(StateDType::Int8, false, &values).chunks(256))
            {
                let unit = values.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0 * 1.001;
                for (x, found) in values.iter().zip(found) {
                    assert!((x - found).abs() <= unit, "{x} {found}, a unit is {unit}");
                }
            }
            for (squares, found) in
                squares.chunks(256).zip(kept(StateDType::Int8, true, &squares).chunks(256))
            {
                let unit = squares.iter().fold(0.0_f32, |most, &x| most.max(x)).sqrt() / 255.0 * 1.001;
                for (&x, &found) in squares.iter().zip(found) {
                    assert!((x.sqrt() - found.sqrt()).abs() <= unit, "{x} {found}, a unit is {unit}");
                    assert!((x > 0.0) == (found > 0.0), "{x} became {found}");
                }
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_stay_apart_from_other_blocks() {
    let mut values = vec![1.0; 600];
    values[300] = f32::INFINITY;
    for is_square in [false, true] {
        let found = kept(StateDType::Int8, is_square, &values);
        assert!(found[..256].iter().chain(&found[512..]).all(|x| (x - 1.0).abs() < 1e-3), "{is_square}");
        assert!(found.iter().all(|x| x.is_finite()));
    }
}

/// A mean of squares that are 1 with a share of 1 %, from steps whose changes are far below a unit of the format.
#[test]
fn rounding_at_random_keeps_means_right() {
    let len = affordable(&[8192, 512], 1)[0];
    for dtype in [StateDType::Bf16, StateDType::Int8] {
        let [first, second] = run(|cpu| {
            let pieces = Pieces::whole(len);
            let (mut first, mut second) = (Kept::new(dtype, false, len), Kept::new(dtype, true, len));
            let ones = vec![1.0; len];
            let all = 0..pieces.as_slice().len();
            cpu.write_state((&pieces, all.clone()), first.slice(), &ones);
            cpu.write_state((&pieces, all), second.slice(), &ones);
            let (mut parameters, grads) = (vec![0.0; len], vec![0.0; len]);
            let mut sums = vec![[0.0; 2]; pieces.as_slice().len()];
            let adamw = Update::AdamW(AdamWStep { beta1: 0.999, beta2: 0.999, ..ADAMW });
            for step in 0..200 {
                let states = [first.slice(), second.slice()];
                cpu.update((&pieces, &[adamw]), &mut parameters, &grads, states, step * 77, &mut sums);
            }
            [first.read(cpu, &pieces, len), second.read(cpu, &pieces, len)]
        });
        let expected = 0.999_f32.powi(200);
        let mean = |values: &[f32]| values.iter().sum::<f32>() / len as f32;
        assert!((mean(&first) / expected - 1.0).abs() < 0.01, "{dtype:?}: {} {expected}", mean(&first));
        assert!((mean(&second) / expected - 1.0).abs() < 0.01, "{dtype:?}: {} {expected}", mean(&second));
    }
}
