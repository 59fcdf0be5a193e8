//! Matmuls with operands rounded to fp8.

use super::{ids, narrow, on_all, on_all_near, random, rounded, shaped, wide};
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::tape::{GroupedLinear, InputActivation, Linear, Recording, WeightLayout};
use trireme_tensor::{
    Category, Device, DeviceError, Fp8Formats, Fp8Recipe, Fp8State, GradSink, GradTarget, Initial, Parameter,
    ParameterSpan, ParameterTable, Parameters, PassState, Precision, Tape,
};

/// A layer with a single weight of 1, so that its outputs are its rounded inputs.
#[test]
fn inputs_are_rounded_to_fp8_and_amaxes_are_recorded() {
    let values = random(500, "x");
    let largest = values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let (found, amaxes) = on_all(|device| {
        let mut table = ParameterTable::default();
        table.begin_unit("layer");
        let layer = Linear::new(&mut table, "layer", [1, 1], Initial::ZEROS, InputActivation::Identity);
        let state = Fp8State::of_matrices(Fp8Recipe::new(Fp8Formats::Hybrid), &table, device);
        let mut state = state.unwrap();
        let mut parameters = Parameters::zeros(&Arc::new(table), device, Category::Parameters).unwrap();
        parameters.set(0, &[1.0, 0.0]);
        let scales = Some(Arc::clone(state.scales()));
        let pass = PassState { fp8: scales, ..Precision::Bf16.into() };
        let mut tape = Tape::new(device, Recording::On, pass);
        let x = tape.input(rounded(device, &values, DType::Bf16).reshaped([500, 1].into()));
        let y = tape.recorder(&parameters).apply(&Arc::new(layer), [x]).unwrap();
        let y = wide(device, &tape.take_output(&y).unwrap());
        let mut amaxes = [0.0; 3];
        state.take_amaxes(device, &mut amaxes).unwrap();
        (y, amaxes)
    });
    // Three fraction bits. Far below the largest value, the rounding step is constant.
    for (&found, &x) in found.iter().zip(&values) {
        let bound = (f64::from(x).abs() / 16.0).max(f64::from(largest) * 2.0_f64.powi(-17)) * 1.1;
        assert!((f64::from(found) - f64::from(x)).abs() <= bound, "{found} instead of {x}");
    }
    assert!((amaxes[0] - largest).abs() <= largest / 256.0 && amaxes[1] == 1.0 && amaxes[2] == 0.0);
}

/// Stores gradients in one flat buffer.
struct Grads(Parameters);

impl GradSink for Grads {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let view = self.0.flat_mut(span.unit).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate: false })
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {}
}

/// A linear layer, and the matmuls in which it computes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer {
    pub(crate) formats: Fp8Formats,
    pub(crate) layout: WeightLayout,
    pub(crate) rows: usize,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    /// Whether the outputs are added to f32 values.
    pub(crate) has_residual: bool,
}

impl Layer {
    /// Returns outputs, gradients of inputs, and gradients of parameters of two steps: with the scales of their values, and with those of
    /// the first step, which had smaller values.
    pub(crate) fn train(self, device: &Device) -> [Vec<f32>; 3] {
        let Layer { formats, layout, rows, inputs, outputs, has_residual } = self;
        let mut table = ParameterTable::default();
        table.begin_unit("layer");
        let shape = match layout {
            WeightLayout::InputsFirst => [inputs, outputs],
            WeightLayout::OutputsFirst => [outputs, inputs],
        };
        let weight = table.add(Parameter::matrix("weight", &shape, Initial::ZEROS));
        let bias = Some(table.add(Parameter::vector("bias", outputs, Initial::ZEROS)));
        let op = Arc::new(Linear { weight, layout, bias, activation: InputActivation::Identity });
        let mut state = Fp8State::of_matrices(Fp8Recipe::new(formats), &table, device).unwrap();
        let table = Arc::new(table);
        let mut parameters = Parameters::zeros(&table, device, Category::Parameters).unwrap();
        parameters.set(0, &random(inputs * outputs + outputs, "parameters"));
        let mut results = [const { Vec::new() }; 3];
        for factor in [1.0, 1.5] {
            let values = |[rows, cols]: [usize; 2], name| {
                let values: Vec<f32> = random(rows * cols, name).iter().map(|x| x * factor).collect();
                narrow(device, &values, [rows, cols], DType::Bf16)
            };
            let pass = PassState { fp8: Some(Arc::clone(state.scales())), ..Precision::Bf16.into() };
            let mut tape = Tape::new(device, Recording::On, pass);
            let mut arguments = vec![tape.input(values([rows, inputs], "x"))];
            let x = arguments[0].id();
            let mut dy = values([rows, outputs], "dy");
            if has_residual {
                arguments.push(tape.input(shaped(
                    device,
                    &random(rows * outputs, "residual"),
                    [rows, outputs],
                )));
                dy = shaped(device, &wide(device, &dy), [rows, outputs]);
            }
            let y = tape.recorder(&parameters).apply(&op, arguments).unwrap();
            results[0].extend(wide(device, &tape.take_output(&y).unwrap()));
            let mut grads = Grads(Parameters::zeros(&table, device, Category::Gradients).unwrap());
            tape.backward(&parameters, Some((y.id(), dy)), &mut grads).unwrap();
            results[1].extend(wide(device, &tape.take_grad(x).unwrap()));
            results[2].extend(device.read::<f32>(grads.0.flat(0)).unwrap());
            let mut amaxes = [0.0; 3];
            state.take_amaxes(device, &mut amaxes).unwrap();
            state.advance(&amaxes);
        }
        results
    }
}

/// The GPU's fp8 units multiply matrices whose sizes are multiples of 16. Results are bf16 numbers, or f32 ones, to which another kernel
/// adds bias and residual.
#[test]
fn layers_in_fp8_have_the_results_of_their_emulation() {
    for (formats, layout, [rows, inputs, outputs], has_residual) in [
        (Fp8Formats::Hybrid, WeightLayout::InputsFirst, [32, 16, 80], false),
        (Fp8Formats::E4m3, WeightLayout::OutputsFirst, [16, 80, 32], true),
        (Fp8Formats::Hybrid, WeightLayout::OutputsFirst, [80, 32, 16], true),
        (Fp8Formats::Hybrid, WeightLayout::InputsFirst, [9, 16, 24], false),
    ] {
        let layer = Layer { formats, layout, rows, inputs, outputs, has_residual };
        on_all_near(1.0 / 128.0, |device| layer.train(device));
    }
}

/// Kernels of groups of rows multiply rounded values in bf16. With the identity as the matrix of each group, they are the outputs.
#[test]
fn groups_of_rows_are_rounded_to_fp8() {
    let (rows, width, starts) = (9, 16, [0, 4, 9]);
    let values = random(rows * width, "rows");
    let found = on_all(|device| {
        let mut table = ParameterTable::default();
        table.begin_unit("layer");
        let weight = table.add(Parameter::matrix("weight", &[2 * width, width], Initial::ZEROS));
        let layer = GroupedLinear { weight, num_groups: 2, activation: InputActivation::Identity };
        let state = Fp8State::of_matrices(Fp8Recipe::new(Fp8Formats::E4m3), &table, device).unwrap();
        let mut parameters = Parameters::zeros(&Arc::new(table), device, Category::Parameters).unwrap();
        let identity = |index: usize| f32::from(u8::from(index / width % width == index % width));
        parameters.set(0, &(0..2 * width * width).map(identity).collect::<Vec<_>>());
        let pass = PassState { fp8: Some(Arc::clone(state.scales())), ..Precision::Bf16.into() };
        let mut tape = Tape::new(device, Recording::Off, pass);
        let arguments = [
            tape.input(narrow(device, &values, [rows, width], DType::Bf16)),
            tape.input(ids(device, &starts)),
        ];
        let y = tape.recorder(&parameters).apply(&Arc::new(layer), arguments).unwrap();
        wide(device, &tape.take_value(y.id()))
    });
    for (found, x) in found.iter().zip(&values) {
        let error = (f64::from(*found) - f64::from(*x)).abs();
        assert!(error > 0.0 && error <= f64::from(x.abs()) / 14.0 + 1e-4, "{found} instead of {x}");
    }
}
