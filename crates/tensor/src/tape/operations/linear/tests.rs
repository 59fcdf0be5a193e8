//! Linear layers in fp8, compared with f64 sums over operands that are quantized here independently.

use super::*;
use crate::Shape;
use crate::View;
use crate::declaration::{Initial, Parameter};
use crate::device::DeviceOptions;
use crate::fp8::{Fp8Formats, Fp8Recipe, Fp8State};
use crate::kernels::Activation;
use crate::parameter_table::ParameterTable;
use crate::parameters::{ParameterSource, Parameters};
use crate::tape::{GradSink, GradTarget, PassState, Recording, Tape, Var};
use std::sync::Arc;
use trireme_base::{Bf16, Category, RandomKey};

const ROWS: usize = 37;
const INPUTS: usize = 24;
const OUTPUTS: usize = 40;

/// Fraction bits, exponent of the smallest normal value, and largest value.
type Format = (i32, i32, f64);
const E4M3: Format = (3, -6, 448.0);
const E5M2: Format = (2, -14, 57_344.0);

/// Returns values rounded to fp8 at the scale that an amax gives.
fn rounded(x: &[f32], (fraction_bits, exponent_min, max): Format, amax: f64, margin: i32) -> Vec<f64> {
    let scale = (max / amax).log2().floor().exp2() * 0.5_f64.powi(margin);
    let round = |x: &f32| {
        let x = (f64::from(*x) * scale).clamp(-max, max);
        let exponent = x.abs().log2().floor().max(f64::from(exponent_min));
        let unit = (exponent - f64::from(fraction_bits)).exp2();
        (x / unit).round_ties_even() * unit / scale
    };
    x.iter().map(round).collect()
}

fn amax(x: &[f32]) -> f64 {
    x.iter().fold(0.0, |amax, &x| f64::from(x.abs()).max(amax))
}

/// Computes `[rows, inner] x [inner, cols]` in f64.
fn product(left: &[f64], right: &[f64], inner: usize) -> Vec<f64> {
    let cols = right.len() / inner;
    let element = |index: usize| {
        let (row, col) = (index / cols, index % cols);
        (0..inner).map(|k| left[row * inner + k] * right[k * cols + col]).sum()
    };
    (0..left.len() / inner * cols).map(element).collect()
}

fn transposed(x: &[f64], cols: usize) -> Vec<f64> {
    (0..x.len()).map(|index| x[index % (x.len() / cols) * cols + index / (x.len() / cols)]).collect()
}

/// Stores gradients in one flat buffer.
struct Grads(Parameters);

impl GradSink for Grads {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>> {
        let view = self.0.flat_mut(span.unit).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate: false })
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {}
}

/// A layer with its inputs.
struct Case {
    device: Device,
    op: Linear,
    parameters: Parameters,
    /// Argument of the activation, in bf16 values.
    x: Vec<f32>,
    residual: Option<Vec<f32>>,
    /// Output gradient, in bf16 values if there is no residual.
    dy: Vec<f32>,
}

/// Results of a pass.
struct Found {
    y: Vec<f32>,
    dx: Vec<f32>,
    d_weight: Vec<f32>,
    d_bias: Vec<f32>,
}

fn random(len: usize, name: &str, deviation: f32) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(9, name).fill_normal(&mut values, deviation);
    values
}

fn in_bf16(x: &[f32]) -> Vec<f32> {
    x.iter().map(|&x| Bf16::from_f32(x).to_f32()).collect()
}

impl Case {
    fn new(layout: WeightLayout, activation: InputActivation, with_residual: bool) -> Self {
        let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
        let mut table = ParameterTable::default();
        table.begin_unit("block");
        let bias = Some(table.add(Parameter::vector("bias", OUTPUTS, Initial::ZEROS)));
        let shape = match layout {
            WeightLayout::InputsFirst => [INPUTS, OUTPUTS],
            WeightLayout::OutputsFirst => [OUTPUTS, INPUTS],
        };
        let weight = table.add(Parameter::matrix("weight", &shape, Initial::ZEROS));
        let mut parameters = Parameters::zeros(&table.into(), &device, Category::Parameters).unwrap();
        let values = random(OUTPUTS + INPUTS * OUTPUTS, "parameters", 0.02);
        device.upload(&values, parameters.flat_mut(0));
        let argument_cols =
            if activation == InputActivation::Gated(Activation::Silu) { 2 * INPUTS } else { INPUTS };
        let dy = random(ROWS * OUTPUTS, "dy", 1e-5);
        Case {
            device,
            op: Linear { weight, layout, bias, activation },
            parameters,
            x: in_bf16(&random(ROWS * argument_cols, "x", 3.0)),
            residual: with_residual.then(|| random(ROWS * OUTPUTS, "residual", 1.0)),
            dy: if with_residual { dy } else { in_bf16(&dy) },
        }
    }

    fn tensor(&self, values: &[f32], dtype: DType) -> Tensor {
        let shape = Shape::from([ROWS, values.len() / ROWS]);
        let mut tensor = self.device.activation_of(shape, dtype).unwrap();
        self.device.convert(View::from_f32s(values, shape), tensor.view_mut());
        tensor
    }

    /// Returns the values of a tensor in f32.
    fn values(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.shape().num_elements()];
        self.device.convert(tensor.view(), ViewMut::from_f32s(&mut values, tensor.shape()));
        values
    }

    /// Returns the activated input.
    fn input(&self) -> Vec<f32> {
        let x = self.tensor(&self.x, DType::Bf16);
        let activated = activate(&self.device, self.op.activation, x.view()).unwrap();
        activated.map_or_else(|| self.x.clone(), |activated| self.values(&activated))
    }

    fn weight(&self) -> Vec<f32> {
        self.device.read(self.parameters.span(&self.op.weight)).unwrap()
    }

    fn run(&self, state: Option<&Fp8State>) -> Found {
        let fp8 = state.map(|state| Arc::clone(state.scales()));
        let pass = PassState { fp8, ..Precision::Bf16.into() };
        let mut tape = Tape::new(&self.device, Recording::On, pass);
        let x = tape.input(self.tensor(&self.x, DType::Bf16));
        let residual = self.residual.as_ref().map(|values| tape.input(self.tensor(values, DType::F32)));
        let (x_place, residual_place) = (x.id(), residual.as_ref().map(Var::id));
        let inputs: Vec<Var> = std::iter::once(x).chain(residual).collect();
        let y = tape.recorder(&self.parameters).apply(&Arc::new(self.op), inputs).unwrap();
        let found_y = self.values(&tape.take_output(&y).unwrap());
        let mut grads =
            Grads(Parameters::zeros(self.parameters.table(), &self.device, Category::Gradients).unwrap());
        let dtype = if residual_place.is_some() { DType::F32 } else { DType::Bf16 };
        tape.backward(&self.parameters, Some((y.id(), self.tensor(&self.dy, dtype))), &mut grads).unwrap();
        if let Some(residual) = residual_place {
            assert_eq!(
                self.values(&tape.take_grad(residual).unwrap()),
                self.dy,
                "the residual is not rounded"
            );
        }
        let of = |span: &ParameterSpan| self.device.read(grads.0.span(span)).unwrap();
        Found {
            y: found_y,
            dx: self.values(&tape.take_grad(x_place).unwrap()),
            d_weight: of(&self.op.weight),
            d_bias: of(&self.op.bias.unwrap()),
        }
    }

    /// Compares with matmuls of operands quantized at the scales of `amaxes`: of input, weight and output gradient.
    fn check(&self, found: &Found, dy_format: Format, amaxes: [f64; 3], margin: i32) {
        let input = rounded(&self.input(), E4M3, amaxes[0], margin);
        let weight = rounded(&self.weight(), E4M3, amaxes[1], margin);
        let dy = rounded(&self.dy, dy_format, amaxes[2], margin);
        let weight = match self.op.layout {
            WeightLayout::InputsFirst => weight,
            WeightLayout::OutputsFirst => transposed(&weight, INPUTS),
        };
        let bias: Vec<f32> = self.device.read(self.parameters.span(&self.op.bias.unwrap())).unwrap();
        let mut y = product(&input, &weight, INPUTS);
        y.iter_mut().enumerate().for_each(|(index, y)| {
            let residual = self.residual.as_ref().map_or(0.0, |residual| residual[index]);
            let bias = Bf16::from_f32(bias[index % OUTPUTS]).to_f32();
            *y += f64::from(bias) + f64::from(residual);
        });
        // Results in bf16 are rounded to 8 bits; those in f32 are not.
        let rounding = if self.residual.is_some() { 1e-6 } else { 1.0 / 256.0 };
        assert_close("y", &found.y, &y, rounding);
        if self.op.activation == InputActivation::Identity {
            let d_input = product(&dy, &transposed(&weight, OUTPUTS), OUTPUTS);
            assert_close("dx", &found.dx, &d_input, 1.0 / 256.0);
        }
        let d_weight = product(&transposed(&input, INPUTS), &dy, ROWS);
        let d_weight = match self.op.layout {
            WeightLayout::InputsFirst => d_weight,
            WeightLayout::OutputsFirst => transposed(&d_weight, OUTPUTS),
        };
        assert_close("weight gradient", &found.d_weight, &d_weight, 1e-6);
        let dy: Vec<f64> = self.dy.iter().map(|&dy| f64::from(dy)).collect();
        let d_bias = product(&[1.0; ROWS], &dy, ROWS);
        assert_close("bias gradient", &found.d_bias, &d_bias, 1e-6);
    }
}

/// Asserts that `found` equals `expected` up to a relative rounding error and the error of the sums.
fn assert_close(what: &str, found: &[f32], expected: &[f64], rounding: f64) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0, |max: f64, x| x.abs().max(max));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs();
        assert!(error <= rounding * expected.abs() + 1e-6 * largest, "{what} {index}: {found} {expected}");
    }
}

fn state(case: &Case, formats: Fp8Formats, margin: u32) -> Fp8State {
    let recipe = Fp8Recipe { formats, amax_history_len: 2, margin };
    Fp8State::new(recipe, vec![case.op.weight.first], &case.device).unwrap()
}

/// Ends a step. Returns its amaxes.
fn advance(device: &Device, state: &mut Fp8State) -> [f64; 3] {
    let mut amaxes = [0.0; 3];
    state.take_amaxes(device, &mut amaxes).unwrap();
    state.advance(&amaxes);
    amaxes.map(f64::from)
}

#[test]
fn matmuls_match_quantized_operands() {
    let identity = InputActivation::Identity;
    for layout in [WeightLayout::InputsFirst, WeightLayout::OutputsFirst] {
        for (activation, with_residual, formats, dy_format, margin) in [
            (identity, false, Fp8Formats::Hybrid, E5M2, 0),
            (identity, true, Fp8Formats::E4m3, E4M3, 1),
            (InputActivation::Elementwise(Activation::Gelu), true, Fp8Formats::Hybrid, E5M2, 0),
            (InputActivation::Gated(Activation::Silu), true, Fp8Formats::E4m3, E4M3, 0),
        ] {
            let mut case = Case::new(layout, activation, with_residual);
            let mut state = state(&case, formats, margin);
            let mut steps: Vec<[f64; 3]> = Vec::new();
            // Larger values than before saturate. Smaller ones lose digits until the history has dropped the larger ones.
            for factor in [1.0, 8.0, 1.0 / 64.0, 1.0, 1.0] {
                case.x.iter_mut().chain(&mut case.dy).for_each(|x| *x *= factor);
                let own = [amax(&case.input()), amax(&case.weight()), amax(&case.dy)];
                let earlier = steps.iter().rev().take(2).copied();
                let largest = |a: [f64; 3], b: [f64; 3]| std::array::from_fn(|index| a[index].max(b[index]));
                let amaxes = earlier.reduce(largest).unwrap_or(own);
                case.check(&case.run(Some(&state)), dy_format, amaxes, margin as i32);
                assert_eq!(advance(&case.device, &mut state), own);
                steps.push(own);
            }
        }
    }
}

#[test]
fn evaluation_and_layers_without_scales_record_no_amaxes() {
    let case = Case::new(WeightLayout::InputsFirst, InputActivation::Identity, true);
    let mut state = state(&case, Fp8Formats::Hybrid, 0);
    let scales = Some(Arc::clone(state.scales()));
    let pass = PassState { fp8: scales, ..Precision::Bf16.into() };
    let mut tape = Tape::new(&case.device, Recording::Off, pass);
    let x = tape.input(case.tensor(&case.x, DType::Bf16));
    let residual = tape.input(case.tensor(case.residual.as_ref().unwrap(), DType::F32));
    let y = tape.recorder(&case.parameters).apply(&Arc::new(case.op), (x, residual)).unwrap();
    assert_eq!(advance(&case.device, &mut state), [0.0; 3]);
    assert_eq!(case.values(&tape.take_value(y.id())), case.run(Some(&state)).y, "it is rounded alike");
    let layers = vec![case.op.bias.unwrap().first];
    let other = Fp8State::new(Fp8Recipe::new(Fp8Formats::Hybrid), layers, &case.device).unwrap();
    let (left_out, plain) = (case.run(Some(&other)), case.run(None));
    assert_eq!((left_out.y, left_out.d_weight), (plain.y, plain.d_weight));
}
