mod blocks;
mod reference;

use super::*;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::simd::SimdLevel;
use crate::kernels::cpu::test_support::{
    DTYPES, Exact, assert_close, cases, cases_for_miri, narrow, not_finite, random, run, run_at_levels,
    to_f64, widen,
};
use proptest::prelude::*;
use reference::{Reference, Settings};
use trireme_base::{AxisRank, Bf16, DType, F16};

const fn shape(
    batch: usize,
    seq_len: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
) -> AttentionShape {
    AttentionShape {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim: head_dim,
        num_keys: seq_len,
    }
}

/// Small cases first: around a block of queries, more than a block of keys, odd and common head dims, grouped heads.
const SHAPES: [AttentionShape; 11] = [
    shape(1, 1, 1, 1, 1),
    shape(2, 3, 2, 1, 3),
    shape(2, 1, 3, 3, 64),
    shape(1, 63, 2, 1, 7),
    shape(1, 64, 2, 2, 64),
    shape(2, 65, 3, 1, 5),
    shape(2, 70, 6, 2, 1),
    AttentionShape { value_dim: 5, ..shape(2, 70, 4, 2, 8) },
    AttentionShape { value_dim: 66, ..shape(1, 65, 2, 2, 3) },
    shape(1, 257, 2, 1, 100),
    shape(2, 300, 4, 2, 6),
];

/// Inputs of an attention operation, and the gradient of its output.
struct Inputs<T> {
    shape: AttentionShape,
    rule: AttentionRule,
    padding_starts: Option<Vec<u32>>,
    document_starts: Option<Vec<u32>>,
    qkv: Vec<T>,
    dy: Vec<T>,
}

impl<T: Element> Inputs<T> {
    fn new(shape: AttentionShape) -> Self {
        let qkv = narrow(&random(shape.rows() * shape.qkv_cols(), "qkv"));
        let dy = narrow(&random(shape.rows() * shape.output_cols(), "dy"));
        let rule = AttentionRule::causal(shape.head_dim);
        Inputs { shape, rule, padding_starts: None, document_starts: None, qkv, dy }
    }

    fn exact(&self) -> Reference {
        Reference::new(&to_f64(&self.qkv), &to_f64(&self.dy), &self.settings())
    }

    fn settings(&self) -> Settings {
        let (padding_starts, document_starts) = (self.padding_starts.clone(), self.document_starts.clone());
        Settings { shape: self.shape, rule: self.rule, padding_starts, document_starts }
    }

    fn views<'a>(
        &'a self,
        queries: &'a [T],
        keys_values: Option<&'a [T]>,
    ) -> AttentionInputs<&'a [T], &'a [u32]> {
        let (padding_starts, document_starts) =
            (self.padding_starts.as_deref(), self.document_starts.as_deref());
        AttentionInputs { queries, keys_values, padding_starts, document_starts }
    }

    /// Returns the output, its logarithms of sums, and the gradient.
    fn run_on(&self, cpu: &Cpu) -> [Vec<f32>; 3] {
        let Inputs { shape, qkv, dy, .. } = self;
        let inputs = self.views(qkv, None);
        let scope = AttentionScope::whole(*shape, self.rule);
        let mut y = narrow::<T>(&vec![f32::NAN; dy.len()]);
        let mut log_sums = vec![f32::NAN; shape.rows() * shape.num_heads];
        let mut scratch = vec![f32::NAN; cpu.attention_scratch::<T>(*shape, 0, false)];
        let results =
            ForwardResults { y: RowDestination::Elements(SharedSlice::new(&mut y)), log_sums: &mut log_sums };
        cpu.attention(inputs, *shape, scope, results, &mut scratch);
        let mut d_qkv = narrow::<T>(&vec![f32::NAN; qkv.len()]);
        let mut scratch = vec![f32::NAN; cpu.attention_scratch::<T>(*shape, 0, true)];
        let queries = RowDestination::Elements(SharedSlice::new(&mut d_qkv));
        let grads = AttentionGrads { queries, keys_values: None };
        let output = AttentionOutput { y: &y[..], log_sums: &log_sums[..], dy: &dy[..] };
        cpu.attention_backward(inputs, *shape, scope, output, grads, &mut scratch);
        [widen(&y), log_sums, widen(&d_qkv)]
    }

    /// Like `run_on`, with rows of keys and values separate from the queries.
    fn run_with_separate_keys_on(&self, cpu: &Cpu) -> [Vec<f32>; 3] {
        let Inputs { shape, qkv, dy, .. } = self;
        let rows = || qkv.chunks_exact(shape.qkv_cols());
        let queries: Vec<T> = rows().flat_map(|row| &row[..shape.query_cols()]).copied().collect();
        let keys_values: Vec<T> = rows().flat_map(|row| &row[shape.query_cols()..]).copied().collect();
        let inputs = self.views(&queries, Some(&keys_values));
        let scope = AttentionScope::whole(*shape, self.rule);
        let mut y = narrow::<T>(&vec![f32::NAN; dy.len()]);
        let mut log_sums = vec![f32::NAN; shape.rows() * shape.num_heads];
        let mut scratch = vec![f32::NAN; cpu.attention_scratch::<T>(*shape, 0, true)];
        let results =
            ForwardResults { y: RowDestination::Elements(SharedSlice::new(&mut y)), log_sums: &mut log_sums };
        cpu.attention(inputs, *shape, scope, results, &mut scratch);
        let [mut d_queries, mut d_keys_values] =
            [&queries, &keys_values].map(|x| narrow::<T>(&vec![f32::NAN; x.len()]));
        let grads = AttentionGrads {
            queries: RowDestination::Elements(SharedSlice::new(&mut d_queries)),
            keys_values: Some(RowDestination::Elements(SharedSlice::new(&mut d_keys_values))),
        };
        let output = AttentionOutput { y: &y[..], log_sums: &log_sums[..], dy: &dy[..] };
        cpu.attention_backward(inputs, *shape, scope, output, grads, &mut scratch);
        let (queries, keys_values) = (widen(&d_queries), widen(&d_keys_values));
        let rows = queries.chunks_exact(shape.query_cols()).zip(keys_values.chunks_exact(shape.kv_cols()));
        let d_qkv = rows.flat_map(|(queries, keys_values)| [queries, keys_values].concat()).collect();
        [widen(&y), log_sums, d_qkv]
    }

    fn run(&self) -> Vec<(SimdLevel, [Vec<f32>; 3])> {
        run_at_levels(|cpu| self.run_on(cpu))
    }
}

fn check<T: Element>(shape: AttentionShape) {
    check_inputs(&Inputs::<T>::new(shape));
}

fn check_inputs<T: Element>(inputs: &Inputs<T>) {
    check_results(inputs, inputs.run());
}

fn check_results<T: Element>(inputs: &Inputs<T>, found: Vec<(SimdLevel, [Vec<f32>; 3])>) {
    let (exact, shape) = (inputs.exact(), inputs.shape);
    let num_terms = shape.seq_len * shape.heads_per_kv_head() + shape.head_dim;
    for (simd_level, [y, log_sums, d_qkv]) in found {
        assert_close::<T>(&(simd_level, "output", shape), &y, exact.y.iter().copied(), num_terms);
        assert_close::<f32>(
            &(simd_level, "sums", shape),
            &log_sums,
            exact.log_sums.iter().copied(),
            num_terms,
        );
        assert_close::<T>(&(simd_level, "gradient", shape), &d_qkv, exact.d_qkv.iter().copied(), num_terms);
    }
}

#[test]
fn outputs_and_gradients_match_f64() {
    for &shape in cases_for_miri(&SHAPES, 2) {
        for dtype in DTYPES {
            with_element!(dtype => |T| check::<T>(shape));
        }
    }
}

/// Returns rules that cover all options.
fn rules(head_dim: usize) -> impl Iterator<Item = AttentionRule> {
    let causal = AttentionRule::causal(head_dim);
    let windows = [1, 5, 64, 300].map(|window| AttentionRule { window: Some(window), ..causal });
    let full = AttentionRule { scale: 0.3, ..AttentionRule::full(head_dim) };
    let capped =
        [AttentionRule { soft_cap: Some(0.7), ..full }, AttentionRule { soft_cap: Some(2.5), ..windows[1] }];
    windows.into_iter().chain([full]).chain(capped)
}

/// Returns the dtypes to test for a shape: only one for long sequences, to save time. Blocks of keys do not depend on the dtype.
fn dtypes(shape: AttentionShape) -> &'static [DType] {
    if shape.seq_len < 500 { &DTYPES } else { &[DType::Bf16] }
}

#[test]
fn every_rule_matches_f64_with_padding_and_without() {
    let all = [shape(2, 3, 2, 1, 3), shape(2, 70, 2, 1, 5), shape(2, 600, 1, 1, 4)];
    for &shape in cases_for_miri(&all, 1) {
        for rule in rules(shape.head_dim) {
            for padding_starts in [None, Some(vec![1, 2]), Some(vec![shape.num_keys as u32, 67])] {
                for &dtype in dtypes(shape) {
                    with_element!(dtype => |T| {
                        let padding_starts = padding_starts.clone();
                        check_inputs(&Inputs { rule, padding_starts, ..Inputs::<T>::new(shape) });
                    });
                }
            }
        }
    }
}

#[test]
fn queries_see_their_document_alone() {
    for dtype in DTYPES {
        with_element!(dtype => |T| {
            let mut inputs = Inputs::<T>::new(shape(2, 70, 2, 1, 5));
            // Documents of 3, 1, 40 and 26 positions in one sequence; one document in the other.
            let starts = [(0, 3), (3, 1), (4, 40), (44, 26), (0, 70)];
            let starts = starts.iter().flat_map(|&(start, len)| std::iter::repeat_n(start, len));
            inputs.document_starts = Some(starts.collect());
            check_inputs(&inputs);
        });
    }
}

#[test]
fn separate_keys_and_values_give_the_same_bits() {
    for rule in rules(5) {
        let inputs = Inputs { rule, ..Inputs::<Bf16>::new(shape(2, 70, 4, 2, 5)) };
        let apart = run_at_levels(|cpu| inputs.run_with_separate_keys_on(cpu));
        for ((simd_level, together), (_, apart)) in inputs.run().into_iter().zip(apart) {
            assert_eq!(together, apart, "{simd_level} {rule:?}");
        }
    }
}

#[test]
fn a_query_that_sees_nothing_has_an_output_and_gradients_of_zero() {
    let mut inputs = Inputs::<f32>::new(shape(2, 70, 2, 1, 5));
    (inputs.rule, inputs.padding_starts) = (AttentionRule::full(5), Some(vec![0, 70]));
    for (simd_level, [y, _, d_qkv]) in inputs.run() {
        let (first, second) = y.split_at(y.len() / 2);
        assert!(first.iter().all(|y| *y == 0.0) && second.iter().all(|y| *y != 0.0), "{simd_level}");
        let (first, second) = d_qkv.split_at(d_qkv.len() / 2);
        assert!(first.iter().all(|d| *d == 0.0) && second.iter().all(|d| d.is_finite()), "{simd_level}");
    }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn outputs_and_gradients_of_any_shape(
        (batch, seq_len, head_dim) in (1_usize..3, 1_usize..if cfg!(miri) { 5 } else { 80 }, 1_usize..24),
        (num_kv_heads, group) in (1_usize..3, 1_usize..3),
        dtype in 0..DTYPES.len(),
    ) {
        let shape = shape(batch, seq_len, num_kv_heads * group, num_kv_heads, head_dim);
        with_element!(DTYPES[dtype] => |T| check::<T>(shape));
    }
}

#[test]
fn the_gradient_is_linear_to_the_last_bit() {
    let shape = shape(1, 33, 2, 1, 5);
    fn check<T: Element>(shape: AttentionShape, factor: f32) {
        let small = Inputs::<T>::new(shape);
        let dy = small.dy.iter().map(|dy| T::from_f32(dy.to_f32() * factor)).collect();
        let large = Inputs { dy, qkv: small.qkv.clone(), ..Inputs::new(shape) };
        for ((simd_level, [_, _, small]), (_, [_, _, large])) in small.run().into_iter().zip(large.run()) {
            let scaled: Vec<f32> = small.iter().map(|x| x * factor).collect();
            assert_eq!(scaled, large, "{simd_level}");
        }
    }
    for factor in [2.0_f32.powi(16), 2.0_f32.powi(90)] {
        check::<f32>(shape, factor);
        check::<Bf16>(shape, factor);
    }
}

#[test]
fn a_score_far_above_the_others_takes_all() {
    fn check<T: Element>(size: f32) {
        let mut inputs = Inputs::<T>::new(shape(1, 20, 1, 1, 4));
        let shape = inputs.shape;
        for (index, x) in inputs.qkv.iter_mut().enumerate() {
            if index % shape.qkv_cols() < shape.value_col(0) {
                *x = T::from_f32(x.to_f32() * size);
            }
        }
        let exact = to_f64(&inputs.qkv);
        let part = |row: usize, col: usize| &exact[row * shape.qkv_cols() + col..][..shape.head_dim];
        for (simd_level, [y, log_sums, d_qkv]) in inputs.run() {
            for row in 0..shape.seq_len {
                let score = |key: &usize| -> f64 {
                    part(row, 0).iter().zip(part(*key, shape.key_col(0))).map(|(q, k)| q * k).sum()
                };
                let winner = (0..=row).max_by(|a, b| score(a).total_cmp(&score(b))).unwrap();
                let expected = part(winner, shape.value_col(0));
                let found = to_f64(&y[row * shape.head_dim..][..shape.head_dim]);
                assert_eq!(found, expected, "{simd_level}: row {row} is value {winner}");
            }
            assert!(log_sums.iter().chain(&d_qkv).all(|x| x.is_finite()), "{simd_level}");
        }
    }
    check::<f32>(1e12);
    check::<Bf16>(1e12);
    check::<F16>(200.0);
}

/// The elements that a non-finite value may reach, and those that it must reach.
struct Reach<'a> {
    may: &'a dyn Fn(Place) -> bool,
    must: &'a dyn Fn(Place) -> bool,
}

/// An element of the output, or of the gradient of the queries, keys or values.
#[derive(Clone, Copy, Debug)]
struct Place {
    sequence: usize,
    position: usize,
    kind: Kind,
    kv_head: usize,
    head: usize,
    col: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Output,
    Query,
    Key,
    Value,
}

impl Place {
    fn of_output(index: usize, shape: AttentionShape) -> Self {
        let (row, col) = (index / shape.output_cols(), index % shape.output_cols());
        let head = col / shape.value_dim;
        Place { kind: Kind::Output, col: col % shape.value_dim, ..Place::of_row(row, head, shape) }
    }

    fn of_gradient(index: usize, shape: AttentionShape) -> Self {
        let (row, col) = (index / shape.qkv_cols(), index % shape.qkv_cols());
        let per_kv_head = shape.heads_per_kv_head();
        let (kind, head, col) = match col {
            col if col < shape.key_col(0) => (Kind::Query, col / shape.head_dim, col % shape.head_dim),
            col if col < shape.value_col(0) => {
                let col = col - shape.key_col(0);
                (Kind::Key, col / shape.head_dim * per_kv_head, col % shape.head_dim)
            }
            col => {
                let col = col - shape.value_col(0);
                (Kind::Value, col / shape.value_dim * per_kv_head, col % shape.value_dim)
            }
        };
        Place { kind, col, ..Place::of_row(row, head, shape) }
    }

    fn of_row(row: usize, head: usize, shape: AttentionShape) -> Self {
        let (sequence, position) = (row / shape.seq_len, row % shape.seq_len);
        let kv_head = head / shape.heads_per_kv_head();
        Place { sequence, position, kind: Kind::Output, kv_head, head, col: 0 }
    }

    /// Returns the index into `qkv`.
    fn in_qkv(self, shape: AttentionShape) -> usize {
        let start = match self.kind {
            Kind::Query => self.head * shape.head_dim,
            Kind::Key => shape.key_col(self.kv_head),
            Kind::Value => shape.value_col(self.kv_head),
            Kind::Output => unreachable!("an output lies elsewhere"),
        };
        (self.sequence * shape.seq_len + self.position) * shape.qkv_cols() + start + self.col
    }

    fn in_output(self, shape: AttentionShape) -> usize {
        let row = self.sequence * shape.seq_len + self.position;
        row * shape.output_cols() + self.head * shape.value_dim + self.col
    }
}

impl Reach<'_> {
    fn check(
        &self,
        clean: &[f32],
        found: &[f32],
        place_of: impl Fn(usize) -> Place,
        what: &dyn std::fmt::Debug,
    ) {
        let may = (0..clean.len()).filter(|&index| (self.may)(place_of(index)));
        let mut untouched = found.to_vec();
        for index in may {
            let place = place_of(index);
            assert!(!(self.must)(place) || !found[index].is_finite(), "{what:?} is hidden from {place:?}");
            untouched[index] = clean[index];
        }
        assert!(not_finite(clean, &untouched).is_empty(), "{what:?} reaches what does not depend on it");
    }
}

#[test]
fn non_finite_values_stay_in_their_sequence_and_group_of_heads() {
    let shape = shape(2, 70, 4, 2, 5);
    fn check<T: Element>(shape: AttentionShape, value: f32) {
        let inputs = Inputs::<T>::new(shape);
        let clean = inputs.run();
        let base = Place { sequence: 0, position: 66, kind: Kind::Query, kv_head: 1, head: 2, col: 3 };
        for kind in [Kind::Query, Kind::Key, Kind::Value, Kind::Output] {
            let culprit = Place { kind, ..base };
            let (qkv, dy) = (inputs.qkv.clone(), inputs.dy.clone());
            let mut spoilt = Inputs { qkv, dy, ..Inputs::new(shape) };
            match kind {
                Kind::Output => spoilt.dy[culprit.in_output(shape)] = T::from_f32(value),
                _ => spoilt.qkv[culprit.in_qkv(shape)] = T::from_f32(value),
            }
            for ((simd_level, clean), (_, found)) in clean.iter().zip(spoilt.run()) {
                let what = (simd_level, T::DTYPE, kind, value);
                let in_group = |at: Place| at.sequence == culprit.sequence && at.kv_head == culprit.kv_head;
                let later = |at: Place| in_group(at) && at.position >= culprit.position;
                let own_row =
                    |at: Place| in_group(at) && at.position == culprit.position && at.head == culprit.head;
                let nowhere = |_: Place| false;
                // A masked value has weight 0 within its block of keys, and 0 times a non-finite value is NaN.
                let same_col = |at: Place| in_group(at) && at.col == culprit.col;
                let reach = match kind {
                    Kind::Query => Reach { may: &own_row, must: &own_row },
                    // A score of negative infinity has weight 0.
                    Kind::Key if value.is_nan() => Reach { may: &later, must: &later },
                    Kind::Key => Reach { may: &later, must: &nowhere },
                    Kind::Value => Reach { may: &same_col, must: &|at| later(at) && same_col(at) },
                    Kind::Output => Reach { may: &nowhere, must: &nowhere },
                };
                reach.check(&clean[0], &found[0], |index| Place::of_output(index, shape), &what);
                let sees = |at: Place| in_group(at) && at.position <= culprit.position;
                let must = |at: Place| match (kind, at.kind) {
                    (Kind::Query, Kind::Query) => own_row(at),
                    (Kind::Query, _) | (Kind::Output, Kind::Key) => sees(at),
                    (Kind::Output, Kind::Query) => own_row(at),
                    (Kind::Output, _) => sees(at) && same_col(at),
                    (Kind::Key | Kind::Value, Kind::Query) => later(at) && value.is_nan(),
                    (Kind::Key | Kind::Value, _) => false,
                };
                let reach = Reach { may: &in_group, must: &must };
                reach.check(&clean[2], &found[2], |index| Place::of_gradient(index, shape), &what);
            }
        }
    }
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for dtype in DTYPES {
            with_element!(dtype => |T| check::<T>(shape, value));
        }
    }
}

#[test]
fn a_cache_continues_where_it_stopped() {
    let shape = if cfg!(miri) { shape(2, 5, 2, 1, 3) } else { shape(2, 300, 4, 2, 6) };
    let shape = AttentionShape { value_dim: 4, ..shape };
    for rule in [AttentionRule::causal(shape.head_dim)].into_iter().chain(rules(shape.head_dim)) {
        if rule.is_causal {
            check_cache(shape, rule);
        }
    }
}

/// Attention in parts with a KV cache equals attention over the full sequence.
fn check_cache(shape: AttentionShape, rule: AttentionRule) {
    let inputs = Inputs { rule, ..Inputs::<f32>::new(shape) };
    let (exact, qkv) = (inputs.exact().y, inputs.qkv);
    let capacity = shape.seq_len + 3;
    let parts = [shape.seq_len - 4, 1, 3];
    let outputs = run_at_levels(|cpu| {
        let mut keys = vec![f32::NAN; shape.batch * capacity * shape.key_cols()];
        let (mut values, mut len) = (vec![f32::NAN; shape.batch * capacity * shape.value_cols()], 0);
        parts.map(|part| {
            let part_shape = AttentionShape { seq_len: part, num_keys: part, ..shape };
            let rows = |sequence: usize| {
                let start = (sequence * shape.seq_len + len) * shape.qkv_cols();
                qkv[start..start + part * shape.qkv_cols()].iter().copied()
            };
            let rows: Vec<f32> = (0..shape.batch).flat_map(rows).collect();
            let mut y = vec![f32::NAN; part_shape.rows() * shape.output_cols()];
            let mut log_sums = vec![f32::NAN; part_shape.rows() * shape.num_heads];
            let mut cache = LayerKvCache { keys: &mut keys, values: &mut values, capacity, len };
            let mut scratch = vec![f32::NAN; cpu.attention_scratch::<f32>(part_shape, len, false)];
            let results = ForwardResults {
                y: RowDestination::Elements(SharedSlice::new(&mut y)),
                log_sums: &mut log_sums,
            };
            cpu.attention_cached(&rows, part_shape, rule, &mut cache, results, &mut scratch);
            len += part;
            y
        })
    });
    for (simd_level, outputs) in outputs {
        let mut first = 0;
        for (part, y) in parts.iter().zip(&outputs) {
            let exact_rows = (0..shape.batch).flat_map(|sequence| {
                let start = (sequence * shape.seq_len + first) * shape.output_cols();
                exact[start..start + part * shape.output_cols()].iter().copied()
            });
            assert_close::<f32>(
                &(simd_level, "rows from", first),
                y,
                exact_rows,
                shape.seq_len + shape.head_dim,
            );
            first += part;
        }
    }
}

#[test]
fn rotations_match_f64_and_are_undone_by_their_inverse() {
    fn check<T: Element>(shape: AttentionShape) {
        let (cols, half) = (shape.qkv_cols(), shape.head_dim / 2);
        let qkv = Inputs::<T>::new(shape).qkv;
        let angles = random((shape.seq_len + 7) * half, "angles");
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            angles.iter().map(|angle| angle.sin_cos()).map(|(s, c)| (c, s)).unzip();
        let rotary = Rotary { cos: &cos[..], sin: &sin[..], positions: Positions::run(7, shape.seq_len) };
        let [turned, back] = run(|cpu| {
            [false, true].map(|inverse| {
                let mut qkv = qkv.clone();
                cpu.rotary(&mut qkv, shape, rotary, inverse);
                widen(&qkv)
            })
        });
        let x = to_f64(&qkv);
        for (found, direction) in [(turned, 1.0), (back, -1.0)] {
            let exact = (0..x.len()).map(|index| {
                let (row, col, i) = (index / cols, index % cols, index % cols % shape.head_dim);
                if col >= shape.value_col(0) || i >= 2 * half {
                    return Exact { value: x[index], ..Exact::default() };
                }
                let angle = (7 + row % shape.seq_len) * half + i % half;
                let (cos, sin) = (f64::from(cos[angle]), direction * f64::from(sin[angle]));
                let (along, across) = if i < half {
                    (x[index] * cos, -x[index + half] * sin)
                } else {
                    (x[index] * cos, x[index - half] * sin)
                };
                Exact::new(along + across, along.abs() + across.abs())
            });
            assert_close::<T>(&("rotated", shape, direction), &found, exact, 0);
        }
    }
    // The last shape takes more than one task.
    for &shape in cases_for_miri(
        &[shape(2, 3, 2, 1, 2), shape(2, 9, 3, 3, 5), shape(1, 4, 1, 1, 1), shape(2, 65, 4, 2, 64)],
        3,
    ) {
        for dtype in DTYPES {
            with_element!(dtype => |T| check::<T>(shape));
        }
    }
}
