//! Matmuls by cuBLASLt: their scratch memory, and what the library does not do.

use super::Cuda;
use super::blas::{Arrays, MatmulKind};
use super::error::CudaError;
use super::job::Job;
use crate::fp8::Fp8Scaling;
use crate::kernels::call::MatmulCall;
use crate::kernels::{MatmulSizes, Operand, OperandMut};
use crate::precision::Precision;
use crate::shape::Shape;
use trireme_base::DType;

/// Largest memory that the library may use during a matmul; NVIDIA recommends it for Hopper.
const WORKSPACE_BYTES_MAX: usize = 32 << 20;

/// Memory that the library may use, relative to an f32 result. Algorithms that split the inner dim use several times the result.
const WORKSPACE_RESULTS: usize = 4;

/// Alignment of workspaces, which the library requires, and the largest alignment of matrices that matters to it.
const ALIGNMENT: usize = 256;

/// Alignment of a bias that the library adds.
const BIAS_ALIGNMENT: u32 = 16;

/// Lowest compute capability with fp8 units, as 10 * major + minor.
const FP8_CAPABILITY_MIN: i32 = 89;

/// cuBLASLt requires that all sizes of an fp8 matmul are multiples of this number, and that its matrices are aligned to as many bytes.
const FP8_MULTIPLE: usize = 16;

/// Side of the tiles of a transposition of fp8 codes; `TRANSPOSE_TILE` in `sources/quantized.cu`.
const TRANSPOSE_TILE: usize = 64;

/// The factors of a matmul as they are passed to the library.
struct Factors {
    left: Operand,
    right: Operand,
    /// Says what the elements stand for if they are fp8 codes.
    fp8: Option<[Fp8Scaling<Operand>; 2]>,
    transposed: [bool; 2],
}

/// Returns the alignment of an array in bytes, up to [`ALIGNMENT`].
fn alignment(array: Operand) -> u32 {
    1 << array.addresses().start.trailing_zeros().min(ALIGNMENT.ilog2())
}

/// The starts of the parts of a matmul's scratch memory in bytes, and their end.
struct Scratch {
    /// An operand in the precision of the matmul, if it is stored in another; or transposed fp8 codes.
    left: usize,
    right: usize,
    /// The bias in the dtype of the result, if it is stored in another or not aligned.
    bias: usize,
    /// The f32 result, if another kernel adds to it and rounds.
    result: usize,
    workspace: usize,
    end: usize,
}

impl Scratch {
    /// Divides the scratch memory of the largest matmul of these sizes and precision: both operands are converted, and the result is
    /// rounded. The dtypes of operands do not matter, so that the size is known before they are.
    fn new(precision: Precision, MatmulSizes { rows, cols, inner }: MatmulSizes) -> Self {
        let size = precision.dtype().size();
        let after = |start: usize, num_bytes: usize| (start + num_bytes).next_multiple_of(ALIGNMENT);
        let (left, result_bytes) = (0, rows * cols * size_of::<f32>());
        let right = after(left, rows * inner * size);
        let bias = after(right, inner * cols * size);
        let result = after(bias, cols * size_of::<f32>());
        let workspace = after(result, result_bytes);
        let end = after(workspace, (WORKSPACE_RESULTS * result_bytes).min(WORKSPACE_BYTES_MAX));
        Scratch { left, right, bias, result, workspace, end }
    }
}

/// Returns the 32-bit words of scratch memory that a matmul needs.
pub(crate) fn matmul_scratch_words(precision: Precision, sizes: MatmulSizes) -> usize {
    // The arena aligns blocks to less.
    (Scratch::new(precision, sizes).end + ALIGNMENT) / size_of::<u32>()
}

impl Cuda {
    /// Runs a matmul. Converts the factors to its precision, and the bias to the dtype of the result, as cuBLASLt requires. cuBLASLt cannot
    /// add a residual of another dtype than the result's, and may lack an algorithm that adds a bias. Then the result is computed in f32,
    /// and another kernel adds bias and residual and rounds. fp8 factors are converted to bf16 unless the library multiplies them.
    pub(super) fn run_matmul(&self, call: &MatmulCall) {
        let MatmulCall::Matmul {
            left,
            right,
            bias: given_bias,
            residual,
            out,
            scratch,
            precision,
            fp8,
            transposed,
            accumulate,
        } = call;
        let inner = if transposed[0] { left.shape().rows() } else { left.shape().cols() };
        let (rows, cols) = (out.shape().rows(), out.shape().cols());
        if rows == 0 || cols == 0 {
            return;
        }
        if inner == 0 {
            // Only the additions are left.
            if !accumulate {
                self.fill(out, 0);
                self.add_bias(out.as_operand(), *given_bias, *residual, out);
            }
            return;
        }
        let sizes = MatmulSizes { rows, cols, inner };
        let parts = Scratch::new(*precision, sizes);
        let address = scratch.as_operand().addresses().start;
        let base = address.next_multiple_of(ALIGNMENT) - address;
        let part = |start: usize, shape: Shape, dtype: DType| {
            let start = base + start;
            scratch.as_operand().part(start..start + shape.num_elements() * dtype.size(), (shape, dtype))
        };
        let dtype = precision.dtype();
        let convert = |operand: Operand, start: usize, dtype: DType| {
            let converted = part(start, operand.shape(), dtype);
            let launch = self.kernel("convert", &[operand.dtype(), dtype]).arg(operand).arg(converted);
            launch.over_elements(operand.shape());
            converted
        };
        let workspace_bytes = parts.end - parts.workspace;
        let workspace = part(parts.workspace, Shape::from([workspace_bytes]), DType::U8);
        // Returns whether the library has an algorithm.
        let multiply = |factors: &Factors, result: Operand, bias: Option<Operand>, added: Option<Operand>| {
            let Factors { left, right, fp8, transposed } = *factors;
            let kind = MatmulKind {
                rows,
                cols,
                inner,
                transposed,
                dtype,
                fp8: fp8.map(|scalings| scalings.map(|scaling| scaling.format)),
                out_dtype: result.dtype(),
                has_bias: bias.is_some(),
                alignments: [right, left, added.unwrap_or(result), result].map(alignment),
                is_tf32: self.blas.allow_tf32 && dtype == DType::F32,
            };
            let reciprocals = fp8.map(|scalings| scalings.map(|scaling| scaling.reciprocal));
            let arrays = Arrays { left, right, reciprocals, bias, added, out: result, workspace };
            let mut has_algorithm = true;
            self.issue(|| {
                let stream = || self.submitted_stream().cast();
                has_algorithm = self.blas.has_algorithm(kind, &arrays, stream)?;
                Ok(())
            });
            if has_algorithm {
                self.queue(Job::Matmul { kind, arrays: Box::new(arrays) });
            }
            has_algorithm
        };
        let result = out.as_operand();
        let usable = |bias: Operand| {
            let is_usable = bias.dtype() == result.dtype() && alignment(bias) >= BIAS_ALIGNMENT;
            if is_usable { bias } else { convert(bias, parts.bias, result.dtype()) }
        };
        let added = if *accumulate { Some(result) } else { *residual };
        // Returns whether the library has an algorithm. Kernels for fp8 add only a bias of 16 bits.
        let compute = |factors: &Factors| {
            let adds_bias = given_bias.is_none() || factors.fp8.is_none() || result.dtype() != DType::F32;
            let is_direct = (result.dtype() == DType::F32 || residual.is_none()) && adds_bias;
            if is_direct && multiply(factors, result, given_bias.map(usable), added) {
                return true;
            }
            let wide = part(parts.result, out.shape(), DType::F32);
            let needs_addition = given_bias.is_some() || !is_direct;
            let has_algorithm = needs_addition && multiply(factors, wide, None, None);
            if has_algorithm {
                self.add_bias(wide, *given_bias, *residual, out);
            }
            has_algorithm
        };
        if let Some(scalings) = fp8
            && self.multiplies_fp8(sizes, [*left, *right, result, added.unwrap_or(result)])
        {
            let transpose = |codes: Operand, start: usize| {
                let (rows, cols) = (codes.shape().rows(), codes.shape().cols());
                let out = part(start, Shape::from([cols, rows]), DType::U8);
                let launch = self.kernel("transpose_codes", &[]).arg(codes).arg(out).arg(rows).arg(cols);
                launch.over_rows(rows.div_ceil(TRANSPOSE_TILE) * cols.div_ceil(TRANSPOSE_TILE));
                out
            };
            // For fp8, cuBLASLt requires that the inner dim is contiguous in both factors.
            let factors = Factors {
                left: if transposed[0] { transpose(*left, parts.left) } else { *left },
                right: if transposed[1] { *right } else { transpose(*right, parts.right) },
                fp8: Some(*scalings),
                transposed: [false, true],
            };
            if compute(&factors) {
                return;
            }
        }
        let factor = |index: usize, operand: &Operand, start: usize| match fp8 {
            Some(scalings) => {
                let values = part(start, operand.shape(), dtype);
                self.dequantize_fp8(*operand, &scalings[index], &OperandMut::new(values));
                values
            }
            None if operand.dtype() == dtype => *operand,
            None => convert(*operand, start, dtype),
        };
        let (left, right) = (factor(0, left, parts.left), factor(1, right, parts.right));
        if !compute(&Factors { left, right, fp8: None, transposed: *transposed }) {
            self.streams.fail(&CudaError::NoAlgorithm { rows, cols, inner, dtype });
        }
    }

    /// Returns whether the GPU has fp8 units, and the sizes and the alignment of the arrays allow their use. cuBLASLt may still have no
    /// algorithm.
    fn multiplies_fp8(&self, MatmulSizes { rows, cols, inner }: MatmulSizes, arrays: [Operand; 4]) -> bool {
        self.context.capability >= FP8_CAPABILITY_MIN
            && [rows, cols, inner].iter().all(|size| size.is_multiple_of(FP8_MULTIPLE))
            && arrays.iter().all(|array| alignment(*array) >= FP8_MULTIPLE as u32)
    }

    /// Computes `y = x + bias + residual`.
    pub(super) fn add_bias(
        &self,
        x: Operand,
        bias: Option<Operand>,
        residual: Option<Operand>,
        y: &OperandMut,
    ) {
        let launch = self.kernel("add_bias", &[x.dtype(), y.dtype()]).arg(x).arg(bias).arg(residual);
        launch.arg(y).arg(x.shape().cols()).over_elements(x.shape());
    }
}
