//! Uploads through pinned memory. The driver copies other memory of the host only when the GPU has reached the copy, and the host would
//! wait for all kernels before it.

use super::api::call;
use super::context::{Context, PinnedMemory};
use super::error::CudaError;
use crate::kernels::host_pinning::HostPinning;
use cudarc::driver::sys as cuda;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Size of the largest upload that the driver copies to memory of its own at once ("CUDA Runtime API", "API synchronization behavior").
const DIRECT_BYTES_MAX: usize = 64 << 10;

/// Size of the largest upload through pinned memory: the ids of a million tokens. Sizes of buffers are powers of two.
const BUFFER_BYTES_MAX: usize = 4 << 20;

/// Maximum size of all buffers together. Plans leave 16 MiB for the memory of a process that they do not count.
const BYTES_MAX: usize = 8 << 20;

/// Alignment of pinned memory: a page.
const ALIGNMENT: usize = 4096;

/// Pinned buffers. They are used again when their copies have run.
#[derive(Debug)]
pub(super) struct Uploads {
    context: Arc<Context>,
    buffers: Mutex<Vec<Buffer>>,
}

/// Pinned memory, and an event after the last copy from it.
#[derive(Debug)]
struct Buffer {
    context: Arc<Context>,
    start: NonNull<u8>,
    layout: Layout,
    copied: cuda::CUevent,
    /// Unpins the memory before it is freed.
    pinning: Option<PinnedMemory>,
}

// SAFETY: owns its memory; handles of the driver may be used on any thread that has entered the context.
unsafe impl Send for Buffer {}

impl Buffer {
    fn new(context: &Arc<Context>, num_bytes: usize) -> Result<Self, CudaError> {
        let layout = Layout::from_size_align(num_bytes, ALIGNMENT).expect("a power of two fits");
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) });
        let start = start.unwrap_or_else(|| std::alloc::handle_alloc_error(layout));
        let pinning = PinnedMemory::new(context);
        pinning.pin(start, num_bytes);
        let (context, copied) = (Arc::clone(context), std::ptr::null_mut());
        let mut buffer = Buffer { context, start, layout, copied, pinning: Some(pinning) };
        let flags = cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes a handle, which `drop` destroys.
        unsafe { call!(buffer.context.installation.driver, cuEventCreate(&mut buffer.copied, flags))? };
        Ok(buffer)
    }

    /// Returns whether the last copy from the buffer has run.
    fn is_free(&self) -> bool {
        // SAFETY: an event of this context. The driver reports success for an event that was never recorded.
        unsafe { (self.context.installation.driver.cuEventQuery)(self.copied) == 0 }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let driver = &self.context.installation.driver;
        let _ = self.context.enter();
        // SAFETY: an event of this context, which is not used after this.
        let has_run = unsafe {
            self.copied.is_null() || {
                let has_run = (driver.cuEventSynchronize)(self.copied) == 0;
                let _ = (driver.cuEventDestroy_v2)(self.copied);
                has_run
            }
        };
        if has_run {
            drop(self.pinning.take());
            // SAFETY: allocated by `new`. The GPU does not read it any more.
            unsafe { dealloc(self.start.as_ptr(), self.layout) };
        } else {
            // The GPU may still read the memory.
            std::mem::forget(self.pinning.take());
        }
    }
}

impl Uploads {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Uploads { context: Arc::clone(context), buffers: Mutex::default() }
    }

    /// Copies bytes to the device's memory at `to`, on a stream. The bytes may be overwritten when this returns. Waits only if all buffers
    /// are in use and there is no room for another. Returns false, without a copy, if the driver can copy so few bytes as well, or if they
    /// are too many.
    pub(super) fn copy(
        &self,
        from: &[u8],
        to: cuda::CUdeviceptr,
        stream: cuda::CUstream,
    ) -> Result<bool, CudaError> {
        if from.len() <= DIRECT_BYTES_MAX || from.len() > BUFFER_BYTES_MAX {
            return Ok(false);
        }
        let driver = &self.context.installation.driver;
        let num_bytes = from.len().next_power_of_two();
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        // Buffers are in the order of their last copies, which run in this order.
        let first = buffers.iter().position(|buffer| buffer.layout.size() >= num_bytes);
        let buffer = match first.filter(|&index| buffers[index].is_free()) {
            Some(index) => buffers.remove(index),
            None => {
                let size =
                    |buffers: &[Buffer]| buffers.iter().map(|buffer| buffer.layout.size()).sum::<usize>();
                while size(&buffers) + num_bytes > BYTES_MAX {
                    buffers.remove(0);
                }
                Buffer::new(&self.context, num_bytes)?
            }
        };
        // SAFETY: the buffer has as many bytes, and no copy reads it. It lives until the copy has run, because `drop` waits for the event.
        // The device's memory outlives the copy (see `kernels::operand`).
        let copied = unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), buffer.start.as_ptr(), from.len());
            call!(driver, cuMemcpyHtoDAsync_v2(to, buffer.start.as_ptr().cast(), from.len(), stream))
                .and_then(|()| call!(driver, cuEventRecord(buffer.copied, stream)))
        };
        if copied.is_err() {
            // The GPU may read the memory.
            std::mem::forget(buffer);
        } else {
            buffers.push(buffer);
        }
        copied.map(|()| true)
    }
}
