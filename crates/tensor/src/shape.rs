use std::fmt;
use trireme_base::DType;

const DIMS_MAX: usize = 4;

/// The dims of a row-major tensor: at most four, the last one contiguous. `Copy`, without heap memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; DIMS_MAX],
    num_dims: usize,
}

impl Shape {
    /// Creates a shape from its dims.
    ///
    /// # Panics
    /// If there are more than four dims.
    pub fn new(dims: &[usize]) -> Self {
        assert!(dims.len() <= DIMS_MAX, "a shape has at most {DIMS_MAX} dims, not {dims:?}");
        let mut shape = Shape { dims: [1; DIMS_MAX], num_dims: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }

    /// Returns the dims.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.num_dims]
    }

    /// Returns the product of the dims: 1 for a scalar, `usize::MAX` on overflow. No device creates a tensor whose shape overflows.
    pub fn num_elements(&self) -> usize {
        product(self.dims())
    }

    /// Returns the product of all dims but the last: the number of rows of length [`cols`](Shape::cols). Saturates like
    /// [`num_elements`](Shape::num_elements).
    pub fn rows(&self) -> usize {
        product(&self.dims()[..self.num_dims.saturating_sub(1)])
    }

    /// Returns the bytes of a tensor of this shape. Returns `None` if the product of the dims, with every 0 counted as 1, exceeds
    /// `isize::MAX` bytes.
    pub(crate) fn num_bytes(&self, dtype: DType) -> Option<usize> {
        let bytes = self.dims().iter().try_fold(dtype.size(), |bytes, &dim| bytes.checked_mul(dim.max(1)))?;
        isize::try_from(bytes).ok()?;
        Some(self.num_elements() * dtype.size())
    }

    /// Returns the shape with the last dim replaced by `cols`.
    ///
    /// # Panics
    /// If the shape has no dim.
    pub fn with_cols(self, cols: usize) -> Shape {
        self.with_dim(self.num_dims - 1, cols)
    }

    /// Returns the shape with `cols` appended as the last dim.
    ///
    /// # Panics
    /// If the shape already has four dims.
    pub fn append_dim(&self, cols: usize) -> Shape {
        assert!(self.num_dims < DIMS_MAX, "{self:?} has no room for another dim");
        Shape { num_dims: self.num_dims + 1, ..*self }.with_cols(cols)
    }

    /// Returns the product of the dims before `dim`, the dim itself, and the product of the dims after it.
    ///
    /// # Panics
    /// If there is no dim `dim`.
    pub fn outer_dim_inner(&self, dim: usize) -> [usize; 3] {
        let dims = self.dims();
        [product(&dims[..dim]), dims[dim], product(&dims[dim + 1..])]
    }

    /// Returns the shape with dim `dim` replaced by `size`.
    ///
    /// # Panics
    /// If there is no dim `dim`.
    pub fn with_dim(mut self, dim: usize, size: usize) -> Shape {
        assert!(dim < self.num_dims, "dim {dim} of {self:?}");
        self.dims[dim] = size;
        self
    }

    /// Returns the last dim, which is the length of a row; 1 for a scalar.
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
