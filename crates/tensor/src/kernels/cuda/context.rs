//! A GPU of this process: its context, memory and compiled kernels.

use super::api::call;
use super::compile::{compile_all, compile_generated};
use super::error::CudaError;
use super::installation::{CudaInstallation, Gpu};
use crate::kernels::host_pinning::HostPinning;
use cudarc::driver::sys as cuda;
use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Memory grows by at least this fraction at a time, because each request takes time.
const GROWTH_DIVISOR: usize = 8;

/// The GPU of a number, with this process's context on it. Dropped when the last device and its memory are.
pub(super) struct Context {
    pub(super) installation: &'static CudaInstallation,
    device: cuda::CUdevice,
    handle: cuda::CUcontext,
    /// Name of the GPU.
    pub(super) name: String,
    /// The compute capability, as 10 * major + minor.
    pub(super) capability: c_int,
    modules: Mutex<Vec<cuda::CUmodule>>,
    functions: Mutex<HashMap<String, Function>>,
    /// Addresses of host memory that is pinned.
    pinned: Mutex<Vec<Range<usize>>>,
}

// SAFETY: handles of the driver may be used on any thread; each entry to the driver sets the context of the thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A compiled kernel.
#[derive(Debug, Clone)]
pub(super) struct Function {
    pub(super) handle: cuda::CUfunction,
    /// The size of each argument in bytes.
    pub(super) argument_bytes: Arc<[usize]>,
}

// SAFETY: a handle of the driver, which may be used on any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("name", &self.name)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Opens the GPU, and compiles the kernels for it unless the cache has them.
    pub(super) fn open(
        installation: &'static CudaInstallation,
        ordinal: usize,
    ) -> Result<Arc<Context>, CudaError> {
        let Gpu { name, capability, .. } = installation.gpu(ordinal)?;
        let driver = &installation.driver;
        let mut device = 0;
        // SAFETY: writes a number.
        unsafe { call!(driver, cuDeviceGet(&mut device, ordinal as c_int))? };
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` releases.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&mut handle, device))? };
        let functions = Mutex::default();
        let (modules, pinned) = (Mutex::default(), Mutex::default());
        let context = Context { installation, device, handle, name, capability, modules, functions, pinned };
        context.enter()?;
        for image in compile_all(installation, capability)? {
            context.load(&image)?;
        }
        Ok(Arc::new(context))
    }

    /// Loads machine code of NVRTC for this GPU.
    fn load(&self, image: &[u8]) -> Result<(), CudaError> {
        let mut module = std::ptr::null_mut();
        // SAFETY: an image of NVRTC for this GPU.
        unsafe {
            call!(self.installation.driver, cuModuleLoadData(&mut module, image.as_ptr().cast()))?;
        }
        self.modules.lock().unwrap_or_else(PoisonError::into_inner).push(module);
        Ok(())
    }

    /// Compiles the generated kernel of this name, unless it has run before.
    pub(super) fn load_generated(
        &self,
        name: &str,
        source: impl FnOnce() -> String,
    ) -> Result<(), CudaError> {
        let is_loaded = self.functions.lock().unwrap_or_else(PoisonError::into_inner).contains_key(name);
        if is_loaded {
            Ok(())
        } else {
            self.load(&compile_generated(self.installation, &source(), self.capability)?)
        }
    }

    /// Returns the number and the name of the GPU.
    pub(super) fn describe(&self) -> String {
        format!("GPU {} ({})", self.device, self.name)
    }

    /// Makes this context current on the calling thread, which calls of the driver require.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        let driver = &self.installation.driver;
        // SAFETY: the context is retained.
        unsafe { call!(driver, cuCtxSetCurrent(self.handle)) }
    }

    /// Returns whether some of these bytes are pinned host memory, which the GPU reads after a copy was issued.
    pub(super) fn is_pinned(&self, bytes: &[u8]) -> bool {
        let addresses = bytes.as_ptr_range();
        let (start, end) = (addresses.start as usize, addresses.end as usize);
        let pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        pinned.iter().any(|range| range.start < end && start < range.end)
    }

    /// Waits until all jobs of a stream have run.
    pub(super) fn synchronize(&self, stream: cuda::CUstream) -> Result<(), CudaError> {
        // SAFETY: a stream of this context.
        unsafe { call!(self.installation.driver, cuStreamSynchronize(stream)) }
    }

    /// Returns a kernel by its name. Fails if no module has it.
    pub(super) fn function(&self, name: &str) -> Result<Function, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let driver = &self.installation.driver;
        let c_name = CString::new(name).expect("names of kernels have no zeros");
        let mut outcome =
            Err(CudaError::Call { function: "cuModuleGetFunction", name: format!("no kernel {name}") });
        for &module in &*self.modules.lock().unwrap_or_else(PoisonError::into_inner) {
            let mut handle = std::ptr::null_mut();
            // SAFETY: a loaded module; writes a handle.
            let found = unsafe { call!(driver, cuModuleGetFunction(&mut handle, module, c_name.as_ptr())) };
            if found.is_ok() {
                outcome = Ok(handle);
                break;
            }
        }
        let handle = outcome?;
        let mut argument_bytes = Vec::new();
        loop {
            let (mut offset, mut num_bytes) = (0, 0);
            // SAFETY: writes two numbers, and fails for an index beyond the last argument.
            let info = unsafe {
                (driver.cuFuncGetParamInfo)(handle, argument_bytes.len(), &mut offset, &mut num_bytes)
            };
            if info != 0 {
                break;
            }
            argument_bytes.push(num_bytes);
        }
        let function = Function { handle, argument_bytes: argument_bytes.into() };
        functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = &self.installation.driver;
        let _ = self.enter();
        // SAFETY: loaded and retained by `open`. Streams, events and memory hold the context, so none is left, and no kernel runs.
        unsafe {
            for &module in &*self.modules.lock().unwrap_or_else(PoisonError::into_inner) {
                let _ = (driver.cuModuleUnload)(module);
            }
            let _ = (driver.cuDevicePrimaryCtxRelease_v2)(self.device);
        }
    }
}

/// A range of a GPU's addresses. Memory is mapped from its start on, as far as it is needed.
#[derive(Debug)]
pub(crate) struct DeviceAddresses {
    context: Arc<Context>,
    start: cuda::CUdeviceptr,
    num_bytes: usize,
    granularity: usize,
    /// Mapped spans, with their handles.
    spans: Mutex<Vec<(Range<usize>, cuda::CUmemGenericAllocationHandle)>>,
}

impl DeviceAddresses {
    /// Reserves as many addresses as the GPU has memory.
    pub(super) fn reserve(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let driver = &context.installation.driver;
        let (mut num_bytes, mut granularity, mut start) = (0, 0, 0);
        let properties = properties(context.device);
        let kind = cuda::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the functions write numbers; the addresses are freed by `drop`.
        unsafe {
            call!(driver, cuDeviceTotalMem_v2(&mut num_bytes, context.device))?;
            call!(driver, cuMemGetAllocationGranularity(&mut granularity, &properties, kind))?;
            num_bytes = num_bytes / granularity * granularity;
            call!(driver, cuMemAddressReserve(&mut start, num_bytes, 0, 0, 0))?;
        }
        let (context, spans) = (Arc::clone(context), Mutex::default());
        Ok(DeviceAddresses { context, start, num_bytes, granularity, spans })
    }

    pub(crate) fn start(&self) -> usize {
        self.start as usize
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Maps memory to the bytes `range`, which follow those with memory, and possibly to some after them. Returns the end.
    pub(crate) fn make_accessible(&self, range: Range<usize>) -> Result<usize, CudaError> {
        let round_up = |end: usize| end.next_multiple_of(self.granularity).min(self.num_bytes);
        let needed = round_up(range.end);
        let ample = needed.max(round_up(range.start + range.start / GROWTH_DIVISOR));
        self.map(range.start..ample).or_else(|_| self.map(range.start..needed))
    }

    fn map(&self, range: Range<usize>) -> Result<usize, CudaError> {
        self.context.enter()?;
        let driver = &self.context.installation.driver;
        let (address, num_bytes) = (self.start + range.start as u64, range.len());
        let properties = properties(self.context.device);
        let access = cuda::CUmemAccessDesc {
            location: properties.location,
            flags: cuda::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let mut handle = 0;
        // SAFETY: the addresses are reserved, and no memory is mapped to them; `drop` unmaps and releases the memory. What fails is undone
        // in reverse.
        unsafe {
            call!(driver, cuMemCreate(&mut handle, num_bytes, &properties, 0))?;
            if let Err(error) = call!(driver, cuMemMap(address, num_bytes, 0, handle, 0)) {
                let _ = (driver.cuMemRelease)(handle);
                return Err(error);
            }
            if let Err(error) = call!(driver, cuMemSetAccess(address, num_bytes, &access, 1)) {
                let _ = (driver.cuMemUnmap)(address, num_bytes);
                let _ = (driver.cuMemRelease)(handle);
                return Err(error);
            }
        }
        let end = range.end;
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push((range, handle));
        Ok(end)
    }
}

impl Drop for DeviceAddresses {
    fn drop(&mut self) {
        let driver = &self.context.installation.driver;
        let _ = self.context.enter();
        let spans = std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner));
        // SAFETY: mapped and reserved by this object. No job uses the memory: the arena holds the backend, which has waited for its
        // streams.
        unsafe {
            for (range, handle) in spans {
                let _ = (driver.cuMemUnmap)(self.start + range.start as u64, range.len());
                let _ = (driver.cuMemRelease)(handle);
            }
            let _ = (driver.cuMemAddressFree)(self.start, self.num_bytes);
        }
    }
}

/// Memory of the host that is pinned: a GPU copies it without the help of the processor.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    context: Arc<Context>,
    starts: Mutex<Vec<usize>>,
    failure: OnceLock<String>,
}

impl PinnedMemory {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        PinnedMemory { context: Arc::clone(context), starts: Mutex::default(), failure: OnceLock::new() }
    }
}

impl HostPinning for PinnedMemory {
    fn pin(&self, start: NonNull<u8>, num_bytes: usize) {
        let driver = &self.context.installation.driver;
        // SAFETY: the memory is accessible, and `drop` unpins it.
        let pinned = self.context.enter().and_then(|()| unsafe {
            call!(driver, cuMemHostRegister_v2(start.as_ptr().cast(), num_bytes, 0))
        });
        if let Err(error) = pinned {
            self.failure.get_or_init(|| error.to_string());
            return;
        }
        let start = start.addr().get();
        self.starts.lock().unwrap_or_else(PoisonError::into_inner).push(start);
        self.context.pinned.lock().unwrap_or_else(PoisonError::into_inner).push(start..start + num_bytes);
    }

    fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.context.enter();
        let starts = std::mem::take(self.starts.get_mut().unwrap_or_else(PoisonError::into_inner));
        for start in starts {
            // SAFETY: pinned by `pin`. Copies hold the memory that they use, so none runs.
            let _ = unsafe { (self.context.installation.driver.cuMemHostUnregister)(start as *mut c_void) };
            let mut pinned = self.context.pinned.lock().unwrap_or_else(PoisonError::into_inner);
            pinned.retain(|range| range.start != start);
        }
    }
}

/// Memory of a GPU outside the arena, for measurements.
pub(super) struct TemporaryMemory<'c> {
    context: &'c Context,
    start: cuda::CUdeviceptr,
}

impl<'c> TemporaryMemory<'c> {
    pub(super) fn allocate(context: &'c Context, num_bytes: usize) -> Result<Self, CudaError> {
        let mut start = 0;
        // SAFETY: writes an address, which `drop` frees.
        unsafe { call!(context.installation.driver, cuMemAlloc_v2(&mut start, num_bytes))? };
        Ok(TemporaryMemory { context, start })
    }

    pub(super) fn start(&self) -> usize {
        self.start as usize
    }
}

impl Drop for TemporaryMemory<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate`. The driver waits for the kernels that use it.
        let _ = unsafe { (self.context.installation.driver.cuMemFree_v2)(self.start) };
    }
}

/// A point in time of a stream.
#[derive(Debug)]
pub(crate) struct TimedEvent {
    context: Arc<Context>,
    handle: cuda::CUevent,
}

// SAFETY: handles of the driver may be used on any thread that has entered the context.
unsafe impl Send for TimedEvent {}

impl TimedEvent {
    pub(super) fn record(context: &Arc<Context>, stream: cuda::CUstream) -> Result<Self, CudaError> {
        context.enter()?;
        let driver = &context.installation.driver;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(driver, cuEventCreate(&mut handle, cuda::CUevent_flags::CU_EVENT_DEFAULT as u32))? };
        let event = TimedEvent { context: Arc::clone(context), handle };
        // SAFETY: handles of this context.
        unsafe { call!(driver, cuEventRecord(handle, stream))? };
        Ok(event)
    }

    /// Waits for the event. Returns the time since an earlier one of the same stream.
    pub(crate) fn milliseconds_since(&self, earlier: &TimedEvent) -> Result<f32, CudaError> {
        self.context.enter()?;
        let driver = &self.context.installation.driver;
        let mut milliseconds = 0.0;
        // SAFETY: handles of this context. Writes a number.
        unsafe {
            call!(driver, cuEventSynchronize(self.handle))?;
            call!(driver, cuEventElapsedTime(&mut milliseconds, earlier.handle, self.handle))?;
        }
        Ok(milliseconds)
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: created by `record`.
        let _ = unsafe { (self.context.installation.driver.cuEventDestroy_v2)(self.handle) };
    }
}

/// Returns the properties of memory of a GPU.
fn properties(device: cuda::CUdevice) -> cuda::CUmemAllocationProp {
    // SAFETY: plain numbers and a pointer, for which zeros are the defaults.
    let mut properties: cuda::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = cuda::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = cuda::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties
}
