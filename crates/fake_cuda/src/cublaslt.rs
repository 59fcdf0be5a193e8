//! cuBLASLt: matmuls of column-major matrices, in f32. There is no algorithm that adds a bias to an odd number of rows of 16 bits. As on
//! Hopper, fp8 matrices are multiplied only if A is transposed, B is not, and all sizes are multiples of 16; only a bf16 bias is added.

use crate::Out;
use crate::driver::call;
use crate::floats::{rounded, rounded_bf16, widened, widened_bf16, widened_e4m3};
use crate::stream::{Driver, Job};
use cudarc::cublaslt::sys::cublasStatus_t::{self, *};
use cudarc::driver::sys::CUresult;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Numbers of the library's enumerations.
const TRANSPOSE_A: u32 = 3;
const TRANSPOSE_B: u32 = 4;
const EPILOGUE: u32 = 7;
const BIAS_POINTER: u32 = 8;
const A_SCALE_POINTER: u32 = 17;
const B_SCALE_POINTER: u32 = 18;
const EPILOGUE_BIAS: u32 = 4;
const COMPUTE_TF32: u32 = 77;

/// Milliseconds that each algorithm takes, on the driver's clock. The first is not the fastest.
const TIMES: [u32; 3] = [3, 1, 2];

/// The description of a matmul.
#[derive(Debug, Clone, Copy, Default)]
struct Description {
    transposed: [bool; 2],
    has_bias: bool,
    bias: usize,
    /// Addresses of numbers by which A and B are multiplied; 0 for none.
    scales: [usize; 2],
    is_tf32: bool,
}

/// The layout of a matrix. Columns have a distance of `stride` elements.
#[derive(Debug, Clone, Copy)]
struct Layout {
    dtype: Dtype,
    rows: usize,
    cols: usize,
    stride: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dtype {
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
}

impl Dtype {
    /// The dtype of a number of the library.
    fn new(number: u32) -> Option<Self> {
        Some(match number {
            0 => Dtype::F32,
            2 => Dtype::F16,
            14 => Dtype::Bf16,
            28 => Dtype::E4m3,
            29 => Dtype::E5m2,
            _ => return None,
        })
    }

    fn num_bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::E4m3 | Dtype::E5m2 => 1,
        }
    }

    fn is_fp8(self) -> bool {
        self.num_bytes() == 1
    }
}

/// A matrix in device memory.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    start: usize,
    layout: Layout,
    is_transposed: bool,
}

impl Layout {
    fn num_bytes(&self) -> usize {
        self.cols * self.stride * self.dtype.num_bytes()
    }

    fn sizes(&self, is_transposed: bool) -> (usize, usize) {
        if is_transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }
}

impl Matrix {
    /// Returns an element.
    ///
    /// # Safety
    /// The matrix is in memory that is accessible now, and has the element.
    unsafe fn get(&self, row: usize, col: usize) -> f32 {
        let (row, col) = if self.is_transposed { (col, row) } else { (row, col) };
        let index = col * self.layout.stride + row;
        // SAFETY: by the promise of the caller.
        unsafe {
            match self.layout.dtype {
                Dtype::F32 => (self.start as *const f32).add(index).read(),
                Dtype::F16 => widened((self.start as *const u16).add(index).read()),
                Dtype::Bf16 => widened_bf16((self.start as *const u16).add(index).read()),
                Dtype::E4m3 => widened_e4m3((self.start as *const u8).add(index).read()),
                // The upper half of an f16.
                Dtype::E5m2 => widened(u16::from((self.start as *const u8).add(index).read()) << 8),
            }
        }
    }

    /// Sets an element, rounded to nearest even.
    ///
    /// # Safety
    /// As for [`get`](Matrix::get).
    unsafe fn set(&self, row: usize, col: usize, value: f32) {
        let index = col * self.layout.stride + row;
        // SAFETY: by the promise of the caller.
        unsafe {
            match self.layout.dtype {
                Dtype::F32 => (self.start as *mut f32).add(index).write(value),
                Dtype::F16 => (self.start as *mut u16).add(index).write(rounded(value)),
                Dtype::Bf16 => (self.start as *mut u16).add(index).write(rounded_bf16(value)),
                Dtype::E4m3 | Dtype::E5m2 => unreachable!("results have more bits"),
            }
        }
    }
}

/// Reads what a pointer names.
///
/// # Safety
/// `from` is the address of a value of this type.
unsafe fn read<T: Copy>(from: *const c_void) -> T {
    // SAFETY: by the promise of the caller.
    unsafe { from.cast::<T>().read_unaligned() }
}

fn status(outcome: CUresult) -> cublasStatus_t {
    if outcome == CUresult::CUDA_SUCCESS { CUBLAS_STATUS_SUCCESS } else { CUBLAS_STATUS_EXECUTION_FAILED }
}

/// Moves a value to memory that the caller owns until it destroys it.
fn create<T>(place: Out<'_, *mut T>, value: T) -> cublasStatus_t {
    place.write(Box::into_raw(Box::new(value)));
    CUBLAS_STATUS_SUCCESS
}

/// Frees a value of [`create`].
///
/// # Safety
/// `create` has made it, and nothing uses it.
unsafe fn destroy<T>(value: *mut T) -> cublasStatus_t {
    // SAFETY: by the promise of the caller.
    drop(unsafe { Box::from_raw(value) });
    CUBLAS_STATUS_SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtGetVersion() -> usize {
    120_800
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtCreate(handle: Out<'_, *mut u8>) -> cublasStatus_t {
    create(handle, 0)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtDestroy(handle: *mut u8) -> cublasStatus_t {
    // SAFETY: the caller passes a handle of `cublasLtCreate`.
    unsafe { destroy(handle) }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulDescCreate(
    description: Out<'_, *mut Description>,
    compute: u32,
    _scale: u32,
) -> cublasStatus_t {
    create(description, Description { is_tf32: compute == COMPUTE_TF32, ..Description::default() })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    description: *mut Description,
    attribute: u32,
    value: *const c_void,
    num_bytes: usize,
) -> cublasStatus_t {
    // SAFETY: the caller passes a description, and the address of a value of the attribute's size, which is checked.
    unsafe {
        match (attribute, num_bytes) {
            (TRANSPOSE_A, 4) => (*description).transposed[0] = read::<u32>(value) == 1,
            (TRANSPOSE_B, 4) => (*description).transposed[1] = read::<u32>(value) == 1,
            (EPILOGUE, 4) => (*description).has_bias = read::<u32>(value) == EPILOGUE_BIAS,
            (BIAS_POINTER, 8) => (*description).bias = read::<usize>(value),
            (A_SCALE_POINTER, 8) => (*description).scales[0] = read::<usize>(value),
            (B_SCALE_POINTER, 8) => (*description).scales[1] = read::<usize>(value),
            _ => return CUBLAS_STATUS_INVALID_VALUE,
        }
    }
    CUBLAS_STATUS_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulDescDestroy(description: *mut Description) -> cublasStatus_t {
    // SAFETY: the caller passes a description that it does not use any more.
    unsafe { destroy(description) }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatrixLayoutCreate(
    layout: Out<'_, *mut Layout>,
    dtype: u32,
    rows: u64,
    cols: u64,
    stride: i64,
) -> cublasStatus_t {
    let Some(dtype) = Dtype::new(dtype) else { return CUBLAS_STATUS_INVALID_VALUE };
    if rows == 0 || cols == 0 || (stride as u64) < rows {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    create(layout, Layout { dtype, rows: rows as usize, cols: cols as usize, stride: stride as usize })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatrixLayoutDestroy(layout: *mut Layout) -> cublasStatus_t {
    // SAFETY: the caller passes a layout that it does not use any more.
    unsafe { destroy(layout) }
}

#[unsafe(no_mangle)]
extern "C" fn cublasLtMatmulPreferenceCreate(preference: Out<'_, *mut Preference>) -> cublasStatus_t {
    create(preference, Preference([256; 4]))
}

/// Alignments of the addresses of A, B, C and D in bytes, which algorithms may rely on.
#[derive(Clone, Copy)]
struct Preference([u32; 4]);

/// `CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES`. The attributes for B, C and D have the next numbers.
const MIN_ALIGNMENT_A: u32 = 5;

/// Alignment of workspaces.
const WORKSPACE_ALIGNMENT: usize = 256;

/// Alignment of a bias.
const BIAS_ALIGNMENT: usize = 16;

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: *mut Preference,
    attribute: u32,
    value: *const c_void,
    num_bytes: usize,
) -> cublasStatus_t {
    if let Some(matrix) = attribute.checked_sub(MIN_ALIGNMENT_A).filter(|matrix| *matrix < 4) {
        if num_bytes != size_of::<u32>() {
            return CUBLAS_STATUS_INVALID_VALUE;
        }
        // SAFETY: the caller passes a preference, and a number of this size.
        unsafe { (*preference).0[matrix as usize] = value.cast::<u32>().read_unaligned() };
    }
    CUBLAS_STATUS_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut Preference) -> cublasStatus_t {
    // SAFETY: the caller passes a preference that it does not use any more.
    unsafe { destroy(preference) }
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct HeuristicResult {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: u32,
    waves: f32,
    reserved: [c_int; 4],
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _handle: *mut u8,
    description: *const Description,
    a: *const Layout,
    b: *const Layout,
    _c: *const Layout,
    d: *const Layout,
    preference: *const Preference,
    num_requested: c_int,
    results: *mut HeuristicResult,
    num_results: Out<'_, c_int>,
) -> cublasStatus_t {
    // SAFETY: the caller passes a description, layouts and a preference.
    let (description, [a, b, d], alignments) = unsafe { (*description, [*a, *b, *d], (*preference).0) };
    let is_odd = description.has_bias && d.dtype != Dtype::F32 && d.rows % 2 == 1;
    if is_odd || !supports(&description, [a, b, d], alignments) {
        num_results.write(0);
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    let num = TIMES.len().min(num_requested as usize);
    for index in 0..num {
        // SAFETY: the caller passes a preference, and as much room as it has asked for.
        unsafe {
            let [a, b, c, d] = (*preference).0.map(u64::from);
            let algorithm = [a, b, c, d, index as u64, 0, 0, 0];
            results.add(index).write(HeuristicResult::new(algorithm));
        }
    }
    num_results.write(num as c_int);
    CUBLAS_STATUS_SUCCESS
}

/// Returns whether the library has an algorithm for these dtypes.
fn supports(description: &Description, [a, b, d]: [Layout; 3], alignments: [u32; 4]) -> bool {
    if !a.dtype.is_fp8() && !b.dtype.is_fp8() {
        return a.dtype == b.dtype && description.scales == [0; 2];
    }
    let sizes = [a.rows, a.cols, a.stride, b.rows, b.cols, b.stride, d.rows, d.cols, d.stride];
    a.dtype.is_fp8()
        && b.dtype.is_fp8()
        && [a.dtype, b.dtype] != [Dtype::E5m2; 2]
        && matches!(d.dtype, Dtype::F32 | Dtype::Bf16)
        && description.transposed == [true, false]
        && (!description.has_bias || d.dtype == Dtype::Bf16)
        && sizes.iter().all(|size| size.is_multiple_of(16))
        && alignments.iter().all(|alignment| *alignment >= 16)
}

impl HeuristicResult {
    fn new(algorithm: [u64; 8]) -> Self {
        HeuristicResult { algorithm, workspace_bytes: 0, state: 0, waves: 1.0, reserved: [0; 4] }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    _handle: *mut u8,
    _description: *const Description,
    _a: *const Layout,
    _b: *const Layout,
    _c: *const Layout,
    _d: *const Layout,
    algorithm: *const [u64; 8],
    result: Out<'_, HeuristicResult>,
) -> cublasStatus_t {
    // SAFETY: the caller passes the bytes of an algorithm.
    let algorithm = unsafe { *algorithm };
    let are_alignments = algorithm[..4].iter().all(|word| word.is_power_of_two() && *word <= 256);
    if !are_alignments || algorithm[4] >= TIMES.len() as u64 {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    result.write(HeuristicResult::new(algorithm));
    CUBLAS_STATUS_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cublasLtMatmul(
    _handle: *mut u8,
    description: *const Description,
    alpha: *const f32,
    a: usize,
    a_layout: *const Layout,
    b: usize,
    b_layout: *const Layout,
    beta: *const f32,
    c: usize,
    c_layout: *const Layout,
    d: usize,
    d_layout: *const Layout,
    algorithm: *const [u64; 8],
    workspace: usize,
    _workspace_bytes: usize,
    stream: u64,
) -> cublasStatus_t {
    // SAFETY: the caller passes a description, layouts and numbers.
    let (description, factors, layouts) =
        unsafe { (*description, [*alpha, *beta], [*a_layout, *b_layout, *c_layout, *d_layout]) };
    // SAFETY: the caller passes an algorithm of the heuristic.
    let algorithm = unsafe { *algorithm };
    let is_aligned = [a, b, c, d]
        .iter()
        .zip(algorithm)
        .all(|(&start, alignment)| (start as u64).is_multiple_of(alignment))
        && workspace.is_multiple_of(WORKSPACE_ALIGNMENT)
        && (!description.has_bias || description.bias.is_multiple_of(BIAS_ALIGNMENT));
    if !is_aligned {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    let matrix = |start, layout, is_transposed| Matrix { start, layout, is_transposed };
    let [a_transposed, b_transposed] = description.transposed;
    let [a, b] = [matrix(a, layouts[0], a_transposed), matrix(b, layouts[1], b_transposed)];
    let [c, d] = [matrix(c, layouts[2], false), matrix(d, layouts[3], false)];
    let milliseconds = TIMES[algorithm[4] as usize];
    status(call(|driver| multiply(driver, description, factors, [a, b, c, d], (stream, milliseconds))))
}

/// Checks a matmul and issues it.
fn multiply(
    driver: &mut Driver,
    description: Description,
    [alpha, beta]: [f32; 2],
    [a, b, c, d]: [Matrix; 4],
    (stream, milliseconds): (u64, u32),
) -> Result<(), CUresult> {
    let (rows, inner) = a.layout.sizes(a.is_transposed);
    let (b_inner, cols) = b.layout.sizes(b.is_transposed);
    // The bias has the dtype of the result.
    let bias_layout = Layout { dtype: d.layout.dtype, rows, cols: 1, stride: rows };
    let bias = Matrix { start: description.bias, layout: bias_layout, is_transposed: false };
    let bias_bytes = if description.has_bias { bias_layout.num_bytes() } else { 0 };
    let fits = inner == b_inner
        && [c, d].iter().all(|matrix| matrix.layout.sizes(false) == (rows, cols))
        && supports(&description, [a.layout, b.layout, d.layout], [256; 4])
        && description.scales.iter().all(|scale| *scale == 0 || driver.memory.contains(*scale, 4))
        && c.layout.dtype == d.layout.dtype
        && [a, b, c, d].iter().all(|matrix| driver.memory.contains(matrix.start, matrix.layout.num_bytes()))
        && driver.memory.contains(bias.start, bias_bytes);
    if !fits {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // TF32 has 10 bits of fraction.
    let factor =
        move |value: f32| if description.is_tf32 { f32::from_bits(value.to_bits() & !0x1fff) } else { value };
    driver.push(
        stream,
        Job::Run(
            Arc::new(move || {
                let scale = |address: usize| match address {
                    0 => 1.0,
                    // SAFETY: jobs run while device memory is accessible, and it has this number, as was checked above.
                    address => unsafe { (address as *const f32).read() },
                };
                let alpha = alpha * scale(description.scales[0]) * scale(description.scales[1]);
                for col in 0..cols {
                    for row in 0..rows {
                        // SAFETY: jobs run while device memory is accessible, and the matrices were checked above.
                        unsafe {
                            let products =
                                (0..inner).map(|at| factor(a.get(row, at)) * factor(b.get(at, col)));
                            let mut value = alpha * products.sum::<f32>();
                            if beta != 0.0 {
                                value += beta * c.get(row, col);
                            }
                            if description.has_bias {
                                value += bias.get(row, 0);
                            }
                            d.set(row, col, value);
                        }
                    }
                }
            }),
            milliseconds,
        ),
    )
}
