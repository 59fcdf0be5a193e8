//! Attention after positions that were read before.

use super::{assert_near, on_all, random, shaped};
use std::sync::Arc;
use trireme_tensor::tape::{Attention, KeyValueCache, Recording};
use trireme_tensor::{AttentionRule, Category, ParameterTable, Parameters, Precision, Tape};

const SEQ_LEN: usize = 7;
const HEADS: usize = 2;
const DIM: usize = 4;
const COLS: usize = 3 * HEADS * DIM;

/// Causal attention of one sequence, by its definition.
fn attention(qkv: &[f32]) -> Vec<f64> {
    let element = |row: usize, part: usize, head: usize, col: usize| {
        f64::from(qkv[row * COLS + part * HEADS * DIM + head * DIM + col])
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

#[test]
fn a_sequence_that_is_read_in_parts_is_attended_to_as_a_whole() {
    let qkv = random(SEQ_LEN * COLS, "qkv");
    let found = on_all(|device| {
        let attention = Attention {
            num_heads: HEADS,
            num_kv_heads: HEADS,
            head_dim: DIM,
            rule: AttentionRule::causal(DIM),
            is_padded: false,
            rotary: None,
        };
        let mut table = ParameterTable::default();
        table.begin_unit("none");
        let parameters = Parameters::zeros(&Arc::new(table), device, Category::Parameters).unwrap();
        let mut cache = KeyValueCache::new(device, 1, SEQ_LEN, HEADS * DIM).unwrap();
        let mut found = Vec::new();
        for rows in [0..3, 3..4, 4..7] {
            let mut tape = Tape::new(device, Recording::Off, Precision::F32);
            let values = &qkv[rows.start * COLS..rows.end * COLS];
            let part = tape.input(shaped(device, values, [1, rows.len(), COLS]));
            let y = tape.recorder(&parameters).attention_cached(&attention, part, &mut cache).unwrap();
            found.extend(device.read::<f32>(tape.take_output(&y).unwrap().view()));
        }
        found
    });
    assert_near(&found, attention(&qkv), 1e-5, "element");
}
