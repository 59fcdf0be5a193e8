use crate::device::DeviceError;
use crate::kernels::cpu::arena::Block;
use crate::kernels::cpu::element::{Element, Floats, FloatsMut};
use crate::shape::Shape;
use bytemuck::Pod;
use std::ops::Range;
use trireme_base::DType;

/// A row-major array that owns its memory on a device.
#[derive(Debug)]
pub struct Tensor {
    block: Block,
    shape: Shape,
    dtype: DType,
}

impl Tensor {
    pub(crate) fn new(block: Block, shape: Shape, dtype: DType) -> Self {
        debug_assert_eq!(Some(block.len()), shape.num_bytes(dtype));
        Tensor { block, shape, dtype }
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

    /// Gives the memory back, and with it the contents; shape and dtype stay.
    pub fn release(&mut self) {
        self.block.release();
    }

    /// Takes memory again after [`release`](Tensor::release); the contents are unspecified.
    ///
    /// # Errors
    /// If there is none.
    pub fn restore(&mut self) -> Result<(), DeviceError> {
        Ok(self.block.retake()?)
    }

    /// Number of bytes, whether they are here or not.
    pub fn num_bytes(&self) -> usize {
        self.block.len()
    }

    /// All of the tensor, to read.
    ///
    /// # Panics
    /// If its memory was given back.
    pub fn view(&self) -> View<'_> {
        View { bytes: self.block.bytes(), shape: self.shape, dtype: self.dtype }
    }

    /// As [`view`](Tensor::view), to write.
    ///
    /// # Panics
    /// If its memory was given back.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut { bytes: self.block.bytes_mut(), shape: self.shape, dtype: self.dtype }
    }
}

/// A borrowed row-major array: a tensor, a parameter within a flat buffer, or host memory.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    bytes: &'a [u8],
    shape: Shape,
    dtype: DType,
}

/// As [`View`], to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    bytes: &'a mut [u8],
    shape: Shape,
    dtype: DType,
}

impl<'a> View<'a> {
    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Host memory as an f32 array.
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_f32s(values: &'a [f32], shape: Shape) -> Self {
        View::from_bytes(bytemuck::cast_slice(values), DType::F32, shape)
    }

    /// Host memory as an array of `dtype`, to which it is aligned.
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: Shape) -> Self {
        assert_eq!(bytes.len(), shape.num_elements() * dtype.size(), "{shape:?}");
        View { bytes, shape, dtype }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no f32.
    pub(crate) fn f32s(&self) -> &'a [f32] {
        self.elements()
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no `T`.
    pub(crate) fn elements<T: Element>(&self) -> &'a [T] {
        assert_eq!(self.dtype, T::DTYPE);
        bytemuck::cast_slice(self.bytes)
    }

    /// Elements as whole numbers of their size, to copy them.
    ///
    /// # Panics
    /// If the elements are of another size.
    pub(crate) fn words<W: Pod>(&self) -> &'a [W] {
        assert_eq!(self.dtype.size(), size_of::<W>());
        bytemuck::cast_slice(self.bytes)
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no floats that kernels compute with.
    pub(crate) fn floats(&self) -> Floats<'a> {
        match self.dtype {
            DType::Bf16 => Floats::Bf16(self.elements()),
            DType::F16 => Floats::F16(self.elements()),
            _ => Floats::F32(self.elements()),
        }
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no u32.
    pub(crate) fn u32s(&self) -> &'a [u32] {
        assert_eq!(self.dtype, DType::U32);
        bytemuck::cast_slice(self.bytes)
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no bytes.
    pub(crate) fn u8s(&self) -> &'a [u8] {
        assert_eq!(self.dtype, DType::U8);
        self.bytes
    }

    /// The same memory as an array of bytes.
    pub fn as_bytes(&self) -> View<'a> {
        View { bytes: self.bytes, shape: [self.bytes.len()].into(), dtype: DType::U8 }
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&self, first: usize, num_rows: usize) -> View<'a> {
        let row_bytes = self.shape.cols() * self.dtype.size();
        View {
            bytes: &self.bytes[first * row_bytes..(first + num_rows) * row_bytes],
            shape: Shape::from([num_rows, self.shape.cols()]),
            dtype: self.dtype,
        }
    }

    /// `shape.num_elements()` elements from element `offset` on, as an array of that shape.
    ///
    /// # Panics
    /// If they lie outside.
    pub fn part(&self, offset: usize, shape: Shape) -> View<'a> {
        let bytes = &self.bytes[part_bytes(self.dtype, offset, shape)];
        View { bytes, shape, dtype: self.dtype }
    }
}

impl<'a> ViewMut<'a> {
    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Host memory as an f32 array.
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_f32s(values: &'a mut [f32], shape: Shape) -> Self {
        ViewMut::from_bytes(bytemuck::cast_slice_mut(values), DType::F32, shape)
    }

    /// Host memory as an array of `dtype`, to which it is aligned.
    ///
    /// # Panics
    /// If the length is not the shape's.
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: Shape) -> Self {
        assert_eq!(bytes.len(), shape.num_elements() * dtype.size(), "{shape:?}");
        ViewMut { bytes, shape, dtype }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no f32.
    pub(crate) fn f32s(&mut self) -> &mut [f32] {
        self.elements()
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no `T`.
    pub(crate) fn elements<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE);
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// As [`View::words`], to write.
    ///
    /// # Panics
    /// If the elements are of another size.
    pub(crate) fn words<W: Pod>(&mut self) -> &mut [W] {
        assert_eq!(self.dtype.size(), size_of::<W>());
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no floats that kernels compute with.
    pub(crate) fn floats(&mut self) -> FloatsMut<'_> {
        match self.dtype {
            DType::Bf16 => FloatsMut::Bf16(self.elements()),
            DType::F16 => FloatsMut::F16(self.elements()),
            _ => FloatsMut::F32(self.elements()),
        }
    }

    /// Elements in memory order.
    ///
    /// # Panics
    /// If the elements are no u32.
    pub(crate) fn u32s(&mut self) -> &mut [u32] {
        assert_eq!(self.dtype, DType::U32);
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// Elements in memory order, for as long as the memory is borrowed.
    ///
    /// # Panics
    /// If the elements are no `T`.
    pub(crate) fn into_elements<T: Element>(self) -> &'a mut [T] {
        assert_eq!(self.dtype, T::DTYPE);
        bytemuck::cast_slice_mut(self.bytes)
    }

    /// Elements in memory order, for as long as the memory is borrowed.
    ///
    /// # Panics
    /// If the elements are no bytes.
    pub(crate) fn into_u8s(self) -> &'a mut [u8] {
        assert_eq!(self.dtype, DType::U8);
        self.bytes
    }

    /// Writes the bytes of `x`.
    ///
    /// # Panics
    /// If they are not as many.
    pub(crate) fn copy_from(&mut self, x: View<'_>) {
        self.bytes.copy_from_slice(x.bytes);
    }

    /// Sets every element to zero, whose bits are zero in every dtype.
    pub(crate) fn zero(&mut self) {
        self.bytes.fill(0);
    }

    /// The same memory as an array of bytes.
    pub fn into_bytes(self) -> ViewMut<'a> {
        let shape = [self.bytes.len()].into();
        ViewMut { bytes: self.bytes, shape, dtype: DType::U8 }
    }

    /// Its bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The same array, to read.
    pub fn as_view(&self) -> View<'_> {
        View { bytes: self.bytes, shape: self.shape, dtype: self.dtype }
    }

    /// The same array for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { bytes: self.bytes, shape: self.shape, dtype: self.dtype }
    }

    /// Rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&mut self, first: usize, num_rows: usize) -> ViewMut<'_> {
        let row_bytes = self.shape.cols() * self.dtype.size();
        ViewMut {
            bytes: &mut self.bytes[first * row_bytes..(first + num_rows) * row_bytes],
            shape: Shape::from([num_rows, self.shape.cols()]),
            dtype: self.dtype,
        }
    }

    /// `shape.num_elements()` elements from element `offset` on, as an array of that shape.
    ///
    /// # Panics
    /// If they lie outside.
    pub fn into_part(self, offset: usize, shape: Shape) -> ViewMut<'a> {
        let bytes = &mut self.bytes[part_bytes(self.dtype, offset, shape)];
        ViewMut { bytes, shape, dtype: self.dtype }
    }
}

/// The bytes of `shape.num_elements()` elements from element `offset` on. What overflows saturates, and lies outside of all
/// memory.
fn part_bytes(dtype: DType, offset: usize, shape: Shape) -> Range<usize> {
    let byte = |element: usize| element.saturating_mul(dtype.size());
    byte(offset)..byte(offset.saturating_add(shape.num_elements()))
}
