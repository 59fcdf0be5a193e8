use crate::device::DeviceError;
use crate::kernels::cpu::arena::Block;
use crate::kernels::{Place, PlaceMut};
use crate::shape::Shape;
use std::marker::PhantomData;
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
        let place = self.block.place(self.dtype);
        View { place, shape: self.shape, lifetime: PhantomData }
    }

    /// As [`view`](Tensor::view), to write.
    ///
    /// # Panics
    /// If its memory was given back.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        let place = PlaceMut::new(self.block.place(self.dtype));
        ViewMut { place, shape: self.shape, lifetime: PhantomData }
    }
}

/// A borrowed row-major array: a tensor, a parameter within a flat buffer, or host memory. Its elements are seen by kernels alone;
/// the host copies them with [`Device::download`](crate::Device::download).
///
/// ```compile_fail,E0624
/// # use trireme_tensor::View;
/// fn address(view: View<'_>) {
///     // Nobody else learns where the elements are.
///     view.place();
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    place: Place,
    shape: Shape,
    lifetime: PhantomData<&'a [u8]>,
}

/// As [`View`], to write.
#[derive(Debug)]
pub struct ViewMut<'a> {
    place: PlaceMut,
    shape: Shape,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> View<'a> {
    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.place.num_bytes()
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
        View { place: Place::of_host(bytes, dtype), shape, lifetime: PhantomData }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.place.dtype()
    }

    /// What a kernel reads.
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// The same memory as an array of bytes.
    pub fn as_bytes(&self) -> View<'a> {
        let num_bytes = self.num_bytes();
        View { place: self.place.part(0..num_bytes, DType::U8), shape: [num_bytes].into(), ..*self }
    }

    /// Rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&self, first: usize, num_rows: usize) -> View<'a> {
        let cols = self.shape.cols();
        self.part(first * cols, [num_rows, cols].into())
    }

    /// `shape.num_elements()` elements from element `offset` on, as an array of that shape.
    ///
    /// # Panics
    /// If they lie outside.
    pub fn part(&self, offset: usize, shape: Shape) -> View<'a> {
        let place = self.place.part(part_bytes(self.dtype(), offset, shape), self.dtype());
        View { place, shape, ..*self }
    }
}

impl<'a> ViewMut<'a> {
    /// Number of bytes.
    pub fn num_bytes(&self) -> usize {
        self.place.num_bytes()
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
        ViewMut { place: PlaceMut::of_host(bytes, dtype), shape, lifetime: PhantomData }
    }

    /// Sizes of the dims.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.place.dtype()
    }

    /// What a kernel writes.
    pub(crate) fn into_place(self) -> PlaceMut {
        self.place
    }

    /// The same memory as an array of bytes.
    pub fn into_bytes(self) -> ViewMut<'a> {
        let num_bytes = self.num_bytes();
        let place = self.place.into_part(0..num_bytes, DType::U8);
        ViewMut { place, shape: [num_bytes].into(), lifetime: PhantomData }
    }

    /// The same array, to read.
    pub fn as_view(&self) -> View<'_> {
        View { place: self.place.as_place(), shape: self.shape, lifetime: PhantomData }
    }

    /// The same array for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { place: self.place.reborrow(), shape: self.shape, lifetime: PhantomData }
    }

    /// Rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&mut self, first: usize, num_rows: usize) -> ViewMut<'_> {
        let cols = self.shape.cols();
        self.reborrow().into_part(first * cols, [num_rows, cols].into())
    }

    /// `shape.num_elements()` elements from element `offset` on, as an array of that shape.
    ///
    /// # Panics
    /// If they lie outside.
    pub fn into_part(self, offset: usize, shape: Shape) -> ViewMut<'a> {
        let dtype = self.dtype();
        let place = self.place.into_part(part_bytes(dtype, offset, shape), dtype);
        ViewMut { place, shape, lifetime: PhantomData }
    }
}

/// The bytes of `shape.num_elements()` elements from element `offset` on. What overflows saturates, and lies outside of all
/// memory.
fn part_bytes(dtype: DType, offset: usize, shape: Shape) -> Range<usize> {
    let byte = |element: usize| element.saturating_mul(dtype.size());
    byte(offset)..byte(offset.saturating_add(shape.num_elements()))
}
