use super::*;
use crate::kernels::cpu::simd::CpuFeatures;
use crate::kernels::cpu::threads::ThreadPool;
use trireme_base::RandomKey;

fn random(len: usize, name: &str) -> Vec<f32> {
    let mut values = vec![0.0; len];
    RandomKey::new(5, name).fill_normal(&mut values, 1.0);
    values
}

/// The levels that this machine has.
fn levels() -> impl Iterator<Item = CpuFeatures> {
    let all = [CpuFeatures::Portable, CpuFeatures::Avx2, CpuFeatures::Avx512];
    all.into_iter().filter(|&level| level <= CpuFeatures::detect())
}

fn run(
    (features, threads): (CpuFeatures, usize),
    size: Product,
    (a, b): (Matrix<'_>, Matrix<'_>),
    out: &mut [f32],
    epilogue: MatmulEpilogue<'_>,
) {
    let cpu = Cpu { threads: ThreadPool::new(threads).unwrap(), features };
    let mut scratch = vec![f32::NAN; cpu.matmul_scratch(size)];
    cpu.matmul(size, a, b, out, epilogue, &mut scratch);
}

fn check(size: Product, left_transposed: bool, right_transposed: bool) {
    let Product { rows, cols, inner } = size;
    let (left, right) = (random(rows * inner, "left"), random(inner * cols, "right"));
    let (bias, residual) = (random(cols, "bias"), random(rows * cols, "residual"));
    let a = Matrix::row_major(&left, if left_transposed { rows } else { inner }, left_transposed);
    let b = Matrix::row_major(&right, if right_transposed { inner } else { cols }, right_transposed);
    let product = |features, threads| {
        let mut out = vec![f32::NAN; rows * cols];
        let epilogue = MatmulEpilogue::Add { bias: Some(&bias), residual: Some(&residual) };
        run((features, threads), size, (a, b), &mut out, epilogue);
        out
    };
    for features in levels() {
        let once = product(features, 1);
        assert_eq!(once, product(features, 3), "{features}: bits depend on the number of threads");
        if features > CpuFeatures::Portable {
            assert_eq!(once, product(CpuFeatures::detect(), 1), "{features}: bits depend on the level");
        }
        let mut twice = once.clone();
        run((features, 1), size, (a, b), &mut twice, MatmulEpilogue::Accumulate);
        compare(size, (a, b), &bias, &residual, (&once, &twice));
    }
}

/// Against sums in f64.
fn compare(
    size: Product,
    (a, b): (Matrix<'_>, Matrix<'_>),
    bias: &[f32],
    residual: &[f32],
    (once, twice): (&[f32], &[f32]),
) {
    let Product { rows, cols, inner } = size;
    for i in 0..rows {
        for j in 0..cols {
            let product: f64 = (0..inner)
                .map(|k| {
                    f64::from(a.data[i * a.row_stride + k * a.col_stride])
                        * f64::from(b.data[k * b.row_stride + j * b.col_stride])
                })
                .sum();
            let added = f64::from(bias[j]) + f64::from(residual[i * cols + j]);
            let error = (f64::from(once[i * cols + j]) - product - added).abs();
            assert!(error < 1e-4, "{size:?} at {i},{j}: off by {error}");
            let error = (f64::from(twice[i * cols + j]) - 2.0 * product - added).abs();
            assert!(error < 2e-4, "{size:?} accumulated at {i},{j}: off by {error}");
        }
    }
}

#[test]
fn products_of_every_layout_and_odd_sizes() {
    // The last two: more columns than are packed at a time, and several blocks of the inner dim.
    let sizes =
        [(1, 1, 1), (3, 5, 7), (33, 65, 20), (257, 17, 40), (70, 600, 9), (13, 2070, 5), (14, 40, 530)];
    for (rows, cols, inner) in sizes {
        for layout in 0..4 {
            check(Product { rows, cols, inner }, layout & 1 == 1, layout & 2 == 2);
        }
    }
}

#[test]
fn an_empty_sum_leaves_the_epilogue() {
    let size = Product { rows: 2, cols: 3, inner: 0 };
    let empty = Matrix::row_major(&[], 0, false);
    for features in levels() {
        let mut out = [f32::NAN; 6];
        run((features, 1), size, (empty, empty), &mut out, MatmulEpilogue::Overwrite);
        assert_eq!(out, [0.0; 6]);
    }
}
