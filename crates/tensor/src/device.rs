//! The interface to hardware: memory, kernels, copies and events.
//!
//! Other crates see hardware only through [`Device`]. A method checks its arguments, counts the cost, and passes a
//! [call](crate::kernels::call) to the [backend](crate::kernels::backend). Most methods are generated where their call is defined. Callers
//! may rely on three things only: kernels run in the order of issue, a kernel may run after its method has returned, and results are on the
//! host after [`Device::download`] or after the [`Event`] of an asynchronous copy.
//!
//! `Device` is one type, not a trait. A trait would repeat the signature of each kernel in the trait and in every backend.
//!
//! # Memory
//! Values reside in the device's own memory, in host memory through which vectors pass on their way to other ranks ([`Device::staging`]),
//! in memory of the [host](Device::host), or on a disk (crate `swap`). If a device [reaches the host's memory](Device::reaches_host), the
//! first three are one address space, and nothing is copied between them.
//!
//! # Reads by the host
//! A download waits for all issued kernels, so steps have few: losses, the gradient norm and the largest magnitudes of fp8 once per step,
//! and the loads of experts before each exchange of rows. A step that records hashes also reads gradients and parameters.

mod attention;
mod counting;
mod detached;
mod error;
mod functions;
mod grouped;
mod matmul;
mod optimizer;
mod recorded;
mod replay;
mod timing;
mod transfer;

pub use crate::kernels::backend::WaitSite;
pub use crate::kernels::cuda::{
    CudaError, CudaFolders, CudaInstallation, CudaOptions, CudaReport, FoundLibrary, Gpu, LIBRARY_VARIABLE,
};
pub use crate::kernels::expression::Expr;
pub use crate::memory::PageSource;
pub(crate) use attention::CacheViews;
pub use detached::DetachedOptions;
pub use error::DeviceError;
pub(crate) use error::Result;
pub use functions::RowInput;
pub use grouped::RowGroups;
pub use matmul::{MatmulEpilogue, MatmulOperand, Transposition};
pub use optimizer::UpdatePass;
pub use recorded::RecordedCalls;
pub use replay::Replay;
pub use timing::{CallTimer, GpuInstant, TimedCall};
pub use transfer::PinnedMemory;

use crate::exchange_memory::ExchangeMemory;
use crate::kernels::backend::Backend;
use crate::kernels::call::{Call, Function, FunctionCall};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::{ALIGNMENT, Arena};
use crate::kernels::cpu::threads::ThreadPool;
use crate::kernels::cuda::Cuda;
use crate::kernels::host_pinning::HostPinning;
use crate::kernels::{ExecutionUnit, Operand, OperandMut, SimdLevel};
use crate::lent_memory::OverflowAllocator;
use crate::memory::{GpuMemory, MemoryCounter};
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use counting::Counting;
use detached::Detached;
use std::panic::Location;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use trireme_base::{
    Category, Cost, DType, DeviceMemory, DeviceTransport, Event, Journal, JournalEntry, KernelCall,
};

/// Options of [`Device::open`].
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceOptions {
    /// Number of kernel threads, including the calling thread; 0 for one per core.
    pub num_threads: usize,
    /// Highest SIMD level that kernels may use; `None` for the highest that the machine supports.
    pub simd_level_max: Option<SimdLevel>,
    /// Maximum bytes in use, over all categories; `None` for no limit but the machine's memory.
    pub budget: Option<usize>,
    /// The hardware.
    pub backend: BackendKind,
    /// Source of the arena's pages. Detached devices ignore it.
    pub page_source: PageSource,
}

/// The hardware behind a device.
#[derive(Debug, Clone, Copy, Default)]
pub enum BackendKind {
    /// The CPU. A kernel runs to completion before its call returns, in memory that the host shares.
    #[default]
    Cpu,
    /// A CPU that behaves like an accelerator: kernels run asynchronously, and the host cannot access its memory.
    Detached(DetachedOptions),
    /// An NVIDIA GPU. Kernels run asynchronously, in memory that the host cannot access.
    Cuda(CudaOptions),
}

/// Hardware that owns memory and runs kernels. Cheap to clone.
///
/// A method *issues* a kernel and may return before the kernel has run. Kernels run in the order of issue. Their results are bitwise
/// identical for any number of threads. Asynchronous copies between host and device run concurrently with kernels, ordered by
/// [events](Event).
#[derive(Debug, Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
    /// The host's processor. On a CPU device, also the backend.
    cpu: Arc<Cpu>,
    arena: Arc<Arena>,
    counter: Arc<MemoryCounter>,
    /// Counts the host memory in which vectors are staged on their way to other ranks.
    staging: Arc<MemoryCounter>,
    cost: Arc<Mutex<Cost>>,
    journal: Arc<OnceLock<Journal>>,
    recorded: Arc<OnceLock<RecordedCalls>>,
    timer: Option<CallTimer>,
    reaches_host: bool,
    /// Whether kernels run on a GPU, which needs other scratch memory.
    is_gpu: bool,
}

impl Device {
    /// Alignment in bytes. Sizes of allocations are rounded up to a multiple of it.
    pub const ALIGNMENT: usize = ALIGNMENT;

    /// Maximum number of threads of a device. Larger numbers are refused before any thread starts.
    pub const THREADS_MAX: usize = ThreadPool::SIZE_MAX;

    /// Opens a device with its own threads.
    ///
    /// # Errors
    /// If its threads cannot be started or its memory cannot be reserved.
    pub fn open(options: DeviceOptions) -> Result<Self> {
        let num_threads = num_threads(options)?;
        let refused = |source| DeviceError::Threads { num_threads, source };
        let processor = || {
            let threads = ThreadPool::new(num_threads).map_err(refused)?;
            Ok::<_, DeviceError>(Cpu::new(threads, simd_level_of(options)))
        };
        let counter = Arc::new(MemoryCounter::new(options.budget));
        let cpu = Arc::new(processor()?);
        match options.backend {
            BackendKind::Cpu => {
                let arena = reserve(options.page_source, None, &counter)?;
                Ok(Self::new(Arc::clone(&cpu) as _, cpu, options, arena, counter))
            }
            BackendKind::Detached(detached) => {
                let arena = Arena::detached(Arc::clone(&counter)).map_err(DeviceError::Reserve)?;
                let own = processor()?.within(Arc::clone(arena.mapping()));
                let backend: Arc<dyn Backend> = Arc::new(Detached::start(own, detached).map_err(refused)?);
                arena.set_backend(&backend);
                Ok(Self::new(backend, cpu, options, arena, counter))
            }
            BackendKind::Cuda(cuda) => {
                let (own, addresses) = Cuda::open(cuda)?;
                let (backend, arena) =
                    (Arc::new(own) as Arc<dyn Backend>, Arena::gpu(addresses, Arc::clone(&counter)));
                arena.set_backend(&backend);
                Ok(Self::new(backend, cpu, options, arena, counter))
            }
        }
    }

    /// Opens a CPU device, like [`open`](Device::open) but ignoring `options.backend`.
    ///
    /// # Errors
    /// As [`open`](Device::open).
    pub fn cpu(options: DeviceOptions) -> Result<Self> {
        Device::open(DeviceOptions { backend: BackendKind::Cpu, ..options })
    }

    /// Opens a device, and returns it with a timer of its kernels.
    ///
    /// # Errors
    /// As [`open`](Device::open).
    pub fn timed(options: DeviceOptions) -> Result<(Self, CallTimer)> {
        let timer = CallTimer::default();
        Ok((Device { timer: Some(timer.clone()), ..Device::open(options)? }, timer))
    }

    /// Opens a device that counts the memory and the cost that a device of these options would incur. Its memory must not be accessed, and
    /// its kernels do not run. Used for dry runs.
    ///
    /// # Errors
    /// If the number of threads exceeds [`THREADS_MAX`](Device::THREADS_MAX), or if its memory cannot be reserved.
    pub fn counting(options: DeviceOptions) -> Result<Self> {
        let cpu = Cpu::new(ThreadPool::unstarted(num_threads(options)?), simd_level_of(options));
        let counter = Arc::new(MemoryCounter::new(options.budget));
        let arena = Arena::counting(Arc::clone(&counter)).map_err(DeviceError::Reserve)?;
        Ok(Self::new(Arc::new(Counting), Arc::new(cpu), options, arena, counter))
    }

    fn new(
        backend: Arc<dyn Backend>,
        cpu: Arc<Cpu>,
        options: DeviceOptions,
        arena: Arena,
        counter: Arc<MemoryCounter>,
    ) -> Self {
        let reaches_host = matches!(options.backend, BackendKind::Cpu);
        let staging = if reaches_host { Arc::clone(&counter) } else { Arc::new(MemoryCounter::new(None)) };
        Device {
            backend,
            cpu,
            arena: Arc::new(arena),
            counter,
            staging,
            cost: Arc::default(),
            journal: Arc::default(),
            recorded: Arc::default(),
            timer: None,
            reaches_host,
            is_gpu: matches!(options.backend, BackendKind::Cuda(_)),
        }
    }

    /// Returns whether kernels can access host memory. If so, host and device share one address space, and no copies between them are
    /// needed.
    pub fn reaches_host(&self) -> bool {
        self.reaches_host
    }

    /// Returns whether kernels run on a GPU.
    pub fn is_gpu(&self) -> bool {
        self.is_gpu
    }

    /// Returns whether both are clones of one device.
    pub fn is_same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.arena, &other.arena)
    }

    /// Returns whether kernels of both devices can access the same memory.
    pub fn shares_address_space(&self, other: &Device) -> bool {
        self.is_same(other) || self.reaches_host && other.reaches_host
    }

    /// Returns whether this device [only counts](Device::counting). Code other than kernels must not write the memory of such a device.
    pub fn is_counting(&self) -> bool {
        self.backend.is_counting()
    }

    /// Returns the analytic cost of the kernels issued since the device was opened or since [`reset_cost`](Device::reset_cost).
    pub fn cost(&self) -> Cost {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resets the cost to zero.
    pub fn reset_cost(&self) {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) = Cost::ZERO;
    }

    /// Records the kernels of this device, and of its [hosts](Device::host), in `journal` from now on. Only the first call has an effect.
    pub fn keep_journal(&self, journal: &Journal) {
        self.journal.get_or_init(|| journal.clone());
    }

    /// Returns the device's journal.
    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Records the kernel calls of this device, and of its [hosts](Device::host), in `calls` from now on. Only the first call has an
    /// effect. On a CPU device, calls of [Rust functions](Device::for_each_row) are not recorded.
    pub fn record_calls(&self, calls: &RecordedCalls) {
        self.recorded.get_or_init(|| calls.clone());
    }

    /// Adds the product of `factors` to the [recomputed operations](Cost::recomputed_operations), which MFU excludes.
    pub(crate) fn count_recomputed(&self, factors: &[usize]) {
        let mut cost = self.cost.lock().unwrap_or_else(PoisonError::into_inner);
        *cost = cost.recomputes(factors);
    }

    /// Adds a kernel's cost to the total and to the journal.
    fn count(&self, kernel: &'static str, cost: Cost) {
        if let Some(journal) = self.journal.get() {
            journal.record(JournalEntry::Kernel(KernelCall { kernel, cost }));
        }
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) += cost;
    }

    /// Counts a kernel and passes it to the backend.
    pub(crate) fn issue(&self, call: impl Into<Call>) {
        let call = call.into();
        self.count(call.name(), call.cost());
        self.run(call);
    }

    /// Passes a call to the backend, and to the recorder and the timer if there are any.
    fn run(&self, call: Call) {
        if let Some(recorded) = self.recorded.get() {
            recorded.record(&call);
        }
        if let Some(timer) = &self.timer {
            timer.time(&call, &*self.backend);
        }
        self.backend.run(call);
    }

    /// Issues a Rust function as a kernel. A CPU backend calls it directly, so that no `FunctionCall` is allocated.
    fn issue_function<const N: usize>(
        &self,
        name: &'static str,
        cost: Cost,
        inputs: [View<'_>; N],
        output: ViewMut<'_>,
        function: impl Fn(&Cpu, [Operand; N], OperandMut) + Send + Sync + 'static,
    ) {
        self.count(name, cost);
        let (inputs, output) = (inputs.map(View::operand), output.into_operand());
        if let Some(cpu) = self.backend.as_cpu().filter(|_| self.timer.is_none()) {
            return function(cpu, inputs, output);
        }
        let function: Function = Arc::new(move |cpu, inputs, output| {
            function(cpu, inputs.try_into().expect("as many as were given"), output);
        });
        let inputs = inputs.to_vec();
        self.run(FunctionCall { name, cost, inputs, output, function }.into());
    }

    /// Starts the kernels issued so far. A GPU collects kernels until something depends on them, to launch them together. Call this at the
    /// end of a part of a program, before the host may wait for other ranks.
    pub fn submit(&self) {
        self.backend.submit();
    }

    /// Returns an event that completes when all kernels issued so far have run.
    pub fn record_event(&self) -> Event {
        self.backend.record()
    }

    /// Records the instant at which the kernels issued so far have run, on the clock of a GPU. `None` on other devices, where the host's
    /// clock measures kernels, and on a device that has failed. Costs about as much as a launch.
    pub fn record_instant(&self) -> Option<GpuInstant> {
        GpuInstant::record(&*self.backend)
    }

    /// Makes kernels issued from now on wait for `event`. Does not block the caller, except on backends that run kernels during the call.
    #[track_caller]
    pub fn wait_for(&self, event: &Event) {
        self.backend.wait_for(event, Location::caller());
    }

    /// Makes kernels issued from now on wait for an exchange that is done at the event `done` of the group. `memory` is from
    /// [`exchange_memory`](Tensor::exchange_memory), and this was its first exchange. Blocks the caller until the ranks have met for the
    /// exchange and it was issued to this device, or until it is done.
    ///
    /// # Panics
    /// If the memory is not of a device.
    #[track_caller]
    pub fn wait_for_exchange(&self, memory: &dyn DeviceMemory, done: &Event) {
        // The next line may block.
        self.submit();
        let issued = ExchangeMemory::of(memory).wait_until_issued(done);
        self.wait_for(issued.as_ref().unwrap_or(done));
    }

    /// Blocks until all issued kernels have run.
    ///
    /// # Panics
    /// If a kernel panicked.
    pub fn synchronize(&self) {
        self.record_event().wait();
    }

    /// Returns the call sites at which streams of a [detached](BackendKind::Detached) device have waited for events.
    pub fn wait_sites(&self) -> Vec<WaitSite> {
        self.backend.wait_sites()
    }

    /// Returns a device for the host's memory and processor, with its own arena and memory counter. It [reaches the host's
    /// memory](Device::reaches_host) and runs kernels during the call. Use it for offloaded state.
    ///
    /// # Errors
    /// If its memory cannot be reserved.
    pub fn host(&self) -> Result<Device> {
        let counter = Arc::new(MemoryCounter::new(None));
        let (backend, arena): (Arc<dyn Backend>, _) = if self.is_counting() {
            let arena = Arena::counting(Arc::clone(&counter)).map_err(DeviceError::Reserve)?;
            (Arc::clone(&self.backend), arena)
        } else {
            let pinning = self.backend.host_pinning();
            (Arc::clone(&self.cpu) as _, reserve(self.arena.page_source(), pinning, &counter)?)
        };
        let (arena, staging, cost) = (Arc::new(arena), Arc::clone(&counter), Arc::default());
        Ok(Device {
            backend,
            arena,
            counter,
            staging,
            cost,
            timer: None,
            reaches_host: true,
            is_gpu: false,
            ..self.clone()
        })
    }

    /// Returns unused memory to the system, for example after a large temporary allocation. No-op on a detached device.
    pub fn trim(&self) {
        self.arena.trim();
    }

    /// Returns the number of kernel threads.
    pub fn num_threads(&self) -> usize {
        self.cpu.threads.num_threads()
    }

    /// Returns the SIMD level of the kernels.
    pub fn simd_level(&self) -> SimdLevel {
        self.cpu.simd_level
    }

    /// Returns the memory counter.
    pub fn memory(&self) -> &MemoryCounter {
        &self.counter
    }

    /// Returns the counter of the host memory in which vectors of this device are staged on their way to other ranks. If kernels reach the
    /// host's memory, it is the same counter as [`memory`](Device::memory). [`pinned_memory`](Device::pinned_memory) is counted in the
    /// `memory` of the host device instead.
    pub fn staging(&self) -> &MemoryCounter {
        &self.staging
    }

    /// Returns the first error of pinning memory of this device, which is the [host](Device::host) of a GPU; `None` if all is pinned, or
    /// for other devices. Copies between memory that is not pinned and the GPU are slow.
    pub fn pinning_failure(&self) -> Option<&str> {
        self.arena.mapping().pinning_failure()
    }

    /// Returns the use of a GPU's memory by all programs; `None` if the device is not a GPU.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the device has failed.
    pub fn gpu_memory(&self) -> Result<Option<GpuMemory>> {
        let found = self.backend.free_and_total_bytes().map_err(DeviceError::Failed)?;
        Ok(found.map(|(free, total)| GpuMemory { total, own: self.arena.accessible_bytes(), free }))
    }

    /// Checks that `num_bytes` do not exceed the total memory of the device. Lets callers fail before they allocate a part of it.
    ///
    /// # Errors
    /// If they exceed it.
    pub fn check_room(&self, num_bytes: usize, category: Category) -> Result<()> {
        self.arena.check_room(num_bytes, category)
    }

    /// Sets an allocator for activations that exceed the budget. From now on, activations leave `reserved` bytes of the budget free: the
    /// maximum that all other categories need. Only the first call has an effect.
    ///
    /// # Panics
    /// If kernels do not [reach the host's memory](Device::reaches_host).
    pub fn set_overflow_allocator(&self, overflow: Arc<dyn OverflowAllocator>, reserved: usize) {
        assert!(self.reaches_host, "kernels work with memory of their device alone");
        self.arena.overflow_to(overflow, reserved);
    }

    /// Allocates a tensor with unspecified contents.
    ///
    /// # Errors
    /// If its size cannot be addressed, or there is no memory for it.
    pub fn empty(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor> {
        Tensor::allocate(&self.arena, shape, dtype, category)
    }

    /// Allocates a tensor with unspecified contents in memory that ranks can [exchange](Tensor::exchange_memory) in place. It stays
    /// allocated while an exchange uses it.
    ///
    /// # Errors
    /// As [`empty`](Device::empty).
    ///
    /// # Panics
    /// If the device has no [transport](Device::transport).
    pub fn exchange_tensor(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor> {
        assert!(self.is_gpu, "GPUs exchange memory");
        Tensor::allocate_for_exchange(&self.arena, shape, dtype, category)
    }

    /// Returns the transport between this device and devices of other ranks: NCCL for GPUs. `None` if there is none, as on the CPU.
    ///
    /// # Errors
    /// If NCCL cannot be used.
    pub fn transport(&self) -> Result<Option<Arc<dyn DeviceTransport>>> {
        if self.is_gpu { Arc::clone(&self.backend).transport(&self.arena) } else { Ok(None) }
    }

    /// Allocates a tensor of zeros.
    ///
    /// # Errors
    /// As [`empty`](Device::empty).
    pub fn zeros(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor> {
        let mut tensor = self.empty(shape, dtype, category)?;
        self.zero(tensor.view_mut());
        Ok(tensor)
    }

    /// Allocates an f32 activation tensor with unspecified contents.
    pub(crate) fn activation(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.activation_of(shape, DType::F32)
    }

    /// Allocates an activation tensor with unspecified contents.
    pub(crate) fn activation_of(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.empty(shape.into(), dtype, Category::Activations)
    }

    /// Runs the operation of `unit` on every thread, `rounds` times, and nothing else. Returns the number of floating-point operations.
    pub(crate) fn run_execution_unit(&self, unit: ExecutionUnit, rounds: u64) -> u64 {
        self.cpu.run_unit(unit, rounds)
    }

    /// Returns the seconds that the hardware takes for the kernels that `issue` issues. Blocks until they have run.
    pub(crate) fn time(&self, mut issue: impl FnMut() -> Result<()>) -> Result<f64> {
        let mut outcome = Ok(());
        let seconds = self.backend.time(&mut || outcome = issue());
        outcome?;
        seconds.map_err(DeviceError::Failed)
    }
}

/// Returns the SIMD level of these options on this machine.
fn simd_level_of(options: DeviceOptions) -> SimdLevel {
    let detected = SimdLevel::detect();
    options.simd_level_max.map_or(detected, |most| most.min(detected))
}

fn reserve(
    page_source: PageSource,
    pinning: Option<Box<dyn HostPinning>>,
    counter: &Arc<MemoryCounter>,
) -> Result<Arena> {
    Arena::reserve(page_source, pinning, Arc::clone(counter)).map_err(|error| match page_source {
        PageSource::Transparent => DeviceError::Reserve(error),
        PageSource::Reserved => DeviceError::ReserveHuge(error),
    })
}

fn num_threads(options: DeviceOptions) -> Result<usize> {
    match options.num_threads {
        0 => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
        num_threads if num_threads > Device::THREADS_MAX => Err(DeviceError::TooManyThreads { num_threads }),
        given => Ok(given),
    }
}

#[cfg(test)]
mod tests;
