//! Non-finite and subnormal values, and sums that overflow.

use super::*;
use crate::kernels::cpu::test_support::not_finite;

/// A matmul of finite values at every level, and a non-finite value to insert.
struct NonFiniteCase {
    case: Case,
    clean: Vec<(SimdLevel, Results)>,
    value: f32,
}

impl NonFiniteCase {
    /// Inserts the value into an operand. In each of the results, exactly the `expected` elements must become non-finite, and no others may
    /// change.
    fn check(&self, spoil: impl Fn(&mut Operands, f32), expected: [&[usize]; 3]) {
        let mut operands = Operands::new(self.case);
        spoil(&mut operands, self.value);
        for ((simd_level, found), (_, clean)) in operands.run().iter().zip(&self.clean) {
            let results = found.iter().zip(clean).zip(expected).enumerate();
            for (output, ((found, clean), expected)) in results.filter(|(_, pair)| !pair.0.0.is_empty()) {
                let NonFiniteCase { case, value, .. } = self;
                assert_eq!(not_finite(clean, found), expected, "{value}, {simd_level}, {case:?}, {output}");
            }
        }
    }
}

#[test]
fn non_finite_values_reach_their_row_or_column_only() {
    // The last value is a NaN whose fraction has bits only in the lower half, which a truncation to bf16 drops.
    let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)];
    let (rows, cols, inner) = (101, 37, 71);
    let whole_row = |row: usize| (row * cols..(row + 1) * cols).collect::<Vec<usize>>();
    let whole_col = |col: usize| (0..rows).map(|row| row * cols + col).collect::<Vec<usize>>();
    for (index, &kind) in cases_for_miri(&KINDS, 1).iter().enumerate() {
        for layout in [index % 2, 3 - index % 2] {
            let case = Case::new((rows, cols, inner), layout, kind);
            let value = values[(index + layout) % values.len()];
            let spoilt = NonFiniteCase { case, clean: Operands::new(case).run(), value };
            // The first and last elements, and elements at the edges of panels, tiles and words.
            for (row, term) in [(0, 0), (31, 70), (95, 31), (96, 32), (100, 69)] {
                let spoil = |operands: &mut Operands, value| {
                    let place = operands.left_place(row, term);
                    operands.left[place] = value;
                };
                spoilt.check(spoil, [&whole_row(row); 3]);
            }
            for (term, col) in [(0, 0), (70, 31), (31, 32), (69, 36)] {
                let spoil = |operands: &mut Operands, value| {
                    let place = operands.right_place(term, col);
                    operands.right[place] = value;
                };
                spoilt.check(spoil, [&whole_col(col); 3]);
            }
            let (col, element) = (32, 95 * cols + 32);
            spoilt.check(|operands, value| operands.bias[col] = value, [&[], &whole_col(col), &[]]);
            spoilt.check(|operands, value| operands.residual[element] = value, [&[], &[element], &[]]);
            spoilt.check(|operands, value| operands.before[element] = value, [&[], &[], &[element]]);
        }
    }
}

/// Multiplies `values` as a row by a column whose elements are all `other`.
fn sum_of(simd_level: SimdLevel, precision: Precision, values: &[f32], other: f32) -> f32 {
    let size = MatmulSizes { rows: 1, cols: 1, inner: values.len() };
    let others = vec![other; values.len()];
    let factors = (
        Matrix::row_major(Floats::F32(values), values.len(), false),
        Matrix::row_major(Floats::F32(&others), 1, false),
    );
    let mut out = [f32::NAN];
    multiply(&cpu(simd_level, 1), precision, size, factors, &mut out, Epilogue::OVERWRITE);
    out[0]
}

#[test]
fn infinities_propagate_and_padding_does_not() {
    for simd_level in levels() {
        for precision in Precision::ALL {
            let what = format!("{simd_level} {precision}");
            for place in [0, 1, 2, 15, 32] {
                let mut values = vec![1.0; 33];
                assert_eq!(sum_of(simd_level, precision, &values, 1.0), 33.0, "{what}");
                values[place] = f32::INFINITY;
                assert_eq!(sum_of(simd_level, precision, &values, 1.0), f32::INFINITY, "{what}");
                assert_eq!(sum_of(simd_level, precision, &values, -1.0), f32::NEG_INFINITY, "{what}");
                assert!(sum_of(simd_level, precision, &values, 0.0).is_nan(), "{what}");
                values[32 - place] = f32::NEG_INFINITY;
                assert!(sum_of(simd_level, precision, &values, 1.0).is_nan(), "{what}");
            }
        }
        assert_eq!(
            sum_of(simd_level, Precision::F32, &[1e30; 3], -1e30),
            f32::NEG_INFINITY,
            "{simd_level} overflows"
        );
        assert_eq!(
            sum_of(simd_level, Precision::Bf16, &[1e30; 3], 1e30),
            f32::INFINITY,
            "{simd_level} overflows"
        );
        // The largest f16 value is 65504; the sum is not f16.
        assert_eq!(
            sum_of(simd_level, Precision::F16, &[7e4; 3], 1.0),
            f32::INFINITY,
            "{simd_level} overflows"
        );
        assert_eq!(
            sum_of(simd_level, Precision::F16, &[6e4; 3], 6e4),
            1.08e10,
            "{simd_level} does not overflow"
        );
    }
}

#[test]
fn subnormal_values_are_kept_unless_instructions_flush_them() {
    let tiny = f32::MIN_POSITIVE / 2.0;
    for simd_level in levels() {
        // vdpbf16ps and tdpbf16ps treat subnormal operands as zero and flush subnormal results to zero.
        let flushes = simd_level >= SimdLevel::Avx512Bf16;
        for precision in [Precision::F32, Precision::Bf16] {
            let expected = |value: f32| if flushes && precision == Precision::Bf16 { 0.0 } else { value };
            let sum = |values: &[f32], other: f32| sum_of(simd_level, precision, values, other);
            assert_eq!(sum(&[tiny; 2], 1.0), expected(2.0 * tiny), "{simd_level} {precision}: factors");
            assert_eq!(
                sum(&[tiny; 3], 2.0_f32.powi(100)),
                expected(3.0 * 2.0_f32.powi(-27)),
                "{simd_level} {precision}: factors of a normal sum"
            );
            let root = 2.0_f32.powi(-65);
            assert_eq!(
                sum(&[root; 3], root),
                expected(3.0 * (f32::MIN_POSITIVE / 16.0)),
                "{simd_level} {precision}: products"
            );
        }
        // The smallest f16 is normal as an f32, so nothing is lost.
        let smallest = F16::from_bits(1).to_f32();
        assert_eq!(sum_of(simd_level, Precision::F16, &[smallest; 2], 1.0), 2.0 * smallest);
        assert_eq!(sum_of(simd_level, Precision::F16, &[smallest; 2], smallest), 2.0 * smallest * smallest);
    }
}
