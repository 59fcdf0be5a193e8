use super::*;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::test_support::{
    DTYPES, Exact, assert_close, cases, cases_for_miri, narrow, not_finite, random, run, to_f64, widen,
};
use proptest::prelude::*;

const EPSILON: f32 = 1e-5;

/// Values of `dx` and `d_weight` before they are accumulated.
const BEFORE: f32 = 0.5;

/// Rows of `mean + deviation * normal`.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    cols: usize,
    is_centered: bool,
    mean: f32,
    deviation: f32,
}

const fn plain(rows: usize, cols: usize, is_centered: bool) -> Case {
    Case { rows, cols, is_centered, mean: 0.0, deviation: 1.0 }
}

/// Small cases first: several tasks of rows, several blocks of columns; values that are far from zero, hardly differ, are subnormal or
/// have large squares.
const CASES: [Case; 14] = [
    plain(1, 1, false),
    plain(1, 1, true),
    plain(0, 3, true),
    plain(3, 17, false),
    plain(3, 70, true),
    plain(520, 33, true),
    plain(520, 33, false),
    plain(2, 257, false),
    Case { mean: 30.0, ..plain(2, 100, true) },
    Case { mean: -30.0, ..plain(2, 100, false) },
    Case { deviation: 0.0, ..plain(2, 40, true) },
    Case { deviation: 0.0, ..plain(2, 40, false) },
    Case { deviation: 1e-40, ..plain(2, 40, true) },
    Case { deviation: 1e17, ..plain(2, 40, true) },
];

struct Inputs<T> {
    case: Case,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<T>,
}

impl<T: Element> Inputs<T> {
    fn new(case: Case) -> Self {
        let Case { rows, cols, mean, deviation, .. } = case;
        let x = random(rows * cols, "x").iter().map(|x| mean + deviation * x).collect();
        let dy = narrow(&random(rows * cols, "dy"));
        Inputs { case, x, weight: random(cols, "weight"), bias: random(cols, "bias"), dy }
    }

    /// Returns the output, its statistics, and the gradients: the input gradient written and accumulated, then the weight gradient
    /// likewise.
    fn run(&self) -> [Vec<f32>; 6] {
        let Case { rows, cols, is_centered, .. } = self.case;
        let (x, weight, dy) = (&self.x[..], &self.weight[..], &self.dy[..]);
        run(|cpu| {
            let kind = NormKind { epsilon: EPSILON, is_centered };
            let mut y = narrow::<T>(&vec![f32::NAN; rows * cols]);
            let mut statistics = vec![f32::NAN; rows * NUM_STATISTICS];
            cpu.norm(x, weight, is_centered.then_some(&self.bias[..]), kind, &mut y, &mut statistics);
            let normalized = NormedRows { x, weight, statistics: &statistics[..] };
            let (mut dx, mut dx_added) = (vec![f32::NAN; rows * cols], vec![BEFORE; rows * cols]);
            cpu.norm_backward_input(normalized, kind, dy, &mut dx, false);
            cpu.norm_backward_input(normalized, kind, dy, &mut dx_added, true);
            let (mut d_weight, mut d_weight_added) = (vec![f32::NAN; cols], vec![BEFORE; cols]);
            cpu.norm_backward_weight(x, dy, &statistics, &mut d_weight, false);
            cpu.norm_backward_weight(x, dy, &statistics, &mut d_weight_added, true);
            [widen(&y), statistics, dx, dx_added, d_weight, d_weight_added]
        })
    }
}

/// The statistics of one row, by definition, in f64.
struct Row {
    x: Vec<f64>,
    mean: f64,
    scale: f64,
}

impl Row {
    fn new(x: &[f64], centered: bool) -> Self {
        let count = x.len() as f64;
        let mean = if centered { x.iter().sum::<f64>() / count } else { 0.0 };
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        Row { x: x.to_vec(), mean, scale: 1.0 / (variance + f64::from(EPSILON)).sqrt() }
    }

    fn normalized(&self, col: usize) -> f64 {
        (self.x[col] - self.mean) * self.scale
    }

    /// Returns the magnitude to which the error of a normalized value is proportional.
    fn magnitude(&self, col: usize) -> f64 {
        let mean_magnitude = self.x.iter().map(|x| x.abs()).sum::<f64>() / self.x.len() as f64;
        let mean_magnitude = if self.mean == 0.0 { 0.0 } else { mean_magnitude };
        (self.x[col].abs() + mean_magnitude) * self.scale
    }
}

/// Returns the slope of `loss` along each of the columns of `x`.
fn slopes(x: &[f64], step: f64, loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let at = |col: usize, by: f64| {
        let mut x = x.to_vec();
        x[col] += by;
        loss(&x)
    };
    (0..x.len()).map(|col| (at(col, step) - at(col, -step)) / (2.0 * step)).collect()
}

fn check<T: Element>(case: Case) {
    let inputs = Inputs::<T>::new(case);
    let [y, statistics, dx, dx_added, d_weight, d_weight_added] = inputs.run();
    let Case { cols, is_centered, .. } = case;
    let (x, dy, weight) = (to_f64(&inputs.x), to_f64(&inputs.dy), to_f64(&inputs.weight));
    let bias = if is_centered { to_f64(&inputs.bias) } else { vec![0.0; cols] };
    let rows: Vec<Row> = x.chunks_exact(cols).map(|x| Row::new(x, is_centered)).collect();

    let exact_y = (0..y.len()).map(|index| {
        let (row, col) = (&rows[index / cols], index % cols);
        let (value, magnitude) = (row.normalized(col) * weight[col], row.magnitude(col) * weight[col].abs());
        Exact::new(value + bias[col], magnitude + bias[col].abs())
    });
    assert_close::<T>(&("output", case), &y, exact_y, cols);
    let exact_statistics = rows.iter().flat_map(|row| {
        let magnitude = row.x.iter().map(|x| x.abs()).sum::<f64>() / cols as f64;
        [Exact::new(row.mean, magnitude), Exact::new(row.scale, row.scale)]
    });
    assert_close::<f32>(&("statistics", case), &statistics, exact_statistics, cols);

    let exact_dx: Vec<Exact> = rows
        .iter()
        .zip(dy.chunks_exact(cols))
        .flat_map(|(row, dy)| input_gradient(row, &weight, dy, is_centered))
        .collect();
    let added =
        |exact: &Exact| Exact::new(exact.value + f64::from(BEFORE), exact.f32_magnitude + f64::from(BEFORE));
    assert_close::<f32>(&("input gradient", case), &dx, exact_dx.iter().copied(), cols);
    assert_close::<f32>(&("added input gradient", case), &dx_added, exact_dx.iter().map(added), cols);

    let exact_d_weight: Vec<Exact> = (0..cols)
        .map(|col| {
            let terms = rows.iter().zip(dy.chunks_exact(cols));
            let sums =
                terms.map(|(row, dy)| (dy[col] * row.normalized(col), dy[col].abs() * row.magnitude(col)));
            let (value, magnitude) = sums.fold((0.0, 0.0), |sum, term| (sum.0 + term.0, sum.1 + term.1));
            Exact::new(value, magnitude)
        })
        .collect();
    let num_terms = cols + case.rows;
    assert_close::<f32>(&("weight gradient", case), &d_weight, exact_d_weight.iter().copied(), num_terms);
    assert_close::<f32>(
        &("added weight gradient", case),
        &d_weight_added,
        exact_d_weight.iter().map(added),
        num_terms,
    );
}

/// Returns central differences of `sum(dy y)`. Steps are small relative to the scale of the row.
fn input_gradient(row: &Row, weight: &[f64], dy: &[f64], centered: bool) -> Vec<Exact> {
    let loss = |x: &[f64]| {
        let row = Row::new(x, centered);
        (0..dy.len()).map(|col| dy[col] * row.normalized(col) * weight[col]).sum::<f64>()
    };
    let values = slopes(&row.x, 1e-4 / row.scale, loss);
    let count = dy.len() as f64;
    let level = (0..dy.len()).map(|col| (dy[col] * weight[col]).abs()).sum::<f64>() / count;
    let along =
        (0..dy.len()).map(|col| (dy[col] * weight[col]).abs() * row.magnitude(col)).sum::<f64>() / count;
    let magnitude =
        |col: usize| row.scale * ((dy[col] * weight[col]).abs() + level + row.magnitude(col) * along);
    values.into_iter().enumerate().map(|(col, value)| Exact::new(value, magnitude(col))).collect()
}

#[test]
fn values_and_gradients_match_f64() {
    for &case in cases_for_miri(&CASES, 4) {
        for dtype in DTYPES {
            with_element!(dtype => |T| check::<T>(case));
        }
    }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn rows_of_any_size(
        (rows, cols) in (1_usize..12, 1_usize..90),
        is_centered in any::<bool>(),
        (mean, deviation) in (-4.0_f32..4.0, 0.01_f32..10.0),
        dtype in 0..DTYPES.len(),
    ) {
        let case = Case { rows, cols, is_centered, mean, deviation };
        with_element!(DTYPES[dtype] => |T| check::<T>(case));
    }
}

#[test]
fn non_finite_values_reach_dependent_values_only() {
    fn check<T: Element>(centered: bool, value: f32) {
        let case = plain(4, 21, centered);
        let (row, col) = (2, 17);
        let place = row * case.cols + col;
        let clean = Inputs::<T>::new(case).run();
        let spoilt = |spoil: &dyn Fn(&mut Inputs<T>)| {
            let mut inputs = Inputs::new(case);
            spoil(&mut inputs);
            inputs.run()
        };
        let all = |len: usize| (0..len).collect::<Vec<usize>>();
        let whole_row: Vec<usize> = (row * case.cols..(row + 1) * case.cols).collect();
        let in_column: Vec<usize> = (0..case.rows).map(|row| row * case.cols + col).collect();

        let [y, statistics, dx, dx_added, d_weight, _] = spoilt(&|inputs| inputs.x[place] = value);
        // In RMS normalization, an infinite element makes the scale 0, so that all others become zero.
        if centered || value.is_nan() {
            assert_eq!(not_finite(&clean[0], &y), whole_row);
        } else {
            assert!(y[place].is_nan() && whole_row.iter().all(|&index| index == place || y[index] == 0.0));
        }
        for (output, found) in [(0, &y), (2, &dx), (3, &dx_added)] {
            let other_rows =
                |values: &[f32]| [&values[..whole_row[0]], &values[whole_row[0] + case.cols..]].concat();
            assert_eq!(other_rows(&clean[output]), other_rows(found), "output {output}");
        }
        assert!(!dx[place].is_finite() && d_weight[col].is_nan());
        assert_eq!(clean[1][..row * NUM_STATISTICS], statistics[..row * NUM_STATISTICS]);

        let found = spoilt(&|inputs| inputs.weight[col] = value);
        assert_eq!(not_finite(&clean[0], &found[0]), in_column);
        assert_eq!(not_finite(&clean[2], &found[2]), all(case.rows * case.cols));
        assert_eq!((&clean[1], &clean[4]), (&found[1], &found[4]));
        if centered {
            assert_eq!(not_finite(&clean[0], &spoilt(&|inputs| inputs.bias[col] = value)[0]), in_column);
        }

        let found = spoilt(&|inputs| inputs.dy[place] = T::from_f32(value));
        assert_eq!((&clean[0], &clean[1]), (&found[0], &found[1]));
        for output in [2, 3] {
            assert_eq!(not_finite(&clean[output], &found[output]), whole_row);
        }
        for output in [4, 5] {
            assert_eq!(not_finite(&clean[output], &found[output]), [col]);
        }
    }
    for dtype in DTYPES {
        for centered in [true, false] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                with_element!(dtype => |T| check::<T>(centered, value));
            }
        }
    }
}

#[test]
fn a_row_whose_squares_overflow_is_normalized_to_zero() {
    let case = Case { deviation: 1e30, ..plain(2, 5, false) };
    let [y, _, dx, ..] = Inputs::<f32>::new(case).run();
    assert!(y.iter().chain(&dx).all(|&value| value == 0.0), "{y:?} {dx:?}");
}
