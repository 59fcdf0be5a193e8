//! Matmuls by cuBLASLt.
//!
//! The library's matrices are column-major. A row-major matrix is the transpose of a column-major one, so the library computes
//! `transpose(out) = transpose(op(right)) transpose(op(left))`.

use super::Cuda;
use super::api::{BlasApi, call};
use super::context::Context;
use super::error::CudaError;
use crate::kernels::backend::Stream;
use crate::kernels::call::MatmulCall;
use crate::kernels::{MatmulSizes, Operand, OperandMut};
use crate::precision::Precision;
use crate::shape::Shape;
use cudarc::cublaslt::sys as blas;
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::DType;

/// Largest memory that the library may use during a matmul; NVIDIA recommends it for Hopper.
const WORKSPACE_BYTES_MAX: usize = 32 << 20;

/// Memory that the library may use, relative to an f32 result. Algorithms that split the inner dim use several times the result.
const WORKSPACE_RESULTS: usize = 4;

/// Alignment of workspaces, which the library requires, and the largest alignment of matrices that matters to it.
const ALIGNMENT: usize = 256;

/// Alignment of a bias that the library adds.
const BIAS_ALIGNMENT: u32 = 16;

/// Returns the alignment of an array in bytes, up to [`ALIGNMENT`].
fn alignment(array: Operand) -> u32 {
    1 << array.addresses().start.trailing_zeros().min(ALIGNMENT.ilog2())
}

/// The parts of the scratch memory of a matmul, as byte ranges.
struct Scratch {
    /// An operand in the precision of the matmul, if it is stored in another.
    left: usize,
    right: usize,
    /// The f32 result, if it is rounded after an addition.
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
        let result = after(right, inner * cols * size);
        let workspace = after(result, result_bytes);
        let end = after(workspace, (WORKSPACE_RESULTS * result_bytes).min(WORKSPACE_BYTES_MAX));
        Scratch { left, right, result, workspace, end }
    }
}

/// Returns the 32-bit words of scratch memory that a matmul needs.
pub(crate) fn matmul_scratch_words(precision: Precision, sizes: MatmulSizes) -> usize {
    // The arena aligns blocks to less.
    (Scratch::new(precision, sizes).end + ALIGNMENT) / size_of::<u32>()
}

/// A handle of cuBLASLt, and the algorithms that were chosen.
#[derive(Debug)]
pub(super) struct Blas {
    context: Arc<Context>,
    handle: blas::cublasLtHandle_t,
    /// The first choice for each kind of matmul stays, so that bits repeat within a run.
    algorithms: Mutex<HashMap<MatmulKind, Algorithm>>,
}

// SAFETY: the library's handle may be used on any thread.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

#[derive(Debug, Clone, Copy)]
struct Algorithm {
    algorithm: blas::cublasLtMatmulAlgo_t,
    workspace_bytes: usize,
}

/// Everything that the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulKind {
    rows: usize,
    cols: usize,
    inner: usize,
    transposed: [bool; 2],
    dtype: DType,
    out_dtype: DType,
    has_bias: bool,
    /// Alignments of the addresses of the library's matrices A, B, C and D in bytes, up to [`ALIGNMENT`].
    alignments: [u32; 4],
}

/// The arrays of a matmul whose operands have the same dtype, with the result in another.
struct Arrays {
    left: Operand,
    right: Operand,
    bias: Option<Operand>,
    /// An array of the dtype and shape of `out` that is added; it may be `out`.
    added: Option<Operand>,
    out: Operand,
    workspace: Operand,
}

impl Blas {
    pub(super) fn open(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(context.installation.blas, cublasLtCreate(&mut handle))? };
        Ok(Blas { context: Arc::clone(context), handle, algorithms: Mutex::default() })
    }

    fn api(&self) -> &'static BlasApi {
        &self.context.installation.blas
    }

    /// Issues a matmul to a stream.
    fn multiply(
        &self,
        kind: MatmulKind,
        arrays: &Arrays,
        stream: blas::cudaStream_t,
    ) -> Result<(), CudaError> {
        let api = self.api();
        let MatmulKind { rows, cols, inner, transposed, .. } = kind;
        let description = Description::new(api, &kind, arrays.bias)?;
        let stored = |rows, cols, is_transposed| if is_transposed { (cols, rows) } else { (rows, cols) };
        let left = Layout::row_major(api, kind.dtype, stored(rows, inner, transposed[0]))?;
        let right = Layout::row_major(api, kind.dtype, stored(inner, cols, transposed[1]))?;
        let out = Layout::row_major(api, kind.out_dtype, (rows, cols))?;
        let layouts = [right.0, left.0, out.0];
        let Algorithm { algorithm, workspace_bytes } =
            self.algorithm(kind, description.0, layouts, arrays.workspace.num_bytes())?;
        let (one, beta) = (1.0_f32, if arrays.added.is_some() { 1.0_f32 } else { 0.0 });
        let address = |operand: Operand| operand.addresses().start as *mut c_void;
        // SAFETY: the layouts describe the arrays, which are on this device and outlive the matmul (see `kernels::operand`). The numbers
        // are read before the function returns.
        unsafe {
            call!(
                api,
                cublasLtMatmul(
                    self.handle,
                    description.0,
                    (&raw const one).cast(),
                    address(arrays.right),
                    right.0,
                    address(arrays.left),
                    left.0,
                    (&raw const beta).cast(),
                    address(arrays.added.unwrap_or(arrays.out)),
                    out.0,
                    address(arrays.out),
                    out.0,
                    &algorithm,
                    address(arrays.workspace),
                    workspace_bytes,
                    stream,
                )
            )
        }
    }

    /// Returns the algorithm that the library prefers for a kind of matmul. The layouts describe the library's operands and the result.
    fn algorithm(
        &self,
        kind: MatmulKind,
        description: blas::cublasLtMatmulDesc_t,
        [first, second, out]: [blas::cublasLtMatrixLayout_t; 3],
        workspace_bytes_max: usize,
    ) -> Result<Algorithm, CudaError> {
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(algorithm) = algorithms.get(&kind) {
            return Ok(*algorithm);
        }
        let api = self.api();
        let mut preference = std::ptr::null_mut();
        let attribute = blas::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let max = workspace_bytes_max as u64;
        use blas::cublasLtMatmulPreferenceAttributes_t as attributes;
        let alignments = [
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            attributes::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        let set_alignments = |preference| {
            alignments.into_iter().zip(kind.alignments).try_for_each(|(attribute, alignment)| {
                let value = (&raw const alignment).cast();
                // SAFETY: the value has the size of the attribute, and is read before the function returns.
                unsafe {
                    call!(
                        api,
                        cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, size_of::<u32>())
                    )
                }
            })
        };
        let mut found = MaybeUninit::<blas::cublasLtMatmulHeuristicResult_t>::uninit();
        let mut num_found = 0;
        // SAFETY: handles of the library. Writes one result and the number of results. Only fields without invalid values are read.
        let algorithm = unsafe {
            call!(api, cublasLtMatmulPreferenceCreate(&mut preference))?;
            let outcome = call!(
                api,
                cublasLtMatmulPreferenceSetAttribute(
                    preference,
                    attribute,
                    (&raw const max).cast(),
                    size_of_val(&max),
                )
            )
            .and_then(|()| set_alignments(preference))
            .and_then(|()| {
                call!(
                    api,
                    cublasLtMatmulAlgoGetHeuristic(
                        self.handle,
                        description,
                        first,
                        second,
                        out,
                        out,
                        preference,
                        1,
                        found.as_mut_ptr(),
                        &mut num_found,
                    )
                )
            });
            let _ = (api.cublasLtMatmulPreferenceDestroy)(preference);
            outcome?;
            if num_found == 0 {
                let name = format!("no algorithm for {kind:?}");
                return Err(CudaError::Call { function: "cublasLtMatmulAlgoGetHeuristic", name });
            }
            let found = found.as_ptr();
            Algorithm {
                algorithm: (&raw const (*found).algo).read(),
                workspace_bytes: (&raw const (*found).workspaceSize).read(),
            }
        };
        algorithms.insert(kind, algorithm);
        Ok(algorithm)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created by `open`.
        let _ = unsafe { (self.api().cublasLtDestroy)(self.handle) };
    }
}

/// The description of a matmul.
struct Description(blas::cublasLtMatmulDesc_t, &'static BlasApi);

impl Description {
    fn new(api: &'static BlasApi, kind: &MatmulKind, bias: Option<Operand>) -> Result<Self, CudaError> {
        use blas::cublasLtMatmulDescAttributes_t as attributes;
        let mut handle = std::ptr::null_mut();
        let (compute, scale) =
            (blas::cublasComputeType_t::CUBLAS_COMPUTE_32F, blas::cudaDataType::CUDA_R_32F);
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(api, cublasLtMatmulDescCreate(&mut handle, compute, scale))? };
        let description = Description(handle, api);
        // The library's `CUBLAS_OP_N` is 0, and `CUBLAS_OP_T` is 1.
        let [left, right] = kind.transposed.map(u32::from);
        description.set(attributes::CUBLASLT_MATMUL_DESC_TRANSA, right)?;
        description.set(attributes::CUBLASLT_MATMUL_DESC_TRANSB, left)?;
        if let Some(bias) = bias {
            let epilogue = blas::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(attributes::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            description.set(attributes::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.addresses().start as u64)?;
        }
        Ok(description)
    }

    fn set<T: bytemuck::Pod>(
        &self,
        attribute: blas::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), CudaError> {
        let Description(handle, api) = self;
        // SAFETY: the value has the size of the attribute, and is read before the function returns.
        unsafe {
            call!(
                api,
                cublasLtMatmulDescSetAttribute(*handle, attribute, (&raw const value).cast(), size_of::<T>())
            )
        }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { (self.1.cublasLtMatmulDescDestroy)(self.0) };
    }
}

/// The layout of a matrix.
struct Layout(blas::cublasLtMatrixLayout_t, &'static BlasApi);

impl Layout {
    /// Describes a row-major matrix as the transpose of a column-major one.
    fn row_major(
        api: &'static BlasApi,
        dtype: DType,
        (rows, cols): (usize, usize),
    ) -> Result<Self, CudaError> {
        let dtype = match dtype {
            DType::Bf16 => blas::cudaDataType::CUDA_R_16BF,
            DType::F16 => blas::cudaDataType::CUDA_R_16F,
            _ => blas::cudaDataType::CUDA_R_32F,
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe {
            call!(api, cublasLtMatrixLayoutCreate(&mut handle, dtype, cols as u64, rows as u64, cols as i64))?
        };
        Ok(Layout(handle, api))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by `row_major`.
        let _ = unsafe { (self.1.cublasLtMatrixLayoutDestroy)(self.0) };
    }
}

impl Cuda {
    /// Runs a matmul: converts operands to its precision where they are stored in another, and rounds the result after bias and residual
    /// are added.
    pub(super) fn run_matmul(&self, call: &MatmulCall) {
        let MatmulCall::Matmul {
            left,
            right,
            bias: given_bias,
            residual,
            out,
            scratch,
            precision,
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
        let parts = Scratch::new(*precision, MatmulSizes { rows, cols, inner });
        let address = scratch.as_operand().addresses().start;
        let base = address.next_multiple_of(ALIGNMENT) - address;
        let part = |start: usize, shape: Shape, dtype: DType| {
            let start = base + start;
            scratch.as_operand().part(start..start + shape.num_elements() * dtype.size(), (shape, dtype))
        };
        let dtype = precision.dtype();
        let converted = |operand: &Operand, start: usize| {
            if operand.dtype() == dtype {
                return *operand;
            }
            let rounded = part(start, operand.shape(), dtype);
            let launch = self.kernel("convert", &[operand.dtype(), dtype]).arg(operand).arg(rounded);
            launch.over_elements(operand.shape());
            rounded
        };
        let (left, right) = (converted(left, parts.left), converted(right, parts.right));
        let is_rounded = out.dtype() != DType::F32 && (given_bias.is_some() || residual.is_some());
        let result = if is_rounded { part(parts.result, out.shape(), DType::F32) } else { out.as_operand() };
        let added = if *accumulate { Some(result) } else { *residual };
        let workspace_bytes = parts.end - parts.workspace;
        let workspace = part(parts.workspace, Shape::from([workspace_bytes]), DType::U8);
        let is_aligned = given_bias.is_none_or(|bias| alignment(bias) >= BIAS_ALIGNMENT);
        let adds_later = is_rounded || !is_aligned;
        let (bias, added) =
            if adds_later { (None, added.filter(|_| *accumulate)) } else { (*given_bias, added) };
        let has_bias = bias.is_some();
        let alignments = [right, left, added.unwrap_or(result), result].map(alignment);
        let kind = MatmulKind {
            rows,
            cols,
            inner,
            transposed: *transposed,
            dtype,
            out_dtype: result.dtype(),
            has_bias,
            alignments,
        };
        let arrays = Arrays { left, right, bias, added, out: result, workspace };
        self.issue(|| self.blas.multiply(kind, &arrays, self.streams.handle(Stream::Compute).cast()));
        if adds_later {
            self.add_bias(result, *given_bias, *residual, out);
        }
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
