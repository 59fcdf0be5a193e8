use crate::kernels::Operand;
use crate::kernels::cpu::arena::{Arena, Block};
use crate::shape::Shape;
use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use trireme_base::{DType, DeviceMemory, DeviceSpan, Event};

/// Memory of a device for vectors that ranks exchange in place.
#[derive(Debug)]
pub(crate) struct ExchangeMemory {
    block: Block,
    /// An event of the device after the exchange, once all of its steps are on a stream of the device.
    issued: Mutex<Option<Event>>,
    changed: Condvar,
}

impl DeviceMemory for ExchangeMemory {
    fn num_bytes(&self) -> usize {
        self.block.len()
    }
}

impl ExchangeMemory {
    pub(crate) fn new(block: Block) -> Self {
        ExchangeMemory { block, issued: Mutex::default(), changed: Condvar::new() }
    }

    /// Forgets the exchange before the one that begins.
    pub(crate) fn begin_exchange(&self) {
        *self.lock() = None;
    }

    /// Tells who waits for the exchange that its steps are on a stream of the device, where they end at an event.
    pub(crate) fn set_issued(&self, end: Event) {
        *self.lock() = Some(end);
        self.changed.notify_all();
    }

    /// Blocks until the steps of the exchange are on a stream of the device, and returns the event after them. `None` if the exchange is
    /// done before, which is at `done`.
    pub(crate) fn wait_until_issued(self: &Arc<Self>, done: &Event) -> Option<Event> {
        let own = Arc::downgrade(self);
        done.on_done(move || {
            if let Some(own) = own.upgrade() {
                drop(own.lock());
                own.changed.notify_all();
            }
        });
        let mut issued = self.lock();
        while issued.is_none() && !done.is_done() {
            issued = self.changed.wait(issued).unwrap_or_else(PoisonError::into_inner);
        }
        issued.take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Event>> {
        self.issued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn operand(&self, of: (Shape, DType)) -> Operand {
        self.block.operand(of)
    }

    /// Returns the memory of a handle. Panics if it is not of this crate.
    pub(crate) fn of(memory: Arc<dyn DeviceMemory>) -> Arc<ExchangeMemory> {
        let memory: Arc<dyn Any + Send + Sync> = memory;
        memory.downcast().expect("the memory is of a device")
    }

    /// Returns the memory of a span. Panics if it is not of this crate.
    pub(crate) fn of_span(span: &DeviceSpan) -> &ExchangeMemory {
        let memory: &dyn Any = &*span.memory;
        memory.downcast_ref().expect("the memory is of a device")
    }

    /// Returns the elements of a span as an array. Panics if the memory is not of this arena, or the span has a fraction of an element.
    pub(crate) fn operand_of(span: &DeviceSpan, dtype: DType, arena: &Arena) -> Operand {
        let memory = ExchangeMemory::of_span(span);
        assert!(std::ptr::eq(memory.block.arena(), arena), "the memory is of this device");
        assert!(span.range.len().is_multiple_of(dtype.size()), "{} bytes of {dtype}", span.range.len());
        let all = memory.operand(([memory.num_bytes()].into(), DType::U8));
        all.part(span.range.clone(), ([span.range.len() / dtype.size()].into(), dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryCounter;
    use trireme_base::{Category, EventCompleter};

    #[test]
    fn who_waits_goes_on_when_the_exchange_is_issued_or_done() {
        let arena = Arc::new(Arena::counting(Arc::new(MemoryCounter::new(None))).unwrap());
        let block = arena.allocate(([4].into(), DType::U8), Category::Communication).unwrap();
        let memory = Arc::new(ExchangeMemory::new(block));
        let [end, done] = [(); 2].map(|()| EventCompleter::new(|| ()));
        std::thread::scope(|scope| {
            scope.spawn(|| memory.set_issued(end.event()));
            assert!(memory.wait_until_issued(&done.event()).unwrap().is_same(&end.event()));
            scope.spawn(|| done.complete(Ok(())));
            assert!(memory.wait_until_issued(&done.event()).is_none());
        });
        memory.set_issued(end.event());
        memory.begin_exchange();
        assert!(memory.wait_until_issued(&done.event()).is_none());
    }
}
