//! The backend for NVIDIA GPUs.
//!
//! Kernels are CUDA C++ (`sources/`), which NVRTC compiles for the GPU at hand. CUDA's libraries are loaded when a device is opened, so the
//! program needs none of them to start. Expressions are translated to CUDA C++ and compiled when they are first issued (`expression.rs`).
//!
//! Jobs of the compute stream are queued, and launched by graphs where they repeat (`graphs.rs`).
//!
//! The host waits for kernels only in downloads, in uploads of many bytes, and to measure times. A failure is recorded, and all events that
//! are pending or recorded later fail with its cause.

mod api;
mod blas;
mod compile;
mod context;
mod error;
mod expression;
mod graphs;
mod installation;
mod job;
mod launch;
mod matmul;
mod nccl;
mod run;
mod stream;
mod uploads;

pub(crate) use context::{DeviceAddresses, TimedEvent};
pub use error::CudaError;
pub use installation::{CudaFolders, CudaInstallation, CudaReport, FoundLibrary, Gpu, LIBRARY_VARIABLE};
pub(crate) use matmul::matmul_scratch_words;
pub(crate) use run::attention_scratch;

use crate::device::DeviceError;
use crate::kernels::backend::{Backend, DeviceSide, HostCopy, Stream};
use crate::kernels::call::Call;
use crate::kernels::cpu::arena::Arena;
use crate::kernels::host_pinning::HostPinning;
use crate::kernels::{Operand, OperandMut};
use api::call;
use blas::Blas;
use context::{Context, PinnedMemory};
use cudarc::driver::sys::CUstream;
use graphs::JobQueue;
use job::Job;
use nccl::NcclTransport;
use std::panic::Location;
use std::sync::Arc;
use stream::Streams;
use trireme_base::{DeviceTransport, Event};
use uploads::Uploads;

/// Options of a CUDA device.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaOptions {
    /// The libraries; `None` for those that [`CudaInstallation::from_environment`] finds when the device is opened.
    pub installation: Option<&'static CudaInstallation>,
    /// Number of the GPU among those that are visible to the process.
    pub ordinal: usize,
    /// Whether f32 matmuls by cuBLASLt round their operands to TF32, which has 10 bits of fraction and is several times as fast. Attention
    /// and experts stay in f32.
    pub allow_tf32: bool,
    /// Whether the algorithms that cuBLASLt proposes for a matmul are timed when its shape first occurs. The fastest is kept in the cache
    /// folder, so that all processes that share the folder use the same. Otherwise, the library's first proposal is used.
    pub time_matmuls: bool,
    /// Whether each kernel is launched on its own. Otherwise, kernels that repeat in each step are launched by CUDA graphs.
    pub launch_singly: bool,
}

/// Rounds of the kernel that delays others: at least 100 microseconds.
const DELAY_ROUNDS: u64 = 1 << 16;

/// A GPU.
#[derive(Debug)]
pub(crate) struct Cuda {
    context: Arc<Context>,
    streams: Streams,
    jobs: JobQueue,
    blas: Blas,
    uploads: Uploads,
}

impl Cuda {
    /// Opens a GPU. Returns its addresses as well, without memory.
    pub(crate) fn open(options: CudaOptions) -> Result<(Self, DeviceAddresses), CudaError> {
        let installation = options.installation.map_or_else(CudaInstallation::from_environment, Ok)?;
        let context = Context::open(installation, options.ordinal)?;
        let addresses = DeviceAddresses::reserve(&context)?;
        let (streams, blas) =
            (Streams::start(&context)?, Blas::open(&context, options.allow_tf32, options.time_matmuls)?);
        let (jobs, uploads) = (
            JobQueue::new(&context, streams.handle(Stream::Compute), !options.launch_singly)?,
            Uploads::new(&context),
        );
        Ok((Cuda { context, streams, jobs, blas, uploads }, addresses))
    }

    /// Copies memory on the device.
    fn copy_on_device(&self, from: Operand, to: &OperandMut) {
        assert_eq!(from.num_bytes(), to.num_bytes());
        let [from, to, num_bytes] =
            [from.addresses().start, to.as_operand().addresses().start, from.num_bytes()];
        if num_bytes > 0 {
            self.queue(Job::Copy { from, to, num_bytes });
        }
    }

    /// Sets all bytes.
    fn fill(&self, to: &OperandMut, byte: u8) {
        let (to, num_bytes) = (to.as_operand().addresses().start, to.num_bytes());
        if num_bytes > 0 {
            self.queue(Job::Fill { to, num_bytes, byte });
        }
    }

    /// Queues a job.
    fn queue(&self, job: Job) {
        self.issue(|| self.jobs.push(job, &self.blas));
    }

    /// Issues the jobs that are queued, and returns their stream.
    fn submitted_stream(&self) -> CUstream {
        self.submit();
        self.streams.handle(Stream::Compute)
    }

    /// Calls the driver, unless the device has failed. If the call fails, the device fails.
    fn issue(&self, issue: impl FnOnce() -> Result<(), CudaError>) {
        if self.streams.failure().is_some() {
            return;
        }
        if let Err(error) = self.context.enter().and_then(|()| issue()) {
            self.streams.fail(&error);
        }
    }
}

impl Backend for Cuda {
    fn transport(
        self: Arc<Self>,
        arena: &Arc<Arena>,
    ) -> Result<Option<Arc<dyn DeviceTransport>>, DeviceError> {
        Ok(Some(Arc::new(NcclTransport::new(self, Arc::clone(arena))?)))
    }

    fn run(&self, call: Call) {
        if self.streams.failure().is_none() {
            self.run_call(&call);
        }
    }

    fn upload(&self, from: &[u8], to: OperandMut) {
        assert_eq!(from.len(), to.num_bytes());
        if from.is_empty() {
            return;
        }
        let driver = &self.context.installation.driver;
        let to = to.as_operand().addresses().start as u64;
        self.issue(|| {
            let stream = self.submitted_stream();
            if self.uploads.copy(from, to, stream)? {
                return Ok(());
            }
            // SAFETY: operands are arrays of this device's memory, which outlives the copy (see `kernels::operand`). The driver has read
            // the host's memory when the function returns, unless it is pinned.
            unsafe { call!(driver, cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream))? };
            if self.context.is_pinned(from) { self.context.synchronize(stream) } else { Ok(()) }
        });
    }

    fn download(&self, from: Operand, to: &mut [u8]) -> Result<(), String> {
        assert_eq!(from.num_bytes(), to.len());
        let driver = &self.context.installation.driver;
        let from = from.addresses().start as u64;
        self.issue(|| {
            let stream = self.submitted_stream();
            // SAFETY: as in `upload`; the host's memory is borrowed until the stream has run.
            unsafe {
                call!(driver, cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream))?;
            }
            self.context.synchronize(stream)
        });
        self.streams.failure().map_or(Ok(()), Err)
    }

    fn copy(&self, HostCopy { device, mut host, after }: HostCopy) -> Event {
        let (stream, operand) = match &device {
            DeviceSide::From(operand) => (Stream::ToHost, *operand),
            DeviceSide::To(operand) => (Stream::FromHost, operand.as_operand()),
        };
        // The next line may block.
        self.submit();
        if let Err(cause) = after.outcome() {
            self.streams.fail_with(cause);
        }
        self.streams.wait(stream, &self.record());
        let driver = &self.context.installation.driver;
        let address = operand.addresses().start as u64;
        self.issue(|| {
            let bytes = host.bytes();
            assert_eq!(operand.num_bytes(), bytes.len());
            // SAFETY: as in `upload`; the host's memory is lent to the copy until its event completes.
            unsafe {
                let stream = self.streams.handle(stream);
                match &device {
                    DeviceSide::From(_) => {
                        call!(
                            driver,
                            cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), address, bytes.len(), stream)
                        )
                    }
                    DeviceSide::To(_) => {
                        call!(
                            driver,
                            cuMemcpyHtoDAsync_v2(address, bytes.as_ptr().cast(), bytes.len(), stream)
                        )
                    }
                }
            }
        });
        self.streams.record(stream, Some((host, operand)))
    }

    fn free_and_total_bytes(&self) -> Result<Option<(usize, usize)>, String> {
        let (mut free, mut total) = (0, 0);
        self.issue(|| {
            // SAFETY: writes two numbers.
            unsafe { call!(self.context.installation.driver, cuMemGetInfo_v2(&mut free, &mut total)) }
        });
        self.streams.failure().map_or(Ok(Some((free, total))), Err)
    }

    fn host_pinning(&self) -> Option<Box<dyn HostPinning>> {
        Some(Box::new(PinnedMemory::new(&self.context)))
    }

    fn submit(&self) {
        self.issue(|| self.jobs.issue(&self.blas));
    }

    fn record(&self) -> Event {
        self.submit();
        self.streams.record(Stream::Compute, None)
    }

    fn time(&self, issue: &mut dyn FnMut()) -> Result<f64, String> {
        let had_graphs = self.jobs.use_graphs(false);
        // While this kernel runs, the host issues the others, so that their times do not have the time of launches.
        self.kernel("delay", &[]).arg(DELAY_ROUNDS).arg(None::<Operand>).run(1);
        let start = self.record_instant();
        issue();
        let end = self.record_instant();
        self.jobs.use_graphs(had_graphs);
        let mut milliseconds = 0.0;
        if let (Some(start), Some(end)) = (&start, &end) {
            self.issue(|| {
                milliseconds = end.milliseconds_since(start)?;
                Ok(())
            });
        }
        self.streams.failure().map_or(Ok(f64::from(milliseconds) / 1e3), Err)
    }

    fn record_instant(&self) -> Option<TimedEvent> {
        let mut recorded = None;
        self.issue(|| {
            recorded = Some(TimedEvent::record(&self.context, self.submitted_stream())?);
            Ok(())
        });
        recorded
    }

    fn wait_for(&self, event: &Event, _caller: &'static Location<'static>) {
        self.submit();
        self.streams.wait(Stream::Compute, event);
    }

    fn reuse(&self, memory: OperandMut) {
        // Jobs that are queued may wait, too. To issue them first would cut runs of jobs where copies happen to be late.
        for event in self.streams.copies_of(&memory.as_operand()) {
            self.streams.wait(Stream::Compute, &event);
        }
    }
}
