//! The functions of CUDA's libraries that the backend calls, as tables that are loaded from a library.
//!
//! `cudarc` declares the types and signatures, from NVIDIA's headers. Its own loader is not used: it looks for libraries by name only, and
//! panics where a library or a function is missing.

use super::error::CudaError;
use cudarc::cublaslt::sys as blas;
use cudarc::driver::sys as cuda;
use cudarc::nccl::sys as nccl;
use cudarc::nvrtc::sys as rtc;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

/// Result of a function: 0, or the number of an error. Not the enumeration of `cudarc`, because a later library may return other numbers.
pub(super) type Status = u32;

/// Defines a table of functions of a library. The compiler compares the signatures with the declarations of `cudarc`, which return
/// `$status`.
macro_rules! functions {
    ($(#[$meta:meta])* $table:ident($module:ident) -> $status:ty { $($function:ident($($argument:ty),*);)* }) => {
        $(#[$meta])*
        #[derive(Debug)]
        #[allow(non_snake_case, reason = "the names of the library")]
        pub(super) struct $table {
            $(pub(super) $function: unsafe extern "C" fn($($argument),*) -> Status,)*
            #[allow(dead_code, reason = "keeps the library loaded")]
            shared_object: Library,
        }

        impl $table {
            /// Finds all functions. Fails if one is missing.
            pub(super) fn load(shared_object: Library) -> Result<Self, libloading::Error> {
                $(const _: unsafe fn($($argument),*) -> $status = $module::$function;)*
                // SAFETY: the functions have the declared signatures, as the assertions above show. The table keeps the library.
                unsafe {
                    Ok($table {
                        $($function: *shared_object.get(concat!(stringify!($function), "\0").as_bytes())?,)*
                        shared_object,
                    })
                }
            }
        }
    };
}

functions! {
    /// The driver.
    DriverApi(cuda) -> cuda::CUresult {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGet(*mut cuda::CUdevice, c_int);
        cuDeviceGetName(*mut c_char, c_int, cuda::CUdevice);
        cuDeviceTotalMem_v2(*mut usize, cuda::CUdevice);
        cuDeviceGetAttribute(*mut c_int, cuda::CUdevice_attribute, cuda::CUdevice);
        cuDevicePrimaryCtxRetain(*mut cuda::CUcontext, cuda::CUdevice);
        cuDevicePrimaryCtxRelease_v2(cuda::CUdevice);
        cuCtxSetCurrent(cuda::CUcontext);
        cuMemGetAllocationGranularity(*mut usize, *const cuda::CUmemAllocationProp, cuda::CUmemAllocationGranularity_flags);
        cuMemAddressReserve(*mut cuda::CUdeviceptr, usize, usize, cuda::CUdeviceptr, c_ulonglong);
        cuMemAddressFree(cuda::CUdeviceptr, usize);
        cuMemCreate(*mut cuda::CUmemGenericAllocationHandle, usize, *const cuda::CUmemAllocationProp, c_ulonglong);
        cuMemRelease(cuda::CUmemGenericAllocationHandle);
        cuMemMap(cuda::CUdeviceptr, usize, usize, cuda::CUmemGenericAllocationHandle, c_ulonglong);
        cuMemUnmap(cuda::CUdeviceptr, usize);
        cuMemSetAccess(cuda::CUdeviceptr, usize, *const cuda::CUmemAccessDesc, usize);
        cuStreamCreate(*mut cuda::CUstream, c_uint);
        cuStreamDestroy_v2(cuda::CUstream);
        cuStreamSynchronize(cuda::CUstream);
        cuStreamQuery(cuda::CUstream);
        cuStreamWaitEvent(cuda::CUstream, cuda::CUevent, c_uint);
        cuStreamBeginCapture_v2(cuda::CUstream, cuda::CUstreamCaptureMode);
        cuStreamEndCapture(cuda::CUstream, *mut cuda::CUgraph);
        cuGraphInstantiateWithFlags(*mut cuda::CUgraphExec, cuda::CUgraph, c_ulonglong);
        cuGraphUpload(cuda::CUgraphExec, cuda::CUstream);
        cuGraphLaunch(cuda::CUgraphExec, cuda::CUstream);
        cuGraphDestroy(cuda::CUgraph);
        cuGraphExecDestroy(cuda::CUgraphExec);
        cuEventCreate(*mut cuda::CUevent, c_uint);
        cuEventDestroy_v2(cuda::CUevent);
        cuEventRecord(cuda::CUevent, cuda::CUstream);
        cuEventSynchronize(cuda::CUevent);
        cuEventQuery(cuda::CUevent);
        cuEventElapsedTime(*mut f32, cuda::CUevent, cuda::CUevent);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemAlloc_v2(*mut cuda::CUdeviceptr, usize);
        cuMemFree_v2(cuda::CUdeviceptr);
        cuMemcpyHtoDAsync_v2(cuda::CUdeviceptr, *const c_void, usize, cuda::CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, cuda::CUdeviceptr, usize, cuda::CUstream);
        cuMemcpyDtoDAsync_v2(cuda::CUdeviceptr, cuda::CUdeviceptr, usize, cuda::CUstream);
        cuMemsetD8Async(cuda::CUdeviceptr, u8, usize, cuda::CUstream);
        cuModuleLoadData(*mut cuda::CUmodule, *const c_void);
        cuModuleUnload(cuda::CUmodule);
        cuModuleGetFunction(*mut cuda::CUfunction, cuda::CUmodule, *const c_char);
        cuFuncGetParamInfo(cuda::CUfunction, usize, *mut usize, *mut usize);
        cuLaunchKernel(cuda::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, cuda::CUstream, *mut *mut c_void, *mut *mut c_void);
    }
}

functions! {
    /// The compiler of kernels.
    NvrtcApi(rtc) -> rtc::nvrtcResult {
        nvrtcVersion(*mut c_int, *mut c_int);
        nvrtcCreateProgram(*mut rtc::nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        nvrtcCompileProgram(rtc::nvrtcProgram, c_int, *const *const c_char);
        nvrtcGetProgramLogSize(rtc::nvrtcProgram, *mut usize);
        nvrtcGetProgramLog(rtc::nvrtcProgram, *mut c_char);
        nvrtcGetCUBINSize(rtc::nvrtcProgram, *mut usize);
        nvrtcGetCUBIN(rtc::nvrtcProgram, *mut c_char);
        nvrtcDestroyProgram(*mut rtc::nvrtcProgram);
    }
}

functions! {
    /// The library for matmuls.
    BlasApi(blas) -> blas::cublasStatus_t {
        cublasLtCreate(*mut blas::cublasLtHandle_t);
        cublasLtDestroy(blas::cublasLtHandle_t);
        cublasLtMatmulDescCreate(*mut blas::cublasLtMatmulDesc_t, blas::cublasComputeType_t, blas::cudaDataType_t);
        cublasLtMatmulDescSetAttribute(blas::cublasLtMatmulDesc_t, blas::cublasLtMatmulDescAttributes_t, *const c_void, usize);
        cublasLtMatmulDescDestroy(blas::cublasLtMatmulDesc_t);
        cublasLtMatrixLayoutCreate(*mut blas::cublasLtMatrixLayout_t, blas::cudaDataType, u64, u64, i64);
        cublasLtMatrixLayoutDestroy(blas::cublasLtMatrixLayout_t);
        cublasLtMatmulPreferenceCreate(*mut blas::cublasLtMatmulPreference_t);
        cublasLtMatmulPreferenceSetAttribute(blas::cublasLtMatmulPreference_t, blas::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize);
        cublasLtMatmulPreferenceDestroy(blas::cublasLtMatmulPreference_t);
        cublasLtMatmulAlgoGetHeuristic(
            blas::cublasLtHandle_t, blas::cublasLtMatmulDesc_t, blas::cublasLtMatrixLayout_t, blas::cublasLtMatrixLayout_t,
            blas::cublasLtMatrixLayout_t, blas::cublasLtMatrixLayout_t, blas::cublasLtMatmulPreference_t, c_int,
            *mut blas::cublasLtMatmulHeuristicResult_t, *mut c_int
        );
        cublasLtMatmulAlgoCheck(
            blas::cublasLtHandle_t, blas::cublasLtMatmulDesc_t, blas::cublasLtMatrixLayout_t, blas::cublasLtMatrixLayout_t,
            blas::cublasLtMatrixLayout_t, blas::cublasLtMatrixLayout_t, *const blas::cublasLtMatmulAlgo_t,
            *mut blas::cublasLtMatmulHeuristicResult_t
        );
        cublasLtMatmul(
            blas::cublasLtHandle_t, blas::cublasLtMatmulDesc_t, *const c_void, *const c_void, blas::cublasLtMatrixLayout_t, *const c_void,
            blas::cublasLtMatrixLayout_t, *const c_void, *const c_void, blas::cublasLtMatrixLayout_t, *mut c_void, blas::cublasLtMatrixLayout_t,
            *const blas::cublasLtMatmulAlgo_t, *mut c_void, usize, blas::cudaStream_t
        );
    }
}

functions! {
    /// The library for collectives.
    NcclApi(nccl) -> nccl::ncclResult_t {
        ncclGetVersion(*mut c_int);
        ncclGetUniqueId(*mut nccl::ncclUniqueId);
        ncclCommInitRankConfig(*mut nccl::ncclComm_t, c_int, nccl::ncclUniqueId, c_int, *mut nccl::ncclConfig_t);
        ncclCommGetAsyncError(nccl::ncclComm_t, *mut nccl::ncclResult_t);
        ncclCommFinalize(nccl::ncclComm_t);
        ncclCommDestroy(nccl::ncclComm_t);
        ncclCommAbort(nccl::ncclComm_t);
        ncclGroupStart();
        ncclGroupEnd();
        ncclSend(*const c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, nccl::cudaStream_t);
        ncclRecv(*mut c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, nccl::cudaStream_t);
        ncclBroadcast(*const c_void, *mut c_void, usize, nccl::ncclDataType_t, c_int, nccl::ncclComm_t, nccl::cudaStream_t);
        ncclAllGather(*const c_void, *mut c_void, usize, nccl::ncclDataType_t, nccl::ncclComm_t, nccl::cudaStream_t);
        ncclAllReduce(*const c_void, *mut c_void, usize, nccl::ncclDataType_t, nccl::ncclRedOp_t, nccl::ncclComm_t, nccl::cudaStream_t);
        ncclReduceScatter(*const c_void, *mut c_void, usize, nccl::ncclDataType_t, nccl::ncclRedOp_t, nccl::ncclComm_t, nccl::cudaStream_t);
    }
}

impl DriverApi {
    /// Turns the result of a call into an error that names the function.
    pub(super) fn check(&self, function: &'static str, status: Status) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        let name = self.error_name(status).unwrap_or_else(|| format!("error {status}"));
        Err(CudaError::Call { function, name })
    }

    /// Returns the driver's name of an error; `None` if it knows none.
    fn error_name(&self, status: Status) -> Option<String> {
        type GetErrorName = unsafe extern "C" fn(Status, *mut *const c_char) -> Status;
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the function has this signature, but for a number in place of an enumeration. It writes the address of a constant text,
        // or null for a number that it does not know.
        unsafe {
            let get_error_name = self.shared_object.get::<GetErrorName>(b"cuGetErrorName\0").ok()?;
            get_error_name(status, &mut name);
            if name.is_null() { None } else { Some(CStr::from_ptr(name).to_string_lossy().into_owned()) }
        }
    }
}

impl NvrtcApi {
    /// As [`DriverApi::check`].
    pub(super) fn check(&self, function: &'static str, status: Status) -> Result<(), CudaError> {
        check_number(function, status)
    }
}

impl NcclApi {
    /// As [`DriverApi::check`]. `ncclInProgress` is no error, because communicators do not block.
    pub(super) fn check(&self, function: &'static str, status: Status) -> Result<(), CudaError> {
        let accepted = [nccl::ncclResult_t::ncclSuccess, nccl::ncclResult_t::ncclInProgress];
        let is_accepted = accepted.iter().any(|accepted| *accepted as Status == status);
        if is_accepted { Ok(()) } else { Err(self.error(function, status)) }
    }

    /// Returns the error of a status, with the library's text.
    fn error(&self, function: &'static str, status: Status) -> CudaError {
        type GetErrorString = unsafe extern "C" fn(Status) -> *const c_char;
        // SAFETY: the function has this signature, but for a number in place of an enumeration. It returns a constant text for any number.
        let text = unsafe {
            let get_error_string = self.shared_object.get::<GetErrorString>(b"ncclGetErrorString\0");
            get_error_string
                .ok()
                .map(|function| function(status))
                .filter(|text| !text.is_null())
                .map(|text| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let reason = text.map_or_else(|| format!("error {status}"), |text| format!("error {status}, {text}"));
        CudaError::Nccl { function, reason }
    }
}

impl BlasApi {
    /// As [`DriverApi::check`].
    pub(super) fn check(&self, function: &'static str, status: Status) -> Result<(), CudaError> {
        check_number(function, status)
    }

    /// Returns the version, as ten thousand times the major and a hundred times the minor number.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the function has this signature and no requirements.
        unsafe {
            let function = self.shared_object.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0");
            function.map_or(0, |function| function())
        }
    }
}

fn check_number(function: &'static str, status: Status) -> Result<(), CudaError> {
    if status == 0 { Ok(()) } else { Err(CudaError::Call { function, name: format!("error {status}") }) }
}

/// Calls a function of a table, and turns its result into an error that names it.
macro_rules! call {
    ($table:expr, $function:ident($($argument:expr),* $(,)?)) => {
        $table.check(stringify!($function), ($table.$function)($($argument),*))
    };
}
pub(super) use call;
