//! A communicator of NCCL, with its stream, until it is left or aborted.

use crate::kernels::cuda::api::{NcclApi, Status, call};
use crate::kernels::cuda::context::Context;
use crate::kernels::cuda::error::CudaError;
use cudarc::driver::sys as cuda;
use cudarc::nccl::sys as nccl;
use std::ffi::{c_int, c_uint};
use std::time::Duration;
use trireme_base::Rank;

/// Time between two checks whether data has reached the peers that a communicator leaves.
const LEAVE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// The version of NCCL that declares this layout of `ncclConfig_t`. Later versions accept it.
const CONFIG_VERSION: c_uint = 22_403;

/// A communicator of the library, and the stream on which its steps run.
pub(super) struct Connection {
    pub(super) handle: nccl::ncclComm_t,
    pub(super) stream: cuda::CUstream,
}

// SAFETY: handles may be used on any thread that has entered the context, by one thread at a time.
unsafe impl Send for Connection {}

impl Connection {
    /// Starts to join the communicator `id`, which may take until [`is_idle`](Connection::is_idle).
    pub(super) fn open(
        context: &Context,
        api: &NcclApi,
        id: nccl::ncclUniqueId,
        rank: Rank,
        world_size: usize,
    ) -> Result<Self, CudaError> {
        let (driver, mut stream) = (&context.installation.driver, std::ptr::null_mut());
        context.enter()?;
        // SAFETY: writes a handle, which is destroyed with the connection.
        unsafe {
            call!(driver, cuStreamCreate(&mut stream, cuda::CUstream_flags::CU_STREAM_NON_BLOCKING as u32))?;
        }
        let mut handle = std::ptr::null_mut();
        let mut config = nccl::ncclConfig_t {
            size: size_of::<nccl::ncclConfig_t>(),
            // `NCCL_API_MAGIC`.
            magic: 0xcafe_beef,
            version: CONFIG_VERSION,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        let num_ranks = world_size as c_int;
        // SAFETY: writes a handle, which is freed with the connection. The library copies the configuration.
        let begun = unsafe {
            call!(api, ncclCommInitRankConfig(&mut handle, num_ranks, id, rank.0 as c_int, &mut config))
        };
        if begun.is_err() {
            // SAFETY: a stream of this context, which nothing uses.
            let _ = unsafe { (driver.cuStreamDestroy_v2)(stream) };
        }
        begun?;
        Ok(Connection { handle, stream })
    }

    /// Finalizes the communicator, which runs nothing, and destroys it.
    pub(super) fn leave(self, context: &Context, api: &NcclApi) {
        // SAFETY: a communicator that was not aborted, and runs nothing.
        let begun = context.enter().and_then(|()| unsafe { call!(api, ncclCommFinalize(self.handle)) });
        let is_finalized = begun.is_ok()
            && loop {
                match self.is_idle(api) {
                    Ok(false) => std::thread::sleep(LEAVE_POLL_INTERVAL),
                    Ok(true) => break true,
                    Err(_) => break false,
                }
            };
        if !is_finalized {
            self.abort(context, api);
            return;
        }
        // SAFETY: finalized; it is not used any more. Nothing uses the stream.
        unsafe {
            let _ = (api.ncclCommDestroy)(self.handle);
            let _ = (context.installation.driver.cuStreamDestroy_v2)(self.stream);
        }
    }

    /// Aborts the communicator. Returns whether nothing runs on its stream any more.
    pub(super) fn abort(self, context: &Context, api: &NcclApi) -> bool {
        let _ = context.enter();
        // SAFETY: a communicator that was not aborted. Kernels of the library end, and those behind them run.
        unsafe {
            let _ = (api.ncclCommAbort)(self.handle);
        }
        let has_ended = context.synchronize(self.stream).is_ok();
        if has_ended {
            // SAFETY: a stream of this context, which nothing uses any more.
            unsafe {
                let _ = (context.installation.driver.cuStreamDestroy_v2)(self.stream);
            }
        }
        has_ended
    }

    /// Returns whether the last function has done its work.
    pub(super) fn is_idle(&self, api: &NcclApi) -> Result<bool, CudaError> {
        let mut state = nccl::ncclResult_t::ncclSuccess;
        // The library may write numbers that the enumeration does not have.
        let place = (&raw mut state).cast::<Status>();
        // SAFETY: a communicator that was not aborted; writes a number of four bytes.
        let state = unsafe {
            call!(api, ncclCommGetAsyncError(self.handle, place.cast()))?;
            place.read()
        };
        api.check("an operation of NCCL", state)?;
        Ok(state == nccl::ncclResult_t::ncclSuccess as Status)
    }
}
