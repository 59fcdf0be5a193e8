use crate::kernels::Operand;
use crate::kernels::cpu::arena::{Arena, Block};
use crate::shape::Shape;
use std::any::Any;
use std::sync::Arc;
use trireme_base::{DType, DeviceMemory, DeviceSpan};

/// Memory of a device for vectors that ranks exchange in place.
#[derive(Debug)]
pub(crate) struct ExchangeMemory(Block);

impl DeviceMemory for ExchangeMemory {
    fn num_bytes(&self) -> usize {
        self.0.len()
    }
}

impl ExchangeMemory {
    pub(crate) fn new(block: Block) -> Self {
        ExchangeMemory(block)
    }

    pub(crate) fn operand(&self, of: (Shape, DType)) -> Operand {
        self.0.operand(of)
    }

    /// Returns the memory of a handle. Panics if it is not of this crate.
    pub(crate) fn of(memory: Arc<dyn DeviceMemory>) -> Arc<ExchangeMemory> {
        let memory: Arc<dyn Any + Send + Sync> = memory;
        memory.downcast().expect("the memory is of a device")
    }

    /// Returns the elements of a span as an array. Panics if the memory is not of this arena, or the span has a fraction of an element.
    pub(crate) fn operand_of(span: &DeviceSpan, dtype: DType, arena: &Arena) -> Operand {
        let memory: &dyn Any = &*span.memory;
        let memory: &ExchangeMemory = memory.downcast_ref().expect("the memory is of a device");
        assert!(std::ptr::eq(memory.0.arena(), arena), "the memory is of this device");
        assert!(span.range.len().is_multiple_of(dtype.size()), "{} bytes of {dtype}", span.range.len());
        let all = memory.operand(([memory.num_bytes()].into(), DType::U8));
        all.part(span.range.clone(), ([span.range.len() / dtype.size()].into(), dtype))
    }
}
