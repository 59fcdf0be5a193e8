//! The boundary between what is computed and the hardware that computes it.

mod attention;
mod blocks;
mod counting;
mod detached;
mod elementwise;
mod error;
mod experts;
mod grouped;
mod layers;
mod matmul;
mod optimizer;
mod quantized;
mod recorded;
mod replay;
mod sums;
mod timing;
mod transfer;

pub use crate::kernels::backend::WaitSite;
pub use crate::memory::PageSource;
pub(crate) use attention::CacheViews;
pub use detached::DetachedOptions;
pub use error::DeviceError;
pub(crate) use error::Result;
pub use matmul::{MatmulEpilogue, Transpose};
pub use optimizer::{FactoredMoments, UpdatePass};
pub use recorded::RecordedCalls;
pub use replay::Replay;
pub use timing::{CallTimer, TimedCall};
pub use transfer::PinnedMemory;

use crate::kernels::backend::Backend;
use crate::kernels::call::{Call, Function, FunctionCall};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::{ALIGNMENT, Arena};
use crate::kernels::cpu::threads::ThreadPool;
use crate::kernels::{CpuFeatures, Operand, OperandMut, Unit};
use crate::lent_memory::Overflow;
use crate::memory::MemoryCounter;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use counting::Counting;
use detached::Detached;
use std::panic::Location;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use trireme_base::{Category, Cost, DType, Event, Journal, JournalEntry, KernelCall, Traffic};

/// How to open a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceOptions {
    /// Threads that kernels may use, the calling one included; 0 means one for each core.
    pub num_threads: usize,
    /// Use no higher SIMD level than this; `None` means the highest that the machine has.
    pub features_max: Option<CpuFeatures>,
    /// Bytes that may be in use at a time, of all categories together; `None` for as many as the machine has.
    pub budget: Option<usize>,
    /// Which hardware.
    pub backend: BackendKind,
    /// Where its pages come from. A detached device ignores it.
    pub page_source: PageSource,
}

/// The hardware behind a device.
#[derive(Debug, Clone, Copy, Default)]
pub enum BackendKind {
    /// The CPU, which runs a kernel to its end before a call returns, in memory that the host shares.
    #[default]
    Cpu,
    /// A CPU that behaves like an accelerator: kernels run later, and the host does not reach its memory.
    Detached(DetachedOptions),
}

/// Hardware that owns memory and runs kernels; cheap to clone.
///
/// A method *issues* a kernel, and may return before it has run. Kernels run in the order of issue, and give the same bits for any
/// number of threads. Copies between the host and the device run beside them, in the order of [events](Event).
#[derive(Debug, Clone)]
pub struct Device {
    backend: Arc<dyn Backend>,
    /// The host's processor. On the CPU it is the backend, too.
    cpu: Arc<Cpu>,
    arena: Arc<Arena>,
    counter: Arc<MemoryCounter>,
    /// Of the host's memory that vectors pass through on their way to other ranks.
    staging: Arc<MemoryCounter>,
    cost: Arc<Mutex<Cost>>,
    journal: Arc<OnceLock<Journal>>,
    recorded: Arc<OnceLock<RecordedCalls>>,
    timer: Option<CallTimer>,
    reaches_host: bool,
}

impl Device {
    /// Sizes of memory are rounded up to a multiple of so many bytes.
    pub const ALIGNMENT: usize = ALIGNMENT;

    /// Threads that a device may have at most; more are refused before any is started.
    pub const THREADS_MAX: usize = ThreadPool::SIZE_MAX;

    /// The device of these options, with threads of its own.
    ///
    /// # Errors
    /// If its threads or its memory cannot be had.
    pub fn open(options: DeviceOptions) -> Result<Self> {
        let num_threads = num_threads(options)?;
        let refused = |source| DeviceError::Threads { num_threads, source };
        let processor = || {
            let threads = ThreadPool::new(num_threads).map_err(refused)?;
            Ok::<_, DeviceError>(Cpu::new(threads, features(options)))
        };
        let counter = Arc::new(MemoryCounter::new(options.budget));
        let cpu = Arc::new(processor()?);
        match options.backend {
            BackendKind::Cpu => {
                let arena = reserve(options.page_source, &counter)?;
                Ok(Self::new(Arc::clone(&cpu) as _, cpu, options, arena, counter))
            }
            BackendKind::Detached(detached) => {
                let arena = Arena::detached(Arc::clone(&counter)).map_err(DeviceError::Reserve)?;
                let own = processor()?.within(Arc::clone(arena.mapping()));
                let backend: Arc<dyn Backend> = Arc::new(Detached::start(own, detached).map_err(refused)?);
                arena.order_by(&backend);
                Ok(Self::new(backend, cpu, options, arena, counter))
            }
        }
    }

    /// The CPU: [`open`](Device::open) of these options, whatever backend they name.
    /// Fails as [`open`](Device::open).
    pub fn cpu(options: DeviceOptions) -> Result<Self> {
        Device::open(DeviceOptions { backend: BackendKind::Cpu, ..options })
    }

    /// Opens the CPU as [`cpu`](Device::cpu) does, and returns a timer of its kernels with it.
    /// Fails as [`open`](Device::open).
    pub fn timed(options: DeviceOptions) -> Result<(Self, CallTimer)> {
        let timer = CallTimer::default();
        Ok((Device { timer: Some(timer.clone()), ..Device::cpu(options)? }, timer))
    }

    /// A device that counts what [`Device::open`] with these options would take and compute, and does neither: its memory is
    /// never touched, and its kernels do not run. What runs on it tells its own size.
    pub fn counting(options: DeviceOptions) -> Result<Self> {
        let cpu = Cpu::new(ThreadPool::unstarted(num_threads(options)?), features(options));
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
        let staging = match reaches_host {
            true => Arc::clone(&counter),
            false => Arc::new(MemoryCounter::new(None)),
        };
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
        }
    }

    /// Whether kernels work in the host's memory, too: then the host and the device are one space, and nothing is copied between them.
    pub fn reaches_host(&self) -> bool {
        self.reaches_host
    }

    /// Whether both are clones of one device.
    pub fn is_same(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.arena, &other.arena)
    }

    /// Whether kernels of both work in one space.
    pub fn shares_space(&self, other: &Device) -> bool {
        self.is_same(other) || self.reaches_host && other.reaches_host
    }

    /// Whether this device [only counts](Device::counting): who fills its memory without a kernel must leave it alone.
    pub fn is_counting(&self) -> bool {
        self.backend.is_counting()
    }

    /// What the kernels have cost that this device has run since it was opened or since [`restart_cost`](Device::restart_cost), as
    /// their formulas say.
    pub fn cost(&self) -> Cost {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the cost of kernels from zero.
    pub fn restart_cost(&self) {
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) = Cost::ZERO;
    }

    /// Notes the kernels of this device and its [hosts](Device::host) from now on. A device keeps one journal; later ones are not
    /// kept.
    pub fn keep_journal(&self, journal: &Journal) {
        self.journal.get_or_init(|| journal.clone());
    }

    /// The journal that the device keeps.
    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Records the kernel calls of this device and its [hosts](Device::host) from now on. A device records to one place: later calls of this
    /// method have no effect. On the CPU, calls of [functions](Device::map) are left out.
    pub fn record_calls(&self, calls: &RecordedCalls) {
        self.recorded.get_or_init(|| calls.clone());
    }

    /// Counts as many operations of the products issued last as [repeated](Cost::repeated_operations) as the product of `factors`.
    pub(crate) fn count_repeated(&self, factors: &[usize]) {
        let mut cost = self.cost.lock().unwrap_or_else(PoisonError::into_inner);
        *cost = cost.repeats(factors);
    }

    /// Adds the cost of a kernel that begins, and notes it in the journal.
    fn count(&self, kernel: &'static str, cost: Cost) {
        if let Some(journal) = self.journal.get() {
            journal.note(JournalEntry::Kernel(KernelCall { kernel, cost }));
        }
        *self.cost.lock().unwrap_or_else(PoisonError::into_inner) += cost;
    }

    /// Counts a kernel, and passes it to the backend.
    fn issue(&self, call: impl Into<Call>) {
        let call = call.into();
        self.count(call.name(), call.cost());
        self.run(call);
    }

    /// Passes a call to the backend, and records it if calls are recorded.
    fn run(&self, call: Call) {
        if let Some(recorded) = self.recorded.get() {
            recorded.note(&call);
        }
        if let Some(timer) = &self.timer {
            timer.time(&call, &self.cpu);
        }
        self.backend.run(call);
    }

    /// Issues a function of this program as a kernel. Where kernels run at once, it is called without a value that would have to be
    /// allocated.
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

    /// An event that is done when all kernels issued so far have run.
    pub fn record(&self) -> Event {
        self.backend.record()
    }

    /// Lets kernels that are issued from now on run after an event. The caller goes on at once, unless kernels run while they are issued.
    #[track_caller]
    pub fn wait_for(&self, event: &Event) {
        self.backend.wait_for(event, Location::caller());
    }

    /// Waits on the host until all that was issued has run.
    ///
    /// # Panics
    /// If a kernel panicked.
    pub fn synchronize(&self) {
        self.record().wait();
    }

    /// Where the streams of a [detached](BackendKind::Detached) device have waited for events.
    pub fn wait_sites(&self) -> Vec<WaitSite> {
        self.backend.wait_sites()
    }

    /// The host beside this device: memory of its own, counted apart, and the processor that works in it. On the CPU that is
    /// the same one. It is a device that [reaches the host's memory](Device::reaches_host), and runs kernels at once.
    ///
    /// # Errors
    /// If its memory cannot be reserved.
    pub fn host(&self) -> Result<Device> {
        let counter = Arc::new(MemoryCounter::new(None));
        let (backend, arena): (Arc<dyn Backend>, _) = match self.is_counting() {
            true => {
                let arena = Arena::counting(Arc::clone(&counter)).map_err(DeviceError::Reserve)?;
                (Arc::clone(&self.backend), arena)
            }
            false => (Arc::clone(&self.cpu) as _, reserve(self.arena.page_source(), &counter)?),
        };
        let (arena, staging, cost) = (Arc::new(arena), Arc::clone(&counter), Arc::default());
        Ok(Device { backend, arena, counter, staging, cost, timer: None, reaches_host: true, ..self.clone() })
    }

    /// Gives memory that is not in use back to the system, after something that took much of it for once. A detached device keeps it.
    pub fn trim(&self) {
        self.arena.trim();
    }

    /// Threads that kernels use.
    pub fn num_threads(&self) -> usize {
        self.cpu.threads.num_threads()
    }

    /// The SIMD level that kernels use.
    pub fn cpu_features(&self) -> CpuFeatures {
        self.cpu.features
    }

    /// Bytes in use, by category.
    pub fn memory(&self) -> &MemoryCounter {
        &self.counter
    }

    /// Bytes of the host's memory in use that vectors of this device pass through on their way to other ranks, by category. Where kernels
    /// reach the host's memory, it is [`memory`](Device::memory). What [`pinned_memory`](Device::pinned_memory) takes counts in the
    /// host's `memory`.
    pub fn staging(&self) -> &MemoryCounter {
        &self.staging
    }

    /// Refuses what can never fit, before any of it is taken: `num_bytes` for `category`, if that is more than all the
    /// memory of the device.
    pub fn check_room(&self, num_bytes: usize, category: Category) -> Result<()> {
        self.arena.check_room(num_bytes, category)
    }

    /// Lets activations that the budget has no room for lie elsewhere from now on. Activations leave `reserved` bytes of the budget free, which is what
    /// everything else takes at most.
    /// A device has one such place; later ones are not used.
    ///
    /// # Panics
    /// If kernels do not [reach the host's memory](Device::reaches_host).
    pub fn overflow_to(&self, overflow: Arc<dyn Overflow>, reserved: usize) {
        assert!(self.reaches_host, "kernels work with memory of their device alone");
        self.arena.overflow_to(overflow, reserved);
    }

    /// A tensor with unspecified contents.
    ///
    /// # Errors
    /// If its size cannot be addressed, or there is no memory for it.
    pub fn empty(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor> {
        Tensor::take(&self.arena, (shape, dtype), category)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, shape: Shape, dtype: DType, category: Category) -> Result<Tensor> {
        let mut tensor = self.empty(shape, dtype, category)?;
        self.zero(tensor.view_mut());
        Ok(tensor)
    }

    /// An f32 tensor for activations, with unspecified contents.
    pub(crate) fn activation(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        self.activation_of(shape, DType::F32)
    }

    /// A tensor for activations, with unspecified contents.
    pub(crate) fn activation_of(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        self.empty(shape.into(), dtype, Category::Activations)
    }

    /// Lets a unit of every thread do nothing but its operation; returns how many floating-point operations that were.
    pub(crate) fn run_unit(&self, unit: Unit, rounds: u64) -> u64 {
        self.cpu.run_unit(unit, rounds)
    }

    /// Goes through memory and computes next to nothing.
    pub(crate) fn stream(&self, traffic: Traffic, memory: ViewMut<'_>) {
        self.issue_function("stream", Cost::ZERO, [], memory, move |cpu, [], mut memory| {
            cpu.stream(traffic, memory.u32s(cpu));
        });
    }
}

/// The SIMD level of these options on this machine.
fn features(options: DeviceOptions) -> CpuFeatures {
    let detected = CpuFeatures::detect();
    options.features_max.map_or(detected, |most| most.min(detected))
}

fn reserve(page_source: PageSource, counter: &Arc<MemoryCounter>) -> Result<Arena> {
    Arena::reserve(page_source, Arc::clone(counter)).map_err(|error| match page_source {
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
