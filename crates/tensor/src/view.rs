//! Borrowed arrays.

use crate::kernels::{Operand, OperandMut};
use crate::shape::Shape;
use std::marker::PhantomData;
use std::ops::Range;
use trireme_base::DType;

/// A borrowed row-major array: a tensor, a parameter within a flat buffer, or host memory. Only kernels can access its elements; the host
/// copies them with [`Device::download`](crate::Device::download).
///
/// ```compile_fail,E0624
/// # use trireme_tensor::View;
/// fn address(view: View<'_>) {
///     // Only kernels learn the address of the elements.
///     view.operand();
/// }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    operand: Operand,
    lifetime: PhantomData<&'a [u8]>,
}

/// The mutable counterpart of [`View`].
#[derive(Debug)]
pub struct ViewMut<'a> {
    operand: OperandMut,
    lifetime: PhantomData<&'a mut [u8]>,
}

impl<'a> View<'a> {
    /// Creates a view that borrows the owner of its memory.
    pub(crate) fn of_owner<T>(_owner: &'a T, operand: Operand) -> Self {
        View { operand, lifetime: PhantomData }
    }

    /// Returns the size in bytes.
    pub fn num_bytes(&self) -> usize {
        self.operand.num_bytes()
    }

    /// Wraps an f32 slice of host memory. Only devices that [reach the host's memory](crate::Device::reaches_host) can use the view.
    ///
    /// # Panics
    /// If the length does not match the shape.
    pub fn from_f32s(values: &'a [f32], shape: Shape) -> Self {
        View::from_bytes(bytemuck::cast_slice(values), DType::F32, shape)
    }

    /// Wraps host memory, which must be aligned for `dtype`, like [`from_f32s`](View::from_f32s).
    ///
    /// # Panics
    /// If the length does not match the shape.
    pub fn from_bytes(bytes: &'a [u8], dtype: DType, shape: Shape) -> Self {
        assert_eq!(bytes.len(), shape.num_elements() * dtype.size(), "{shape:?}");
        View { operand: Operand::of_host(bytes, (shape, dtype)), lifetime: PhantomData }
    }

    /// Returns the dims.
    pub fn shape(&self) -> Shape {
        self.operand.shape()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.operand.dtype()
    }

    pub(crate) fn operand(self) -> Operand {
        self.operand
    }

    /// Returns the same memory as an array of bytes.
    pub fn as_bytes(&self) -> View<'a> {
        let num_bytes = self.num_bytes();
        self.byte_range(0..num_bytes, ([num_bytes].into(), DType::U8))
    }

    /// Returns rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&self, first: usize, num_rows: usize) -> View<'a> {
        let cols = self.shape().cols();
        self.part(first * cols, [num_rows, cols].into())
    }

    /// Returns the `shape.num_elements()` elements from element `offset` on, in that shape.
    ///
    /// # Panics
    /// If they exceed the view.
    pub fn part(&self, offset: usize, shape: Shape) -> View<'a> {
        self.byte_range(part_bytes(self.dtype(), offset, shape), (shape, self.dtype()))
    }

    fn byte_range(&self, range: Range<usize>, of: (Shape, DType)) -> View<'a> {
        View { operand: self.operand.part(range, of), lifetime: PhantomData }
    }
}

impl<'a> ViewMut<'a> {
    /// Creates a view that borrows the owner of its memory.
    pub(crate) fn of_owner<T>(_owner: &'a mut T, operand: OperandMut) -> Self {
        ViewMut { operand, lifetime: PhantomData }
    }

    /// Returns the size in bytes.
    pub fn num_bytes(&self) -> usize {
        self.operand.num_bytes()
    }

    /// Like [`View::from_f32s`].
    ///
    /// # Panics
    /// If the length does not match the shape.
    pub fn from_f32s(values: &'a mut [f32], shape: Shape) -> Self {
        ViewMut::from_bytes(bytemuck::cast_slice_mut(values), DType::F32, shape)
    }

    /// Like [`View::from_bytes`].
    ///
    /// # Panics
    /// If the length does not match the shape.
    pub fn from_bytes(bytes: &'a mut [u8], dtype: DType, shape: Shape) -> Self {
        assert_eq!(bytes.len(), shape.num_elements() * dtype.size(), "{shape:?}");
        ViewMut { operand: OperandMut::of_host(bytes, (shape, dtype)), lifetime: PhantomData }
    }

    /// Returns the dims.
    pub fn shape(&self) -> Shape {
        self.operand.shape()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.operand.dtype()
    }

    pub(crate) fn into_operand(self) -> OperandMut {
        self.operand
    }

    /// Returns the same memory as an array of bytes.
    pub fn into_bytes(self) -> ViewMut<'a> {
        let num_bytes = self.num_bytes();
        let operand = self.operand.into_part(0..num_bytes, ([num_bytes].into(), DType::U8));
        ViewMut { operand, lifetime: PhantomData }
    }

    /// Borrows the array for reading.
    pub fn as_view(&self) -> View<'_> {
        View { operand: self.operand.as_operand(), lifetime: PhantomData }
    }

    /// Reborrows the array for a shorter lifetime.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { operand: self.operand.reborrow(), lifetime: PhantomData }
    }

    /// Returns rows `first..first + num_rows` of a matrix.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn rows(&mut self, first: usize, num_rows: usize) -> ViewMut<'_> {
        self.reborrow().into_rows(first, num_rows)
    }

    /// Like [`rows`](ViewMut::rows), for the full lifetime of the view. Panics in the same cases.
    pub fn into_rows(self, first: usize, num_rows: usize) -> ViewMut<'a> {
        let cols = self.shape().cols();
        self.into_part(first * cols, [num_rows, cols].into())
    }

    /// Returns the `shape.num_elements()` elements from element `offset` on, in that shape.
    ///
    /// # Panics
    /// If they exceed the view.
    pub fn into_part(self, offset: usize, shape: Shape) -> ViewMut<'a> {
        let dtype = self.dtype();
        let operand = self.operand.into_part(part_bytes(dtype, offset, shape), (shape, dtype));
        ViewMut { operand, lifetime: PhantomData }
    }
}

/// Returns the byte range of `shape.num_elements()` elements from element `offset` on. Bounds that overflow saturate, and so exceed every
/// view.
fn part_bytes(dtype: DType, offset: usize, shape: Shape) -> Range<usize> {
    let byte = |element: usize| element.saturating_mul(dtype.size());
    byte(offset)..byte(offset.saturating_add(shape.num_elements()))
}
