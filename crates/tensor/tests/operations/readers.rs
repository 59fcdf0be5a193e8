//! Values with several readers.

use crate::{PRECISIONS, gelu, no_parameters, product};
use std::sync::Arc;
use trireme_base::{DType, RandomKey};
use trireme_tensor::tape::{
    Add, Attention, InputActivation, Linear, LossHead, Mul, Norm, Recorder, Recording, RotaryTable, Scale,
    Tanh, WeightLayout,
};
use trireme_tensor::{
    Activation, AttentionRule, Category, Device, DeviceError, DeviceOptions, GradSink, GradTarget, Initial,
    Parameter, ParameterSpan, ParameterTable, Parameters, Precision, Shape, Tape, Tensor, Var,
};
use trireme_testkit::{GradientCheck, Input};

/// A gradient sink for tapes without parameters.
pub(crate) struct NoParameters;

impl GradSink for NoParameters {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        panic!("{span:?} is read by no operation")
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {}
}

fn device() -> Device {
    Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap()
}

fn random(device: &Device, shape: impl Into<Shape>, name: &str) -> Tensor {
    let mut values = device.empty(shape.into(), DType::F32, Category::Activations).unwrap();
    let mut on_host = vec![0.0; values.shape().num_elements()];
    RandomKey::new(1, name).fill_normal(&mut on_host, 1.0);
    device.upload(&on_host, values.view_mut());
    values
}

fn rms_norm(weight: ParameterSpan) -> Arc<Norm> {
    Arc::new(Norm { weight, bias: None, weight_offset: 0.0, epsilon: 1e-3, is_centered: false })
}

/// Returns a rotary attention with one head of four elements.
fn rotary_attention(device: &Device, seq_len: usize) -> Arc<Attention> {
    let rotary = Some(Arc::new(RotaryTable::new(device, seq_len, &[1.0, 0.25], 1.0).unwrap()));
    let rule = AttentionRule::causal(4);
    Arc::new(Attention::new(1, 1, 4, rule).with_rotary(rotary))
}

/// Two linear layers, a normalization and a sum read one value, in every order.
#[test]
fn a_value_with_several_readers() {
    let (rows, cols) = (3, 6);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let weights = ["first", "left", "right"]
        .map(|name| table.add(Parameter::matrix(name, &[cols, cols], Initial::ZEROS)));
    let norm_weight = table.add(Parameter::vector("norm", cols, Initial::ZEROS));
    let linear = |weight, activation| {
        Arc::new(Linear { weight, layout: WeightLayout::InputsFirst, bias: None, activation })
    };
    let [first, left, right] = weights;
    let [first, left] = [first, left].map(|weight| linear(weight, InputActivation::Identity));
    // The backward of this layer computes in the memory of its input.
    let right = linear(right, InputActivation::Elementwise(Activation::Gelu));
    let norm = rms_norm(norm_weight);
    let reference = |inputs: &[Vec<f64>], parameters: &[f64]| {
        let square = cols * cols;
        let [first, left, right] = [0, 1, 2].map(|place| &parameters[place * square..(place + 1) * square]);
        let weight = &parameters[3 * square..];
        let x = product(&inputs[0], first, cols, cols);
        let activated: Vec<f64> = x.iter().map(|&x| gelu(x)).collect();
        let (left, right) = (product(&x, left, cols, cols), product(&activated, right, cols, cols));
        let normed = |index: usize| {
            let row = &x[index / cols * cols..(index / cols + 1) * cols];
            let mean_square = row.iter().map(|x| x * x).sum::<f64>() / cols as f64;
            x[index] / (mean_square + f64::from(1e-3_f32)).sqrt() * weight[index % cols]
        };
        (0..x.len())
            .map(|index| left[index] + right[index] + normed(index) + x[index] + inputs[1][index])
            .collect()
    };
    for order in 0..24 {
        // Decodes a permutation of the readers.
        let mut places = vec![0, 1, 2, 3];
        let order: Vec<usize> =
            [order / 6, order / 2 % 3, order % 2, 0].map(|place| places.remove(place)).into();
        let run = |recorder: &mut Recorder<'_>, inputs: Vec<Var>| {
            let [input, other] = inputs.try_into().unwrap();
            let x = recorder.apply(&first, [input])?;
            let mut sum = None;
            for &reader in &order {
                let read = match reader {
                    0 => recorder.apply(&left, [&x])?,
                    1 => recorder.apply(&right, [&x])?,
                    2 => recorder.apply(&norm, [&x])?,
                    _ => recorder.apply(&Add, (&x, &other))?,
                };
                sum = Some(match sum {
                    None => read,
                    Some(sum) => recorder.apply(&Add, (sum, read))?,
                });
            }
            Ok(sum)
        };
        for precision in PRECISIONS {
            GradientCheck {
                name: format!("readers {order:?} in {precision}"),
                run: &run,
                table: table.clone(),
                precision,
                inputs: ["x", "other"].map(|name| Input::random(&[rows, cols], name)).into(),
                reference: &reference,
            }
            .check();
        }
    }
}

/// The parameters still get a gradient: zero.
#[test]
fn a_layer_whose_output_nothing_reads() {
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let weights = ["read", "unread"].map(|name| table.add(Parameter::matrix(name, &[4, 4], Initial::ZEROS)));
    let (layout, activation) = (WeightLayout::InputsFirst, InputActivation::Identity);
    let [read, unread] = weights.map(|weight| Arc::new(Linear { weight, layout, bias: None, activation }));
    let reference = |x: &[Vec<f64>], parameters: &[f64]| product(&x[0], &parameters[..16], 4, 4);
    for precision in PRECISIONS {
        GradientCheck {
            name: format!("a layer beside one that is not read, in {precision}"),
            run: &|recorder, inputs| {
                let [x] = inputs.try_into().unwrap();
                recorder.apply(&unread, [&x])?;
                Ok(Some(recorder.apply(&read, [x])?))
            },
            table: table.clone(),
            precision,
            inputs: vec![Input::random(&[3, 4], "x")],
            reference: &reference,
        }
        .check();
    }
}

/// An f32 value whose readers compute in 16 bits, and an f32 gradient of a 16-bit value.
#[test]
fn values_and_gradients_of_two_types() {
    let (rows, cols) = (4, 6);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let [first, second] =
        ["first", "second"].map(|name| table.add(Parameter::matrix(name, &[cols, cols], Initial::ZEROS)));
    let norm_weight = table.add(Parameter::vector("norm", cols, Initial::ZEROS));
    let linear = |weight| {
        let (layout, activation) = (WeightLayout::InputsFirst, InputActivation::Identity);
        Arc::new(Linear { weight, layout, bias: None, activation })
    };
    let norm = rms_norm(norm_weight);
    let (first, head) = (linear(first), Arc::new(LossHead { weight: second, soft_cap: None }));
    let reference = |inputs: &[Vec<f64>], parameters: &[f64]| {
        let (first, rest) = parameters.split_at(cols * cols);
        let (head, weight) = rest.split_at(cols * cols);
        let x = &inputs[0];
        let projected = product(x, first, cols, cols);
        let row = |(row, &target): (usize, &f64)| -> f64 {
            let range = row * cols..(row + 1) * cols;
            let x = &x[range.clone()];
            let mean_square = x.iter().map(|x| x * x).sum::<f64>() / cols as f64;
            let scale = 1.0 / (mean_square + f64::from(1e-3_f32)).sqrt();
            let sum = x.iter().zip(&projected[range]).zip(weight);
            let hidden: Vec<f64> = sum.map(|((x, y), weight)| (x * scale * weight + y).tanh()).collect();
            let logit = |token: usize| -> f64 {
                hidden.iter().zip(&head[token * cols..]).map(|(x, weight)| x * weight).sum()
            };
            (0..cols).map(|token| logit(token).exp()).sum::<f64>().ln() - logit(target as usize)
        };
        vec![inputs[1].iter().enumerate().map(row).sum::<f64>() / rows as f64]
    };
    for precision in PRECISIONS {
        GradientCheck {
            name: format!("values of two types in {precision}"),
            run: &|recorder, inputs| {
                let [x, targets] = inputs.try_into().unwrap();
                let projected = recorder.apply(&first, [&x])?;
                let normed = recorder.apply(&norm, [x])?;
                let sum = recorder.apply(&Add, (projected, normed))?;
                let hidden = recorder.apply(&Tanh, [sum])?;
                recorder.apply_loss(&head, (hidden, targets), 1.0)?;
                Ok(None)
            },
            table: table.clone(),
            precision,
            inputs: vec![Input::random(&[rows, cols], "x").in_f32(), Input::ids(&[rows], &[5, 0, 2, 2])],
            reference: &reference,
        }
        .check();
    }
}

/// An operation computes in place only if its input has no other reader.
#[test]
fn rotation_in_place_leaves_what_others_read() {
    let (seq_len, cols) = (3, 12);
    let device = device();
    let attention = rotary_attention(&device, seq_len);
    let double = Arc::new(Scale(2.0));
    let mut bits = Vec::new();
    for order in 0..2 {
        let table = Arc::new(no_parameters());
        let parameters = Parameters::zeros(&table, &device, Category::Parameters).unwrap();
        let mut tape = Tape::new(&device, Recording::On, Precision::F32);
        let input = tape.input(random(&device, [1, seq_len, cols], "qkv"));
        let place = input.id();
        let mut recorder = tape.recorder(&parameters);
        let qkv = recorder.apply(&double, [&input]).unwrap();
        // The square is computed before or after the rotation, and its backward reads the value again.
        let (attended, square) = match order {
            0 => {
                let square = recorder.apply(&Mul, (&qkv, &qkv)).unwrap();
                (recorder.apply(&attention, [qkv]).unwrap(), square)
            }
            _ => {
                let attended = recorder.apply(&attention, [&qkv]).unwrap();
                (attended, recorder.apply(&Mul, (&qkv, &qkv)).unwrap())
            }
        };
        let mut found = Vec::new();
        for output in [&attended, &square] {
            found.extend(device.read::<u32>(tape.take_output(output).unwrap().view()).unwrap());
        }
        let grad = device.zeros([1, seq_len, 4].into(), DType::F32, Category::Activations).unwrap();
        let mut ones = device.empty([1, seq_len, cols].into(), DType::F32, Category::Activations).unwrap();
        device.upload(&vec![1.0_f32; seq_len * cols], ones.view_mut());
        let start = [(attended.id(), grad), (square.id(), ones)];
        tape.backward(&parameters, start, &mut NoParameters).unwrap();
        found.extend(device.read::<u32>(tape.take_grad(place).unwrap().view()).unwrap());
        bits.push(found);
    }
    assert!(bits[0] == bits[1]);
}

/// Values that will be recomputed are not overwritten in forward, because backward would otherwise read the recomputed contents.
#[test]
fn values_to_recompute_are_not_overwritten() {
    let (seq_len, cols) = (3, 12);
    let device = device();
    let attention = rotary_attention(&device, seq_len);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let norm = Arc::new(Norm {
        weight: table.add(Parameter::vector("norm", cols, Initial::ZEROS)),
        bias: None,
        weight_offset: 0.0,
        epsilon: 1e-3,
        is_centered: false,
    });
    let mut parameters = Parameters::zeros(&Arc::new(table), &device, Category::Parameters).unwrap();
    device.upload(&vec![1.0_f32; cols], parameters.flat_mut(0));
    let gradient = |is_recomputed: bool| -> Vec<u32> {
        let mut tape = Tape::new(&device, Recording::On, Precision::F32);
        let input = tape.input(random(&device, [1, seq_len, cols], "x"));
        let id = input.id();
        let mut recorder = tape.recorder(&parameters);
        let qkv = recorder.apply(&norm, [input]).unwrap();
        let attended = recorder.apply(&attention, [qkv]).unwrap();
        tape.take_output(&attended).unwrap();
        if is_recomputed {
            tape.free_recomputable();
            tape.recompute(&parameters).unwrap();
        }
        tape.backward_input(&parameters, [(attended.id(), random(&device, [1, seq_len, 4], "dy"))]).unwrap();
        device.read(tape.take_grad(id).unwrap().view()).unwrap()
    };
    assert_eq!(gradient(true), gradient(false));
}

/// Backward does not overwrite an input of the tape, even if it is the only reader.
#[test]
fn backward_does_not_overwrite_inputs_of_the_tape() {
    let device = device();
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let weight = table.add(Parameter::matrix("weight", &[4, 4], Initial::ZEROS));
    let (layout, activation) = (WeightLayout::InputsFirst, InputActivation::Elementwise(Activation::Gelu));
    let linear = Arc::new(Linear { weight, layout, bias: None, activation });
    let parameters = Parameters::zeros(&Arc::new(table), &device, Category::Parameters).unwrap();
    let mut tape = Tape::new(&device, Recording::On, Precision::F32);
    let lent = tape.constant(random(&device, [3, 4], "x"));
    let y = tape.recorder(&parameters).apply(&linear, [&lent]).unwrap();
    tape.backward_input(&parameters, [(y.id(), random(&device, [3, 4], "dy"))]).unwrap();
    let values = |x: &Tensor| device.read::<f32>(x.view()).unwrap();
    assert_eq!(values(&tape.take_value(lent.id())), values(&random(&device, [3, 4], "x")));
}
