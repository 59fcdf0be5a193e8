//! The boundary between a device and the hardware that runs its kernels.

use super::call::Call;
use super::cpu::Cpu;
use super::{Operand, OperandMut};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{Event, HostMemory, Pending};

/// A queue of a device. Its jobs run in order; jobs of different streams run in any order that events allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stream {
    /// Kernels.
    Compute,
    /// Copies to the host's memory.
    ToHost,
    /// Copies from the host's memory.
    FromHost,
}

/// A place in the code where a stream waits for an event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct WaitSite(pub(crate) Stream, pub(crate) &'static Location<'static>);

impl fmt::Debug for WaitSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {}", self.0, self.1)
    }
}

/// Hardware that runs kernels in the order of issue, and copies between its memory and the host's concurrently, in the order of
/// events.
///
/// To add one, implement this trait, and open a device with it by a [`BackendKind`](crate::BackendKind) of its own.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// The processor on which a device calls functions and copies directly. `None` if all must pass through this backend, to be queued or counted.
    fn as_cpu(&self) -> Option<&Cpu> {
        None
    }

    /// Whether kernels and copies do not run.
    fn is_counting(&self) -> bool {
        false
    }

    /// Runs a kernel, after those that were issued before. Panics if operands do not fit each other: here, or on the thread that
    /// runs the kernel.
    fn run(&self, call: Call);

    /// Copies bytes of the host into memory of the device, after the kernels that were issued before. The bytes may be overwritten
    /// once this returns.
    fn upload(&self, from: &[u8], to: OperandMut);

    /// Copies memory of the device, after the kernels that were issued before, and returns when it is copied.
    fn download(&self, from: Operand, to: &mut [u8]);

    /// Copies after the kernels that were issued before, concurrently with those that are issued later. Returns an event that is done when
    /// the memory of the host was given back.
    fn copy(&self, copy: HostCopy) -> Event;

    /// Returns an event that is done when the kernels issued so far have run.
    fn record(&self) -> Event;

    /// Lets kernels that are issued from now on run after an event. `caller` is the code that waits.
    fn wait_for(&self, event: &Event, caller: &'static Location<'static>);

    /// Called when memory is handed out again: kernels that are issued from now on wait for copies that still use it.
    fn reuse(&self, _memory: OperandMut) {}

    /// Where kernels and copies have waited for events, if the backend keeps a list of it.
    fn wait_sites(&self) -> Vec<WaitSite> {
        Vec::new()
    }
}

/// A copy between memory of a device and memory of the host.
pub(crate) struct HostCopy {
    pub(crate) device: DeviceSide,
    pub(crate) host: Box<dyn HostPart>,
    /// Done when no earlier copy uses the host's memory.
    pub(crate) after: Event,
}

/// The memory of the device that a copy reads or writes.
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

    /// Copies to or from memory of the host on a processor that reaches both. Panics if `host` has another number of bytes.
    pub(crate) fn copy(&mut self, cpu: &Cpu, host: &mut [u8]) {
        match self {
            DeviceSide::From(operand) => host.copy_from_slice(operand.bytes(cpu)),
            DeviceSide::To(operand) => operand.bytes(cpu).copy_from_slice(host),
        }
    }
}

/// Memory of the host that is lent to a copy.
pub(crate) trait HostPart: Send {
    /// The bytes to copy. Panics if an earlier copy still works with them.
    fn bytes(&mut self) -> &mut [u8];

    /// Gives the memory back, which a copy does once it has run. The memory of a copy that fails is lost.
    fn give_back(self: Box<Self>);
}

/// A range of bytes of `B`. The copy moves `B` into `returned` when it has run.
struct Lent<B: HostMemory> {
    memory: Pending<B>,
    range: Range<usize>,
    returned: Arc<Mutex<Option<B>>>,
}

impl<B: HostMemory> HostPart for Lent<B> {
    fn bytes(&mut self) -> &mut [u8] {
        assert!(self.memory.event().is_done(), "a copy runs after the one before");
        &mut self.memory.wait_mut().bytes_mut()[self.range.clone()]
    }

    fn give_back(self: Box<Self>) {
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.memory.wait());
    }
}

/// Issues a copy, and lends the bytes `range` of `host` to it until it has run.
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
