//! The functions of the driver.

use crate::Out;
use crate::gpu::{GRID_YZ_MAX, NUM_MULTIPROCESSORS, SHARED_BYTES, THREADS_PER_BLOCK_MAX};
use crate::launch::{Index, Launch};
use crate::memory::GRANULARITY;
use crate::module::{Module, image_bytes};
use crate::stream::{Driver, Job};
use cudarc::driver::sys::CUdevice_attribute::{self, *};
use cudarc::driver::sys::CUresult::{self, *};
use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

fn driver() -> MutexGuard<'static, Driver> {
    static DRIVER: OnceLock<Mutex<Driver>> = OnceLock::new();
    DRIVER.get_or_init(|| Mutex::new(Driver::new())).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a function of the driver that needs a device.
pub(crate) fn call(run: impl FnOnce(&mut Driver) -> Result<(), CUresult>) -> CUresult {
    let mut driver = driver();
    if !driver.is_initialized {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    let outcome = driver.failure.map_or(Ok(()), Err).and_then(|()| run(&mut driver));
    outcome.map_or_else(|error| error, |()| CUDA_SUCCESS)
}

/// Returns the number of the GPU that the process uses.
pub(crate) fn ordinal() -> i32 {
    driver().ordinal
}

fn check(is_valid: bool) -> Result<(), CUresult> {
    if is_valid { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(_flags: c_uint) -> CUresult {
    let mut driver = driver();
    if driver.gpus.num_gpus == 0 {
        return CUDA_ERROR_NO_DEVICE;
    }
    driver.is_initialized = true;
    CUDA_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: Out<'_, c_int>) -> CUresult {
    version.write(driver().gpus.driver_version);
    CUDA_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CUresult, name: Out<'_, *const c_char>) -> CUresult {
    let text = match error {
        CUDA_ERROR_OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        CUDA_ERROR_LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        CUDA_ERROR_ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        CUDA_ERROR_INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        CUDA_ERROR_INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        CUDA_ERROR_NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        CUDA_ERROR_NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        CUDA_ERROR_LAUNCH_TIMEOUT => c"CUDA_ERROR_LAUNCH_TIMEOUT",
        CUDA_ERROR_DEVICE_UNAVAILABLE => c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    name.write(text.as_ptr());
    CUDA_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: Out<'_, c_int>) -> CUresult {
    call(|driver| {
        count.write(driver.gpus.num_gpus);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: Out<'_, c_int>, ordinal: c_int) -> CUresult {
    call(|driver| {
        if !(0..driver.gpus.num_gpus).contains(&ordinal) {
            return Err(CUDA_ERROR_INVALID_DEVICE);
        }
        device.write(ordinal);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) -> CUresult {
    let text = c"Fake GPU".to_bytes_with_nul();
    call(|_| {
        check(len as usize >= text.len())?;
        // SAFETY: the caller passes the address of `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(num_bytes: Out<'_, usize>, _device: c_int) -> CUresult {
    call(|driver| {
        num_bytes.write(driver.gpus.memory_bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: Out<'_, c_int>,
    attribute: CUdevice_attribute,
    device: c_int,
) -> CUresult {
    call(|driver| {
        let found = match attribute {
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => driver.gpus.capability(device) / 10,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => driver.gpus.capability(device) % 10,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => NUM_MULTIPROCESSORS,
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => device + 1,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID | CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID => 0,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        value.write(found);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: Out<'_, *mut c_void>, device: c_int) -> CUresult {
    call(|driver| {
        driver.ordinal = device;
        context.write((device as usize * 16 + 8) as *mut c_void);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> CUresult {
    call(|_| Ok(()))
}

thread_local! {
    static HAS_CONTEXT: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs a function that needs the current thread's context.
fn call_in_context(run: impl FnOnce(&mut Driver) -> Result<(), CUresult>) -> CUresult {
    if !HAS_CONTEXT.get() {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    call(run)
}

/// Calls a function as [`call_in_context`] does, again and again until it returns true. Other threads may call the driver in between.
fn wait_in_context(run: impl Fn(&mut Driver) -> Result<bool, CUresult>) -> CUresult {
    loop {
        let mut is_done = false;
        let result = call_in_context(|driver| {
            is_done = run(driver)?;
            Ok(())
        });
        if is_done || result != CUDA_SUCCESS {
            return result;
        }
        std::thread::yield_now();
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> CUresult {
    HAS_CONTEXT.set(!context.is_null());
    call(|_| Ok(()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: Out<'_, usize>,
    _properties: *const CUmemAllocationProp,
    _option: c_uint,
) -> CUresult {
    granularity.write(GRANULARITY);
    CUDA_SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    address: Out<'_, u64>,
    num_bytes: usize,
    _alignment: usize,
    _hint: u64,
    _flags: c_ulonglong,
) -> CUresult {
    call_in_context(|driver| {
        check(num_bytes > 0 && num_bytes.is_multiple_of(GRANULARITY))?;
        let start = driver.memory.reserve(num_bytes).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        address.write(start as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressFree(address: u64, num_bytes: usize) -> CUresult {
    call_in_context(|driver| check(driver.memory.free_addresses(address as usize, num_bytes)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    handle: Out<'_, u64>,
    num_bytes: usize,
    _properties: *const CUmemAllocationProp,
    _flags: c_ulonglong,
) -> CUresult {
    call_in_context(|driver| {
        check(num_bytes > 0 && num_bytes.is_multiple_of(GRANULARITY))?;
        if num_bytes > driver.free_bytes() {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        handle.write(driver.memory.create(num_bytes));
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemGetInfo_v2(free: Out<'_, usize>, total: Out<'_, usize>) -> CUresult {
    call_in_context(|driver| {
        free.write(driver.free_bytes());
        total.write(driver.gpus.memory_bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemRelease(handle: u64) -> CUresult {
    call_in_context(|driver| check(driver.memory.release(handle)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemMap(
    address: u64,
    num_bytes: usize,
    offset: usize,
    handle: u64,
    _flags: c_ulonglong,
) -> CUresult {
    call_in_context(|driver| check(offset == 0 && driver.memory.map(address as usize, num_bytes, handle)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemUnmap(address: u64, num_bytes: usize) -> CUresult {
    call_in_context(|driver| check(driver.memory.unmap(address as usize, num_bytes)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(
    address: u64,
    num_bytes: usize,
    _access: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    call_in_context(|driver| check(count == 1 && driver.memory.allow(address as usize, num_bytes)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: Out<'_, u64>, _flags: c_uint) -> CUresult {
    call_in_context(|driver| {
        stream.write(driver.create_stream());
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamDestroy_v2(stream: u64) -> CUresult {
    call_in_context(|driver| driver.destroy_stream(stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamSynchronize(stream: u64) -> CUresult {
    wait_in_context(|driver| driver.try_synchronize_stream(stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamQuery(stream: u64) -> CUresult {
    call_in_context(|driver| if driver.query_stream(stream)? { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> CUresult {
    call_in_context(|driver| driver.wait_event(stream, event))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: u64, _mode: c_uint) -> CUresult {
    call_in_context(|driver| driver.begin_capture(stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamEndCapture(stream: u64, graph: Out<'_, u64>) -> CUresult {
    call_in_context(|driver| {
        graph.write(driver.end_capture(stream)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphInstantiateWithFlags(
    launched: Out<'_, u64>,
    graph: u64,
    _flags: c_ulonglong,
) -> CUresult {
    call_in_context(|driver| {
        launched.write(driver.instantiate(graph)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphUpload(graph: u64, stream: u64) -> CUresult {
    call_in_context(|driver| driver.check_graph(graph, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(graph: u64, stream: u64) -> CUresult {
    call_in_context(|driver| driver.launch_graph(graph, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: u64) -> CUresult {
    call_in_context(|driver| driver.destroy_graph(graph))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(graph: u64) -> CUresult {
    call_in_context(|driver| driver.destroy_launchable_graph(graph))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: Out<'_, u64>, flags: c_uint) -> CUresult {
    call_in_context(|driver| {
        event.write(driver.create_event(flags & DISABLE_TIMING == 0));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventDestroy_v2(event: u64) -> CUresult {
    call_in_context(|driver| driver.destroy_event(event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventRecord(event: u64, stream: u64) -> CUresult {
    call_in_context(|driver| driver.record(event, stream))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventSynchronize(event: u64) -> CUresult {
    wait_in_context(|driver| driver.try_synchronize_event(event))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventQuery(event: u64) -> CUresult {
    call_in_context(|driver| if driver.query_event(event)? { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(milliseconds: Out<'_, f32>, start: u64, end: u64) -> CUresult {
    call_in_context(|driver| {
        milliseconds.write(driver.elapsed(start, end)?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(start: usize, num_bytes: usize, _flags: c_uint) -> CUresult {
    call_in_context(|driver| {
        let end = start + num_bytes;
        let overlaps = driver.pinned.iter().any(|(&other, &len)| other < end && start < other + len);
        check(!overlaps && num_bytes > 0)?;
        if driver.pinned.values().sum::<usize>() + num_bytes > driver.gpus.pinned_bytes_max {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        driver.pinned.insert(start, num_bytes);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(start: usize) -> CUresult {
    call_in_context(|driver| {
        let outcome = driver.unpin(start);
        if outcome == Err(CUDA_ERROR_ILLEGAL_ADDRESS) {
            // Programs do not check the result of this function when they end.
            std::process::abort();
        }
        outcome
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAlloc_v2(start: Out<'_, u64>, num_bytes: usize) -> CUresult {
    call_in_context(|driver| {
        driver.refuse_during_capture()?;
        let num_bytes = num_bytes.next_multiple_of(GRANULARITY);
        if num_bytes > driver.free_bytes() {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let address = driver.memory.reserve(num_bytes).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let handle = driver.memory.create(num_bytes);
        check(driver.memory.map(address, num_bytes, handle) && driver.memory.allow(address, num_bytes))?;
        driver.allocations.insert(address, (num_bytes, handle));
        start.write(address as u64);
        Ok(())
    })
}

/// Waits for all jobs, as the driver does.
#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(start: u64) -> CUresult {
    call_in_context(|driver| {
        driver.refuse_during_capture()?;
        let address = start as usize;
        let (num_bytes, handle) = driver.allocations.remove(&address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        driver.synchronize()?;
        let is_freed = driver.memory.unmap(address, num_bytes)
            && driver.memory.release(handle)
            && driver.memory.free_addresses(address, num_bytes);
        check(is_freed)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    num_bytes: usize,
    stream: u64,
) -> CUresult {
    call_in_context(|driver| {
        let (to, from) = (to as usize, from as usize);
        check(driver.memory.contains(to, num_bytes))?;
        // SAFETY: the caller passes the address of as many bytes of host memory.
        unsafe { driver.copy_from_host(stream, from, to, num_bytes) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    num_bytes: usize,
    stream: u64,
) -> CUresult {
    call_in_context(|driver| {
        let (to, from) = (to as usize, from as usize);
        check(driver.memory.contains(from, num_bytes))?;
        driver.push(stream, Job::Copy { from, to, num_bytes })?;
        // A copy to pageable memory has run when the function returns.
        driver.synchronize_stream(stream)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, num_bytes: usize, stream: u64) -> CUresult {
    call_in_context(|driver| {
        let (to, from) = (to as usize, from as usize);
        check(driver.memory.contains(from, num_bytes) && driver.memory.contains(to, num_bytes))?;
        driver.push(stream, Job::Copy { from, to, num_bytes })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemsetD8Async(to: u64, byte: u8, num_bytes: usize, stream: u64) -> CUresult {
    call_in_context(|driver| {
        check(driver.memory.contains(to as usize, num_bytes))?;
        driver.push(stream, Job::Fill { to: to as usize, num_bytes, byte })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: Out<'_, u64>, image: *const c_void) -> CUresult {
    call_in_context(|driver| {
        // SAFETY: the caller passes an image that NVRTC has made.
        let image = unsafe {
            let image = image.cast::<u8>();
            std::slice::from_raw_parts(image, image_bytes(image))
        };
        let loaded = Module::of_image(image).map_err(|error| {
            eprintln!("fake CUDA: {error}");
            CUDA_ERROR_INVALID_IMAGE
        })?;
        let handle = driver.handle();
        driver.modules.insert(handle, loaded);
        module.write(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> CUresult {
    call_in_context(|driver| check(driver.modules.remove(&module).is_some()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: Out<'_, u64>,
    module: u64,
    name: *const c_char,
) -> CUresult {
    call_in_context(|driver| {
        // SAFETY: the caller passes a text.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let module = driver.modules.get(&module).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let kernel = module.kernel(&name).ok_or(CUDA_ERROR_NOT_FOUND)?;
        let handle = driver.handle();
        driver.functions.insert(handle, (name, kernel));
        function.write(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetParamInfo(
    function: u64,
    index: usize,
    offset: Out<'_, usize>,
    num_bytes: Out<'_, usize>,
) -> CUresult {
    call_in_context(|driver| {
        let (_, kernel) = driver.functions.get(&function).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let size = *kernel.sizes().get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        offset.write(0);
        num_bytes.write(size);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: u64,
    arguments: *const *const c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    call_in_context(|driver| {
        let grid = Index { x: grid_x, y: grid_y, z: grid_z };
        let block = Index { x: block_x, y: block_y, z: block_z };
        check((1..=i32::MAX as u32).contains(&grid.x))?;
        check([grid.y, grid.z].iter().all(|size| (1..=GRID_YZ_MAX).contains(size)))?;
        check((1..=THREADS_PER_BLOCK_MAX).contains(&block.num()) && block.z <= 64)?;
        let shared_bytes = shared_bytes as usize;
        check(shared_bytes <= SHARED_BYTES)?;
        let (name, kernel) = driver.functions.get(&function).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let copied = kernel.sizes().iter().enumerate().map(|(index, &size)| {
            let mut argument = vec![0_u128; size.div_ceil(16)];
            // SAFETY: the caller passes the address of each argument; the kernel's table tells their sizes.
            unsafe {
                let from = (*arguments.add(index)).cast::<u8>();
                std::ptr::copy_nonoverlapping(from, argument.as_mut_ptr().cast(), size);
            }
            argument
        });
        let (name, kernel, arguments) = (name.clone(), kernel.clone(), copied.collect());
        let launch = Launch { name, kernel, grid, block, shared_bytes, arguments };
        driver.push(stream, Job::Launch(Box::new(launch)))
    })
}

/// The real NVRTC asks the driver for tables of functions that have no documentation. It does without them.
#[unsafe(no_mangle)]
extern "C" fn cuGetExportTable(_table: *mut *const c_void, _id: *const c_void) -> CUresult {
    CUDA_ERROR_NOT_FOUND
}
