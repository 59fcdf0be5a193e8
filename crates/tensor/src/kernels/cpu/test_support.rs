//! Helpers for kernel tests: processors, values, and error bounds.

use super::element::Element;
use super::simd::SimdLevel;
use super::threads::ThreadPool;
use super::{Cpu, f32_error};
use proptest::prelude::ProptestConfig;
use std::fmt::Debug;
use trireme_base::{DType, RandomKey};

/// Element types that kernels compute with.
pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Returns the SIMD levels of this machine. AMX is emulated if the machine has AVX512-BF16 but no AMX.
pub(crate) fn levels() -> impl Iterator<Item = SimdLevel> {
    // Miri does not support signal handlers.
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
    trireme_testkit::emulate_amx();
    let detected = SimdLevel::detect();
    let emulates = cfg!(all(target_arch = "x86_64", target_os = "linux", not(miri)))
        && detected >= SimdLevel::Avx512Bf16;
    SimdLevel::ALL.into_iter().filter(move |&level| level <= detected || emulates)
}

/// Returns a processor with a SIMD level and a number of threads.
pub(crate) fn cpu(simd_level: SimdLevel, num_threads: usize) -> Cpu {
    Cpu::new(ThreadPool::new(num_threads).unwrap(), simd_level)
}

/// Returns the outputs of a kernel at each level. Checks that one thread and three threads give equal bits.
pub(crate) fn run_at_levels<const N: usize>(
    kernel: impl Fn(&Cpu) -> [Vec<f32>; N],
) -> Vec<(SimdLevel, [Vec<f32>; N])> {
    let at_level = |simd_level| {
        let alone = kernel(&cpu(simd_level, 1));
        assert_same_bits(&alone, &kernel(&cpu(simd_level, 3)), &format!("{simd_level} with three threads"));
        (simd_level, alone)
    };
    levels().map(at_level).collect()
}

/// Like [`run_at_levels`], for a kernel without matmuls, whose bits must not depend on the level either.
pub(crate) fn run<const N: usize>(kernel: impl Fn(&Cpu) -> [Vec<f32>; N]) -> [Vec<f32>; N] {
    let mut results = run_at_levels(kernel).into_iter();
    let (_, first) = results.next().expect("every machine has the lowest level");
    for (simd_level, outputs) in results {
        assert_same_bits(&first, &outputs, &format!("{simd_level}"));
    }
    first
}

/// Returns the bits of a value. All NaNs are equal, because their bits are not specified.
fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

fn assert_same_bits<const N: usize>(expected: &[Vec<f32>; N], found: &[Vec<f32>; N], what: &str) {
    for (output, (expected, found)) in expected.iter().zip(found).enumerate() {
        assert_eq!(expected.len(), found.len());
        let differs = |index: &usize| bits(expected[*index]) != bits(found[*index]);
        if let Some(index) = (0..expected.len()).find(differs) {
            let (expected, found) = (expected[index], found[index]);
            panic!("{what}: output {output}, element {index} is {found:e} instead of {expected:e}");
        }
    }
}

/// Returns random normal values of standard deviation 1.
pub(crate) fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(9, name).fill_normal(&mut values, 1.0);
    values
}

/// Rounds values to an element type.
pub(crate) fn narrow<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&x| T::from_f32(x)).collect()
}

/// Converts elements to f32, exactly.
pub(crate) fn widen<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|x| x.to_f32()).collect()
}

/// Converts elements to f64, exactly.
pub(crate) fn to_f64<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// Returns the indices of non-finite values in `after`. All others must have the same bits as in `before`.
pub(crate) fn not_finite(before: &[f32], after: &[f32]) -> Vec<usize> {
    assert_eq!(before.len(), after.len());
    let spoilt: Vec<usize> = (0..after.len()).filter(|&index| !after[index].is_finite()).collect();
    for index in (0..after.len()).filter(|&index| after[index].is_finite()) {
        assert_eq!(before[index].to_bits(), after[index].to_bits(), "element {index} has changed");
    }
    spoilt
}

/// Returns only the first, small cases of a table under Miri, which is about a thousand times slower.
pub(crate) fn cases_for_miri<C>(cases: &[C], num_small: usize) -> &[C] {
    if cfg!(miri) { &cases[..num_small] } else { cases }
}

/// Returns the settings of a property test with `number` cases.
pub(crate) fn cases(number: u32) -> ProptestConfig {
    let cases = if cfg!(miri) { number.min(2) } else { number };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Returns the largest relative error of one rounding, the largest absolute error of a rounding to a subnormal value, and the largest
/// finite value.
fn limits<T: Element>() -> (f64, f64, f64) {
    match T::DTYPE {
        DType::Bf16 => (2.0_f64.powi(-8), 2.0_f64.powi(-134), (2.0 - 2.0_f64.powi(-7)) * 2.0_f64.powi(127)),
        DType::F16 => (2.0_f64.powi(-11), 2.0_f64.powi(-25), 65504.0),
        _ => (2.0_f64.powi(-24), 2.0_f64.powi(-150), f64::from(f32::MAX)),
    }
}

/// Absolute error that every comparison allows: smaller values may be lost when an exponential overflows. Far below any value that a test
/// examines.
const VANISHING: f64 = 1e-33;

/// The expected result of a kernel, and the magnitudes to which its rounding errors are proportional.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Exact {
    pub(crate) value: f64,
    /// Sum of the magnitudes of the terms that are computed in f32.
    pub(crate) f32_magnitude: f64,
    /// Sum of the magnitudes that are rounded to the element type: the value, and intermediate results.
    pub(crate) element_magnitude: f64,
}

impl Exact {
    /// Creates an exact value with terms of this magnitude.
    pub(crate) fn new(value: f64, magnitude: f64) -> Self {
        Exact { value, f32_magnitude: magnitude, element_magnitude: value.abs() }
    }
}

/// Compares a kernel's results, which were stored as `T` and had up to `num_terms` terms, with exact ones.
///
/// The error bound is one unit roundoff of `T`, plus [`f32_error`] for the operations before it.
pub(crate) fn assert_close<T: Element>(
    what: &impl Debug,
    found: &[f32],
    exact: impl IntoIterator<Item = Exact>,
    num_terms: usize,
) {
    let (unit, smallest, largest) = limits::<T>();
    let f32_rounding_error = f32_error(num_terms);
    let mut num_exact = 0;
    for (index, exact) in exact.into_iter().enumerate() {
        let bound =
            unit * exact.element_magnitude + f32_rounding_error * exact.f32_magnitude + smallest + VANISHING;
        let found = f64::from(found[index]);
        let overflows = exact.value.abs() + bound > largest && found == exact.value.signum() * f64::INFINITY;
        assert!(
            (found - exact.value).abs() <= bound || overflows,
            "{} {what:?}: element {index} is {found:e} instead of {:e}, which is not within {bound:e}",
            T::DTYPE,
            exact.value
        );
        num_exact += 1;
    }
    assert_eq!(found.len(), num_exact, "{what:?}");
}
