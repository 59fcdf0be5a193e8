mod special;

use super::*;
use crate::kernels::cpu::element::{Floats, with_element};
use crate::kernels::cpu::simd::SimdLevel;
use crate::kernels::cpu::test_support::{
    DTYPES, Exact, assert_close, cases, cases_for_miri, cpu, levels, narrow, random, run_at_levels, to_f64,
    widen,
};
use proptest::prelude::*;
use trireme_base::{Bf16, DType, F16};

/// The sizes, layouts and dtypes of a matmul.
#[derive(Clone, Copy, Debug)]
struct Case {
    size: MatmulSizes,
    left_transposed: bool,
    right_transposed: bool,
    kind: Kind,
    has_bias: bool,
    has_residual: bool,
}

impl Case {
    /// Creates one of the four layouts.
    fn new((rows, cols, inner): (usize, usize, usize), layout: usize, kind: Kind) -> Self {
        Case {
            size: MatmulSizes { rows, cols, inner },
            left_transposed: layout & 1 == 1,
            right_transposed: layout & 2 == 2,
            kind,
            has_bias: true,
            has_residual: true,
        }
    }
}

/// A precision, and the dtypes of the left operand, the right operand and the result.
type Kind = (Precision, DType, DType, DType);

/// The matmuls of the tape: activations, weights and gradients, in each precision.
const KINDS: [Kind; 9] = [
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

/// Returns the index of an element in a matrix of this size.
fn place((row, col): (usize, usize), (rows, cols): (usize, usize), transposed: bool) -> usize {
    if transposed { col * rows + row } else { row * cols + col }
}

/// Stored operands of a matmul, before they are rounded to its dtypes.
struct Operands {
    case: Case,
    left: Vec<f32>,
    right: Vec<f32>,
    bias: Vec<f32>,
    residual: Vec<f32>,
    /// Previous values of the result, for accumulation.
    before: Vec<f32>,
}

/// Results of a matmul: overwritten, with bias and residual, and accumulated (not for 16-bit results).
type Results = [Vec<f32>; 3];

impl Operands {
    fn new(case: Case) -> Self {
        let MatmulSizes { rows, cols, inner } = case.size;
        Operands {
            case,
            left: random(rows * inner, "left"),
            right: random(inner * cols, "right"),
            bias: random(cols, "bias"),
            residual: random(rows * cols, "residual"),
            before: random(rows * cols, "before"),
        }
    }

    fn left_place(&self, row: usize, inner: usize) -> usize {
        place((row, inner), (self.case.size.rows, self.case.size.inner), self.case.left_transposed)
    }

    fn right_place(&self, inner: usize, col: usize) -> usize {
        place((inner, col), (self.case.size.inner, self.case.size.cols), self.case.right_transposed)
    }

    fn run(&self) -> Vec<(SimdLevel, Results)> {
        let (_, left, right, out) = self.case.kind;
        with_element!(left => |L| with_element!(right => |R| with_element!(out => |T| self.run_typed::<L, R, T>())))
    }

    /// Wraps the operands' values as matrices.
    fn factors<'a>(&self, left: Floats<'a>, right: Floats<'a>) -> (Matrix<'a>, Matrix<'a>) {
        let Case { size, left_transposed, right_transposed, .. } = self.case;
        let left_cols = if left_transposed { size.rows } else { size.inner };
        let right_cols = if right_transposed { size.inner } else { size.cols };
        (
            Matrix::row_major(left, left_cols, left_transposed),
            Matrix::row_major(right, right_cols, right_transposed),
        )
    }

    fn run_typed<L: Element, R: Element, T: Element>(&self) -> Vec<(SimdLevel, Results)> {
        let Case { size, kind, has_bias, has_residual, .. } = self.case;
        let (left, right) = (narrow::<L>(&self.left), narrow::<R>(&self.right));
        let factors = self.factors(L::floats(&left), R::floats(&right));
        let (bias, residual) =
            (has_bias.then_some(&self.bias[..]), has_residual.then_some(&self.residual[..]));
        run_at_levels(|cpu| {
            let product = |before: &[f32], epilogue| {
                let mut out = narrow::<T>(before);
                multiply(cpu, kind.0, size, factors, &mut out, epilogue);
                widen(&out)
            };
            let empty = vec![f32::NAN; self.before.len()];
            let accumulated = match T::DTYPE {
                DType::F32 => product(&self.before, Epilogue { accumulate: true, ..Epilogue::OVERWRITE }),
                _ => Vec::new(),
            };
            let added = Epilogue { bias, residual, ..Epilogue::OVERWRITE };
            [product(&empty, Epilogue::OVERWRITE), product(&empty, added), accumulated]
        })
    }

    /// Returns each element's sum in f64, of operands rounded to the matmul's precision.
    fn sums(&self) -> Vec<Exact> {
        let (precision, left, right, _) = self.case.kind;
        let round = |values: &[f32], dtype| {
            let stored: Vec<f32> = with_element!(dtype => |T| widen(&narrow::<T>(values)));
            match precision {
                Precision::F32 => to_f64(&stored),
                Precision::Bf16 => to_f64(&narrow::<Bf16>(&stored)),
                Precision::F16 => to_f64(&narrow::<F16>(&stored)),
            }
        };
        let (left, right) = (round(&self.left, left), round(&self.right, right));
        let MatmulSizes { rows, cols, inner } = self.case.size;
        let sum = |index: usize| {
            let (row, col) = (index / cols, index % cols);
            let terms = (0..inner)
                .map(|inner| left[self.left_place(row, inner)] * right[self.right_place(inner, col)]);
            let (sum, magnitude) =
                terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            Exact::new(sum, magnitude)
        };
        (0..rows * cols).map(sum).collect()
    }
}

fn multiply<T: Element>(
    cpu: &Cpu,
    precision: Precision,
    size: MatmulSizes,
    factors: (Matrix<'_>, Matrix<'_>),
    out: &mut [T],
    epilogue: Epilogue<'_>,
) {
    let mut scratch = vec![u32::MAX; cpu.matmul_scratch(precision, size, factors.0)];
    let out = match T::DTYPE {
        DType::F32 => FloatsMut::F32(bytemuck::cast_slice_mut(out)),
        DType::Bf16 => FloatsMut::Bf16(bytemuck::cast_slice_mut(out)),
        _ => FloatsMut::F16(bytemuck::cast_slice_mut(out)),
    };
    cpu.matmul(precision, size, factors, out, epilogue, &mut scratch);
}

/// Adds two more terms to a sum.
fn plus(sum: &Exact, terms: [f32; 2]) -> Exact {
    let terms = terms.map(f64::from);
    Exact::new(sum.value + terms[0] + terms[1], sum.f32_magnitude + terms[0].abs() + terms[1].abs())
}

fn check(case: Case) {
    let operands = Operands::new(case);
    let (sums, MatmulSizes { cols, inner, .. }) = (operands.sums(), case.size);
    for (simd_level, [plain, added, accumulated]) in operands.run() {
        let what = |what| (what, simd_level, case);
        with_element!(case.kind.3 => |T| {
            assert_close::<T>(&what("product"), &plain, sums.iter().copied(), inner);
            let exact = sums.iter().enumerate().map(|(index, sum)| {
                let bias = if case.has_bias { operands.bias[index % cols] } else { 0.0 };
                let residual = if case.has_residual { operands.residual[index] } else { 0.0 };
                plus(sum, [bias, residual])
            });
            assert_close::<T>(&what("product with what is added"), &added, exact, inner);
        });
        if !accumulated.is_empty() {
            let exact = sums.iter().zip(&operands.before).map(|(sum, &before)| plus(sum, [before, 0.0]));
            assert_close::<f32>(&what("accumulated product"), &accumulated, exact, inner);
        }
    }
}

#[test]
fn products_of_every_layout_and_odd_sizes() {
    // No rows, columns or terms; the edges of registers; the last five: several tiles of rows and of columns, more columns than are packed
    // at a time, and several blocks of the inner dim.
    let sizes = [
        (1, 1, 1),
        (130, 3, 0),
        (0, 3, 2),
        (3, 0, 2),
        (3, 5, 7),
        (33, 65, 20),
        (193, 17, 33),
        (70, 600, 9),
        (13, 2070, 5),
        (14, 40, 530),
        (37, 33, 1031),
    ];
    for &size in cases_for_miri(&sizes, 5) {
        for kind in KINDS {
            (0..4).for_each(|layout| check(Case::new(size, layout, kind)));
        }
    }
}

#[test]
fn threads_share_a_packed_left_factor() {
    // Two tiles of columns whose tasks read the same panels. Small enough for Miri, which detects data races.
    for kind in [KINDS[0], KINDS[1]] {
        check(Case::new((5, TILE_COLS + 1, 3), 1, kind));
    }
}

#[test]
fn narrow_results_never_read_uninitialized_memory() {
    // No terms, a full tile of the portable kernel, and edges. Miri detects references to uninitialized memory with
    // MIRIFLAGS=-Zmiri-recursive-validation.
    for size in [(2, 3, 0), (4, 16, 2), (5, 17, 2)] {
        check(Case::new(size, 0, KINDS[1]));
    }
}

#[test]
#[should_panic(expected = "the result is 4294967296 x 4294967296")]
fn overflowing_result_sizes_are_not_empty() {
    let size = MatmulSizes { rows: 1 << 32, cols: 1 << 32, inner: 0 };
    let empty = Matrix::row_major(Floats::F32(&[]), 0, false);
    let (factors, out) = ((empty, empty), FloatsMut::F32(&mut []));
    let cpu = cpu(SimdLevel::Portable, 1);
    cpu.matmul(Precision::F32, size, factors, out, Epilogue::OVERWRITE, &mut []);
}

#[test]
fn a_matrix_whose_extent_overflows_is_not_covered() {
    let values = [0.0; 4];
    let matrix = Matrix { values: Floats::F32(&values), row_stride: 1 << 32, col_stride: 1 };
    assert!(matrix.covers(1, 4) && matrix.covers(0, usize::MAX));
    assert!(!matrix.covers((1 << 32) + 1, 4));
}

/// Generates lengths, with zero and one more often.
fn lengths(max: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => 0_usize..2, 5 => 2_usize..max]
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn products_of_any_size_and_dtypes(
        size in (lengths(100), lengths(100), lengths(100)),
        layout in 0_usize..4,
        precision in 0..Precision::ALL.len(),
        (left, right, out) in (0..DTYPES.len(), 0..DTYPES.len(), 0..DTYPES.len()),
        (has_bias, has_residual) in any::<(bool, bool)>(),
    ) {
        let kind = (Precision::ALL[precision], DTYPES[left], DTYPES[right], DTYPES[out]);
        check(Case { has_bias, has_residual, ..Case::new(size, layout, kind) });
    }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn products_that_cross_tiles_and_blocks(
        size in (60_usize..120, prop_oneof![20_usize..60, 500_usize..530], prop_oneof![1_usize..40, 500_usize..600]),
        layout in 0_usize..4,
        kind in 0..KINDS.len(),
    ) {
        if !cfg!(miri) {
            check(Case::new(size, layout, KINDS[kind]));
        }
    }
}

#[test]
fn matmuls_packed_per_tile_match_f64() {
    for size in [(1, 1, 1), (3, 5, 0), (33, 17, 40), (70, 64, 65), (13, 33, 1031)] {
        for (index, kind) in KINDS.into_iter().enumerate() {
            let operands = Operands::new(Case::new(size, index % 4, kind));
            with_element!(kind.1 => |L| with_element!(kind.2 => |R| check_packed_per_tile::<L, R>(&operands)));
        }
    }
}

fn check_packed_per_tile<L: Element, R: Element>(operands: &Operands) {
    let Case { size, kind, .. } = operands.case;
    let (left, right) = (narrow::<L>(&operands.left), narrow::<R>(&operands.right));
    let factors = operands.factors(L::floats(&left), R::floats(&right));
    let sums = operands.sums();
    for simd_level in levels() {
        let product = |before: &[f32], accumulate| {
            let mut out = before.to_vec();
            let micro = MicroKernel::new(simd_level, kind.0);
            let mut words = vec![u32::MAX; RightPanels::num_words(micro, size.inner, size.cols)];
            let right = RightPanels::pack(micro, (size.inner, size.cols), factors.1, &mut words);
            Tile::whole(&mut out, size).multiply(LeftOperand::InMemory(factors.0), right, accumulate);
            out
        };
        let what = (simd_level, operands.case);
        let plain = product(&vec![f32::NAN; operands.before.len()], false);
        assert_close::<f32>(&what, &plain, sums.iter().copied(), size.inner);
        let exact = sums.iter().zip(&operands.before).map(|(sum, &before)| plus(sum, [before, 0.0]));
        assert_close::<f32>(&what, &product(&operands.before, true), exact, size.inner);
    }
}

#[test]
fn f32_products_have_the_same_bits_with_registers_of_any_width() {
    let operands = Operands::new(Case::new((37, 70, 530), 0, KINDS[0]));
    let results = operands.run();
    let fused: Vec<_> = results.iter().filter(|(level, _)| *level > SimdLevel::Portable).collect();
    for (simd_level, found) in &fused {
        assert_eq!(found, &fused[0].1, "{simd_level}");
    }
}

#[test]
fn transposed_operands_match_products_by_hand() {
    // Expected values by hand, so that a mistake in a helper is detected.
    let left = [1.0, 2.0, 3.0, 4.0];
    let identity = [1.0, 0.0, 0.0, 1.0];
    let size = MatmulSizes { rows: 2, cols: 2, inner: 2 };
    for (transposed, expected) in [(false, [1.0, 2.0, 3.0, 4.0]), (true, [1.0, 3.0, 2.0, 4.0])] {
        let left = Matrix::row_major(Floats::F32(&left), 2, transposed);
        let right = Matrix::row_major(Floats::F32(&identity), 2, false);
        for (simd_level, precision) in
            levels().flat_map(|level| Precision::ALL.map(|precision| (level, precision)))
        {
            let mut out = [0.0_f32; 4];
            multiply(&cpu(simd_level, 1), precision, size, (left, right), &mut out, Epilogue::OVERWRITE);
            assert_eq!(out, expected, "{simd_level} {precision}");
        }
    }
}

#[test]
fn an_element_has_the_same_bits_at_an_edge_and_within() {
    let (size, inner) = ((64, 96), 1100);
    let (left, right) = (random(size.0 * inner, "left"), random(inner * size.1, "right"));
    let left = narrow::<Bf16>(&left);
    let before = random(size.0 * size.1, "before");
    let factors = (
        Matrix::row_major(Bf16::floats(&left), inner, false),
        Matrix::row_major(f32::floats(&right), size.1, false),
    );
    for precision in [Precision::F32, Precision::Bf16] {
        for level in levels() {
            let product = |rows: usize, cols: usize| {
                let from = |row: usize| before[row * size.1..][..cols].iter().copied();
                let mut out: Vec<f32> = (0..rows).flat_map(from).collect();
                let size = MatmulSizes { rows, cols, inner };
                multiply(
                    &cpu(level, 1),
                    precision,
                    size,
                    factors,
                    &mut out,
                    Epilogue { accumulate: true, ..Epilogue::OVERWRITE },
                );
                out
            };
            let (whole, cut) = (product(64, 96), product(33, 70));
            for (row, cut) in cut.chunks_exact(70).enumerate() {
                assert_eq!(cut, &whole[row * 96..][..70], "{precision} at {level}: row {row}");
            }
        }
    }
}

#[test]
fn tile_rows_balance_threads() {
    let rows = |rows, panel_rows, col_tiles, num_threads| tile_rows(rows, panel_rows, col_tiles, num_threads);
    // Three tiles on two threads would take as long as four.
    assert_eq!([rows(256, 12, 1, 1), rows(256, 12, 1, 2)], [96, 72]);
    assert_eq!([rows(1024, 12, 1, 1), rows(1024, 12, 1, 2)], [96, 84]);
    // With many tiles, the last one matters little.
    assert_eq!(rows(4096, 12, 2, 2), 96);
    assert_eq!([rows(1, 12, 1, 8), rows(0, 32, 1, 8), rows(100, 6, 3, 64)], [96, 96, 48]);
}
