use crate::device::{DeviceError, Result};
use crate::kernels::cpu::arena::{Arena, Block};
use crate::kernels::{Operand, OperandMut};
use crate::lent_memory::LentMemory;
use crate::shape::Shape;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{Category, DType};

/// A row-major array, in memory of a device or in memory lent by the host.
#[derive(Debug)]
pub struct Tensor {
    memory: Memory,
    shape: Shape,
    dtype: DType,
}

#[derive(Debug)]
enum Memory {
    Block(Block),
    Lent(LentGuard),
}

/// Gives lent memory back.
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
            memory.give_back();
        }
    }
}

impl Memory {
    /// The arena's, or what lies elsewhere if its budget has no room.
    fn take(arena: &Arc<Arena>, num_bytes: usize, category: Category) -> Result<Self> {
        let overflow =
            || arena.overflow(num_bytes, category).map(|memory| Memory::Lent(LentGuard(Some(memory))));
        if arena.is_overflowing(num_bytes, category)
            && let Some(memory) = overflow()
        {
            return Ok(memory);
        }
        match arena.take(num_bytes, category) {
            Err(DeviceError::OverBudget(error)) => overflow().ok_or(error.into()),
            taken => Ok(Memory::Block(taken?)),
        }
    }
}

impl Tensor {
    pub(crate) fn take(
        arena: &Arc<Arena>,
        (shape, dtype): (Shape, DType),
        category: Category,
    ) -> Result<Self> {
        let unaddressable = DeviceError::Unaddressable { shape, dtype, category };
        let num_bytes = shape.num_bytes(dtype).ok_or(unaddressable)?;
        Ok(Tensor { memory: Memory::take(arena, num_bytes, category)?, shape, dtype })
    }

    /// Elements in memory of the host, which is aligned to them. Only devices that [reach it](crate::Device::reaches_host) work with the tensor.
    ///
    /// # Panics
    /// If the memory has not as many bytes.
    pub fn lent(memory: Box<dyn LentMemory>, shape: Shape, dtype: DType) -> Self {
        assert_eq!(Some(memory.bytes().len()), shape.num_bytes(dtype), "{shape:?}");
        Tensor { memory: Memory::Lent(LentGuard(Some(memory))), shape, dtype }
    }

    /// The memory that was [lent](Tensor::lent), if it was.
    pub fn lent_memory(&self) -> Option<&dyn LentMemory> {
        match &self.memory {
            Memory::Lent(guard) => guard.0.as_deref(),
            Memory::Block(_) => None,
        }
    }

    /// The memory that was [lent](Tensor::lent).
    ///
    /// # Errors
    /// The tensor, if its memory is a device's.
    pub fn into_lent(self) -> Result<Box<dyn LentMemory>, Tensor> {
        match self.memory {
            Memory::Lent(mut guard) => Ok(guard.0.take().expect("it is there until the end")),
            memory @ Memory::Block(_) => Err(Tensor { memory, ..self }),
        }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If it has not as many elements.
    pub fn reshaped(self, shape: Shape) -> Self {
        assert_eq!(shape.num_elements(), self.shape.num_elements(), "{:?} as {shape:?}", self.shape);
        Tensor { shape, ..self }
    }

    /// Gives the memory back, unless it was lent, and with it the contents; shape and dtype stay.
    pub fn release(&mut self) {
        if let Memory::Block(block) = &mut self.memory {
            block.release();
        }
    }

    /// Takes memory again after [`release`](Tensor::release); the contents are unspecified.
    ///
    /// # Errors
    /// If there is none.
    pub fn restore(&mut self) -> Result<()> {
        let Memory::Block(block) = &mut self.memory else { return Ok(()) };
        match block.retake() {
            Err(DeviceError::OverBudget(error)) => {
                let memory = block.arena().overflow(block.len(), block.category()).ok_or(error)?;
                self.memory = Memory::Lent(LentGuard(Some(memory)));
                Ok(())
            }
            taken => taken,
        }
    }

    /// Number of bytes, whether they are here or not.
    pub fn num_bytes(&self) -> usize {
        match &self.memory {
            Memory::Block(block) => block.len(),
            Memory::Lent(memory) => memory.bytes().len(),
        }
    }

    /// All of the tensor, to read.
    ///
    /// # Panics
    /// If its memory was given back.
    pub fn view(&self) -> View<'_> {
        let of = (self.shape, self.dtype);
        let operand = match &self.memory {
            Memory::Block(block) => block.operand(of),
            Memory::Lent(memory) => Operand::of_host(memory.bytes(), of),
        };
        View { operand, lifetime: PhantomData }
    }

    /// As [`view`](Tensor::view), to write.
    ///
    /// # Panics
    /// If its memory was given back.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let of = (self.shape, self.dtype);
        let operand = match &mut self.memory {
            Memory::Block(block) => OperandMut::new(block.operand(of)),
            Memory::Lent(memory) => OperandMut::of_host(memory.bytes_mut(), of),
        };
        ViewMut { operand, lifetime: PhantomData }
    }
}

/// A borrowed row-major array: a tensor, a parameter within a flat buffer, or host memory. Its elements are seen by kernels alone;
/// the host copies them with [`Device::download`](crate::Device::download).
///
/// ```compile_fail,E0624
/// # use trireme_tensor::View;
/// fn address(view: View<'_>) {
///     // Nobody else learns where the elements are.
///     view.operand();
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    operand: Operand,
    lifetime: PhantomData<&'a [u8]>,
}

/// As [`View`], to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    operand: OperandMut,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> View<'a> {
    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.operand.num_bytes()
    }

    /// Host memory as an f32 array. Only devices that [reach the host's memory](crate::Device::reaches_host) work with it.
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_f32s(values: &'a [f32], shape: Shape) -> Self {
        View::from_bytes(bytemuck::cast_slice(values), DType::F32, shape)
    }

    /// As [`from_f32s`](View::from_f32s), of any type, to which the memory is aligned.
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: Shape) -> Self {
        assert_eq!(bytes.len(), shape.num_elements() * dtype.size(), "{shape:?}");
        View { operand: Operand::of_host(bytes, (shape, dtype)), lifetime: PhantomData }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.operand.shape()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.operand.dtype()
    }

    pub(crate) fn operand(self) -> Operand {
        self.operand
    }

    /// The same memory as an array of bytes.
    pub fn as_bytes(&self) -> View<'a> {
        let num_bytes = self.num_bytes();
        self.bytes(0..num_bytes, ([num_bytes].into(), DType::U8))
    }

    /// Rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&self, first: usize, num_rows: usize) -> View<'a> {
        let cols = self.shape().cols();
        self.part(first * cols, [num_rows, cols].into())
    }

    /// `shape.num_elements()` elements from element `offset` on, as an array of that shape.
    ///
    /// # Panics
    /// If they lie outside.
    pub fn part(&self, offset: usize, shape: Shape) -> View<'a> {
        self.bytes(part_bytes(self.dtype(), offset, shape), (shape, self.dtype()))
    }

    fn bytes(&self, range: Range<usize>, of: (Shape, DType)) -> View<'a> {
        View { operand: self.operand.part(range, of), lifetime: PhantomData }
    }
}

impl<'a> ViewMut<'a> {
    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.operand.num_bytes()
    }

    /// As [`View::from_f32s`].
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_f32s(values: &'a mut [f32], shape: Shape) -> Self {
        ViewMut::from_bytes(bytemuck::cast_slice_mut(values), DType::F32, shape)
    }

    /// As [`View::from_bytes`].
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: Shape) -> Self {
        assert_eq!(bytes.len(), shape.num_elements() * dtype.size(), "{shape:?}");
        ViewMut { operand: OperandMut::of_host(bytes, (shape, dtype)), lifetime: PhantomData }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.operand.shape()
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.operand.dtype()
    }

    pub(crate) fn into_operand(self) -> OperandMut {
        self.operand
    }

    /// The same memory as an array of bytes.
    pub fn into_bytes(self) -> ViewMut<'a> {
        let num_bytes = self.num_bytes();
        let operand = self.operand.into_part(0..num_bytes, ([num_bytes].into(), DType::U8));
        ViewMut { operand, lifetime: PhantomData }
    }

    /// The same array, to read.
    pub fn as_view(&self) -> View<'_> {
        View { operand: self.operand.as_operand(), lifetime: PhantomData }
    }

    /// The same array for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { operand: self.operand.reborrow(), lifetime: PhantomData }
    }

    /// Rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&mut self, first: usize, num_rows: usize) -> ViewMut<'_> {
        self.reborrow().into_rows(first, num_rows)
    }

    /// As [`rows`](ViewMut::rows), for as long as the whole.
    /// Panics as [`rows`](ViewMut::rows).
    pub fn into_rows(self, first: usize, num_rows: usize) -> ViewMut<'a> {
        let cols = self.shape().cols();
        self.into_part(first * cols, [num_rows, cols].into())
    }

    /// `shape.num_elements()` elements from element `offset` on, as an array of that shape.
    ///
    /// # Panics
    /// If they lie outside.
    pub fn into_part(self, offset: usize, shape: Shape) -> ViewMut<'a> {
        let dtype = self.dtype();
        let operand = self.operand.into_part(part_bytes(dtype, offset, shape), (shape, dtype));
        ViewMut { operand, lifetime: PhantomData }
    }
}

/// The bytes of `shape.num_elements()` elements from element `offset` on. What overflows saturates, and lies outside of all
/// memory.
fn part_bytes(dtype: DType, offset: usize, shape: Shape) -> Range<usize> {
    let byte = |element: usize| element.saturating_mul(dtype.size());
    byte(offset)..byte(offset.saturating_add(shape.num_elements()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, DeviceOptions};
    use std::sync::{Arc, Mutex};
    use trireme_base::Category;
    use trireme_base::HostMemory;

    /// Eight bytes that come back to a list.
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
        fn give_back(self: Box<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    #[test]
    fn lent_memory_is_worked_with_and_comes_back() {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let returned = Arc::new(Mutex::new(Vec::new()));
        let lend = || Tensor::lent(Box::new(Bytes([0; 8], Arc::clone(&returned))), [2, 4].into(), DType::U8);
        let mut tensor = lend().reshaped([8].into());
        device.upload(&[1_u8, 2, 3, 4, 5, 6, 7, 8], tensor.view_mut());
        tensor.release();
        tensor.restore().unwrap();
        assert_eq!((tensor.num_bytes(), device.read::<u8>(tensor.view())[7]), (8, 8));
        drop(tensor);
        assert_eq!(returned.lock().unwrap().pop(), Some([1, 2, 3, 4, 5, 6, 7, 8]));
        let memory = lend().into_lent().unwrap();
        assert!(returned.lock().unwrap().is_empty());
        memory.give_back();
        assert_eq!(returned.lock().unwrap().len(), 1);
        let own = device.empty([1].into(), DType::U8, Category::Activations).unwrap();
        assert!(own.into_lent().is_err());
    }
}
