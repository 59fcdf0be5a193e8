//! cuBLASLt.
//!
//! The library's matrices are column-major. A row-major matrix is the transpose of a column-major one, so the library computes
//! `transpose(out) = transpose(op(right)) transpose(op(left))`.

mod algorithms;

use super::api::{BlasApi, call};
use super::context::Context;
use super::error::CudaError;
use crate::kernels::Operand;
use algorithms::{Algorithm, AlgorithmFile, Problem};
use cudarc::cublaslt::sys as blas;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use trireme_base::{DType, Fp8Format};

/// A handle of cuBLASLt, and the algorithms that were chosen.
#[derive(Debug)]
pub(super) struct Blas {
    context: Arc<Context>,
    handle: blas::cublasLtHandle_t,
    /// `None` for a kind of which the library has no algorithm.
    algorithms: Mutex<HashMap<MatmulKind, Option<Algorithm>>>,
    /// Keeps the fastest algorithms, if matmuls are timed.
    file: Option<AlgorithmFile>,
    /// Whether matmuls in f32 round their operands to TF32.
    pub(super) allow_tf32: bool,
}

// SAFETY: the library's handle may be used on any thread.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Everything that the choice of an algorithm depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MatmulKind {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) inner: usize,
    pub(super) transposed: [bool; 2],
    pub(super) dtype: DType,
    /// The formats of the factors, if they are fp8 codes.
    pub(super) fp8: Option<[Fp8Format; 2]>,
    pub(super) out_dtype: DType,
    pub(super) has_bias: bool,
    /// Alignments of the addresses of the library's matrices A, B, C and D in bytes.
    pub(super) alignments: [u32; 4],
    /// Whether factors in f32 are rounded to TF32.
    pub(super) is_tf32: bool,
}

/// The arrays of a matmul.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct Arrays {
    pub(super) left: Operand,
    pub(super) right: Operand,
    /// Numbers by which the library multiplies fp8 factors.
    pub(super) reciprocals: Option<[Operand; 2]>,
    pub(super) bias: Option<Operand>,
    /// An array of the dtype and shape of `out` that is added; it may be `out`.
    pub(super) added: Option<Operand>,
    pub(super) out: Operand,
    pub(super) workspace: Operand,
}

impl Blas {
    pub(super) fn open(
        context: &Arc<Context>,
        allow_tf32: bool,
        time_matmuls: bool,
    ) -> Result<Self, CudaError> {
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(context.installation.blas, cublasLtCreate(&mut handle))? };
        let file = time_matmuls.then(|| AlgorithmFile::new(context));
        Ok(Blas { context: Arc::clone(context), handle, algorithms: Mutex::default(), file, allow_tf32 })
    }

    fn api(&self) -> &'static BlasApi {
        &self.context.installation.blas
    }

    /// Returns whether the library has an algorithm for a matmul. Chooses one if such a matmul is new. Algorithms may be timed on the
    /// stream that `stream` returns, which overwrites the workspace, so earlier jobs must have been issued.
    pub(super) fn has_algorithm(
        &self,
        kind: MatmulKind,
        arrays: &Arrays,
        stream: impl FnOnce() -> blas::cudaStream_t,
    ) -> Result<bool, CudaError> {
        if let Some(known) = self.lock().get(&kind) {
            return Ok(known.is_some());
        }
        self.with_problem(kind, arrays, stream(), |problem| Ok(self.algorithm(problem)?.is_some()))
    }

    /// Issues a matmul to a stream. Fails if the library has no algorithm for it.
    pub(super) fn multiply(
        &self,
        kind: MatmulKind,
        arrays: &Arrays,
        stream: blas::cudaStream_t,
    ) -> Result<(), CudaError> {
        self.with_problem(kind, arrays, stream, |problem| match self.algorithm(problem)? {
            Some(algorithm) => self.issue(problem, &algorithm, arrays.out.addresses().start),
            None => {
                let MatmulKind { rows, cols, inner, dtype, .. } = kind;
                Err(CudaError::NoAlgorithm { rows, cols, inner, dtype })
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<MatmulKind, Option<Algorithm>>> {
        self.algorithms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Describes a matmul to the library.
    fn with_problem<T>(
        &self,
        kind: MatmulKind,
        arrays: &Arrays,
        stream: blas::cudaStream_t,
        run: impl FnOnce(&Problem<'_>) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let api = self.api();
        let MatmulKind { rows, cols, inner, transposed, .. } = kind;
        let description = Description::new(api, &kind, arrays)?;
        let stored = |rows, cols, is_transposed| if is_transposed { (cols, rows) } else { (rows, cols) };
        let [left_type, right_type] = match kind.fp8 {
            Some(formats) => formats.map(fp8_data_type),
            None => [data_type(kind.dtype); 2],
        };
        let left = Layout::row_major(api, left_type, stored(rows, inner, transposed[0]))?;
        let right = Layout::row_major(api, right_type, stored(inner, cols, transposed[1]))?;
        let out = Layout::row_major(api, data_type(kind.out_dtype), (rows, cols))?;
        let layouts = [&right, &left, &out];
        run(&Problem { kind, description: &description, layouts, arrays, stream })
    }

    /// Issues a matmul whose result goes to the address `out`.
    fn issue(&self, problem: &Problem<'_>, algorithm: &Algorithm, out: usize) -> Result<(), CudaError> {
        let (api, arrays) = (self.api(), problem.arrays);
        let [right, left, result] = problem.layouts;
        let (one, beta) = (1.0_f32, if arrays.added.is_some() { 1.0_f32 } else { 0.0 });
        let address = |operand: Operand| operand.addresses().start as *mut c_void;
        // SAFETY: the layouts describe the arrays, which are on this device and outlive the matmul (see `kernels::operand`), as does the
        // memory at `out`. The numbers are read before the function returns.
        unsafe {
            call!(
                api,
                cublasLtMatmul(
                    self.handle,
                    problem.description.0,
                    (&raw const one).cast(),
                    address(arrays.right),
                    right.0,
                    address(arrays.left),
                    left.0,
                    (&raw const beta).cast(),
                    arrays.added.map_or(out as *const c_void, |added| address(added).cast_const()),
                    result.0,
                    out as *mut c_void,
                    result.0,
                    &algorithm.algorithm,
                    address(arrays.workspace),
                    algorithm.workspace_bytes,
                    problem.stream,
                )
            )
        }
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
    fn new(api: &'static BlasApi, kind: &MatmulKind, arrays: &Arrays) -> Result<Self, CudaError> {
        use blas::cublasLtMatmulDescAttributes_t as attributes;
        let mut handle = std::ptr::null_mut();
        use blas::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
        let compute = if kind.is_tf32 { CUBLAS_COMPUTE_32F_FAST_TF32 } else { CUBLAS_COMPUTE_32F };
        let scale = blas::cudaDataType::CUDA_R_32F;
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(api, cublasLtMatmulDescCreate(&mut handle, compute, scale))? };
        let description = Description(handle, api);
        // The library's `CUBLAS_OP_N` is 0, and `CUBLAS_OP_T` is 1.
        let [left, right] = kind.transposed.map(u32::from);
        description.set(attributes::CUBLASLT_MATMUL_DESC_TRANSA, right)?;
        description.set(attributes::CUBLASLT_MATMUL_DESC_TRANSB, left)?;
        let address = |array: Operand| array.addresses().start as u64;
        if let Some([left, right]) = arrays.reciprocals {
            description.set(attributes::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, address(right))?;
            description.set(attributes::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, address(left))?;
        }
        if let Some(bias) = arrays.bias {
            let epilogue = blas::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(attributes::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
            description.set(attributes::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address(bias))?;
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

/// Returns the library's name of a dtype that it multiplies.
fn data_type(dtype: DType) -> blas::cudaDataType {
    match dtype {
        DType::Bf16 => blas::cudaDataType::CUDA_R_16BF,
        DType::F16 => blas::cudaDataType::CUDA_R_16F,
        _ => blas::cudaDataType::CUDA_R_32F,
    }
}

/// Returns the library's name of an fp8 format.
fn fp8_data_type(format: Fp8Format) -> blas::cudaDataType {
    match format {
        Fp8Format::E4m3 => blas::cudaDataType::CUDA_R_8F_E4M3,
        Fp8Format::E5m2 => blas::cudaDataType::CUDA_R_8F_E5M2,
    }
}

/// The layout of a matrix.
struct Layout(blas::cublasLtMatrixLayout_t, &'static BlasApi);

impl Layout {
    /// Describes a row-major matrix as the transpose of a column-major one.
    fn row_major(
        api: &'static BlasApi,
        dtype: blas::cudaDataType,
        (rows, cols): (usize, usize),
    ) -> Result<Self, CudaError> {
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
