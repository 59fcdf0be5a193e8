//! Fused layers.

use crate::{check, gelu, no_parameters, normal_distribution, op, product};
use trireme_tensor::tape::{
    Attention, Embedding, GroupedLinear, InputActivation, Linear, LossHead, MatMul, Norm, Op, WeightLayout,
};
use trireme_tensor::{Activation, AttentionRule, Initial, Parameter, ParameterTable};
use trireme_testkit::Input;

#[test]
fn linear_layers() {
    let (inputs, outputs) = (5, 7);
    for (rows, layout, activation, has_bias, has_residual) in [
        (3, WeightLayout::InputsFirst, InputActivation::Identity, false, false),
        (1, WeightLayout::OutputsFirst, InputActivation::Identity, true, true),
        (4, WeightLayout::InputsFirst, InputActivation::Elementwise(Activation::Gelu), true, true),
        (2, WeightLayout::OutputsFirst, InputActivation::Gated(Activation::Silu), true, false),
        (2, WeightLayout::InputsFirst, InputActivation::Gated(Activation::Silu), false, true),
        (3, WeightLayout::InputsFirst, InputActivation::Elementwise(Activation::ExactGelu), true, false),
        (2, WeightLayout::OutputsFirst, InputActivation::Gated(Activation::Gelu), false, true),
    ] {
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        let is_inputs_first = layout == WeightLayout::InputsFirst;
        let shape = if is_inputs_first { [inputs, outputs] } else { [outputs, inputs] };
        let weight = table.add(Parameter::matrix("weight", &shape, Initial::ZEROS));
        let bias = has_bias.then(|| table.add(Parameter::vector("bias", outputs, Initial::ZEROS)));
        let reference = move |x: &[Vec<f64>], parameters: &[f64]| {
            let (weight, bias) = parameters.split_at(inputs * outputs);
            let activated = activated(activation, &x[0], inputs);
            let transposed: Vec<f64> =
                (0..weight.len()).map(|index| weight[index % outputs * inputs + index / outputs]).collect();
            let weight = if is_inputs_first { weight } else { &transposed };
            let mut y = product(&activated, weight, inputs, outputs);
            for (index, y) in y.iter_mut().enumerate() {
                *y += bias.get(index % outputs).copied().unwrap_or_default();
                *y += x.get(1).map_or(0.0, |residual| residual[index]);
            }
            y
        };
        let cols = if matches!(activation, InputActivation::Gated(_)) { 2 * inputs } else { inputs };
        let mut values = vec![Input::random(&[rows, cols], "x")];
        if has_residual {
            values.push(Input::random(&[rows, outputs], "residual").in_f32());
        }
        check(&op(Linear { weight, layout, bias, activation }), &table, &values, &reference);
    }
}

/// Applies a layer's activation to rows; the results have `inputs` elements.
fn activated(activation: InputActivation, x: &[f64], inputs: usize) -> Vec<f64> {
    let curve = |activation: Activation, x: f64| match activation {
        Activation::Gelu => gelu(x),
        Activation::ExactGelu => x * normal_distribution(x),
        Activation::Silu => x / (1.0 + (-x).exp()),
    };
    match activation {
        InputActivation::Identity => x.to_vec(),
        InputActivation::Elementwise(activation) => x.iter().map(|&x| curve(activation, x)).collect(),
        InputActivation::Gated(activation) => {
            let row = |row: &[f64]| -> Vec<f64> {
                let (gate, up) = row.split_at(inputs);
                gate.iter().zip(up).map(|(gate, up)| curve(activation, *gate) * up).collect()
            };
            x.chunks(2 * inputs).flat_map(row).collect()
        }
    }
}

#[test]
fn layers_of_groups_of_rows() {
    let (inputs, outputs) = (5, 7);
    for (starts, activation) in [
        (&[0_usize, 2, 2, 5][..], InputActivation::Identity),
        (&[0, 4], InputActivation::Elementwise(Activation::ExactGelu)),
        (&[0, 0, 3, 4], InputActivation::Gated(Activation::Silu)),
        (&[0, 0, 0], InputActivation::Identity),
    ] {
        let (num_groups, rows) = (starts.len() - 1, *starts.last().unwrap());
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        let part = |group| Parameter::matrix(format!("weight.{group}"), &[outputs, inputs], Initial::ZEROS);
        let weight = table.add_stacked((0..num_groups).map(part));
        let reference = |x: &[Vec<f64>], parameters: &[f64]| -> Vec<f64> {
            let x = activated(activation, &x[0], inputs);
            let of_group = |group: usize| {
                let weight = &parameters[group * outputs * inputs..][..outputs * inputs];
                let transposed: Vec<f64> = (0..weight.len())
                    .map(|index| weight[index % outputs * inputs + index / outputs])
                    .collect();
                product(&x[starts[group] * inputs..starts[group + 1] * inputs], &transposed, inputs, outputs)
            };
            (0..num_groups).flat_map(of_group).collect()
        };
        let cols = if matches!(activation, InputActivation::Gated(_)) { 2 * inputs } else { inputs };
        let of_groups: Vec<u32> = starts.iter().map(|&start| start as u32).collect();
        let values = [Input::random(&[rows, cols], "x"), Input::ids(&[num_groups + 1], &of_groups)];
        check(&op(GroupedLinear { weight, num_groups, activation }), &table, &values, &reference);
    }
}

#[test]
fn products_of_two_values() {
    let (inner, cols) = (5, 4);
    for (left, right) in [
        (&[3_usize, inner][..], &[inner, cols][..]),
        (&[0, inner], &[inner, cols]),
        (&[2, 3, inner], &[inner, cols]),
        (&[2, 3, inner], &[2, inner, cols]),
        (&[2, 1, 3, inner], &[2, 1, inner, cols]),
    ] {
        let reference = |x: &[Vec<f64>], _: &[f64]| -> Vec<f64> {
            if right.len() == 2 {
                return product(&x[0], &x[1], inner, cols);
            }
            let matrices = x[0].chunks(3 * inner).zip(x[1].chunks(inner * cols));
            matrices.flat_map(|(left, right)| product(left, right, inner, cols)).collect()
        };
        let inputs = [Input::random(left, "left"), Input::random(right, "right")];
        check(&Op::from(&MatMul), &no_parameters(), &inputs, &reference);
    }
}

#[test]
fn normalizations() {
    for (rows, cols, is_centered, weight_offset) in
        [(3, 7, true, 0.0), (2, 33, false, 0.0), (1, 16, true, 0.0), (3, 9, false, 1.0)]
    {
        let mut table = ParameterTable::default();
        table.begin_unit("unit");
        let weight = table.add(Parameter::vector("weight", cols, Initial::ZEROS));
        let bias = is_centered.then(|| table.add(Parameter::vector("bias", cols, Initial::ZEROS)));
        let epsilon = 1e-3;
        let reference = move |x: &[Vec<f64>], parameters: &[f64]| {
            let (weight, bias) = parameters.split_at(cols);
            let row = |row: &[f64]| -> Vec<f64> {
                let mean = if is_centered { row.iter().sum::<f64>() / cols as f64 } else { 0.0 };
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
                let scale = 1.0 / (variance + f64::from(epsilon)).sqrt();
                let element = |col: usize| {
                    let weight = weight[col] + f64::from(weight_offset);
                    (row[col] - mean) * scale * weight + bias.get(col).copied().unwrap_or_default()
                };
                (0..cols).map(element).collect()
            };
            x[0].chunks(cols).flat_map(row).collect()
        };
        let norm = op(Norm { weight, bias, weight_offset, epsilon, is_centered });
        // Inputs in the precision of activations, and in f32 as in the residual stream.
        let x = Input::random(&[rows, cols], "x");
        check(&norm, &table, std::slice::from_ref(&x), &reference);
        check(&norm, &table, &[x.in_f32()], &reference);
    }
}

#[test]
fn embeddings() {
    let (vocabulary, positions, cols) = (11, 6, 5);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let tokens = table.add(Parameter::embedding("tokens", &[vocabulary, cols], Initial::ZEROS));
    let positions = Some(table.add(Parameter::embedding("positions", &[positions, cols], Initial::ZEROS)));
    let ids: Vec<u32> = vec![3, 0, 3, 10, 1, 3, 0, 0];
    let reference = move |inputs: &[Vec<f64>], parameters: &[f64]| {
        let (tokens, positions) = parameters.split_at(vocabulary * cols);
        let row = |(index, &id): (usize, &f64)| -> Vec<f64> {
            (0..cols)
                .map(|col| tokens[id as usize * cols + col] + positions[index % 4 * cols + col])
                .collect()
        };
        inputs[0].iter().enumerate().flat_map(row).collect()
    };
    let ids = Input::ids(&[2, 4], &ids);
    check(&op(Embedding { tokens, positions }), &table, &[ids], &reference);
}

#[test]
fn causal_attention() {
    for (batch, seq_len, num_heads, num_kv_heads, head_dim) in
        [(1, 1, 1, 1, 2), (2, 5, 2, 2, 4), (1, 4, 4, 2, 6)]
    {
        let reference = move |inputs: &[Vec<f64>], _: &[f64]| {
            let kv_cols = num_kv_heads * head_dim;
            let cols = num_heads * head_dim + 2 * kv_cols;
            let qkv = |sequence: usize, position: usize, col: usize| {
                inputs[0][(sequence * seq_len + position) * cols + col]
            };
            let mut y = vec![0.0; batch * seq_len * num_heads * head_dim];
            for (row, y) in y.chunks_mut(head_dim).enumerate() {
                let (head, position) = (row % num_heads, row / num_heads % seq_len);
                let sequence = row / num_heads / seq_len;
                let kv_head = head / (num_heads / num_kv_heads);
                let key = num_heads * head_dim + kv_head * head_dim;
                let score = |other: usize| -> f64 {
                    let products = (0..head_dim).map(|col| {
                        qkv(sequence, position, head * head_dim + col) * qkv(sequence, other, key + col)
                    });
                    (products.sum::<f64>() / (head_dim as f64).sqrt()).exp()
                };
                let scores: Vec<f64> = (0..=position).map(score).collect();
                for (col, y) in y.iter_mut().enumerate() {
                    let value = |other: usize| qkv(sequence, other, key + kv_cols + col);
                    *y = scores.iter().enumerate().map(|(other, score)| score * value(other)).sum::<f64>()
                        / scores.iter().sum::<f64>();
                }
            }
            y
        };
        let cols = (num_heads + 2 * num_kv_heads) * head_dim;
        let attention =
            op(Attention::new(num_heads, num_kv_heads, head_dim, AttentionRule::causal(head_dim)));
        check(&attention, &no_parameters(), &[Input::random(&[batch, seq_len, cols], "qkv")], &reference);
    }
}

#[test]
fn attention_with_separate_keys_padding_and_soft_cap() {
    let (batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim) = (2, 3, 5, 4, 2, 3);
    let rule = AttentionRule { scale: 0.4, soft_cap: Some(1.5), ..AttentionRule::full(head_dim) };
    let reference = move |inputs: &[Vec<f64>], _: &[f64]| {
        let cols = num_heads * head_dim;
        let mut y = vec![0.0; batch * num_queries * cols];
        for (index, y) in y.chunks_mut(head_dim).enumerate() {
            let (row, head) = (index / num_heads, index % num_heads);
            let sequence = row / num_queries;
            let query = &inputs[0][row * cols + head * head_dim..][..head_dim];
            let kv_cols = num_kv_heads * head_dim;
            let part = |key: usize, first: usize| {
                let start = (sequence * num_keys + key) * 2 * kv_cols + first;
                &inputs[1][start + head / (num_heads / num_kv_heads) * head_dim..][..head_dim]
            };
            let seen = inputs[2][sequence] as usize;
            let weight = |key: usize| -> f64 {
                let product: f64 = query.iter().zip(part(key, 0)).map(|(q, k)| q * k).sum();
                (1.5 * (product * 0.4 / 1.5).tanh()).exp()
            };
            let weights: Vec<f64> = (0..seen).map(weight).collect();
            for (col, y) in y.iter_mut().enumerate() {
                let sum: f64 = (0..seen).map(|key| weights[key] * part(key, kv_cols)[col]).sum();
                *y = sum / weights.iter().sum::<f64>();
            }
        }
        y
    };
    let attention = Attention::new(num_heads, num_kv_heads, head_dim, rule);
    let inputs = [
        Input::random(&[batch, num_queries, num_heads * head_dim], "queries"),
        Input::random(&[batch, num_keys, 2 * num_kv_heads * head_dim], "keys and values"),
        Input::ids(&[batch], &[5, 2]),
    ];
    check(&op(attention), &no_parameters(), &inputs, &reference);
}

#[test]
fn losses_over_a_vocabulary() {
    let (rows, cols, vocabulary) = (4, 6, 9);
    let mut table = ParameterTable::default();
    table.begin_unit("unit");
    let weight = table.add(Parameter::matrix("weight", &[vocabulary, cols], Initial::ZEROS));
    for soft_cap in [None, Some(0.8)] {
        let reference = move |inputs: &[Vec<f64>], weight: &[f64]| {
            let row = |(row, &target): (usize, &f64)| -> f64 {
                let x = &inputs[0][row * cols..(row + 1) * cols];
                let logit = |token: usize| -> f64 {
                    let logit = x.iter().zip(&weight[token * cols..]).map(|(x, weight)| x * weight).sum();
                    soft_cap.map_or(logit, |cap| f64::from(cap) * (logit / f64::from(cap)).tanh())
                };
                (0..vocabulary).map(|token| logit(token).exp()).sum::<f64>().ln() - logit(target as usize)
            };
            let weight = |index: usize| inputs.get(2).map_or(1.0, |weights| weights[index]);
            let losses =
                inputs[1].iter().enumerate().map(|(index, target)| weight(index) * row((index, target)));
            vec![losses.sum::<f64>() / rows as f64]
        };
        let targets = || Input::ids(&[rows], &[8, 0, 3, 3]);
        let inputs = [Input::random(&[rows, cols], "x"), targets()];
        check(&op(LossHead { weight, soft_cap }), &table, &inputs, &reference);
        let weights = Input::values(&[rows], &[2.0, 0.0, 1.0, 0.5]).in_f32().constant();
        let inputs = [Input::random(&[rows, cols], "x"), targets(), weights];
        check(&op(LossHead { weight, soft_cap }), &table, &inputs, &reference);
    }
}
