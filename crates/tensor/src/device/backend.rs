//! The boundary between a device and the hardware that runs its kernels.

use super::WaitSite;
use crate::kernels::call::Call;
use crate::kernels::cpu::Cpu;
use crate::kernels::{Operand, OperandMut};
use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{Event, HostMemory, Pending};

/// Hardware that runs kernels in the order of issue, and copies between its memory and the host's beside them, in the order of
/// events.
///
/// To add one, implement this trait, and open a device with it by a [`BackendKind`](super::BackendKind) of its own.
pub(crate) trait Backend: fmt::Debug + Send + Sync {
    /// The processor of this program, if that runs each kernel before [`run`](Backend::run) returns, in memory that the host shares.
    fn as_cpu(&self) -> Option<&Cpu> {
        None
    }

    /// Whether kernels and copies are counted and do not run.
    fn only_counts(&self) -> bool {
        false
    }

    /// Runs a kernel, after those that were issued before.
    fn run(&self, call: Call);

    /// Copies bytes of the host into memory of the device, after the kernels that were issued before. The bytes may be overwritten
    /// once this returns.
    fn upload(&self, from: &[u8], to: OperandMut);

    /// Copies memory of the device, after the kernels that were issued before, and returns when it is copied.
    fn download(&self, from: Operand, to: &mut [u8]);

    /// Copies after the kernels that were issued before, and beside those that are issued later. Returns an event that is done when
    /// the memory of the host is back.
    fn copy(&self, copy: HostCopy) -> Event;

    /// Returns an event that is done when the kernels issued so far have run.
    fn record(&self) -> Event;

    /// Lets kernels that are issued from now on run after an event. `caller` is the code that waits.
    fn wait_for(&self, event: &Event, caller: &'static Location<'static>);

    /// Orders kernels that are issued from now on after copies of memory that has a new owner.
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
    /// The host's memory is back from an earlier copy.
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

    /// Copies to or from memory of the host on a processor that reaches both.
    ///
    /// # Panics
    /// If `host` has another number of bytes.
    pub(crate) fn copy(&mut self, cpu: &Cpu, host: &mut [u8]) {
        match self {
            DeviceSide::From(operand) => host.copy_from_slice(operand.bytes(cpu)),
            DeviceSide::To(operand) => operand.bytes(cpu).copy_from_slice(host),
        }
    }
}

/// Memory of the host that is lent to a copy, and given back when this is dropped.
pub(crate) trait HostPart: Send {
    /// The bytes to copy.
    ///
    /// # Panics
    /// If an earlier copy still works with them.
    fn bytes(&mut self) -> &mut [u8];
}

/// A range of bytes of `B`, which is put into `returned` in the end.
struct Lent<B: HostMemory> {
    /// Absent when it has been given back.
    memory: Option<Pending<B>>,
    range: Range<usize>,
    returned: Arc<Mutex<Option<B>>>,
}

impl<B: HostMemory> HostPart for Lent<B> {
    fn bytes(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("it is given back in the end");
        assert!(memory.event().is_done(), "a copy runs after the one before");
        &mut memory.wait_mut().bytes_mut()[self.range.clone()]
    }
}

impl<B: HostMemory> Drop for Lent<B> {
    fn drop(&mut self) {
        let memory = self.memory.take().and_then(|memory| memory.try_take().ok());
        *self.returned.lock().unwrap_or_else(PoisonError::into_inner) = memory;
    }
}

/// Copies later, and lends the bytes `range` of `host` until then.
pub(crate) fn copy_later<B: HostMemory>(
    backend: &dyn Backend,
    device: DeviceSide,
    host: &mut Pending<B>,
    range: Range<usize>,
) {
    let (after, returned) = (host.event(), Arc::new(Mutex::new(None)));
    let memory = Some(std::mem::replace(host, Pending::until(Event::DONE, Arc::clone(&returned))));
    let lent = Box::new(Lent { memory, range, returned: Arc::clone(&returned) });
    *host = Pending::until(backend.copy(HostCopy { device, host: lent, after }), returned);
}
