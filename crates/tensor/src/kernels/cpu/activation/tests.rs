use super::*;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::test_support::{
    DTYPES, Exact, assert_close, cases, cases_for_miri, narrow, not_finite, random, run, to_f64, widen,
};
use proptest::prelude::*;
use trireme_base::Float;

/// Zeros, subnormal and tiny values, values where the exponential begins to overflow, and the largest.
const EDGES: [f32; 26] = [
    0.0, -0.0, 1e-40, -1e-40, 1.2e-38, -1.2e-38, 1e-20, 0.5, -0.5, 5.5, -5.5, 10.0, -10.0, 20.0, -20.0, 88.5,
    -88.5, 89.0, -89.0, 104.5, -104.5, 6e4, -6e4, 1e30, -1e30, 3e38,
];

/// Returns the finite edge cases, followed by random values: enough for more than two tasks, the last one shorter.
fn values<T: Element>(name: &str) -> Vec<T> {
    let random: Vec<f32> =
        random(if cfg!(miri) { 70 } else { 40_007 }, name).iter().map(|x| 4.0 * x).collect();
    let mut values: Vec<T> = narrow(&EDGES);
    values.retain(|x| x.to_f32().is_finite());
    values.extend(narrow::<T>(&random));
    values
}

/// Returns the sigmoid `s` of `x`, `1 - s`, and a bound on the error of `1 - s` in f32, in units of 2^-24. The bound is one rounding of
/// `s`. Where `1 - s` is smaller, `s` rounds to 1, and the bound is `1 - s`.
fn sigmoid_f64(x: f64) -> (f64, f64, f64) {
    let (s, rest) = (1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + x.exp()));
    (s, rest, (rest * 2.0_f64.powi(24)).min(1.0))
}

/// Returns GELU and its slope.
fn gelu_f64(x: f64) -> (Exact, Exact) {
    let scale = (8.0 / std::f64::consts::PI).sqrt();
    let argument = scale * (x + 0.044715 * x.powi(3));
    let (s, rest, rest_magnitude) = sigmoid_f64(argument);
    // An absolute error of the argument is a relative error of its exponential.
    let amplified = 1.0 + argument.abs().min(1e3) * rest;
    let steepness = scale * (1.0 + 3.0 * 0.044715 * x * x);
    // Where the sigmoid is 0 or 1, the product for the largest arguments would be zero times infinity.
    let product = |factor: f64| if x * s * factor == 0.0 { 0.0 } else { x * s * factor * steepness };
    let slope_magnitude = s + product(rest_magnitude).abs();
    (Exact::new(x * s, (x * s).abs() * amplified), Exact::new(s + product(rest), slope_magnitude * amplified))
}

/// Returns the cumulative normal distribution at `x`, by the continued fraction of its tail or the series around 0.
fn normal_distribution(x: f64) -> f64 {
    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let z = x.abs();
    let tail = if z < 3.0 {
        // x + x^3 / 3 + x^5 / (3 5) + ...
        let (mut term, mut sum, mut n) = (z, z, 1.0);
        while term > 1e-18 * sum {
            n += 2.0;
            term *= z * z / n;
            sum += term;
        }
        0.5 - density * sum
    } else {
        density / (1..=200).rev().fold(z, |fraction, n| z + f64::from(n) / fraction)
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Returns the exact GELU and its slope.
fn exact_gelu_f64(x: f64) -> (Exact, Exact) {
    let (distribution, density) =
        (normal_distribution(x), (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt());
    // The polynomial has a few roundings and an approximation error.
    let amplified = 4.0;
    let slope = Exact::new(
        distribution + x * density,
        amplified * (distribution + (x * density).abs() * (1.0 + x.abs().min(1e3))),
    );
    (Exact::new(x * distribution, amplified * (x * distribution).abs() * (1.0 + x.abs().min(1e3))), slope)
}

fn scaled(exact: Exact, factor: f64) -> Exact {
    let Exact { value, f32_magnitude: in_f32, element_magnitude: in_element } = exact;
    Exact {
        value: value * factor,
        f32_magnitude: in_f32 * factor.abs(),
        element_magnitude: in_element * factor.abs(),
    }
}

#[test]
fn the_reference_is_the_published_formula() {
    for step in -600..=600 {
        let x = f64::from(step) / 100.0;
        let tanh = |x: f64| ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh();
        let published = |x: f64| 0.5 * x * (1.0 + tanh(x));
        let (value, slope) = gelu_f64(x);
        assert!((value.value - published(x)).abs() < 1e-14, "{x}");
        assert!((slope.value - (published(x + 1e-5) - published(x - 1e-5)) / 2e-5).abs() < 1e-9, "{x}");
    }
}

/// Returns `y`, followed by the results of backward for `x` and `dy`.
fn run_gelu<T: Element>(activation: Activation, x: &[T], dy: &[T]) -> [Vec<f32>; 3] {
    run(|cpu| {
        let (mut y, mut input, mut dy) = (narrow::<T>(&vec![f32::NAN; x.len()]), x.to_vec(), dy.to_vec());
        cpu.activate(activation, x, &mut y);
        cpu.activate_backward(activation, &mut input, &mut dy);
        [widen(&y), widen(&input), widen(&dy)]
    })
}

fn check_gelu<T: Element>(x: &[T], dy: &[T]) {
    for activation in [Activation::Gelu, Activation::ExactGelu] {
        let exact = if activation == Activation::Gelu { gelu_f64 } else { exact_gelu_f64 };
        let [y, again, dx] = run_gelu(activation, x, dy);
        assert_eq!(y, again, "backward gives the output back");
        let exact: Vec<(Exact, Exact)> = to_f64(x).into_iter().map(exact).collect();
        assert_close::<T>(&activation, &y, exact.iter().map(|exact| exact.0), 0);
        let dx_exact = exact.iter().zip(to_f64(dy)).map(|(exact, dy)| scaled(exact.1, dy));
        assert_close::<T>(&("gradient", activation), &dx, dx_exact, 0);
    }
}

/// Returns `y`, followed by the results of backward for `gate | up` and `dy`.
fn run_swiglu<T: Element>(gate_up: &[T], dy: &[T], cols: usize) -> [Vec<f32>; 3] {
    run(|cpu| {
        let mut y = narrow::<T>(&vec![f32::NAN; dy.len()]);
        let (mut gate_up, mut dy) = (gate_up.to_vec(), dy.to_vec());
        cpu.gate(Activation::Silu, &gate_up, &mut y, cols);
        cpu.gate_backward(Activation::Silu, &mut gate_up, &mut dy, cols);
        [widen(&y), widen(&gate_up), widen(&dy)]
    })
}

fn check_swiglu<T: Element>(gate_up: &[T], dy: &[T], cols: usize) {
    let [y, d_gate_up, again] = run_swiglu(gate_up, dy, cols);
    assert_eq!(y, again, "backward gives the output back");
    let (gate_up, dy) = (to_f64(gate_up), to_f64(dy));
    let gate_and_up = |index: usize| {
        let (row, col) = (index / cols, index % cols);
        (gate_up[row * 2 * cols + col], gate_up[row * 2 * cols + cols + col])
    };
    let exact_y = (0..dy.len()).map(|index| {
        let (gate, up) = gate_and_up(index);
        let y = gate * sigmoid_f64(gate).0 * up;
        Exact::new(y, y.abs())
    });
    assert_close::<T>(&"swiglu", &y, exact_y, 0);
    let exact_gradient = (0..gate_up.len()).map(|index| {
        let (row, col) = (index / (2 * cols), index % (2 * cols));
        let index = row * cols + col % cols;
        let ((gate, up), dy) = (gate_and_up(index), dy[index]);
        let (s, rest, rest_magnitude) = sigmoid_f64(gate);
        let slope = Exact::new(s + gate * s * rest, s + (gate * s).abs() * rest_magnitude);
        if col < cols { scaled(slope, dy * up) } else { Exact::new(dy * gate * s, (dy * gate * s).abs()) }
    });
    assert_close::<T>(&"gradient of swiglu", &d_gate_up, exact_gradient, 0);
}

#[test]
fn values_and_gradients_match_f64() {
    fn check<T: Element>() {
        let (x, dy) = (values::<T>("x"), values::<T>("dy"));
        let moderate: Vec<T> = narrow(&random(x.len(), "dy"));
        check_gelu(&x, &moderate);
        // Products of edge cases would overflow.
        let (up, dy) = (&dy[EDGES.len()..], &moderate);
        for &cols in cases_for_miri(&[1, 7, 16, 33, 400], 2) {
            let rows = up.len() / cols;
            let row = |row: usize| [&x[row * cols..][..cols], &up[row * cols..][..cols]].concat();
            check_swiglu(&(0..rows).flat_map(row).collect::<Vec<T>>(), &dy[..rows * cols], cols);
        }
        check_gelu::<T>(&[], &[]);
        check_swiglu::<T>(&[], &[], 3);
    }
    for dtype in DTYPES {
        with_element!(dtype => |T| check::<T>());
    }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn any_finite_value_has_a_finite_gradient(
        x in proptest::collection::vec(prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO, 0..70),
        dtype in 0..DTYPES.len(),
    ) {
        with_element!(DTYPES[dtype] => |T| {
            let mut x: Vec<T> = narrow(&x);
            x.retain(|x| x.to_f32().is_finite());
            check_gelu(&x, &narrow::<T>(&random(x.len(), "dy")));
        });
    }

    #[test]
    fn rows_of_any_width(
        (rows, cols) in (0_usize..9, 1_usize..70),
        range in -20_i32..20,
        dtype in 0..DTYPES.len(),
    ) {
        let scale = 2.0_f32.powi(range);
        let gate_up: Vec<f32> = random(rows * 2 * cols, "gate_up").iter().map(|x| (scale * x).clamp(-6e4, 6e4)).collect();
        with_element!(DTYPES[dtype] => |T| {
            check_swiglu(&narrow::<T>(&gate_up), &narrow::<T>(&random(rows * cols, "dy")), cols);
        });
    }
}

#[test]
fn non_finite_values_reach_their_outputs_only() {
    const COLS: usize = 33;
    fn check<T: Element>() {
        let (x, dy): (Vec<T>, Vec<T>) = (narrow(&random(4 * COLS, "x")), narrow(&random(2 * COLS, "dy")));
        let clean_gelu = run_gelu(Activation::ExactGelu, &x[..2 * COLS], &dy);
        let clean_swiglu = run_swiglu(&x, &dy, COLS);
        let spoilt = |clean: &[Vec<f32>; 3], found: [Vec<f32>; 3]| {
            [0, 1, 2].map(|output| not_finite(&clean[output], &found[output]))
        };
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 31, 32, COLS + 1] {
                let with = |values: &[T], place: usize| {
                    let mut values = values.to_vec();
                    values[place] = T::from_f32(value);
                    values
                };
                let found =
                    spoilt(&clean_gelu, run_gelu(Activation::ExactGelu, &with(&x[..2 * COLS], place), &dy));
                assert_eq!(found, [vec![place], vec![place], vec![place]], "{value} into gelu");
                let found =
                    spoilt(&clean_gelu, run_gelu(Activation::ExactGelu, &x[..2 * COLS], &with(&dy, place)));
                assert_eq!(found, [vec![], vec![], vec![place]], "{value} into the gradient of gelu");

                let (row, col) = (place / COLS, place % COLS);
                let (gate, up) = (row * 2 * COLS + col, row * 2 * COLS + COLS + col);
                let found = spoilt(&clean_swiglu, run_swiglu(&with(&x, gate), &dy, COLS));
                assert_eq!(found, [vec![place], vec![gate, up], vec![place]], "{value} as a gate");
                let found = spoilt(&clean_swiglu, run_swiglu(&with(&x, up), &dy, COLS));
                assert_eq!(found, [vec![place], vec![gate], vec![place]], "{value} next to a gate");
                let found = spoilt(&clean_swiglu, run_swiglu(&x, &with(&dy, place), COLS));
                assert_eq!(found, [vec![], vec![gate, up], vec![]], "{value} into the gradient of swiglu");
            }
        }
    }
    for dtype in DTYPES {
        with_element!(dtype => |T| check::<T>());
    }
}
