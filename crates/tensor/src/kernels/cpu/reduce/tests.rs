use super::*;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::test_support::{
    DTYPES, Exact, assert_close, cases, cases_for_miri, cpu, levels, narrow, not_finite, random, run, to_f64,
    widen,
};
use proptest::prelude::*;
use trireme_base::{Bf16, F16};

/// Values of a destination before they are accumulated.
const BEFORE: f32 = 0.5;

/// Rows and columns: none and one; widths near the width of a register and of a task; rows around the number per block.
const SHAPES: [(usize, usize); 13] = [
    (1, 1),
    (0, 3),
    (3, 15),
    (2, 17),
    (5, 31),
    (127, 63),
    (128, 64),
    (129, 65),
    (2, 16),
    (2, 200),
    (300, 33),
    (1, 129),
    (2000, 2),
];

/// Returns the sums of the columns, written and accumulated.
fn column_sums<T: Element>(x: &[T], cols: usize) -> [Vec<f32>; 2] {
    run(|cpu| {
        let (mut written, mut added) = (vec![f32::NAN; cols], vec![BEFORE; cols]);
        cpu.column_sums(x, &mut written, false);
        cpu.column_sums(x, &mut added, true);
        [written, added]
    })
}

fn check_columns<T: Element>(x: &[T], cols: usize) {
    let rows = x.len() / cols;
    let [written, added] = column_sums(x, cols);
    let x = to_f64(x);
    let sum = |col: usize, before: f64| {
        let column = x.iter().skip(col).step_by(cols);
        let (sum, magnitude) = column.fold((0.0, 0.0), |(sum, magnitude), x| (sum + x, magnitude + x.abs()));
        Exact::new(sum + before, magnitude + before)
    };
    let what = (T::DTYPE, rows, cols);
    assert_close::<f32>(&("sums", what), &written, (0..cols).map(|col| sum(col, 0.0)), rows);
    let exact = (0..cols).map(|col| sum(col, f64::from(BEFORE)));
    assert_close::<f32>(&("added sums", what), &added, exact, rows);
}

#[test]
fn column_sums_match_f64() {
    for &(rows, cols) in cases_for_miri(&SHAPES, 4) {
        for scale in [1.0, 1e-40, 1e30] {
            let x: Vec<f32> = random(rows * cols, "x").iter().map(|x| scale * x).collect();
            check_columns(&x, cols);
        }
        check_columns::<Bf16>(&narrow(&random(rows * cols, "x")), cols);
        check_columns::<F16>(&narrow(&random(rows * cols, "x")), cols);
    }
}

#[test]
fn small_terms_of_a_long_column_are_not_lost() {
    // Added one by one, each would be less than half a unit in the last place of the sum.
    let rows = if cfg!(miri) { 300 } else { 4096 };
    let x: Vec<f32> = (0..rows).map(|row| if row < 128 { 1.0 } else { 3e-6 }).collect();
    let [written, _] = column_sums(&x, 1);
    let exact: f64 = to_f64(&x).iter().sum();
    assert!((f64::from(written[0]) - exact).abs() < 1e-5 * (rows as f64 / 128.0), "{} {exact}", written[0]);
}

#[test]
fn non_finite_values_reach_their_column_only() {
    fn check<T: Element>() {
        let (rows, cols) = (130, 67);
        let x: Vec<T> = narrow(&random(rows * cols, "x"));
        let clean = column_sums(&x, cols);
        for (row, col) in [(0, 0), (127, 63), (128, 64), (129, 66)] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = x.clone();
                x[row * cols + col] = T::from_f32(value);
                for (clean, found) in clean.iter().zip(column_sums(&x, cols)) {
                    assert_eq!(not_finite(clean, &found), [col]);
                    assert_eq!(found[col].is_nan(), value.is_nan());
                }
            }
        }
    }
    for dtype in DTYPES {
        with_element!(dtype => |T| check::<T>());
    }
}

/// Returns values of every kind: all 16-bit values, the halfway points between them, and their neighbors.
fn values_to_round<T: Element>(from_bits: impl Fn(u16) -> T) -> Vec<f32> {
    let step = if cfg!(miri) { 397 } else { 1 };
    let widened =
        (0..u16::MAX).step_by(step).map(|bits| (from_bits(bits).to_f32(), from_bits(bits + 1).to_f32()));
    let around = |(low, high): (f32, f32)| {
        let halfway = ((f64::from(low) + f64::from(high)) / 2.0) as f32;
        [low, halfway, halfway.next_up(), halfway.next_down()]
    };
    let edges = [0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN];
    // NaN with only bits that rounding drops, and the smallest values.
    let hidden = [0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 1, 0x8000_0001, 0x007f_ffff].map(f32::from_bits);
    widened.flat_map(around).chain(edges).chain(hidden).collect()
}

#[test]
fn conversions_round_each_element_to_nearest_even_at_every_level() {
    fn check<T: Element, U: Element>(x: &[f32]) {
        let x: Vec<T> = narrow(x);
        let [found] = run(|cpu| {
            let mut y = narrow::<U>(&vec![0.25; x.len()]);
            cpu.convert(&x, &mut y);
            [widen(&y)]
        });
        for (x, found) in to_f64(&x).into_iter().zip(found) {
            // The conversion of single elements is tested with the element types.
            let expected = U::from_f32(x as f32).to_f32();
            let is_same = expected.to_bits() == found.to_bits() || (x.is_nan() && found.is_nan());
            assert!(is_same, "{} to {}: {x:e} became {found:e}", T::DTYPE, U::DTYPE);
        }
    }
    let x = [values_to_round(Bf16::from_bits), values_to_round(F16::from_bits)].concat();
    for from in DTYPES {
        for to in DTYPES {
            with_element!(from => |T| with_element!(to => |U| check::<T, U>(&x)));
        }
    }
    for len in [0, 1, 15, 17, 33] {
        check::<f32, Bf16>(&x[..len]);
        check::<f32, F16>(&x[..len]);
    }
}

#[test]
fn halfway_values_go_to_the_even_neighbor() {
    let unit = 2.0_f32.powi(-8);
    let f16_unit = 2.0_f32.powi(-11);
    let smallest = F16::from_bits(1).to_f32();
    let x = [
        1.0 + unit,
        1.0 + 3.0 * unit,
        f32::MAX,
        1.0 + f16_unit,
        1.0 + 3.0 * f16_unit,
        smallest / 2.0,
        65520.0,
    ];
    let (mut bf16, mut f16) = ([Bf16::from_f32(0.0); 7], [F16::from_f32(0.0); 7]);
    for level in levels() {
        cpu(level, 1).convert(&x, &mut bf16);
        cpu(level, 1).convert(&x, &mut f16);
        assert_eq!(bf16.map(Bf16::to_f32)[..3], [1.0, 1.0 + 4.0 * unit, f32::INFINITY]);
        assert_eq!(f16.map(F16::to_f32)[3..], [1.0, 1.0 + 4.0 * f16_unit, 0.0, f32::INFINITY]);
    }
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn column_sums_of_any_shape(
        (rows, cols) in (0_usize..300, 1_usize..140),
        dtype in 0..DTYPES.len(),
    ) {
        with_element!(DTYPES[dtype] => |T| check_columns::<T>(&narrow(&random(rows * cols, "x")), cols));
    }

    #[test]
    fn sums_of_any_two_buffers_are_correctly_rounded(
        pairs in proptest::collection::vec(any::<(u32, u32)>(), 0..100),
        repeat in prop_oneof![Just(1_usize), Just(400)],
    ) {
        let pairs = pairs.repeat(if cfg!(miri) { 1 } else { repeat });
        let term: Vec<f32> = pairs.iter().map(|pair| f32::from_bits(pair.0)).collect();
        let before: Vec<f32> = pairs.iter().map(|pair| f32::from_bits(pair.1)).collect();
        let [found] = run(|cpu| {
            let mut out = before.clone();
            cpu.zip_in_place(&mut out, &term, |out, term| out + term);
            [out]
        });
        for (index, found) in found.into_iter().enumerate() {
            // In f64, the sum of two f32 is rounded so finely that the rounding to f32 is not affected.
            let exact = (f64::from(before[index]) + f64::from(term[index])) as f32;
            prop_assert!(exact.to_bits() == found.to_bits() || (exact.is_nan() && found.is_nan()));
        }
    }
}
