//! Operations of a mixture of experts.

use crate::{PRECISIONS, check, no_parameters, op, product};
use std::sync::Arc;
use trireme_base::{Category, DType};
use trireme_tensor::tape::{
    Argument, BalanceLoss, Capacity, CombineRows, DroppedChoices, GroupRows, LatentHeads, PeakLoad,
    PermuteRows, Recorder, Recording, RotaryTable, Router, RouterEntropy, RouterZLoss, Sigmoid, Softmax,
    TopK,
};
use trireme_tensor::{
    BackendKind, DetachedOptions, Device, DeviceError, DeviceOptions, ExpertGroups, GradSink, GradTarget,
    Initial, LatentHeadShape, Parameter, ParameterSpan, ParameterTable, Parameters, Precision, RoutingRule,
    Tape, Tensor, Var,
};
use trireme_testkit::{GradientCheck, Input, Reference, TracedDevice, test_gpu};

#[test]
fn routers() {
    let (inputs, num_experts) = (6, 5);
    for rows in [4, 0] {
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        let weight = table.add(Parameter::matrix("weight", &[num_experts, inputs], Initial::ZEROS));
        let reference = |x: &[Vec<f64>], parameters: &[f64]| -> Vec<f64> {
            let transposed: Vec<f64> = (0..parameters.len())
                .map(|index| parameters[index % num_experts * inputs + index / num_experts])
                .collect();
            product(&x[0], &transposed, inputs, num_experts)
        };
        let x = Input::random(&[rows, inputs], "x");
        check(&op(Router { weight }), &table, &[x], &reference);
    }
}

/// Returns the indices of the `k` largest elements of a row, in descending order.
fn largest(row: &[f64], k: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..row.len()).collect();
    places.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    places.truncate(k);
    places
}

#[test]
fn largest_elements_of_rows() {
    for (shape, k, normalizes) in [(&[3_usize, 7][..], 2, true), (&[2, 2, 4], 4, false), (&[0, 3], 1, true)] {
        let cols = shape[shape.len() - 1];
        // Softmax makes scores positive, so that their sum can normalize them.
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let row = |row: &[f64]| -> Vec<f64> {
                let exps: Vec<f64> = row.iter().map(|x| x.exp()).collect();
                let sum: f64 = exps.iter().sum();
                let found: Vec<f64> = largest(row, k).iter().map(|&place| exps[place] / sum).collect();
                let norm: f64 = if normalizes { found.iter().sum() } else { 1.0 };
                found.iter().map(|value| value / norm).collect()
            };
            x[0].chunks(cols).flat_map(row).collect()
        };
        let run = |recorder: &mut Recorder<'_>, inputs: Vec<Var>| {
            let probabilities = recorder.apply(&Softmax, inputs)?;
            Ok(recorder
                .apply_many(
                    op(TopK { rule: RoutingRule { normalizes, ..RoutingRule::largest(k) }, bias: None }),
                    [probabilities],
                )?
                .next())
        };
        GradientCheck {
            name: format!("the {k} largest of {shape:?}"),
            run: &run,
            table: no_parameters(),
            precision: Precision::F32,
            inputs: vec![Input::random(shape, "x")],
            reference: &reference,
        }
        .check();
    }
}

/// Copies each row once per chosen expert, in the order of the experts, and combines the results.
#[test]
fn rows_by_expert_and_back() {
    let (cols, num_groups) = (600, 4);
    for (choices, k) in [(&[2_u32, 0, 1, 2, 0, 3][..], 2), (&[3, 3, 1], 1), (&[], 2)] {
        let num_tokens = choices.len() / k;
        for has_residual in [false, true] {
            let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
                let element = |index: usize| {
                    let token = index / cols;
                    let weights: f64 = x[2][token * k..(token + 1) * k].iter().sum();
                    x[0][index] * weights + x.get(3).map_or(0.0, |residual| residual[index])
                };
                (0..num_tokens * cols).map(element).collect()
            };
            let mut inputs = vec![
                Input::random(&[num_tokens, cols], "x"),
                Input::ids(&[num_tokens, k], choices),
                Input::random(&[num_tokens, k], "weights").in_f32(),
            ];
            if has_residual {
                inputs.push(Input::random(&[num_tokens, cols], "residual").in_f32());
            }
            let run = |recorder: &mut Recorder<'_>, inputs: Vec<Var>| {
                let [x, choices, weights] = [&inputs[0], &inputs[1], &inputs[2]];
                let mut groups =
                    recorder.apply_many(op(GroupRows { num_groups, capacity: None }), [choices])?;
                let [_, order, places] = [(); 3].map(|()| groups.next().unwrap());
                let rows = recorder.apply(&PermuteRows, [x, &order, &places])?;
                let residual = inputs.get(3);
                let combined = [&rows, &order, &places, weights].into_iter().chain(residual);
                recorder.apply(op(CombineRows::default()), combined.collect::<Vec<&Var>>()).map(Some)
            };
            for precision in PRECISIONS {
                GradientCheck {
                    name: format!("{choices:?} by expert and back in {precision}"),
                    run: &run,
                    table: no_parameters(),
                    precision,
                    inputs: inputs.clone(),
                    reference: &reference,
                }
                .check();
            }
        }
    }
}

/// Chooses experts of the best groups, by scores with a bias that does not affect weights.
#[test]
fn experts_of_the_best_groups() {
    let (rows, cols) = (5, 12);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let bias = table.add(Parameter::vector("bias", cols, Initial::ZEROS));
    let groups = Some(ExpertGroups { num_groups: 4, num_chosen: 2 });
    for (groups, normalizes) in [(groups, true), (None, false)] {
        let rule = RoutingRule { num_choices: 3, normalizes, scale: 2.5, groups };
        let chosen = |scores: &[f64], bias: &[f64]| -> Vec<usize> {
            let mut biased: Vec<f64> = scores.iter().zip(bias).map(|(score, bias)| score + bias).collect();
            if groups.is_some() {
                let group = |group: usize| {
                    let members = &biased[3 * group..3 * group + 3];
                    let best = largest(members, 2);
                    members[best[0]] + members[best[1]]
                };
                let kept = largest(&(0..4).map(group).collect::<Vec<f64>>(), 2);
                let is_kept = |place: usize| kept.contains(&(place / 3));
                (0..cols)
                    .filter(|&place| !is_kept(place))
                    .for_each(|place| biased[place] = f64::NEG_INFINITY);
            }
            largest(&biased, 3)
        };
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let reference = |x: &[Vec<f64>], bias: &[f64]| -> Vec<f64> {
            let row = |row: &[f64]| -> Vec<f64> {
                let scores: Vec<f64> = row.iter().map(|&x| sigmoid(x)).collect();
                let found: Vec<f64> = chosen(&scores, bias).iter().map(|&place| scores[place]).collect();
                let sum: f64 = if normalizes { found.iter().sum() } else { 1.0 };
                found.iter().map(|value| 2.5 * value / sum).collect()
            };
            x[0].chunks(cols).flat_map(row).collect()
        };
        // The gradient of the bias is not a derivative.
        let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
        let mut parameters = Parameters::zeros(&table.clone().into(), &device, Category::Parameters).unwrap();
        let biases: Vec<f32> = (0..cols).map(|place| (place * 5 % 7) as f32 * 0.1).collect();
        device.upload(&biases, parameters.flat_mut(0));
        let x: Vec<f32> = (0..rows * cols).map(|place| (place * 37 % 29) as f32 * 0.2 - 2.0).collect();
        let mut tape = Tape::new(&device, Recording::On, Precision::F32);
        let mut tensor = device.zeros([rows, cols].into(), DType::F32, Category::Activations).unwrap();
        device.upload(&x, tensor.view_mut());
        let x_var = tape.input(tensor);
        let x_id = x_var.id();
        let mut recorder = tape.recorder(&parameters);
        let scores = recorder.apply(&Arc::new(Sigmoid), [x_var]).unwrap();
        let mut outputs = recorder.apply_many(op(TopK { rule, bias: Some(bias) }), [scores]).unwrap();
        let (weights, ids) = (outputs.next().unwrap(), outputs.next().unwrap());
        let ids: Vec<u32> = device.read(tape.take_output(&ids).unwrap().view()).unwrap();
        let values: Vec<f32> = device.read(tape.take_output(&weights).unwrap().view()).unwrap();
        let exact = |x: &[f32]| -> Vec<f64> { x.iter().map(|&x| f64::from(x)).collect() };
        let expected = reference(&[exact(&x)], &exact(&biases));
        assert!(values.iter().zip(&expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6), "{values:?}");
        let dy: Vec<f32> = (0..rows * 3).map(|place| (place * 11 % 7) as f32 - 3.0).collect();
        let mut grad = device.zeros([rows, 3].into(), DType::F32, Category::Activations).unwrap();
        device.upload(&dy, grad.view_mut());
        let mut sink = BiasGrad { device: device.clone(), loads: Vec::new(), target: None };
        tape.backward(&parameters, Some((weights.id(), grad)), &mut sink).unwrap();
        let mut loads = vec![-(rows as f32 * 3.0 / cols as f32); cols];
        ids.iter().for_each(|&id| loads[id as usize] += 1.0);
        assert_eq!(sink.loads, loads);
        let found: Vec<f32> = device.read(tape.take_grad(x_id).unwrap().view()).unwrap();
        for (place, found) in found.iter().enumerate() {
            let loss = |by: f64| -> f64 {
                let mut x = exact(&x);
                x[place] += by;
                reference(&[x], &exact(&biases)).iter().zip(&dy).map(|(y, dy)| y * f64::from(*dy)).sum()
            };
            let slope = (loss(1e-5) - loss(-1e-5)) / 2e-5;
            assert!((f64::from(*found) - slope).abs() < 1e-4, "{place}: {found} instead of {slope}");
        }
    }
}

/// Stores the gradient of one parameter.
struct BiasGrad {
    device: Device,
    loads: Vec<f32>,
    target: Option<Tensor>,
}

impl GradSink for BiasGrad {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let target = self.device.zeros(span.shape, DType::F32, Category::Gradients)?;
        Ok(GradTarget { view: self.target.insert(target).view_mut(), accumulate: false })
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {
        self.loads = self.device.read(self.target.take().expect("it was written").view()).unwrap();
    }
}

#[test]
fn losses_that_balance_experts() {
    let (rows, num_experts) = (4, 3);
    let choices = [0_u32, 1, 0, 2, 0, 1, 1, 0];
    let softmax = |row: &[f64]| -> Vec<f64> {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(|x| x.exp() / sum).collect()
    };
    let balance = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
        let loads = (0..num_experts).map(|expert| x[1].iter().filter(|&&id| id == expert as f64).count());
        let scores: Vec<Vec<f64>> = x[0].chunks(num_experts).map(softmax).collect();
        let term = |(expert, load): (usize, usize)| {
            let mean = scores.iter().map(|scores| scores[expert]).sum::<f64>() / rows as f64;
            load as f64 / choices.len() as f64 * mean
        };
        vec![num_experts as f64 * loads.enumerate().map(term).sum::<f64>()]
    };
    let z_loss = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
        let squares = x[0].chunks(num_experts);
        let squares = squares.map(|row| row.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2));
        vec![squares.sum::<f64>() / rows as f64]
    };
    let entropy = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
        let of_row = |row| softmax(row).iter().map(|part| -part * part.ln()).sum::<f64>();
        vec![x[0].chunks(num_experts).map(of_row).sum::<f64>() / rows as f64]
    };
    let inputs = vec![Input::random(&[rows, num_experts], "x"), Input::ids(&[rows, 2], &choices)];
    type Apply<'a> = &'a dyn Fn(&mut Recorder<'_>, Var, Var) -> Result<(), DeviceError>;
    let apply_balance_loss: Apply<'_> = &|recorder, x, choices| {
        let scores = recorder.apply(&Softmax, [x])?;
        recorder.apply_loss(&BalanceLoss, (scores, choices), 1.0)
    };
    let apply_z_loss: Apply<'_> = &|recorder, x, _| recorder.apply_loss(&RouterZLoss, [x], 1.0);
    let cases: [(&str, Apply<'_>, &Reference<'_>); 2] =
        [("balance", apply_balance_loss, &balance), ("z", apply_z_loss, &z_loss)];
    for (name, apply, reference) in cases {
        GradientCheck {
            name: name.to_owned(),
            run: &|recorder, inputs| {
                let [x, choices] = inputs.try_into().unwrap();
                apply(recorder, x, choices)?;
                Ok(None)
            },
            table: no_parameters(),
            precision: Precision::F32,
            inputs: inputs.clone(),
            reference,
        }
        .check();
    }
    // Metrics without a gradient, and an auxiliary loss with a weighted gradient.
    let device = Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap();
    let parameters = Parameters::zeros(&no_parameters().into(), &device, Category::Parameters).unwrap();
    let x: Vec<f32> = (0..rows * num_experts).map(|place| (place * 7 % 5) as f32 * 0.3).collect();
    let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let with_ids = [exact, choices.map(f64::from).to_vec()];
    let run = |weight: f32| {
        let mut tape = Tape::new(&device, Recording::On, Precision::F32);
        let mut logits = device.zeros([rows, num_experts].into(), DType::F32, Category::Activations).unwrap();
        device.upload(&x, logits.view_mut());
        let mut ids = device.zeros([rows, 2].into(), DType::U32, Category::Activations).unwrap();
        device.upload(&choices, ids.view_mut());
        let (x, ids) = (tape.input(logits), tape.constant(ids));
        let place = x.id();
        let mut recorder = tape.recorder(&parameters);
        let scores = recorder.apply(&Softmax, [&x]).unwrap();
        recorder.apply_metric("entropy", &RouterEntropy, [&scores]).unwrap();
        recorder.apply_metric("peak", op(PeakLoad { num_experts }), [&ids]).unwrap();
        let groups = GroupRows { num_groups: num_experts, capacity: Some(Capacity { factor: 0.5 }) };
        let groups: Vec<Var> = recorder.apply_many(op(groups), [&ids]).unwrap().collect();
        recorder.apply_metric("drops", &DroppedChoices, [&groups[0], &groups[2]]).unwrap();
        recorder.apply_auxiliary_loss("balance", &BalanceLoss, (scores, ids), weight).unwrap();
        assert!(tape.loss().is_none());
        let means: Vec<f64> = tape
            .metrics()
            .iter()
            .map(|metric| metric.mean.read(&device).unwrap())
            .map(|mean| mean.sum / mean.num_rows as f64)
            .collect();
        tape.backward(
            &parameters,
            None,
            &mut BiasGrad { device: device.clone(), loads: Vec::new(), target: None },
        )
        .unwrap();
        let grad: Vec<f32> = device.read(tape.take_grad(place).unwrap().view()).unwrap();
        (means, grad)
    };
    let (means, grads) = run(0.5);
    let capacity = choices.len().div_ceil(2 * num_experts);
    let load = |expert: usize| choices.iter().filter(|&&id| id as usize == expert).count();
    let num_dropped: usize = (0..num_experts).map(|expert| load(expert).saturating_sub(capacity)).sum();
    let dropped = num_dropped as f64 / choices.len() as f64;
    assert!(dropped > 0.0);
    let expected = [entropy(&with_ids, &[])[0], 1.5, dropped, balance(&with_ids, &[])[0]];
    assert!(means.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{means:?}, {expected:?}");
    let (again, doubled) = run(1.0);
    assert_eq!(again, means, "the weight is that of the gradient");
    assert!(grads.iter().zip(&doubled).all(|(one, two)| 2.0 * one == *two) && grads[0] != 0.0);
}

#[test]
fn heads_of_latent_attention() {
    let (batch, seq_len) = (2, 3);
    for (num_heads, is_interleaved) in [(1, false), (3, true)] {
        let shape = LatentHeadShape { num_heads, nope_dim: 3, rotary_dim: 4, value_dim: 5, is_interleaved };
        let frequencies = [1.0, 0.3];
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            let rotated = |x: &[f64], position: usize| -> Vec<f64> {
                let pair = |index: usize| {
                    let places = if is_interleaved { [2 * index, 2 * index + 1] } else { [index, index + 2] };
                    let angle = position as f64 * frequencies[index];
                    let [a, b] = places.map(|place| x[place]);
                    [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
                };
                let pairs = [pair(0), pair(1)];
                vec![pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
            };
            let row = |row: usize| {
                let position = row % seq_len;
                let query = |head: usize| &x[0][(row * num_heads + head) * 7..][..7];
                let own = |head: usize| &x[1][(row * num_heads + head) * 8..][..8];
                let shared = &x[2][row * 4..][..4];
                let queries = (0..num_heads).flat_map(move |head| {
                    [query(head)[..3].to_vec(), rotated(&query(head)[3..], position)].concat()
                });
                let keys = (0..num_heads)
                    .flat_map(move |head| [own(head)[..3].to_vec(), rotated(shared, position)].concat());
                let values = (0..num_heads).flat_map(move |head| own(head)[3..].to_vec());
                queries.chain(keys).chain(values).collect::<Vec<f64>>()
            };
            (0..batch * seq_len).flat_map(row).collect()
        };
        let inputs = vec![
            Input::random(&[batch, seq_len, shape.query_cols()], "queries"),
            Input::random(&[batch, seq_len, shape.kv_cols()], "keys and values"),
            Input::random(&[batch, seq_len, 4], "shared"),
        ];
        for precision in PRECISIONS {
            GradientCheck {
                name: format!("{shape:?} in {precision}"),
                run: &|recorder, inputs| {
                    let rotary = RotaryTable::new(recorder.device(), seq_len, &frequencies, 1.0)?.into();
                    recorder.apply(op(LatentHeads { shape, rotary }), inputs).map(Some)
                },
                table: no_parameters(),
                precision,
                inputs: inputs.clone(),
                reference: &reference,
            }
            .check();
        }
    }
}

/// Router statistics over tokens and padding equal those over the tokens alone. Padding has no expert and no gradient.
#[test]
fn padding_does_not_count_in_statistics_of_routers() {
    for backend in
        [BackendKind::Cpu, BackendKind::Detached(DetachedOptions::default())].into_iter().chain(test_gpu())
    {
        let options = DeviceOptions { num_threads: 2, backend, ..DeviceOptions::default() };
        padding_does_not_count(&TracedDevice::open(options).unwrap());
    }
}

fn padding_does_not_count(device: &Device) {
    let (num_experts, num_tokens, num_padded) = (3, 4, 6);
    let biases = {
        let mut table = ParameterTable::default();
        table.begin_unit("router");
        let bias = table.add(Parameter::balance("bias", num_experts));
        (bias, Arc::new(table))
    };
    let parameters = Parameters::zeros(&biases.1, device, Category::Parameters).unwrap();
    let logits: Vec<f32> = (0..num_padded * num_experts).map(|place| (place * 7 % 5) as f32 * 0.3).collect();
    let run = |rows: usize, weights: Option<&[f32]>| {
        let mut tape = Tape::new(device, Recording::On, Precision::F32);
        let mut x = device.zeros([rows, num_experts].into(), DType::F32, Category::Activations).unwrap();
        device.upload(&logits[..rows * num_experts], x.view_mut());
        let x = tape.input(x);
        let place = x.id();
        let weights = weights.map(|weights| {
            let mut tensor = device.zeros([rows].into(), DType::F32, Category::Activations).unwrap();
            device.upload(weights, tensor.view_mut());
            tape.constant(tensor)
        });
        let weights = || weights.as_ref().map(Argument::from);
        let mut recorder = tape.recorder(&parameters);
        recorder.apply_auxiliary_loss("z", &RouterZLoss, (&x, weights()), 0.5).unwrap();
        let scores = recorder.apply(&Softmax, [x]).unwrap();
        let top_k = TopK { rule: RoutingRule::largest(2), bias: Some(biases.0) };
        let chosen: Vec<Var> = recorder.apply_many(op(top_k), (&scores, weights())).unwrap().collect();
        let [values, ids] = chosen.try_into().unwrap();
        recorder.apply_metric("peak", op(PeakLoad { num_experts }), [&ids]).unwrap();
        recorder.apply_metric("entropy", &RouterEntropy, (&scores, weights())).unwrap();
        recorder.apply_auxiliary_loss("balance", &BalanceLoss, (scores, &ids, weights()), 0.5).unwrap();
        let groups = GroupRows { num_groups: num_experts, capacity: Some(Capacity { factor: 0.5 }) };
        let groups: Vec<Var> = recorder.apply_many(op(groups), [ids]).unwrap().collect();
        let [starts, _, places] = groups.try_into().unwrap();
        recorder.apply_metric("drops", &DroppedChoices, (&starts, &places, weights())).unwrap();
        let means = tape.metrics().iter().map(|metric| metric.mean.read(device).unwrap());
        let means: Vec<f64> = means.map(|mean| mean.sum / mean.num_rows as f64).collect();
        let mut sink = BiasGrad { device: device.clone(), loads: Vec::new(), target: None };
        let mut dy = device.zeros([rows, 2].into(), DType::F32, Category::Activations).unwrap();
        device.upload(&vec![1.0_f32; rows * 2], dy.view_mut());
        tape.backward(&parameters, Some((values.id(), dy)), &mut sink).unwrap();
        let grad: Vec<f32> = device.read(tape.take_grad(place).unwrap().view()).unwrap();
        (means, grad, sink.loads)
    };
    let (means, grad, loads) = run(num_tokens, None);
    let weight = num_padded as f32 / num_tokens as f32;
    let weights: Vec<f32> = (0..num_padded).map(|row| if row < num_tokens { weight } else { 0.0 }).collect();
    let (padded_means, padded_grad, padded_loads) = run(num_padded, Some(&weights));
    let is_near = |a: f64, b: f64| (a - b).abs() < 1e-6;
    assert!(means.len() == 5 && means[4] > 0.0, "{means:?}");
    assert!(means.iter().zip(&padded_means).all(|(a, b)| is_near(*a, *b)), "{means:?} {padded_means:?}");
    let (tokens, padding) = padded_grad.split_at(num_tokens * num_experts);
    assert!(grad.iter().zip(tokens).all(|(a, b)| is_near((*a).into(), (*b).into())), "{grad:?} {tokens:?}");
    assert!(padding.iter().all(|grad| *grad == 0.0), "{padding:?}");
    assert_eq!(padded_loads, loads);
    let (unweighted, _, _) = run(num_padded, None);
    assert!(means.iter().zip(&unweighted).all(|(a, b)| !is_near(*a, *b)), "{means:?} {unweighted:?}");
}
