use super::*;
use crate::kernels::cpu::simd::SimdLevel;
use crate::kernels::cpu::test_support::{cases_for_miri, cpu, levels, random, to_f64};

/// Returns the sum. Checks that its bits do not depend on threads, levels and the division of the terms.
fn sum_of_squares(x: &[f32]) -> f64 {
    let divided = |cpu: &Cpu, cuts: &[usize]| {
        let bounds = [0].into_iter().chain(cuts.iter().map(|&cut| cut.min(x.len()))).chain([x.len()]);
        let bounds: Vec<usize> = bounds.collect();
        let mut sum = ExactSum::default();
        for part in bounds.windows(2).rev() {
            sum.add(cpu.sum_of_squares(&x[part[0]..part[1]]).windows());
        }
        sum.value()
    };
    let sums = levels().flat_map(|level| {
        [(1, &[][..]), (3, &[]), (1, &[1]), (2, &[3, 17, 300, 4097, 66_000])]
            .map(|(threads, cuts)| divided(&cpu(level, threads), cuts))
    });
    let sums: Vec<f64> = sums.collect();
    let is_same = |sum: &f64| sum.to_bits() == sums[0].to_bits() || (sum.is_nan() && sums[0].is_nan());
    assert!(sums.iter().all(is_same), "{sums:?}");
    sums[0]
}

#[test]
fn sums_of_squares_match_f64() {
    for &len in cases_for_miri(&[0, 1, 15, 16, 17, 255, 257, 65_536, 65_537, 200_003], 5) {
        for scale in [1.0, 1e-15, 1e15] {
            let x: Vec<f32> = random(len, "x").iter().map(|x| scale * x).collect();
            let exact: f64 = to_f64(&x).iter().map(|x| x * x).sum();
            let error = (sum_of_squares(&x) - exact).abs();
            // Each square is rounded to f32.
            assert!(error <= 1.01 * 2.0_f64.powi(-24) * exact, "{len} of {scale:e}: off by {error:e}");
        }
    }
}

#[test]
fn no_term_is_lost_next_to_larger_ones() {
    // Powers of two whose squares range from about the smallest f32 to about the largest: far more bits than an f64 has.
    let x: Vec<f32> = (-74..=63).map(|exponent| (exponent as f32).exp2()).collect();
    let of = |x: &[f32]| cpu(SimdLevel::Portable, 1).sum_of_squares(x);
    let mut without = of(&x);
    let whole = without;
    for &x in &x[1..] {
        without.add(&of(&[x]).windows().map(|window| -window));
    }
    assert_eq!(without.value(), 2.0_f64.powi(-148), "the smallest is left");
    assert_eq!(whole.value(), x.iter().rev().map(|&x| f64::from(x).powi(2)).sum::<f64>());
}

#[test]
fn sums_of_squares_overflow_underflow_and_propagate_non_finite_values() {
    let with = |place: usize, value: f32| {
        let mut x = vec![1.0; 5000];
        x[place] = value;
        sum_of_squares(&x)
    };
    for place in [0, 17, 4095, 4096, 4999] {
        assert!(with(place, f32::NAN).is_nan());
        assert!(with(place, -f32::NAN).is_nan());
        for value in [f32::INFINITY, f32::NEG_INFINITY, 2e19, f32::MAX] {
            assert_eq!(with(place, value), f64::INFINITY, "{value:e} at {place}");
        }
        assert_eq!(with(place, 1e-40), 4999.0, "squares of subnormal values are zero");
    }
    assert_eq!(sum_of_squares(&[1e-20; 40]), 40.0 * f64::from(1e-20_f32 * 1e-20), "subnormal squares count");
}

#[test]
fn many_large_terms_fit_between_carries() {
    let len = if cfg!(miri) { CARRY_BLOCK } else { 20 * CARRY_BLOCK };
    let x = vec![f32::from_bits(0x5eff_ffff); len];
    let square = f64::from(x[0] * x[0]);
    let exact = square * len as f64;
    assert!((sum_of_squares(&x) - exact).abs() <= 4.0 * f64::EPSILON * exact);
}
