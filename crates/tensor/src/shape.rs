use std::fmt;
use trireme_base::DType;

const DIMS_MAX: usize = 4;

/// Sizes of a row-major tensor's dims, at most four, the last varying fastest. Copied freely: no heap.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; DIMS_MAX],
    num_dims: usize,
}

impl Shape {
    /// A shape of the given dims.
    ///
    /// # Panics
    /// If there are more than four.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= DIMS_MAX, "a shape has at most {DIMS_MAX} dims, not {dims:?}");
        let mut shape = Shape { dims: [1; DIMS_MAX], num_dims: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }

    /// The dims' sizes.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.num_dims]
    }

    /// Product of the dims: 1 for a scalar, `usize::MAX` if it overflows. No device has a tensor of a shape that overflows.
    pub fn num_elements(&self) -> usize {
        product(self.dims())
    }

    /// Product of all dims but the last: the number of rows when the last dim is a row. Saturates as
    /// [`num_elements`](Shape::num_elements) does.
    pub fn rows(&self) -> usize {
        product(&self.dims()[..self.num_dims.saturating_sub(1)])
    }

    /// Bytes of a tensor of this shape; `None` unless every product of its dims, in bytes, can be addressed. Dims of 0 do
    /// not excuse the others.
    pub(crate) fn num_bytes(&self, dtype: DType) -> Option<usize> {
        let bytes = self.dims().iter().try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim.max(1)))?;
        isize::try_from(bytes).ok()?;
        Some(self.num_elements() * dtype.size())
    }

    /// The same shape with rows of another length.
    ///
    /// # Panics
    /// If there is no dim.
    pub fn with_cols(self, cols: usize) -> Shape {
        self.with_dim(self.num_dims - 1, cols)
    }

    /// The same shape with one more dim, the last.
    ///
    /// # Panics
    /// If there are four already.
    pub fn and_cols(&self, cols: usize) -> Shape {
        assert!(self.num_dims < DIMS_MAX, "{self:?} has no room for another dim");
        Shape { num_dims: self.num_dims + 1, ..*self }.with_cols(cols)
    }

    /// Products of the dims before dim `dim`, that dim, and the product of those after it.
    ///
    /// # Panics
    /// If there is no such dim.
    pub fn around(&self, dim: usize) -> [usize; 3] {
        let dims = self.dims();
        [product(&dims[..dim]), dims[dim], product(&dims[dim + 1..])]
    }

    /// The same shape with another size of one dim.
    ///
    /// # Panics
    /// If there is no such dim.
    pub fn with_dim(mut self, dim: usize, size: usize) -> Shape {
        assert!(dim < self.num_dims, "dim {dim} of {self:?}");
        self.dims[dim] = size;
        self
    }

    /// The last dim: the length of a row; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }
}

fn product(dims: &[usize]) -> usize {
    dims.iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dims().fmt(f)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Shape::new(&dims)
    }
}
