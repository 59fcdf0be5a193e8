//! Verification of matmul kernels against the portable kernel.
//!
//! Commands use a matmul kernel only after it has passed. Where no operation rounds, the kernel must compute the same bits as the portable
//! kernel; elsewhere, values within the error bound of the kernel tests. The crate `cli` verifies kernels in a child process
//! (`cli/src/simd/`) and gives devices the highest SIMD level whose kernels have passed
//! ([`DeviceOptions::simd_level_max`](crate::DeviceOptions::simd_level_max)).

use crate::kernels::cpu::element::{Element, FloatsMut, with_element};
use crate::kernels::cpu::matmul::{Epilogue, MatmulSizes, Matrix};
use crate::kernels::cpu::threads::ThreadPool;
use crate::kernels::cpu::{Cpu, f32_error};
use crate::kernels::{ExecutionUnit, SimdLevel};
use crate::precision::Precision;
use crate::probe::Transposes;
use std::fmt;
use trireme_base::DType;

/// A matmul kernel for operands of a precision, which uses an execution unit of the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulKernel {
    /// Precision of the operands.
    pub precision: Precision,
    /// The execution unit that multiplies.
    pub unit: ExecutionUnit,
}

impl MatmulKernel {
    /// Returns the kernel that matmuls of a precision use at a SIMD level.
    pub fn of(simd_level: SimdLevel, precision: Precision) -> Self {
        MatmulKernel { precision, unit: ExecutionUnit::of(simd_level, precision) }
    }

    /// Returns every kernel that some SIMD level up to `simd_level` uses, in ascending order of level for each precision.
    pub fn up_to(simd_level: SimdLevel) -> Vec<MatmulKernel> {
        let levels = SimdLevel::ALL.into_iter().filter(|level| *level <= simd_level);
        let kernels = |precision| levels.clone().map(move |level| MatmulKernel::of(level, precision));
        let mut kernels: Vec<_> = Precision::ALL.into_iter().flat_map(kernels).collect();
        // Levels that share a kernel for a precision are adjacent.
        kernels.dedup();
        kernels
    }

    /// Returns whether this is a portable kernel, which exists on every machine and is the reference for the others.
    pub fn is_portable(self) -> bool {
        self.unit.min_simd_level() == SimdLevel::Portable
    }

    /// Compares the kernel with the portable one on small matmuls, with full tiles and edges, and with inner dims of 1, odd length and
    /// several blocks. Takes about a millisecond. If the system forbids an instruction, the process is killed.
    ///
    /// # Errors
    /// The first wrong element. Elements whose partial sums are small integers must be equal; others may differ by the rounding error.
    ///
    /// # Panics
    /// If the machine does not have the kernel's SIMD level.
    pub fn verify(self) -> Result<(), WrongMatmulElement> {
        let simd_level = self.unit.min_simd_level();
        assert!(simd_level <= SimdLevel::detect(), "{self} is beyond this machine");
        self.verify_at(simd_level)
    }

    fn verify_at(self, simd_level: SimdLevel) -> Result<(), WrongMatmulElement> {
        let [portable, candidate] = [SimdLevel::Portable, simd_level].map(single_threaded);
        compare(self.precision, |case| case.product(&portable), |case| case.product(&candidate))
    }
}

impl fmt::Display for MatmulKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} products on {}", self.precision, self.unit)
    }
}

/// A wrong element that a kernel computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error(
    "element {row},{col} of a product of {sizes} ({transposes}) is {found:e}, but the portable kernel computes \
     {expected:e}"
)]
#[expect(missing_docs, reason = "the message explains the fields")]
pub struct WrongMatmulElement {
    pub sizes: MatmulSizes,
    pub transposes: Transposes,
    pub row: usize,
    pub col: usize,
    pub found: f32,
    pub expected: f32,
}

/// Rows, columns and inner dim. Every micro-kernel gets full tiles and edges, and inner dims of 1, odd length and several blocks. The left
/// operand of the last matmul is packed once for two tiles of columns.
const SIZES: [[usize; 3]; 6] = [[1, 1, 1], [5, 7, 3], [33, 37, 19], [32, 33, 32], [2, 17, 531], [3, 515, 5]];

fn single_threaded(simd_level: SimdLevel) -> Cpu {
    // A pool of size one uses the calling thread and starts none.
    Cpu::new(ThreadPool::new(1).expect("a pool of one starts no thread"), simd_level)
}

/// Compares two implementations of matmuls of a precision.
fn compare(
    precision: Precision,
    expected: impl Fn(&Case) -> Vec<f32>,
    found: impl Fn(&Case) -> Vec<f32>,
) -> Result<(), WrongMatmulElement> {
    // Operands are activations or, if f32, also weights and gradients.
    let activation_dtype = precision.dtype();
    let mut dtypes = vec![
        (activation_dtype, DType::F32),
        (activation_dtype, activation_dtype),
        (DType::F32, activation_dtype),
        (DType::F32, DType::F32),
    ];
    if precision == Precision::F32 {
        // All four pairs are equal. Two are kept, because one result is overwritten and one is accumulated.
        dtypes.truncate(2);
    }
    for [rows, cols, inner] in SIZES {
        for transposes in Transposes::ALL {
            for (index, &dtypes) in dtypes.iter().enumerate() {
                let size = MatmulSizes { rows, cols, inner };
                let case = Case::new(precision, size, transposes, dtypes, index % 2 == 1);
                case.check(&expected(&case), &found(&case))?;
            }
        }
    }
    Ok(())
}

/// A matmul with its operands.
///
/// Even rows of the left operand and even columns of the right one hold small integers. Where they meet, no operation rounds, whatever the
/// order of the sum.
struct Case {
    precision: Precision,
    size: MatmulSizes,
    transposes: Transposes,
    dtypes: (DType, DType),
    left: Vec<f32>,
    right: Vec<f32>,
    /// Previous value of the output, if the result is accumulated.
    before: Option<f32>,
}

impl Case {
    fn new(
        precision: Precision,
        size: MatmulSizes,
        transposes: Transposes,
        dtypes: (DType, DType),
        accumulates: bool,
    ) -> Self {
        let MatmulSizes { rows, cols, inner } = size;
        let (mut left, mut right) = (vec![0.0; rows * inner], vec![0.0; inner * cols]);
        let mut case = Case {
            precision,
            size,
            transposes,
            dtypes,
            left: Vec::new(),
            right: Vec::new(),
            before: accumulates.then_some(3.0),
        };
        for term in 0..inner {
            (0..rows).for_each(|row| left[case.left_place(row, term)] = value(row * inner + term, row));
            (0..cols).for_each(|col| right[case.right_place(term, col)] = value(!(term * cols + col), col));
        }
        (case.left, case.right) = (left, right);
        case
    }

    fn left_place(&self, row: usize, term: usize) -> usize {
        match self.transposes {
            Transposes::TN => term * self.size.rows + row,
            Transposes::NN | Transposes::NT => row * self.size.inner + term,
        }
    }

    fn right_place(&self, term: usize, col: usize) -> usize {
        match self.transposes {
            Transposes::NT => col * self.size.inner + term,
            Transposes::NN | Transposes::TN => term * self.size.cols + col,
        }
    }

    fn product(&self, cpu: &Cpu) -> Vec<f32> {
        with_element!(self.dtypes.0 => |L| with_element!(self.dtypes.1 => |R| self.product_of::<L, R>(cpu)))
    }

    fn product_of<L: Element, R: Element>(&self, cpu: &Cpu) -> Vec<f32> {
        let MatmulSizes { rows, cols, inner } = self.size;
        let (left, right) = (narrow::<L>(&self.left), narrow::<R>(&self.right));
        let (left_cols, left_transposed) =
            if self.transposes == Transposes::TN { (rows, true) } else { (inner, false) };
        let (right_cols, right_transposed) =
            if self.transposes == Transposes::NT { (inner, true) } else { (cols, false) };
        let left = Matrix::row_major(L::floats(&left), left_cols, left_transposed);
        let right = Matrix::row_major(R::floats(&right), right_cols, right_transposed);
        let epilogue = Epilogue { accumulate: self.before.is_some(), ..Epilogue::OVERWRITE };
        // Memory that a kernel must not read holds NaN.
        let mut out = vec![self.before.unwrap_or(f32::NAN); rows * cols];
        let mut scratch = vec![u32::MAX; cpu.matmul_scratch(self.precision, self.size, left)];
        let factors = (left, right);
        cpu.matmul(self.precision, self.size, factors, FloatsMut::F32(&mut out), epilogue, &mut scratch);
        out
    }

    fn check(&self, expected: &[f32], found: &[f32]) -> Result<(), WrongMatmulElement> {
        let cols = self.size.cols;
        for (index, (&expected, &found)) in expected.iter().zip(found).enumerate() {
            let (row, col) = (index / cols, index % cols);
            let is_exact = row % 2 == 0 && col % 2 == 0;
            if expected.to_bits() == found.to_bits()
                || (!is_exact && f64::from((found - expected).abs()) <= self.bound(row, col))
            {
                continue;
            }
            let (sizes, transposes) = (self.size, self.transposes);
            return Err(WrongMatmulElement { sizes, transposes, row, col, found, expected });
        }
        Ok(())
    }

    /// Returns the maximum difference of two kernels that each have a rounding error.
    fn bound(&self, row: usize, col: usize) -> f64 {
        let term = |term| {
            f64::from((self.left[self.left_place(row, term)] * self.right[self.right_place(term, col)]).abs())
        };
        let magnitude = (0..self.size.inner).map(term).sum::<f64>() + f64::from(self.before.unwrap_or(0.0));
        2.0 * f32_error(self.size.inner) * magnitude
    }
}

/// Returns an integer from -4 to 3 in even lines, a fraction from -1 to 1 in odd ones.
fn value(index: usize, line: usize) -> f32 {
    let bits = (index as u32).wrapping_mul(0x9e37_79b1);
    let bits = (bits ^ (bits >> 15)).wrapping_mul(0x2c1b_3c6d);
    if line.is_multiple_of(2) {
        (bits >> 29) as f32 - 4.0
    } else {
        (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
    }
}

fn narrow<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&value| T::from_f32(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::test_support::levels;

    #[test]
    fn kernels_of_every_level_are_verified() {
        for simd_level in levels() {
            for kernel in MatmulKernel::up_to(simd_level) {
                kernel.verify_at(simd_level.min(kernel.unit.min_simd_level())).unwrap();
            }
        }
    }

    #[test]
    fn levels_share_kernels() {
        let names =
            |simd_level| MatmulKernel::up_to(simd_level).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(MatmulKernel::up_to(SimdLevel::Portable).iter().all(|kernel| kernel.is_portable()));
        let amx = names(SimdLevel::AmxBf16);
        assert_eq!(
            amx,
            [
                "f32 products on mul+add 128",
                "f32 products on fma 256",
                "f32 products on fma 512",
                "bf16 products on mul+add 128",
                "bf16 products on fma 256",
                "bf16 products on fma 512",
                "bf16 products on vdpbf16ps",
                "bf16 products on tdpbf16ps",
                "f16 products on mul+add 128",
                "f16 products on fma 256",
                "f16 products on fma 512",
            ]
        );
        assert_eq!(names(SimdLevel::Avx512Bf16).len(), amx.len() - 1);
    }

    /// Compares the portable kernel with itself, with an injected mistake.
    fn compare_with_mistake(
        precision: Precision,
        mistake: impl Fn(&Case, &mut Vec<f32>),
    ) -> Result<(), WrongMatmulElement> {
        let cpu = single_threaded(SimdLevel::Portable);
        compare(
            precision,
            |case| case.product(&cpu),
            |case| {
                let mut found = case.product(&cpu);
                mistake(case, &mut found);
                found
            },
        )
    }

    #[test]
    fn wrong_elements_are_found_and_reported() {
        for precision in Precision::ALL {
            compare_with_mistake(precision, |_, _| ()).unwrap();
            // The last elements of full tiles and of edges; changed values and NaN.
            for (row, col) in [(0, 0), (32, 36), (31, 31)] {
                let at = |case: &Case, found: &mut Vec<f32>, wrong: &dyn Fn(f32) -> f32| {
                    if (case.size.rows, case.size.cols) == (33, 37) {
                        found[row * 37 + col] = wrong(found[row * 37 + col]);
                    }
                };
                for wrong in [|x: f32| x + 0.01, |_| f32::NAN, |x| x * (1.0 + 1e-4) + 1e-4] {
                    let error =
                        compare_with_mistake(precision, |case, found| at(case, found, &wrong)).unwrap_err();
                    assert_eq!((error.row, error.col, error.sizes.inner), (row, col, 19), "{error}");
                    assert!(error.to_string().contains("of a product of 33x37x19 (NN) is"), "{error}");
                }
            }
        }
    }

    #[test]
    fn exact_elements_match_to_the_last_bit() {
        let next = |case: &Case, found: &mut Vec<f32>| {
            if case.size.inner == 531 {
                found[2] = found[2].next_up();
            }
        };
        let error = compare_with_mistake(Precision::F32, next).unwrap_err();
        assert_eq!((error.row, error.col, error.sizes.inner), (0, 2, 531));
        // Other elements may differ in the last bit.
        let next = |_: &Case, found: &mut Vec<f32>| {
            if let Some(odd) = found.get_mut(1) {
                *odd = odd.next_up();
            }
        };
        compare_with_mistake(Precision::F32, next).unwrap();
    }

    #[test]
    fn sums_that_are_rounded_to_16_bits_are_found() {
        let narrow = |_: &Case, found: &mut Vec<f32>| {
            found.iter_mut().for_each(|x| *x = trireme_base::Bf16::from_f32(*x).to_f32());
        };
        assert!(compare_with_mistake(Precision::Bf16, narrow).is_err());
    }
}
