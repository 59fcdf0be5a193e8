//! Attention in f64, with all scores at once.

use super::*;

/// Outputs, logarithms of the sums of exponentials, and gradients.
pub(super) struct Reference {
    pub(super) y: Vec<Exact>,
    pub(super) log_sums: Vec<Exact>,
    pub(super) d_qkv: Vec<Exact>,
}

/// Settings of an attention operation.
pub(super) struct Settings {
    pub(super) shape: AttentionShape,
    pub(super) rule: AttentionRule,
    pub(super) padding_starts: Option<Vec<u32>>,
    pub(super) document_starts: Option<Vec<u32>>,
}

impl Settings {
    /// Returns the key positions that the query at `position` sees.
    fn seen(&self, sequence: usize, position: usize) -> Vec<usize> {
        let num_keys =
            self.padding_starts.as_ref().map_or(usize::MAX, |num_keys| num_keys[sequence] as usize);
        let AttentionRule { is_causal, window, .. } = self.rule;
        let row = sequence * self.shape.seq_len + position;
        let start = self.document_starts.as_ref().map_or(0, |starts| starts[row] as usize);
        let is_seen = |key: &usize| {
            let is_past = *key <= position && window.is_none_or(|window| position - key < window);
            *key < num_keys && (!is_causal || is_past && *key >= start)
        };
        (0..self.shape.seq_len).filter(is_seen).collect()
    }
}

/// One query and the keys that it sees.
struct Row {
    query: usize,
    head_dim: usize,
    /// Starts of the rows of keys and values in `qkv`.
    keys: Vec<usize>,
    values: Vec<usize>,
    weights: Vec<f64>,
    /// Derivatives of the scores with respect to the dot products of queries and keys.
    slopes: Vec<f64>,
    /// Bound on the slopes.
    steepness: f64,
    log_sum: f64,
    /// Largest sum of magnitudes of the terms of a score.
    score_magnitude: f64,
}

impl Row {
    fn new(qkv: &[f64], settings: &Settings, row: usize, head: usize) -> Self {
        let (shape, rule) = (settings.shape, settings.rule);
        let cols = shape.qkv_cols();
        let (sequence, position) = (row / shape.seq_len, row % shape.seq_len);
        let kv_head = head / (shape.num_heads / shape.num_kv_heads);
        let seen = settings.seen(sequence, position);
        let first = sequence * shape.seq_len;
        let place = |col: usize| seen.iter().map(|key| (first + key) * cols + col).collect::<Vec<usize>>();
        let query = row * cols + head * shape.head_dim;
        let first_value = (shape.num_heads + shape.num_kv_heads) * shape.head_dim;
        let keys = place((shape.num_heads + kv_head) * shape.head_dim);
        let values = place(first_value + kv_head * shape.value_dim);
        let scale = f64::from(rule.scale);
        let dot = |key: &usize, term: fn(f64) -> f64| {
            (0..shape.head_dim).map(|i| term(qkv[query + i] * qkv[key + i])).sum::<f64>() * scale
        };
        let cap = rule.soft_cap.map(f64::from);
        let soft_capped = |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh());
        let scores: Vec<f64> = keys.iter().map(|key| soft_capped(dot(key, |term| term))).collect();
        let slope = |score: &f64| cap.map_or(scale, |cap| scale * (1.0 - (score / cap).powi(2)));
        let slopes = scores.iter().map(slope).collect();
        let score_magnitude = keys.iter().map(|key| dot(key, f64::abs)).fold(0.0, f64::max);
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        let log_sum = largest + sum.ln();
        let weights = scores.iter().map(|score| (score - log_sum).exp()).collect();
        let head_dim = shape.head_dim;
        Row { query, head_dim, keys, values, weights, slopes, steepness: scale, log_sum, score_magnitude }
    }

    /// Returns the amplification from errors of scores to errors of weights: an absolute error of an argument is a relative error of its
    /// exponential, and weights are quotients of two exponentials.
    fn amplified(&self) -> f64 {
        1.0 + 2.0 * self.score_magnitude
    }

    /// Returns element `i` of the output.
    fn output(&self, qkv: &[f64], i: usize) -> Exact {
        let terms = || self.weights.iter().zip(&self.values).map(|(weight, value)| weight * qkv[value + i]);
        let (value, magnitude) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        Exact {
            value,
            f32_magnitude: magnitude * self.amplified(),
            element_magnitude: value.abs() + magnitude,
        }
    }

    /// Adds the row's contribution to the gradients.
    fn backward(&self, qkv: &[f64], y: &[Exact], dy: &[f64], d_qkv: &mut [Exact]) {
        let mut add = |index: usize, value: f64, magnitude: f64| {
            d_qkv[index].value += value;
            d_qkv[index].f32_magnitude += magnitude * self.amplified();
            d_qkv[index].element_magnitude += magnitude;
        };
        let delta: f64 = y.iter().zip(dy).map(|(y, dy)| y.value * dy).sum();
        // The output is rounded before it is used here.
        let delta_magnitude: f64 = y.iter().zip(dy).map(|(y, dy)| y.element_magnitude * dy.abs()).sum();
        let places = self.keys.iter().zip(&self.values);
        for ((&weight, &slope), (&key, &value)) in self.weights.iter().zip(&self.slopes).zip(places) {
            let terms = || dy.iter().enumerate().map(|(i, dy)| dy * qkv[value + i]);
            let d_score = weight * (terms().sum::<f64>() - delta) * slope;
            let magnitude = weight * (terms().map(f64::abs).sum::<f64>() + delta_magnitude) * self.steepness;
            for i in 0..self.head_dim {
                add(self.query + i, d_score * qkv[key + i], magnitude * qkv[key + i].abs());
                add(key + i, d_score * qkv[self.query + i], magnitude * qkv[self.query + i].abs());
            }
            dy.iter().enumerate().for_each(|(i, dy)| add(value + i, weight * dy, weight * dy.abs()));
        }
    }
}

impl Reference {
    pub(super) fn new(qkv: &[f64], dy: &[f64], settings: &Settings) -> Self {
        let shape = settings.shape;
        let dim = shape.value_dim;
        let mut y = vec![Exact::default(); dy.len()];
        let mut log_sums = vec![Exact::default(); shape.rows() * shape.num_heads];
        let mut d_qkv = vec![Exact::default(); qkv.len()];
        for row in 0..shape.rows() {
            for head in 0..shape.num_heads {
                let place = row * shape.output_cols() + head * dim;
                let (y, dy) = (&mut y[place..place + dim], &dy[place..place + dim]);
                let found = Row::new(qkv, settings, row, head);
                y.iter_mut().enumerate().for_each(|(i, y)| *y = found.output(qkv, i));
                let (sequence, position) = (row / shape.seq_len, row % shape.seq_len);
                log_sums[(sequence * shape.num_heads + head) * shape.seq_len + position] =
                    Exact::new(found.log_sum, 1.0 + found.score_magnitude);
                found.backward(qkv, y, dy, &mut d_qkv);
            }
        }
        // The sums are rounded at the end.
        d_qkv.iter_mut().for_each(|exact| exact.element_magnitude += exact.value.abs());
        Reference { y, log_sums, d_qkv }
    }

    fn loss(qkv: &[f64], dy: &[f64], settings: &Settings) -> f64 {
        Reference::new(qkv, dy, settings).y.iter().zip(dy).map(|(y, dy)| y.value * dy).sum()
    }
}

#[test]
fn reference_gradients_match_finite_differences() {
    let shape = shape(2, 4, 4, 2, 3);
    let qkv = to_f64(&random(shape.rows() * shape.qkv_cols(), "qkv"));
    let dy = to_f64(&random(shape.rows() * shape.output_cols(), "dy"));
    for rule in rules(3) {
        let settings = Settings { shape, rule, padding_starts: Some(vec![4, 3]), document_starts: None };
        let exact = Reference::new(&qkv, &dy, &settings);
        for (index, exact) in exact.d_qkv.iter().enumerate() {
            let shifted = |by: f64| {
                let mut qkv = qkv.clone();
                qkv[index] += by;
                Reference::loss(&qkv, &dy, &settings)
            };
            let slope = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
            assert!((exact.value - slope).abs() < 1e-8, "{index}: {} instead of {slope}", exact.value);
        }
    }
}
