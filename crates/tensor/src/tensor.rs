use crate::device::{DeviceError, Result};
use crate::exchange_memory::ExchangeMemory;
use crate::kernels::OperandMut;
use crate::kernels::cpu::arena::{Arena, Block, num_bytes};
use crate::lent_memory::LentMemory;
use crate::shape::Shape;
use crate::view::{View, ViewMut};
use std::sync::Arc;
use trireme_base::{Category, DType, DeviceMemory};

/// A row-major array in a device's arena or in lent host memory.
#[derive(Debug)]
pub struct Tensor {
    memory: Memory,
    shape: Shape,
    dtype: DType,
}

#[derive(Debug)]
enum Memory {
    Block(Block),
    /// Memory that the ranks of a group may exchange.
    Exchange(Arc<Block>),
    Lent(LentGuard),
}

/// Returns lent memory to its owner on drop.
#[derive(Debug)]
struct LentGuard(Option<Box<dyn LentMemory>>);

impl LentGuard {
    fn bytes(&self) -> &[u8] {
        self.0.as_ref().expect("it is there until the end").bytes()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().expect("it is there until the end").bytes_mut()
    }
}

impl Drop for LentGuard {
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            memory.return_to_owner();
        }
    }
}

impl Memory {
    /// Allocates from the arena, or from its overflow memory if the budget has no room.
    fn allocate(arena: &Arc<Arena>, array: (Shape, DType), category: Category) -> Result<Self> {
        let num_bytes = num_bytes(array, category)?;
        let overflow = || {
            arena.allocate_overflow(num_bytes, category).map(|memory| Memory::Lent(LentGuard(Some(memory))))
        };
        if arena.is_overflowing(num_bytes, category)
            && let Some(memory) = overflow()
        {
            return Ok(memory);
        }
        match arena.allocate(array, category) {
            Err(DeviceError::OverBudget(error)) => overflow().ok_or(error.into()),
            taken => Ok(Memory::Block(taken?)),
        }
    }
}

impl Tensor {
    pub(crate) fn allocate(
        arena: &Arc<Arena>,
        shape: Shape,
        dtype: DType,
        category: Category,
    ) -> Result<Self> {
        Ok(Tensor { memory: Memory::allocate(arena, (shape, dtype), category)?, shape, dtype })
    }

    pub(crate) fn allocate_for_exchange(
        arena: &Arc<Arena>,
        shape: Shape,
        dtype: DType,
        category: Category,
    ) -> Result<Self> {
        let block = arena.allocate((shape, dtype), category)?;
        Ok(Tensor { memory: Memory::Exchange(Arc::new(block)), shape, dtype })
    }

    /// Wraps memory of an [exchange tensor](crate::Device::exchange_tensor) that a group has returned.
    ///
    /// # Panics
    /// If `memory` does not belong to an exchange tensor, or if its size does not match shape and dtype.
    pub fn from_exchange_memory(memory: Arc<dyn DeviceMemory>, shape: Shape, dtype: DType) -> Self {
        assert_eq!(Some(memory.num_bytes()), shape.num_bytes(dtype), "{shape:?}");
        Tensor { memory: Memory::Exchange(Arc::clone(ExchangeMemory::of(&*memory).block())), shape, dtype }
    }

    /// Returns the memory of an [exchange tensor](crate::Device::exchange_tensor) for an exchange; `None` for other tensors. Kernels must
    /// not be issued on it from the start of the exchange until the kernels [wait](crate::Device::wait_for_exchange) for its end.
    pub fn exchange_memory(&self) -> Option<Arc<dyn DeviceMemory>> {
        match &self.memory {
            Memory::Exchange(block) => Some(Arc::new(ExchangeMemory::new(Arc::clone(block)))),
            Memory::Block(_) | Memory::Lent(_) => None,
        }
    }

    /// Wraps host memory, which must be aligned for `dtype`. Only devices that [reach the host's memory](crate::Device::reaches_host) can
    /// use the tensor.
    ///
    /// # Panics
    /// If the size of the memory does not match shape and dtype.
    pub fn lent(memory: Box<dyn LentMemory>, shape: Shape, dtype: DType) -> Self {
        assert_eq!(Some(memory.bytes().len()), shape.num_bytes(dtype), "{shape:?}");
        Tensor { memory: Memory::Lent(LentGuard(Some(memory))), shape, dtype }
    }

    /// Returns the [lent](Tensor::lent) memory; `None` if the tensor resides in a device's arena.
    pub fn lent_memory(&self) -> Option<&dyn LentMemory> {
        match &self.memory {
            Memory::Lent(guard) => guard.0.as_deref(),
            Memory::Block(_) | Memory::Exchange(_) => None,
        }
    }

    /// Unwraps the [lent](Tensor::lent) memory.
    ///
    /// # Errors
    /// Returns the tensor if it resides in a device's arena.
    #[expect(
        clippy::missing_panics_doc,
        reason = "only this method takes the memory, and it consumes the tensor"
    )]
    pub fn into_lent(self) -> Result<Box<dyn LentMemory>, Tensor> {
        match self.memory {
            Memory::Lent(mut guard) => Ok(guard.0.take().expect("it is there until the end")),
            memory @ (Memory::Block(_) | Memory::Exchange(_)) => Err(Tensor { memory, ..self }),
        }
    }

    /// Returns the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the same elements in another shape.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn reshaped(self, shape: Shape) -> Self {
        assert_eq!(shape.num_elements(), self.shape.num_elements(), "{:?} as {shape:?}", self.shape);
        Tensor { shape, ..self }
    }

    /// Frees the memory, and with it the contents, unless the memory is lent or allocated for exchanges. Shape and dtype stay.
    pub fn release(&mut self) {
        if let Memory::Block(block) = &mut self.memory {
            block.release();
        }
    }

    /// Allocates memory again after [`release`](Tensor::release). The contents are unspecified.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn restore(&mut self) -> Result<()> {
        let Memory::Block(block) = &mut self.memory else { return Ok(()) };
        match block.reallocate((self.shape, self.dtype)) {
            Err(DeviceError::OverBudget(error)) => {
                let memory = block.arena().allocate_overflow(block.len(), block.category()).ok_or(error)?;
                self.memory = Memory::Lent(LentGuard(Some(memory)));
                Ok(())
            }
            taken => taken,
        }
    }

    /// Returns the size in bytes, also while the memory is released.
    pub fn num_bytes(&self) -> usize {
        match &self.memory {
            Memory::Block(block) => block.len(),
            Memory::Exchange(block) => block.len(),
            Memory::Lent(memory) => memory.bytes().len(),
        }
    }

    /// Borrows the tensor for reading.
    ///
    /// # Panics
    /// If its memory is released.
    pub fn view(&self) -> View<'_> {
        match &self.memory {
            Memory::Block(block) => View::of_owner(block, block.operand((self.shape, self.dtype))),
            Memory::Exchange(block) => View::of_owner(block, block.operand((self.shape, self.dtype))),
            Memory::Lent(memory) => View::from_bytes(memory.bytes(), self.dtype, self.shape),
        }
    }

    /// Borrows the tensor for writing.
    ///
    /// # Panics
    /// If its memory is released.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        match &mut self.memory {
            Memory::Block(block) => {
                let operand = OperandMut::new(block.operand((self.shape, self.dtype)));
                ViewMut::of_owner(block, operand)
            }
            Memory::Exchange(block) => {
                let operand = OperandMut::new(block.operand((self.shape, self.dtype)));
                ViewMut::of_owner(block, operand)
            }
            Memory::Lent(memory) => ViewMut::from_bytes(memory.bytes_mut(), self.dtype, self.shape),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, DeviceOptions};
    use std::sync::{Arc, Mutex};
    use trireme_base::Category;
    use trireme_base::HostMemory;

    /// Eight bytes that are pushed to a list when they are returned.
    #[derive(Debug)]
    struct Bytes([u8; 8], Arc<Mutex<Vec<[u8; 8]>>>);

    impl HostMemory for Bytes {
        fn bytes(&self) -> &[u8] {
            &self.0
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }

    impl LentMemory for Bytes {
        fn return_to_owner(self: Box<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    #[test]
    fn lent_memory_is_used_and_returned() {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let returned = Arc::new(Mutex::new(Vec::new()));
        let lend = || Tensor::lent(Box::new(Bytes([0; 8], Arc::clone(&returned))), [2, 4].into(), DType::U8);
        let mut tensor = lend().reshaped([8].into());
        device.upload(&[1_u8, 2, 3, 4, 5, 6, 7, 8], tensor.view_mut());
        tensor.release();
        tensor.restore().unwrap();
        assert_eq!((tensor.num_bytes(), device.read::<u8>(tensor.view()).unwrap()[7]), (8, 8));
        drop(tensor);
        assert_eq!(returned.lock().unwrap().pop(), Some([1, 2, 3, 4, 5, 6, 7, 8]));
        let memory = lend().into_lent().unwrap();
        assert!(returned.lock().unwrap().is_empty());
        memory.return_to_owner();
        assert_eq!(returned.lock().unwrap().len(), 1);
        let own = device.empty([1].into(), DType::U8, Category::Activations).unwrap();
        assert!(own.into_lent().is_err());
    }
}
