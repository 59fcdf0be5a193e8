use super::*;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::simd::LANES;
use crate::kernels::cpu::test_support::{
    DTYPES, Exact, assert_close, cases, cases_for_miri, narrow, not_finite, random, run, to_f64, widen,
};
use proptest::prelude::*;

/// Rows of logits, `deviation * normal`, in chunks of `width` columns.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    cols: usize,
    width: usize,
    deviation: f32,
    scale: f32,
}

const fn plain(rows: usize, cols: usize, width: usize) -> Case {
    Case { rows, cols, width, deviation: 3.0, scale: 0.5 }
}

/// Small cases first: chunk widths around the register width, and of one column; several tasks of rows; logits that hardly differ, are
/// subnormal, or differ by more than an exponential can represent.
const CASES: [Case; 14] = [
    plain(1, 1, 1),
    plain(0, 4, 4),
    plain(3, 5, 5),
    plain(2, 37, 10),
    plain(3, 37, 1),
    plain(3, 33, 32),
    plain(2, 64, 16),
    plain(2, 100, 63),
    plain(40, 1100, 1000),
    plain(2000, 20, 20),
    Case { deviation: 0.0, ..plain(2, 40, 16) },
    Case { deviation: 1e-40, scale: 65536.0, ..plain(2, 40, 16) },
    Case { deviation: 1e4, scale: 65536.0, ..plain(4, 70, 23) },
    Case { deviation: 1e37, ..plain(4, 70, 23) },
];

struct Inputs {
    case: Case,
    logits: Vec<f32>,
    targets: Vec<u32>,
}

impl Inputs {
    /// Targets are the first column, the last one, and some in between.
    fn new(case: Case) -> Self {
        let Case { rows, cols, deviation, .. } = case;
        let logits = random(rows * cols, "logits").iter().map(|x| deviation * x).collect();
        let target = |row: usize| if row == 1 { cols - 1 } else { row * 7919 % cols };
        Inputs { case, logits, targets: (0..rows).map(|row| target(row) as u32).collect() }
    }

    /// Returns the columns of a chunk, row by row.
    fn part(&self, chunk: VocabularyChunk) -> Vec<f32> {
        let rows = self.logits.chunks_exact(self.case.cols);
        rows.flat_map(|row| &row[chunk.first..][..chunk.len]).copied().collect()
    }

    /// Returns the rows' losses and the gradient.
    fn run<T: Element>(&self) -> [Vec<f32>; 2] {
        let Case { rows, cols, width, scale, .. } = self.case;
        let chunk = |first| VocabularyChunk { first, len: width.min(cols - first), vocabulary_start: 0 };
        let chunks: Vec<_> =
            (0..cols).step_by(width).map(|first| (chunk(first), self.part(chunk(first)))).collect();
        run(|cpu| {
            let mut statistics = vec![f32::NAN; rows * NUM_STATISTICS];
            for (chunk, logits) in &chunks {
                cpu.softmax_statistics(logits, &self.targets, *chunk, &mut statistics);
            }
            let mut gradient = vec![f32::NAN; rows * cols];
            for (chunk, logits) in &chunks {
                let mut part = narrow::<T>(&vec![f32::NAN; logits.len()]);
                cpu.cross_entropy_gradient(
                    logits,
                    &self.targets,
                    *chunk,
                    &statistics,
                    RowFactors { scale, weights: None },
                    &mut part,
                );
                for (gradient, part) in gradient.chunks_exact_mut(cols).zip(part.chunks_exact(chunk.len)) {
                    gradient[chunk.first..][..chunk.len].copy_from_slice(&widen(part));
                }
            }
            [statistics.chunks_exact(NUM_STATISTICS).map(row_loss).collect(), gradient]
        })
    }
}

/// The loss and the softmax of one row, by definition, in f64.
struct Row {
    loss: Exact,
    /// Softmax probability of each column, and the magnitude of its error.
    probabilities: Vec<(f64, f64)>,
}

impl Row {
    fn new(logits: &[f64], target: usize) -> Self {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
        // An absolute error of the argument is a relative error of its exponential.
        let with_error = |logit: &f64| {
            let share = (logit - max).exp() / sum;
            let amplified = if share == 0.0 { 0.0 } else { share * (1.0 + (logit - max).abs()) };
            (share, amplified)
        };
        let shares: Vec<(f64, f64)> = logits.iter().map(with_error).collect();
        let sum_error: f64 = shares.iter().map(|share| share.1).sum();
        let below = max - logits[target];
        Row {
            loss: Exact::new(below + sum.ln(), below + sum.ln().abs() + sum_error),
            probabilities: shares
                .into_iter()
                .map(|(share, error)| (share, error + share * sum_error))
                .collect(),
        }
    }
}

fn check<T: Element>(inputs: &Inputs) {
    let case = inputs.case;
    let Case { cols, width, .. } = case;
    let [losses, gradient] = inputs.run::<T>();
    let (logits, scale) = (to_f64(&inputs.logits), f64::from(case.scale));
    let rows = || {
        let rows = logits.chunks_exact(cols).zip(&inputs.targets);
        rows.map(|(logits, &target)| (Row::new(logits, target as usize), target as usize))
    };
    // Each chunk scales the sum over earlier chunks.
    let num_terms = cols + LANES * cols.div_ceil(width);
    assert_close::<f32>(&("loss", case), &losses, rows().map(|(row, _)| row.loss), num_terms);
    let exact = rows().flat_map(|(row, target)| {
        let gradient = move |(col, (share, error))| {
            let hit = if col == target { 1.0 } else { 0.0 };
            Exact::new(scale * (share - hit), scale * error)
        };
        row.probabilities.into_iter().enumerate().map(gradient)
    });
    assert_close::<T>(&("gradient", case), &gradient, exact, num_terms);
}

#[test]
fn losses_and_gradients_match_f64_however_the_vocabulary_is_cut() {
    for &case in cases_for_miri(&CASES, 4) {
        for dtype in DTYPES {
            with_element!(dtype => |T| check::<T>(&Inputs::new(case)));
        }
    }
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn rows_of_any_width_in_chunks_of_any_width(
        (rows, cols, width) in (1_usize..6, 1_usize..100, 1_usize..100),
        (range, scale) in (-10_i32..20, 0.001_f32..1000.0),
        vanishing in 0..4_usize,
        dtype in 0..DTYPES.len(),
    ) {
        let case = Case { rows, cols, width, deviation: 2.0_f32.powi(range), scale };
        let mut inputs = Inputs::new(case);
        // Sets `vanishing` out of every four runs of seven columns to negative infinity, so that their probability is 0. The target keeps
        // its logit.
        for (row, logits) in inputs.logits.chunks_exact_mut(cols).enumerate() {
            for (col, logit) in logits.iter_mut().enumerate() {
                if (col / 7 + row) % 4 < vanishing && col != inputs.targets[row] as usize {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        with_element!(DTYPES[dtype] => |T| check::<T>(&inputs));
    }
}

#[test]
fn a_chunk_that_vanishes_changes_nothing() {
    let mut inputs = Inputs::new(plain(3, 48, 16));
    inputs.targets = vec![20, 20, 47];
    for vanishing in [0..16, 16..20, 32..47] {
        for logits in inputs.logits.chunks_exact_mut(48) {
            logits[vanishing.clone()].fill(f32::NEG_INFINITY);
        }
        check::<f32>(&inputs);
    }
}

#[test]
fn non_finite_values_reach_their_row_only() {
    fn check<T: Element>(width: usize) {
        let case = plain(4, 37, width);
        let (row, cols) = (2, case.cols);
        let clean = Inputs::new(case).run::<T>();
        let whole_row: Vec<usize> = (row * cols..(row + 1) * cols).collect();
        let target = Inputs::new(case).targets[row] as usize;
        let with = |col: usize, value: f32| {
            let mut inputs = Inputs::new(case);
            inputs.logits[row * cols + col] = value;
            inputs.run::<T>()
        };
        for col in [0, 15, 16, 36, target] {
            // The softmax of a row with a logit of positive infinity is undefined, so the whole row becomes NaN.
            for value in [f32::NAN, f32::INFINITY] {
                let [losses, gradient] = with(col, value);
                assert!(losses[row].is_nan() && gradient[whole_row[0]..][..cols].iter().all(|x| x.is_nan()));
                assert_eq!(not_finite(&clean[0], &losses), [row]);
                assert_eq!(not_finite(&clean[1], &gradient), whole_row);
            }
        }
        let [losses, gradient] = with(target, f32::NEG_INFINITY);
        assert_eq!(losses[row], f32::INFINITY);
        assert_eq!(not_finite(&clean[0], &losses), [row]);
        assert_eq!(gradient[row * cols + target], -case.scale);
        assert!(gradient.iter().all(|value| value.is_finite()));
    }
    for &dtype in cases_for_miri(&DTYPES, 1) {
        for &width in cases_for_miri(&[16, 1, 37], 1) {
            with_element!(dtype => |T| check::<T>(width));
        }
    }
}

#[test]
fn a_row_without_any_finite_logit_is_nan() {
    for width in [1, 2, 5] {
        for value in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
            let mut inputs = Inputs::new(plain(2, 5, width));
            inputs.logits[..5].fill(value);
            let [losses, gradient] = inputs.run::<f32>();
            assert!(losses[0].is_nan() && gradient[..5].iter().all(|x| x.is_nan()), "{value}");
            assert!(losses[1].is_finite() && gradient[5..].iter().all(|x| x.is_finite()), "{value}");
        }
    }
}
