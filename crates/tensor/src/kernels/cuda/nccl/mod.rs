//! NCCL: communicators between GPUs.
//!
//! Communicators do not block: a function may return before its work is done, and the next one may be called only when
//! `ncclCommGetAsyncError` reports success. An idle communicator that is dropped is finalized and destroyed on a thread of its own; after a
//! failure, it is aborted.

mod connection;

use super::Cuda;
use super::api::{NcclApi, Status, call};
use super::context::Context;
use super::error::CudaError;
use crate::exchange_memory::ExchangeMemory;
use crate::kernels::Operand;
use crate::kernels::backend::Backend;
use crate::kernels::cpu::arena::Arena;
use connection::Connection;
use cudarc::driver::sys as cuda;
use cudarc::nccl::sys as nccl;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;
use trireme_base::{
    Category, DType, DeviceCommunicator, DeviceCommunicatorId, DeviceMemory, DeviceSpan, DeviceStep,
    DeviceTransfer, DeviceTransport, DeviceTransportError, Rank, ReduceOp, spawn_thread,
};

/// How long communicators that leave may take.
const LEAVE_MAX: Duration = Duration::from_secs(5);

/// Opens communicators of a GPU. Dropped after them, it waits until they have left their peers: all together, because the library waits for
/// peers of this host, which may leave theirs in another order.
#[derive(Debug)]
pub(super) struct NcclTransport(Nccl);

impl NcclTransport {
    pub(super) fn new(cuda: Arc<Cuda>, arena: Arc<Arena>) -> Result<Self, CudaError> {
        Nccl::new(cuda, arena).map(NcclTransport)
    }
}

impl Drop for NcclTransport {
    fn drop(&mut self) {
        let Departures { state, changed } = &*self.0.departures;
        let state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |state: &mut DepartureState| state.num_leaving > 0 && !state.has_aborted;
        // Longer only if a peer hangs. Its threads end with the process.
        drop(changed.wait_timeout_while(state, LEAVE_MAX, waits));
    }
}

/// The communicators of a GPU that are leaving.
#[derive(Debug, Default)]
struct Departures {
    state: Mutex<DepartureState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct DepartureState {
    num_leaving: usize,
    /// Whether a communicator was aborted, so that peers may not leave.
    has_aborted: bool,
}

impl Departures {
    fn change(&self, change: impl FnOnce(&mut DepartureState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

/// A GPU and the library.
#[derive(Debug, Clone)]
struct Nccl {
    cuda: Arc<Cuda>,
    arena: Arc<Arena>,
    api: &'static NcclApi,
    departures: Arc<Departures>,
}

impl Nccl {
    fn new(cuda: Arc<Cuda>, arena: Arc<Arena>) -> Result<Self, CudaError> {
        let api = cuda.context.installation.nccl()?;
        cuda.context.enter()?;
        // Loaded now, because the driver may wait for kernels to load one, and these may wait for a peer that does the same.
        for dtype in ["f32", "bf16", "f16"] {
            cuda.context.function(&format!("combine_{dtype}"))?;
            cuda.context.function(&format!("divide_{dtype}"))?;
        }
        Ok(Nccl { cuda, arena, api, departures: Arc::default() })
    }
}

fn library_error(error: CudaError) -> DeviceTransportError {
    DeviceTransportError::Library(error.to_string())
}

impl DeviceTransport for NcclTransport {
    fn create_id(&self) -> Result<DeviceCommunicatorId, DeviceTransportError> {
        let mut id = nccl::ncclUniqueId { internal: [0; 128] };
        let created = self.0.cuda.context.enter().and_then(|()| {
            // SAFETY: writes an identifier.
            unsafe { call!(self.0.api, ncclGetUniqueId(&mut id)) }
        });
        created.map_err(library_error)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    fn join(
        &self,
        id: &DeviceCommunicatorId,
        rank: Rank,
        world_size: usize,
    ) -> Result<Box<dyn DeviceCommunicator>, DeviceTransportError> {
        let id = nccl::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let communicator = Communicator::join(&self.0, id, rank, world_size);
        Ok(Box::new(communicator.map_err(library_error)?))
    }

    fn allocate(&self, num_bytes: usize) -> Result<Arc<dyn DeviceMemory>, DeviceTransportError> {
        let failure = |cause: String| DeviceTransportError::Device(cause);
        let block = self.0.arena.allocate(([num_bytes].into(), DType::U8), Category::Communication);
        let block = block.map_err(|error| failure(error.to_string()))?;
        // Kernels that were issued before may still use the memory.
        self.0.cuda.record().outcome().map_err(failure)?;
        Ok(Arc::new(ExchangeMemory::new(Arc::new(block))))
    }

    fn can_reduce(&self, dtype: DType) -> bool {
        matches!(dtype, DType::F32 | DType::Bf16 | DType::F16)
    }
}

/// The place of a rank in a communicator, and the steps that it was given.
struct Communicator {
    nccl: Nccl,
    /// `None` when it was aborted.
    connection: Option<Connection>,
    rank: Rank,
    world_size: usize,
    /// Steps that were not given to the library and the driver yet.
    waiting: VecDeque<DeviceStep>,
    /// Steps that may be running, whose memory is in use.
    running: Vec<DeviceStep>,
    /// Whether the stream has all steps.
    is_issued: bool,
}

impl Communicator {
    fn join(nccl: &Nccl, id: nccl::ncclUniqueId, rank: Rank, world_size: usize) -> Result<Self, CudaError> {
        let connection = Some(Connection::open(&nccl.cuda.context, nccl.api, id, rank, world_size)?);
        Ok(Communicator {
            nccl: nccl.clone(),
            connection,
            rank,
            world_size,
            waiting: VecDeque::new(),
            running: Vec::new(),
            is_issued: false,
        })
    }

    fn context(&self) -> &Context {
        &self.nccl.cuda.context
    }

    fn connection(&self) -> &Connection {
        self.connection.as_ref().expect("the communicator was not aborted")
    }

    /// Gives steps to the library and the driver as far as possible. Returns whether all have run.
    fn advance(&mut self) -> Result<bool, CudaError> {
        self.context().enter()?;
        while !self.is_issued {
            if !self.connection().is_idle(self.nccl.api)? {
                return Ok(false);
            }
            let Some(step) = self.waiting.pop_front() else {
                self.is_issued = true;
                self.announce_issued();
                break;
            };
            let issued = self.issue_step(&step);
            // Also after a failure, because a part may run.
            self.running.push(step);
            issued?;
        }
        // In this order: peers of steps that have run may have left.
        if self.has_run()? {
            return Ok(true);
        }
        self.connection().is_idle(self.nccl.api)?;
        Ok(false)
    }

    /// Tells those that wait for the memory of the running steps where the steps end on the stream, so that other streams of this GPU can
    /// wait for it without the host.
    fn announce_issued(&self) {
        if self.running.is_empty() {
            return;
        }
        let end = self.nccl.cuda.streams.record_on(self.connection().stream);
        for step in &self.running {
            step.for_each_span(|span| ExchangeMemory::of(&*span.memory).set_issued(&end));
        }
    }

    fn has_run(&mut self) -> Result<bool, CudaError> {
        let has_run = self.query_stream()?;
        if has_run {
            self.running.clear();
        }
        Ok(has_run)
    }

    /// Returns whether the stream has run all that it has.
    fn query_stream(&self) -> Result<bool, CudaError> {
        const NOT_READY: Status = cuda::CUresult::CUDA_ERROR_NOT_READY as Status;
        let driver = &self.context().installation.driver;
        // SAFETY: a stream of this context.
        match unsafe { (driver.cuStreamQuery)(self.connection().stream) } {
            NOT_READY => Ok(false),
            status => driver.check("cuStreamQuery", status).map(|()| true),
        }
    }

    /// Issues transfers that run together.
    fn issue_exchange(&self, transfers: &[DeviceTransfer]) -> Result<(), CudaError> {
        let api = self.nccl.api;
        // SAFETY: no requirements.
        unsafe { call!(api, ncclGroupStart())? };
        let issued = transfers.iter().try_for_each(|transfer| self.issue_transfer(transfer));
        // SAFETY: ends the group that was started, also if a transfer was refused.
        let ended = unsafe { call!(api, ncclGroupEnd()) };
        issued.and(ended)
    }

    fn issue_transfer(&self, transfer: &DeviceTransfer) -> Result<(), CudaError> {
        let Connection { handle: comm, stream } = *self.connection();
        let (api, stream) = (self.nccl.api, stream.cast());
        let bytes = nccl::ncclDataType_t::ncclUint8;
        let (DeviceTransfer::Send { from: span, to: peer }
        | DeviceTransfer::Receive { to: span, from: peer }) = transfer;
        let (start, len) = (self.operand(span, DType::U8).addresses().start, span.range.len());
        let peer = peer.0 as c_int;
        // SAFETY: as in `issue_step`.
        unsafe {
            match transfer {
                DeviceTransfer::Send { .. } => {
                    call!(api, ncclSend(start as *const c_void, len, bytes, peer, comm, stream))
                }
                DeviceTransfer::Receive { .. } => {
                    call!(api, ncclRecv(start as *mut c_void, len, bytes, peer, comm, stream))
                }
            }
        }
    }

    fn issue_step(&self, step: &DeviceStep) -> Result<(), CudaError> {
        let Connection { handle: comm, stream } = *self.connection();
        let (api, stream) = (self.nccl.api, stream.cast());
        let bytes = nccl::ncclDataType_t::ncclUint8;
        let span = |span: &DeviceSpan| (self.operand(span, DType::U8).addresses().start, span.range.len());
        let own_block = |start: usize, num_bytes: usize| start + self.rank.0 * (num_bytes / self.world_size);
        // SAFETY: a communicator that was not aborted, and memory of this GPU, which `running` keeps until the steps have run.
        unsafe {
            match step {
                DeviceStep::Exchange(transfers) => self.issue_exchange(transfers),
                DeviceStep::Broadcast { span: all, root } => {
                    let (start, len) = span(all);
                    let (from, to, root) = (start as *const c_void, start as *mut c_void, root.0 as c_int);
                    call!(api, ncclBroadcast(from, to, len, bytes, root, comm, stream))
                }
                DeviceStep::AllGather { span: all } => {
                    let (start, len) = span(all);
                    let (from, to) = (own_block(start, len) as *const c_void, start as *mut c_void);
                    call!(api, ncclAllGather(from, to, len / self.world_size, bytes, comm, stream))
                }
                DeviceStep::AllReduce { span: all, dtype, op } => {
                    let (start, len) = span(all);
                    let (from, to) = (start as *const c_void, start as *mut c_void);
                    let (len, dtype, op) = (len / dtype.size(), data_type(*dtype), reduction(*op));
                    call!(api, ncclAllReduce(from, to, len, dtype, op, comm, stream))
                }
                DeviceStep::ReduceScatter { span: all, dtype, op } => {
                    let (start, len) = span(all);
                    let (from, to) = (start as *const c_void, own_block(start, len) as *mut c_void);
                    let len = len / dtype.size() / self.world_size;
                    let (dtype, op) = (data_type(*dtype), reduction(*op));
                    call!(api, ncclReduceScatter(from, to, len, dtype, op, comm, stream))
                }
                DeviceStep::Copy { from, to } => {
                    let ((from, from_len), (to, to_len)) = (span(from), span(to));
                    assert_eq!(from_len, to_len, "a copy");
                    let driver = &self.context().installation.driver;
                    call!(
                        driver,
                        cuMemcpyDtoDAsync_v2(to as u64, from as u64, to_len, self.connection().stream)
                    )
                }
                DeviceStep::Combine { left, right, out, dtype, op } => {
                    let [left, right, out] = [left, right, out].map(|span| self.operand(span, *dtype));
                    assert!(left.shape() == right.shape() && left.shape() == out.shape(), "a reduction");
                    let launch = self.nccl.cuda.kernel("combine", &[*dtype]);
                    let launch = launch.arg(reduction(*op) as u32).arg(left).arg(right).arg(out);
                    launch.over_elements_on(self.connection().stream, out.shape())
                }
                DeviceStep::Divide { span, dtype, by } => {
                    let sums = self.operand(span, *dtype);
                    let launch = self.nccl.cuda.kernel("divide", &[*dtype]);
                    launch.arg(sums).arg(*by as f32).over_elements_on(self.connection().stream, sums.shape())
                }
            }
        }
    }

    fn operand(&self, span: &DeviceSpan, dtype: DType) -> Operand {
        ExchangeMemory::operand_of(span, dtype, &self.nccl.arena)
    }
}

impl DeviceCommunicator for Communicator {
    fn poll(&mut self) -> Result<bool, DeviceTransportError> {
        let streams = &self.nccl.cuda.streams;
        if let Some(cause) = streams.failure() {
            return Err(DeviceTransportError::Device(cause));
        }
        self.advance().map_err(|error| {
            // NCCL reports failures of this GPU as well as of other ranks.
            let error = match error {
                CudaError::Nccl { .. } => match self.query_stream() {
                    Ok(_) => return library_error(error),
                    Err(own) => own,
                },
                error => error,
            };
            let streams = &self.nccl.cuda.streams;
            streams.fail(&error);
            DeviceTransportError::Device(streams.failure().unwrap_or_else(|| error.to_string()))
        })
    }

    fn issue(&mut self, steps: Vec<DeviceStep>) -> Result<(), DeviceTransportError> {
        assert!(self.waiting.is_empty() && self.running.is_empty(), "operations run one at a time");
        self.waiting.extend(steps);
        self.is_issued = false;
        self.poll().map(drop)
    }

    fn abort(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        // Freed only when no step writes to the memory.
        let running = ManuallyDrop::new(std::mem::take(&mut self.running));
        self.waiting.clear();
        let nccl = self.nccl.clone();
        nccl.departures.change(|state| state.has_aborted = true);
        // The library waits for peers of this host, so the caller must not.
        let abort = move || {
            if connection.abort(&nccl.cuda.context, nccl.api) {
                drop(ManuallyDrop::into_inner(running));
            }
        };
        // Without a thread, the process keeps everything until it ends.
        let _ = spawn_thread("nccl-abort", abort);
    }
}

impl Drop for Communicator {
    /// Begins to leave the peers, when all data has reached them.
    fn drop(&mut self) {
        let is_idle = self.waiting.is_empty() && self.running.is_empty();
        if !is_idle {
            return self.abort();
        }
        let Some(connection) = self.connection.take() else { return };
        self.nccl.departures.change(|state| state.num_leaving += 1);
        let nccl = self.nccl.clone();
        let leave = move || {
            connection.leave(&nccl.cuda.context, nccl.api);
            nccl.departures.change(|state| state.num_leaving -= 1);
        };
        if spawn_thread("nccl-leave", leave).is_err() {
            self.nccl.departures.change(|state| state.num_leaving -= 1);
        }
    }
}

/// Returns the library's number of a dtype, of those that GPUs [can reduce](NcclTransport::can_reduce).
fn data_type(dtype: DType) -> nccl::ncclDataType_t {
    match dtype {
        DType::F32 => nccl::ncclDataType_t::ncclFloat32,
        DType::Bf16 => nccl::ncclDataType_t::ncclBfloat16,
        DType::F16 => nccl::ncclDataType_t::ncclFloat16,
        _ => unreachable!("GPUs do not reduce {dtype}"),
    }
}

/// Returns NCCL's number of a reduction, which `sources/exchange.cu` uses as well. A mean is a sum until it is divided.
fn reduction(op: ReduceOp) -> nccl::ncclRedOp_t {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => nccl::ncclRedOp_t::ncclSum,
        ReduceOp::Prod => nccl::ncclRedOp_t::ncclProd,
        ReduceOp::Max => nccl::ncclRedOp_t::ncclMax,
        ReduceOp::Min => nccl::ncclRedOp_t::ncclMin,
    }
}
