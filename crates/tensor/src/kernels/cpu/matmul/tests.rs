use super::*;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::simd::CpuFeatures;
use crate::kernels::cpu::threads::ThreadPool;
use proptest::prelude::*;
use trireme_base::{Bf16, DType, F16, RandomKey};

fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(5, name).fill_normal(&mut values, 1.0);
    values
}

/// The levels that this machine has; AMX is emulated where it has none.
fn levels() -> impl Iterator<Item = CpuFeatures> {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    trireme_testkit::emulate_amx();
    let detected = CpuFeatures::detect();
    let emulates =
        cfg!(all(target_arch = "x86_64", target_os = "linux")) && detected >= CpuFeatures::Avx512Bf16;
    CpuFeatures::ALL.into_iter().filter(move |&level| level <= detected || emulates)
}

/// What a product is made of.
#[derive(Clone, Copy, Debug)]
struct Case {
    size: Product,
    left_transposed: bool,
    right_transposed: bool,
    precision: Precision,
    left: DType,
    right: DType,
    out: DType,
}

/// Values of a factor in its dtype; kept beside them as f64 what the product takes them for.
struct Factor<T> {
    values: Vec<T>,
    rounded: Vec<f64>,
    cols: usize,
    transposed: bool,
}

impl<T: Element> Factor<T> {
    fn new(values: &[f32], precision: Precision, (rows, cols): (usize, usize), transposed: bool) -> Self {
        let values: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
        let round = |x: f32| match precision {
            Precision::F32 => x,
            Precision::Bf16 => Bf16::from_f32(x).to_f32(),
            Precision::F16 => F16::from_f32(x).to_f32(),
        };
        let rounded = values.iter().map(|x| f64::from(round(x.to_f32()))).collect();
        Factor { values, rounded, cols: if transposed { rows } else { cols }, transposed }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::row_major(T::floats(&self.values), self.cols, self.transposed)
    }

    fn at(&self, row: usize, col: usize) -> f64 {
        self.rounded[if self.transposed { col * self.cols + row } else { row * self.cols + col }]
    }
}

fn run<T: Element>(
    (features, threads): (CpuFeatures, usize),
    (precision, size): (Precision, Product),
    factors: (Matrix<'_>, Matrix<'_>),
    out: &mut [T],
    epilogue: MatmulEpilogue<'_>,
) {
    let cpu = Cpu { threads: ThreadPool::new(threads).unwrap(), features };
    let mut scratch = vec![u32::MAX; cpu.matmul_scratch(precision, size, factors.0)];
    let out = match T::DTYPE {
        DType::F32 => FloatsMut::F32(bytemuck::cast_slice_mut(out)),
        DType::Bf16 => FloatsMut::Bf16(bytemuck::cast_slice_mut(out)),
        _ => FloatsMut::F16(bytemuck::cast_slice_mut(out)),
    };
    cpu.matmul(precision, size, factors, out, epilogue, &mut scratch);
}

/// Every level and several thread counts against sums in f64.
fn check(case: Case) {
    with_element!(case.left => |L| with_element!(case.right => |R| with_element!(case.out => |T| check_typed::<L, R, T>(case))));
}

fn check_typed<L: Element, R: Element, T: Element>(case: Case) {
    let Case { size, precision, .. } = case;
    let Product { rows, cols, inner } = size;
    let left =
        Factor::<L>::new(&random(rows * inner, "left"), precision, (rows, inner), case.left_transposed);
    let right =
        Factor::<R>::new(&random(inner * cols, "right"), precision, (inner, cols), case.right_transposed);
    let (bias, residual) = (random(cols, "bias"), random(rows * cols, "residual"));
    let factors = (left.matrix(), right.matrix());
    for features in levels() {
        let product = |threads, epilogue| {
            let mut out = vec![T::from_f32(f32::NAN); rows * cols];
            run((features, threads), (precision, size), factors, &mut out, epilogue);
            out
        };
        let added = MatmulEpilogue::Add { bias: Some(&bias), residual: Some(&residual) };
        let (plain, once) = (product(1, MatmulEpilogue::Overwrite), product(1, added));
        assert_eq!(once, product(3, added), "{features} {case:?}: bits depend on the number of threads");
        let mut twice = once.clone();
        if T::DTYPE == DType::F32 {
            run((features, 1), (precision, size), factors, &mut twice, MatmulEpilogue::Accumulate);
        }
        for (index, ((plain, once), twice)) in plain.iter().zip(&once).zip(&twice).enumerate() {
            let (row, col) = (index / cols, index % cols);
            let terms = (0..inner).map(|k| left.at(row, k) * right.at(k, col));
            let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), x| (s + x, m + x.abs()));
            let added = f64::from(bias[col]) + f64::from(residual[index]);
            let close = |found: &T, expected: f64, what: &str| {
                // Summation in f32, and one rounding of the result.
                let unit = match T::DTYPE {
                    DType::Bf16 => 2.0_f64.powi(-8),
                    DType::F16 => 2.0_f64.powi(-11),
                    _ => 2.0_f64.powi(-23),
                };
                let bound = 2e-6 * (magnitude + added.abs() + 1.0) + unit * expected.abs();
                let error = (f64::from(found.to_f32()) - expected).abs();
                assert!(error <= bound, "{features} {case:?} {what} at {row},{col}: off by {error}");
            };
            close(plain, sum, "plain");
            close(once, sum + added, "with bias and residual");
            if T::DTYPE == DType::F32 {
                close(twice, 2.0 * sum + added, "accumulated");
            }
        }
    }
}

const F32_CASE: Case = Case {
    size: Product { rows: 0, cols: 0, inner: 0 },
    left_transposed: false,
    right_transposed: false,
    precision: Precision::F32,
    left: DType::F32,
    right: DType::F32,
    out: DType::F32,
};

/// What the tape multiplies: activations, weights and gradients, in each precision.
const KINDS: [(Precision, DType, DType, DType); 9] = [
    (Precision::F32, DType::F32, DType::F32, DType::F32),
    (Precision::Bf16, DType::Bf16, DType::F32, DType::Bf16),
    (Precision::Bf16, DType::F32, DType::F32, DType::Bf16),
    (Precision::Bf16, DType::Bf16, DType::Bf16, DType::F32),
    (Precision::Bf16, DType::F32, DType::Bf16, DType::F32),
    (Precision::F16, DType::F16, DType::F32, DType::F16),
    (Precision::F16, DType::F32, DType::F32, DType::F16),
    (Precision::F16, DType::F16, DType::F16, DType::F32),
    (Precision::F16, DType::F32, DType::F16, DType::F32),
];

#[test]
fn products_of_every_layout_and_odd_sizes() {
    // The last three: more columns than are packed at a time, and several blocks of the inner dim.
    let sizes = [
        (1, 1, 1),
        (3, 5, 7),
        (33, 65, 20),
        (257, 17, 40),
        (70, 600, 9),
        (13, 2070, 5),
        (14, 40, 530),
        (37, 33, 1031),
    ];
    for (rows, cols, inner) in sizes {
        for (precision, left, right, out) in KINDS {
            for layout in 0..4 {
                check(Case {
                    size: Product { rows, cols, inner },
                    left_transposed: layout & 1 == 1,
                    right_transposed: layout & 2 == 2,
                    precision,
                    left,
                    right,
                    out,
                });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_of_any_size(
        (rows, cols, inner) in (1_usize..120, 1_usize..120, 1_usize..600),
        (left_transposed, right_transposed) in any::<(bool, bool)>(),
        kind in 0..KINDS.len(),
    ) {
        let (precision, left, right, out) = KINDS[kind];
        let size = Product { rows, cols, inner };
        check(Case { size, left_transposed, right_transposed, precision, left, right, out });
    }
}

#[test]
fn f32_products_have_the_same_bits_with_registers_of_any_width() {
    let size = Product { rows: 37, cols: 70, inner: 530 };
    let (left, right) = (random(37 * 530, "left"), random(530 * 70, "right"));
    let factors = (
        Matrix::row_major(Floats::F32(&left), 530, false),
        Matrix::row_major(Floats::F32(&right), 70, false),
    );
    let product = |features| {
        let mut out = vec![f32::NAN; 37 * 70];
        run((features, 1), (Precision::F32, size), factors, &mut out, MatmulEpilogue::Overwrite);
        out
    };
    for features in levels().filter(|&level| level > CpuFeatures::Portable) {
        assert_eq!(product(features), product(CpuFeatures::detect()), "{features}");
    }
}

#[test]
fn an_empty_sum_leaves_the_epilogue() {
    let size = Product { rows: 2, cols: 3, inner: 0 };
    let empty = Matrix::row_major(Floats::F32(&[]), 0, false);
    for features in levels() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let mut out = [f32::NAN; 6];
            run((features, 1), (precision, size), (empty, empty), &mut out, MatmulEpilogue::Overwrite);
            assert_eq!(out, [0.0; 6]);
            let mut out = [Bf16::from_f32(f32::NAN); 6];
            let bias = MatmulEpilogue::Add { bias: Some(&[1.0, 2.0, 3.0]), residual: None };
            run((features, 1), (precision, size), (empty, empty), &mut out, bias);
            assert_eq!(out.map(Bf16::to_f32), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        }
    }
}

/// A product of 1 x `values.len()` with ones.
fn sum_of(features: CpuFeatures, precision: Precision, values: &[f32]) -> f32 {
    let size = Product { rows: 1, cols: 1, inner: values.len() };
    let ones = vec![1.0; values.len()];
    let factors = (
        Matrix::row_major(Floats::F32(values), values.len(), false),
        Matrix::row_major(Floats::F32(&ones), 1, false),
    );
    let mut out = [0.0];
    run((features, 1), (precision, size), factors, &mut out, MatmulEpilogue::Overwrite);
    out[0]
}

#[test]
fn what_is_not_finite_reaches_the_result_and_padding_does_not() {
    for features in levels() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            for place in [0, 1, 2, 16, 32] {
                let mut values = vec![1.0; 33];
                assert_eq!(sum_of(features, precision, &values), 33.0, "{features} {precision}");
                values[place] = f32::INFINITY;
                assert_eq!(sum_of(features, precision, &values), f32::INFINITY, "{features} {precision}");
                values[32 - place] = f32::NEG_INFINITY;
                assert!(
                    place == 16 || sum_of(features, precision, &values).is_nan(),
                    "{features} {precision}"
                );
                values[place] = f32::NAN;
                assert!(
                    place == 16 || sum_of(features, precision, &values).is_nan(),
                    "{features} {precision}"
                );
            }
        }
    }
}

#[test]
fn subnormal_factors_count_or_are_zero() {
    let tiny = f32::MIN_POSITIVE / 2.0;
    for features in levels() {
        assert_eq!(sum_of(features, Precision::F32, &[tiny, 1.0]), 1.0);
        let sum = sum_of(features, Precision::Bf16, &[tiny, tiny]);
        assert!(sum == 0.0 || sum == 2.0 * tiny, "{features}: {sum:e}");
        // The smallest f16 is normal as an f32: nothing is lost.
        let smallest = F16::from_bits(1).to_f32();
        assert_eq!(sum_of(features, Precision::F16, &[smallest, smallest]), 2.0 * smallest);
    }
}

#[test]
fn one_wrong_stride_would_be_seen() {
    // A case of the table above with its own check, so that a broken helper does not pass unseen.
    let case = Case { size: Product { rows: 2, cols: 2, inner: 2 }, ..F32_CASE };
    check(case);
    let left = [1.0, 2.0, 3.0, 4.0];
    let identity = [1.0, 0.0, 0.0, 1.0];
    for (transposed, expected) in [(false, [1.0, 2.0, 3.0, 4.0]), (true, [1.0, 3.0, 2.0, 4.0])] {
        let factors = (
            Matrix::row_major(Floats::F32(&left), 2, transposed),
            Matrix::row_major(Floats::F32(&identity), 2, false),
        );
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let mut out = [0.0_f32; 4];
            let size = Product { rows: 2, cols: 2, inner: 2 };
            run((CpuFeatures::detect(), 1), (precision, size), factors, &mut out, MatmulEpilogue::Overwrite);
            assert_eq!(out, expected, "{precision}");
        }
    }
}
