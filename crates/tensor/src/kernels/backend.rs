//! The interface between a device and the hardware that runs its kernels.
//!
//! A backend provides:
//!
//! - **Memory.** The arena hands out blocks in the order of issue. A freed block may go to the next kernel at once, because that kernel
//!   runs later; only copies that still use the block must end first ([`Backend::reuse`]). A backend with memory of its own needs a
//!   constructor of `Mapping` (`kernels/cpu/mapping.rs`).
//! - **Streams.** There is one [stream](Stream) of kernels, and one of copies in each direction. Copies use host memory that is
//!   [`Pending`], which no thread reads before its event is done.
//! - **Kernels.** `docs/kernels.md` lists them. `cargo xtask kernels` derives the list from the methods of [`Device`](crate::Device), their
//!   calls and a run of the suites, and refuses a kernel that is not tested on every backend. The results of a kernel have the same bits on
//!   all processors; on a GPU, the same bits from run to run. The suites are `tests/conformance` and `tests/operations`;
//!   `testkit/src/traced.rs` lists the backends that they run on.
//! - **Transport.** Optionally, a [`DeviceTransport`] to devices of other ranks, for memory of the arena.
//! - **Functions.** An [`ExpressionCall`](super::call::ExpressionCall) computes a function of elements, which is data: see
//!   [`Expr`](crate::Expr). A [`FunctionCall`](super::call::FunctionCall) runs Rust code of another crate; hardware that cannot run it
//!   refuses it in [`Device::for_each_row`](crate::Device::for_each_row).
//!
//! There are four backends: the CPU (`kernels/cpu/run/`), where a kernel has run when its method returns and every event is done; the
//! counting backend (`device/counting.rs`), which runs nothing; the detached CPU (`device/detached.rs`), which behaves like an
//! accelerator; and NVIDIA GPUs (`kernels/cuda/`).

use super::call::Call;
use super::cpu::Cpu;
use super::cpu::arena::Arena;
use super::cuda::TimedEvent;
use super::host_pinning::HostPinning;
use super::{Operand, OperandMut};
use crate::device::DeviceError;
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use trireme_base::{DeviceTransport, Event, HostMemory, Pending};

/// A queue of jobs of a device. Jobs run in order; jobs of different streams run in any order that events allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stream {
    /// Kernels.
    Compute,
    /// Copies to the host's memory.
    ToHost,
    /// Copies from the host's memory.
    FromHost,
}

/// A call site at which a stream waits for an event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitSite(pub(crate) Stream, pub(crate) &'static Location<'static>);

impl fmt::Debug for WaitSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}", self.0, self.1)
    }
}

/// Hardware that runs kernels in the order of issue, and copies between its memory and host memory concurrently, ordered by events.
///
/// To add a backend, implement this trait and add a [`BackendKind`](crate::BackendKind).
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// Returns the CPU if this backend runs calls on it immediately. The device then calls functions and copies memory directly, bypassing
    /// the backend. Returns `None` if the backend queues calls or only counts them.
    fn as_cpu(&self) -> Option<&Cpu> {
        None
    }

    /// Returns whether the backend only counts: kernels and copies do not run.
    fn is_counting(&self) -> bool {
        false
    }

    /// Runs a kernel after those issued before. Panics if operands do not match, either here or on the thread that runs the kernel.
    fn run(&self, call: Call);

    /// Starts the kernels issued so far, as soon as those before have run. Until then, the backend may collect them.
    fn submit(&self) {}

    /// Copies host bytes to device memory, after the kernels issued before. The bytes may be overwritten once this returns.
    fn upload(&self, from: &[u8], to: OperandMut);

    /// Copies device memory to the host, after the kernels issued before. Blocks until done. If the device has failed, returns the cause.
    fn download(&self, from: Operand, to: &mut [u8]) -> Result<(), String>;

    /// Starts a copy after the kernels issued before, concurrent with later ones. Returns an event that completes when the host memory has
    /// been returned.
    fn copy(&self, copy: HostCopy) -> Event;

    /// Returns an event that completes when the kernels issued so far have run.
    fn record(&self) -> Event;

    /// Returns the seconds that the hardware takes for the kernels that `issue` issues, without the time of earlier ones. Blocks until they
    /// have run. If the device has failed, returns the cause.
    fn time(&self, issue: &mut dyn FnMut()) -> Result<f64, String> {
        self.record().outcome()?;
        let start = Instant::now();
        issue();
        self.record().outcome()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Records the instant at which the kernels issued so far have run, on the clock of a GPU. `None` on other hardware, and if the device
    /// has failed.
    fn record_instant(&self) -> Option<TimedEvent> {
        None
    }

    /// Makes kernels issued from now on wait for an event. `caller` is the code that waits.
    fn wait_for(&self, event: &Event, caller: &'static Location<'static>);

    /// Returns the bytes of the hardware's memory that no program uses, and all of its bytes; `None` if it has no memory of its own. If the
    /// device has failed, returns the cause.
    fn free_and_total_bytes(&self) -> Result<Option<(usize, usize)>, String> {
        Ok(None)
    }

    /// Returns the pinning of host memory that copies use, if the hardware copies pinned memory faster.
    fn host_pinning(&self) -> Option<Box<dyn HostPinning>> {
        None
    }

    /// Returns the transport between this device and devices of other ranks, for memory of `arena`; `None` if the hardware has none.
    fn transport(
        self: Arc<Self>,
        _arena: &Arc<Arena>,
    ) -> Result<Option<Arc<dyn DeviceTransport>>, DeviceError> {
        Ok(None)
    }

    /// Called when freed memory is allocated again: kernels issued from now on wait for copies that still use it.
    fn reuse(&self, _memory: OperandMut) {}

    /// Returns the call sites at which streams have waited for events, if the backend records them.
    fn wait_sites(&self) -> Vec<WaitSite> {
        Vec::new()
    }
}

/// A copy between memory of a device and memory of the host.
pub(crate) struct HostCopy {
    pub(crate) device: DeviceSide,
    pub(crate) host: Box<dyn HostSide>,
    /// Completes when no earlier copy uses the host memory.
    pub(crate) after: Event,
}

/// The device memory that a copy reads or writes.
pub(crate) enum DeviceSide {
    From(Operand),
    To(OperandMut),
}

impl DeviceSide {
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            DeviceSide::From(operand) => operand.num_bytes(),
            DeviceSide::To(operand) => operand.num_bytes(),
        }
    }

    /// Copies to or from host memory on a processor that can access both. Panics if the sizes differ.
    pub(crate) fn copy(&mut self, cpu: &Cpu, host: &mut [u8]) {
        match self {
            DeviceSide::From(operand) => host.copy_from_slice(operand.bytes(cpu)),
            DeviceSide::To(operand) => operand.bytes(cpu).copy_from_slice(host),
        }
    }
}

/// Host memory that is lent to a copy.
pub(crate) trait HostSide: Send {
    /// Returns the bytes to copy. Panics if an earlier copy still uses them.
    fn bytes(&mut self) -> &mut [u8];

    /// Returns the memory to its owner. Called when the copy has run; the memory of a failed copy is lost.
    fn return_to_owner(self: Box<Self>);
}

/// A host buffer whose bytes `range` are lent to a copy. After the copy, the buffer is stored in `returned`.
struct Lent<B: HostMemory> {
    memory: Pending<B>,
    range: Range<usize>,
    returned: Arc<Mutex<Option<B>>>,
}

impl<B: HostMemory> HostSide for Lent<B> {
    fn bytes(&mut self) -> &mut [u8] {
        assert!(self.memory.event().is_done(), "a copy runs after the one before");
        &mut self.memory.wait_mut().bytes_mut()[self.range.clone()]
    }

    fn return_to_owner(self: Box<Self>) {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.memory.wait());
    }
}

/// Issues a copy and lends the bytes `range` of `host` to it until it has run.
pub(crate) fn copy_later<B: HostMemory>(
    backend: &dyn Backend,
    device: DeviceSide,
    host: &mut Pending<B>,
    range: Range<usize>,
) {
    let (after, returned) = (host.event(), Arc::new(Mutex::new(None)));
    let memory = std::mem::replace(host, Pending::until(Event::DONE, Arc::clone(&returned)));
    let lent = Box::new(Lent { memory, range, returned: Arc::clone(&returned) });
    *host = Pending::until(backend.copy(HostCopy { device, host: lent, after }), returned);
}
