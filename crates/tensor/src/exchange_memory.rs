use crate::kernels::Operand;
use crate::kernels::cpu::arena::{Arena, Block};
use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use trireme_base::{DType, DeviceMemory, DeviceSpan, Event};

/// Memory of a device for a vector that ranks exchange in place. Each exchange has a handle of its own.
#[derive(Debug)]
pub(crate) struct ExchangeMemory {
    block: Arc<Block>,
    issued: Arc<Issued>,
}

/// An event of the device after the exchange, once all of its steps are on a stream of the device.
#[derive(Debug, Default)]
struct Issued {
    end: Mutex<Option<Event>>,
    changed: Condvar,
}

impl DeviceMemory for ExchangeMemory {
    fn num_bytes(&self) -> usize {
        self.block.len()
    }
}

impl ExchangeMemory {
    pub(crate) fn new(block: Arc<Block>) -> Self {
        ExchangeMemory { block, issued: Arc::default() }
    }

    /// Returns the memory without the exchange.
    pub(crate) fn block(&self) -> &Arc<Block> {
        &self.block
    }

    /// Tells who waits for the exchange that its steps are on a stream of the device, where they end at an event. Only the first event
    /// counts.
    pub(crate) fn set_issued(&self, end: &Event) {
        self.issued.lock().get_or_insert_with(|| end.clone());
        self.issued.changed.notify_all();
    }

    /// Blocks until the steps of the exchange are on a stream of the device, and returns the event after them. `None` if the exchange is
    /// done, which is at `done`.
    pub(crate) fn wait_until_issued(&self, done: &Event) -> Option<Event> {
        // Not the memory, which would be freed late.
        let issued = Arc::clone(&self.issued);
        done.on_done(move || {
            drop(issued.lock());
            issued.changed.notify_all();
        });
        let mut end = self.issued.lock();
        while !done.is_done() {
            if end.is_some() {
                return end.clone();
            }
            end = self.issued.changed.wait(end).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }

    /// Returns the memory of a handle. Panics if it is not of this crate.
    pub(crate) fn of(memory: &dyn DeviceMemory) -> &ExchangeMemory {
        let memory: &dyn Any = memory;
        memory.downcast_ref().expect("the memory is of a device")
    }

    /// Returns the elements of a span as an array. Panics if the memory is not of this arena, or the span has a fraction of an element.
    pub(crate) fn operand_of(span: &DeviceSpan, dtype: DType, arena: &Arena) -> Operand {
        let memory = ExchangeMemory::of(&*span.memory);
        assert!(std::ptr::eq(memory.block.arena(), arena), "the memory is of this device");
        assert!(span.range.len().is_multiple_of(dtype.size()), "{} bytes of {dtype}", span.range.len());
        let all = memory.block.operand(([memory.num_bytes()].into(), DType::U8));
        all.part(span.range.clone(), ([span.range.len() / dtype.size()].into(), dtype))
    }
}

impl Issued {
    fn lock(&self) -> MutexGuard<'_, Option<Event>> {
        self.end.lock().unwrap_or_else(PoisonError::into_inner)
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
        let block = Arc::new(arena.allocate(([4].into(), DType::U8), Category::Communication).unwrap());
        let handle = || ExchangeMemory::new(Arc::clone(&block));
        let [end, later, done] = [(); 3].map(|()| EventCompleter::new(|| ()));
        let (first, second) = (handle(), handle());
        std::thread::scope(|scope| {
            scope.spawn(|| first.set_issued(&end.event()));
            assert!(first.wait_until_issued(&done.event()).unwrap().is_same(&end.event()));
            first.set_issued(&later.event());
            assert!(first.wait_until_issued(&done.event()).unwrap().is_same(&end.event()));
            // The second exchange of the same memory has not been issued.
            scope.spawn(|| done.complete(Ok(())));
            assert!(second.wait_until_issued(&done.event()).is_none());
        });
    }

    /// The thread that completes an exchange may run late.
    #[test]
    fn who_waits_for_an_exchange_does_not_keep_its_memory() {
        let counter = Arc::new(MemoryCounter::new(None));
        let arena = Arc::new(Arena::counting(Arc::clone(&counter)).unwrap());
        let block = arena.allocate(([4].into(), DType::U8), Category::Communication).unwrap();
        let memory = ExchangeMemory::new(Arc::new(block));
        let [end, done] = [(); 2].map(|()| EventCompleter::new(|| ()));
        memory.set_issued(&end.event());
        memory.wait_until_issued(&done.event()).unwrap();
        drop(memory);
        assert_eq!(counter.usage(Category::Communication).current, 0);
    }
}
