//! What a mixture of experts is made of.

use crate::{PRECISIONS, check, no_parameters, op, product};
use trireme_tensor::tape::{CombineRows, GroupRows, Recorder, Router, Softmax, SpreadRows, TopK};
use trireme_tensor::{Initial, Parameter, ParameterTable, Precision, Var};
use trireme_testkit::{GradientCheck, Input};

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

/// Places of the `k` largest elements of a row, the largest first.
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
        // Of positive numbers, as those of which there are sums.
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
            Ok(recorder.apply_many(op(TopK { k, normalizes }), [probabilities])?.next())
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

/// Rows go to the experts that were chosen, and their sums back.
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
                let mut groups = recorder.apply_many(op(GroupRows { num_groups }), [choices])?;
                let [_, order, places] = [(); 3].map(|()| groups.next().unwrap());
                let rows = recorder.apply(&SpreadRows, [x, &order, &places])?;
                let residual = inputs.get(3);
                let combined = [&rows, &order, &places, weights].into_iter().chain(residual);
                recorder.apply(&CombineRows, combined.collect::<Vec<&Var>>()).map(Some)
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
