//! Attention with a KV cache, with and without rotary embeddings.

use super::{assert_near, on_all_near, random, shaped};
use std::sync::Arc;
use trireme_tensor::tape::{Attention, KeyValueCache, Recording, RotaryTable};
use trireme_tensor::{AttentionRule, Category, Device, ParameterTable, Parameters, Precision, Tape};

const SEQ_LEN: usize = 7;
const HEADS: usize = 2;
const DIM: usize = 4;
const COLS: usize = 3 * HEADS * DIM;

/// Angles per position of the pairs of a rotary head.
const FREQUENCIES: [f64; DIM / 2] = [1.0, 0.25];

/// Computes causal attention of one sequence by its definition (rotary embeddings: Su et al., "RoFormer", 2021, section 3.4.2).
fn attention(qkv: &[f64], is_rotary: bool) -> Vec<f64> {
    let element = |row: usize, part: usize, head: usize, col: usize| {
        let at = |col: usize| qkv[row * COLS + part * HEADS * DIM + head * DIM + col];
        if part == 2 || !is_rotary {
            return at(col);
        }
        // Pairs consist of one element from each half of a head.
        let (sin, cos) = (row as f64 * FREQUENCIES[col % 2]).sin_cos();
        if col < DIM / 2 { at(col) * cos - at(col + 2) * sin } else { at(col) * cos + at(col - 2) * sin }
    };
    let mut y = vec![0.0; SEQ_LEN * HEADS * DIM];
    for row in 0..SEQ_LEN {
        for head in 0..HEADS {
            let score = |key: usize| -> f64 {
                let product = (0..DIM).map(|col| element(row, 0, head, col) * element(key, 1, head, col));
                product.sum::<f64>() / (DIM as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=row).map(|key| score(key).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for col in 0..DIM {
                let values = weights.iter().enumerate();
                let mean: f64 = values.map(|(key, weight)| weight / sum * element(key, 2, head, col)).sum();
                y[(row * HEADS + head) * DIM + col] = mean;
            }
        }
    }
    y
}

fn operation(device: &Device, is_rotary: bool) -> Attention {
    let rotary = is_rotary.then(|| Arc::new(RotaryTable::new(device, SEQ_LEN, &FREQUENCIES, 1.0).unwrap()));
    let rule = AttentionRule::causal(DIM);
    Attention::new(HEADS, HEADS, DIM, rule).with_rotary(rotary)
}

fn no_parameters(device: &Device) -> Parameters {
    let mut table = ParameterTable::default();
    table.begin_unit("none");
    Parameters::zeros(&Arc::new(table), device, Category::Parameters).unwrap()
}

#[test]
fn cached_attention_of_chunks_equals_attention_of_the_sequence() {
    let qkv = random(SEQ_LEN * COLS, "qkv");
    for is_rotary in [false, true] {
        let [found] = on_all_near(1e-5, |device| {
            let (attention, parameters) = (operation(device, is_rotary), no_parameters(device));
            let mut cache = KeyValueCache::new(device, 1, SEQ_LEN, &attention).unwrap();
            let mut found = Vec::new();
            for rows in [0..3, 3..4, 4..7] {
                let mut tape = Tape::new(device, Recording::Off, Precision::F32);
                let values = &qkv[rows.start * COLS..rows.end * COLS];
                let part = tape.input(shaped(device, values, [1, rows.len(), COLS]));
                let y = tape.recorder(&parameters).attention_cached(&attention, part, &mut cache).unwrap();
                found.extend(device.read::<f32>(tape.take_output(&y).unwrap().view()).unwrap());
            }
            [found]
        });
        let qkv: Vec<f64> = qkv.iter().map(|&x| f64::from(x)).collect();
        assert_near(&found, attention(&qkv, is_rotary), 1e-5, "element");
    }
}

#[test]
fn rotary_attention_has_the_gradient_of_its_definition() {
    let (qkv, dy) = (random(SEQ_LEN * COLS, "qkv"), random(SEQ_LEN * HEADS * DIM, "dy"));
    let [found] = on_all_near(1e-5, |device| {
        let (attention, parameters) = (Arc::new(operation(device, true)), no_parameters(device));
        let mut tape = Tape::new(device, Recording::On, Precision::F32);
        let input = tape.input(shaped(device, &qkv, [1, SEQ_LEN, COLS]));
        let id = input.id();
        let y = tape.recorder(&parameters).apply(&attention, [input]).unwrap();
        tape.take_output(&y).unwrap();
        tape.backward_input(&parameters, [(y.id(), shaped(device, &dy, [1, SEQ_LEN, HEADS * DIM]))]).unwrap();
        [device.read::<f32>(tape.take_grad(id).unwrap().view()).unwrap()]
    });
    let mut x: Vec<f64> = qkv.iter().map(|&x| f64::from(x)).collect();
    let product =
        |x: &[f64]| -> f64 { attention(x, true).iter().zip(&dy).map(|(y, &dy)| y * f64::from(dy)).sum() };
    let gradient: Vec<f64> = (0..x.len())
        .map(|index| {
            let value = x[index];
            let [above, below] = [1e-5, -1e-5].map(|step| {
                x[index] = value + step;
                product(&x)
            });
            x[index] = value;
            (above - below) / 2e-5
        })
        .collect();
    assert_near(&found, gradient, 1e-5, "gradient");
}
