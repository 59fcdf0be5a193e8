use super::*;
use crate::device::DeviceOptions;
use trireme_base::RandomKey;

fn device() -> Device {
    Device::cpu(DeviceOptions { num_threads: 2, ..DeviceOptions::default() }).unwrap()
}

fn random(rows: usize, cols: usize, size: f32) -> Vec<f32> {
    let mut values = vec![0.0; rows * cols];
    RandomKey::new(1, "matrix").fill_normal(&mut values, size);
    values
}

fn orthogonal(values: &[f32], [rows, cols]: [usize; 2], precision: Precision) -> Vec<f32> {
    let mut values = values.to_vec();
    let matrix = ViewMut::from_f32s(&mut values, [rows, cols].into());
    device().orthogonalize(matrix, 5, precision).unwrap();
    values
}

fn transposed(values: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
    (0..rows * cols).map(|index| values[index % rows * cols + index / rows]).collect()
}

/// Returns the dot product of two rows.
fn dot(values: &[f32], cols: usize, left: usize, right: usize) -> f64 {
    let row = |row: usize| &values[row * cols..(row + 1) * cols];
    row(left).iter().zip(row(right)).map(|(x, y)| f64::from(x * y)).sum()
}

#[test]
fn matrices_become_nearly_orthogonal() {
    for shape @ [rows, cols] in [[1, 5], [4, 40], [33, 70]] {
        for size in [1e-25, 1.0, 1e25] {
            let values = random(rows, cols, size);
            let found = orthogonal(&values, shape, Precision::F32);
            // The iteration leaves singular values between 0.7 and 1.2. A squared row norm is a weighted mean of their squares.
            for row in 0..rows {
                let square = dot(&found, cols, row, row);
                assert!((0.4..1.5).contains(&square), "{shape:?} of {size}: a row of length {square}");
                for other in 0..row {
                    assert!(dot(&found, cols, row, other).abs() < 0.4, "{shape:?} of {size}");
                }
            }
            let tall = orthogonal(&transposed(&values, shape), [cols, rows], Precision::F32);
            for (found, tall) in transposed(&found, shape).iter().zip(&tall) {
                assert!((found - tall).abs() < 1e-4, "{shape:?} of {size}: {found} {tall}");
            }
        }
    }
}

#[test]
fn bf16_matmuls_are_close_to_f32() {
    let shape = [24, 60];
    let values = random(24, 60, 1.0);
    let exact = orthogonal(&values, shape, Precision::F32);
    let rounded = orthogonal(&values, shape, Precision::Bf16);
    assert!(exact != rounded);
    let distance: f32 = exact.iter().zip(&rounded).map(|(x, y)| (x - y) * (x - y)).sum();
    // The rows have norms near 1, so the squared norm of the matrix is about 24.
    assert!(distance < 0.01 * 24.0, "{distance}");
}

#[test]
fn zero_stays_zero() {
    assert_eq!(orthogonal(&[0.0; 12], [3, 4], Precision::F32), [0.0; 12]);
}

#[test]
fn subnormal_numbers_become_zero() {
    // The momentum of a matrix without gradients ends at the smallest number, not at zero.
    for size in [f32::from_bits(1), 2.9e-39] {
        let matrix = [size, 0.0, -size, 0.0, size, 0.0];
        assert!(orthogonal(&matrix, [2, 3], Precision::F32).iter().all(|x| *x == 0.0));
    }
    let smallest = [f32::MIN_POSITIVE, 0.0, 0.0, f32::MIN_POSITIVE];
    assert!(orthogonal(&smallest, [2, 2], Precision::F32).iter().all(|x| x.is_finite()));
}
