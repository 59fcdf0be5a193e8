//! Attention over more queries and keys than a kernel reads at a time, forward and backward.

use super::{FLOATS, assert_near, ids, narrow, on_all_near, random, rounded, rounding, wide};
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::tape::{Attention, Recording};
use trireme_tensor::{
    AttentionRule, Category, Device, DeviceOptions, ParameterTable, Parameters, Precision, Tape,
};
use trireme_testkit::TracedDevice;

#[derive(Debug, Clone, Copy)]
struct Case {
    rule: AttentionRule,
    /// Number of sequences, and of queries and keys of each.
    batch: usize,
    lens: [usize; 2],
    /// Numbers of query heads and of key heads, and the dims of heads.
    heads: [usize; 2],
    dims: [usize; 2],
    /// Number of keys of each sequence that are not padding.
    padding_starts: Option<[u32; 2]>,
    /// Number of positions per document.
    document_len: Option<usize>,
}

impl Case {
    fn query_cols(&self) -> usize {
        self.heads[0] * self.dims[0]
    }

    fn output_cols(&self) -> usize {
        self.heads[0] * self.dims[1]
    }

    fn kv_cols(&self) -> usize {
        self.heads[1] * (self.dims[0] + self.dims[1])
    }

    fn document_start(&self, position: usize) -> usize {
        self.document_len.map_or(0, |len| position / len * len)
    }

    fn is_visible(&self, sequence: usize, query: usize, key: usize) -> bool {
        let is_hidden = self.rule.is_causal
            && (key > query
                || key < self.document_start(query)
                || self.rule.window.is_some_and(|window| key + window <= query));
        !is_hidden && self.padding_starts.is_none_or(|starts| key < starts[sequence] as usize)
    }
}

/// Returns the output and the gradients of queries and of keys and values by their definition.
fn definition(case: Case, queries: &[f64], keys_values: &[f64], dy: &[f64]) -> [Vec<f64>; 3] {
    let Case { rule, batch, lens: [num_queries, num_keys], heads: [num_heads, num_kv_heads], .. } = case;
    let [dim, value_dim] = case.dims;
    let mut found = [vec![0.0; dy.len()], vec![0.0; queries.len()], vec![0.0; keys_values.len()]];
    let [y, d_queries, d_keys_values] = &mut found;
    let (scale, soft_cap) = (f64::from(rule.scale), rule.soft_cap.map(f64::from));
    for sequence in 0..batch {
        for (query, head) in (0..num_queries).flat_map(|query| (0..num_heads).map(move |head| (query, head)))
        {
            let row = sequence * num_queries + query;
            let kv_head = head / (num_heads / num_kv_heads);
            let query_start = row * case.query_cols() + head * dim;
            let output_start = row * case.output_cols() + head * value_dim;
            let key_start = |key: usize| (sequence * num_keys + key) * case.kv_cols() + kv_head * dim;
            let value_start = |key: usize| {
                (sequence * num_keys + key) * case.kv_cols() + num_kv_heads * dim + kv_head * value_dim
            };
            let own = &queries[query_start..][..dim];
            let dot =
                |left: &[f64], right: &[f64]| -> f64 { left.iter().zip(right).map(|(l, r)| l * r).sum() };
            let keys: Vec<usize> =
                (0..num_keys).filter(|&key| case.is_visible(sequence, query, key)).collect();
            // Each score, and its derivative by the product of query and key.
            let scores: Vec<[f64; 2]> = keys
                .iter()
                .map(|&key| {
                    let scaled = dot(own, &keys_values[key_start(key)..][..dim]) * scale;
                    soft_cap.map_or([scaled, scale], |cap| {
                        let t = (scaled / cap).tanh();
                        [cap * t, scale * (1.0 - t * t)]
                    })
                })
                .collect();
            let sum: f64 = scores.iter().map(|[score, _]| score.exp()).sum();
            let weights: Vec<f64> = scores.iter().map(|[score, _]| score.exp() / sum).collect();
            for (&key, weight) in keys.iter().zip(&weights) {
                for col in 0..value_dim {
                    y[output_start + col] += weight * keys_values[value_start(key) + col];
                }
            }
            let own_dy = &dy[output_start..][..value_dim];
            let delta = dot(&y[output_start..][..value_dim], own_dy);
            for ((&key, weight), [_, slope]) in keys.iter().zip(&weights).zip(&scores) {
                let d_weight = dot(own_dy, &keys_values[value_start(key)..][..value_dim]);
                let d_product = weight * (d_weight - delta) * slope;
                for col in 0..dim {
                    d_queries[query_start + col] += d_product * keys_values[key_start(key) + col];
                    d_keys_values[key_start(key) + col] += d_product * own[col];
                }
                for col in 0..value_dim {
                    d_keys_values[value_start(key) + col] += weight * own_dy[col];
                }
            }
        }
    }
    found
}

/// Returns what [`definition`] does, as a device computes it.
fn computed(device: &Device, case: Case, dtype: DType, values: [&[f32]; 3]) -> [Vec<f32>; 3] {
    let Case { batch, lens: [num_queries, num_keys], heads, dims, rule, .. } = case;
    let mut table = ParameterTable::default();
    table.begin_unit("none");
    let parameters = Parameters::zeros(&Arc::new(table), device, Category::Parameters).unwrap();
    let attention = Arc::new(Attention::with_value_dim(heads, dims, rule));
    let mut tape = Tape::new(device, Recording::On, Precision::F32);
    let [queries, keys_values, dy] = values;
    let queries = tape.input(narrow(device, queries, [batch, num_queries, case.query_cols()], dtype));
    let keys_values = tape.input(narrow(device, keys_values, [batch, num_keys, case.kv_cols()], dtype));
    let input_ids = [queries.id(), keys_values.id()];
    let mut inputs = vec![queries, keys_values];
    if let Some(starts) = case.padding_starts {
        inputs.push(tape.constant(ids(device, &starts[..batch])));
    }
    if case.document_len.is_some() {
        let start = |row: usize| case.document_start(row % num_queries) as u32;
        let starts: Vec<u32> = (0..batch * num_queries).map(start).collect();
        inputs.push(tape.constant(ids(device, &starts).reshaped([batch, num_queries].into())));
    }
    let y = tape.recorder(&parameters).apply(&attention, inputs).unwrap();
    let id = y.id();
    let output = wide(device, &tape.take_output(&y).unwrap());
    let dy = narrow(device, dy, [batch, num_queries, case.output_cols()], dtype);
    tape.backward_input(&parameters, [(id, dy)]).unwrap();
    let [d_queries, d_keys_values] = input_ids.map(|id| wide(device, &tape.take_grad(id).unwrap()));
    [output, d_queries, d_keys_values]
}

#[test]
fn attention_over_many_tiles_has_the_gradient_of_its_definition() {
    let causal = AttentionRule::causal(20);
    let plain = Case {
        rule: causal,
        batch: 1,
        lens: [150; 2],
        heads: [2; 2],
        dims: [20; 2],
        padding_starts: None,
        document_len: None,
    };
    let capped = AttentionRule { window: Some(40), soft_cap: Some(2.0), ..causal };
    let cases = [
        (&FLOATS[..], Case { heads: [4, 2], ..plain }),
        (&FLOATS[..], Case { rule: capped, dims: [32; 2], ..plain }),
        (&FLOATS[..2], Case { document_len: Some(70), heads: [3, 1], dims: [24; 2], ..plain }),
        (
            &FLOATS[..2],
            Case {
                rule: AttentionRule::full(20),
                batch: 2,
                lens: [9, 150],
                padding_starts: Some([101, 1]),
                dims: [40, 20],
                ..plain
            },
        ),
        // The gradients of keys and of values are computed on their own.
        (&FLOATS[1..2], Case { dims: [192, 130], lens: [80; 2], heads: [1; 2], ..plain }),
    ];
    for (dtypes, case) in cases {
        let rows = |len: usize, cols: usize, name: &str| random(case.batch * len * cols, name);
        let queries = rows(case.lens[0], case.query_cols(), "queries");
        let keys_values = rows(case.lens[1], case.kv_cols(), "keys and values");
        let dy = rows(case.lens[0], case.output_cols(), "dy");
        for &dtype in dtypes {
            // Outputs, weights and the gradients of scores are rounded to the dtype.
            let bound = if dtype == DType::F32 { 1e-5 } else { 8.0 * rounding(dtype) };
            let values = [&queries, &keys_values, &dy].map(|values| &values[..]);
            let found = on_all_near(bound, |device| computed(device, case, dtype, values));
            let device = TracedDevice::open(DeviceOptions::default()).unwrap();
            let exact = values.map(|values| -> Vec<f64> {
                wide(&device, &rounded(&device, values, dtype)).into_iter().map(f64::from).collect()
            });
            let expected = definition(case, &exact[0], &exact[1], &exact[2]);
            for ((found, expected), what) in
                found.iter().zip(expected).zip(["y", "d_queries", "d_keys_values"])
            {
                assert_near(found, expected, bound, what);
            }
        }
    }
}
