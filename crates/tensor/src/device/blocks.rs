//! Elements in another order or place, sums over a dim, and softmax, on a device.

use super::{Device, each};
use crate::kernels::Blocks;
use crate::kernels::cpu::element::{with_element, with_word};
use crate::tensor::{View, ViewMut};
use trireme_base::Cost;

impl Device {
    /// Copies `num_blocks` blocks of `len` elements from `x` to `y`.
    ///
    /// # Panics
    /// If a block lies outside, or the types differ.
    pub(crate) fn copy_blocks(
        &self,
        (x, from): (View<'_>, Blocks),
        (mut y, to): (ViewMut<'_>, Blocks),
        blocks: (usize, usize),
    ) {
        assert_eq!(x.dtype(), y.dtype());
        let num_bytes = blocks.0 * blocks.1 * x.dtype().size();
        self.count("copy_blocks", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        with_word!(x.dtype() => |W| self.cpu.copy_blocks::<W>((x.words(), from), (y.words(), to), blocks));
    }

    /// Reads `x` in another order of its dims: `strides` are those of `x`, of the `dims` of `y`.
    pub(crate) fn permute(
        &self,
        (x, strides): (View<'_>, [usize; 4]),
        (mut y, dims): (ViewMut<'_>, [usize; 4]),
    ) {
        assert_eq!(x.dtype(), y.dtype());
        self.count("permute", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()));
        with_word!(x.dtype() => |W| self.cpu.permute::<W>((x.words(), strides), (y.words(), dims)));
    }

    /// `y[o, i] = factor * sum over d of x[o, d, i]`, for `x` of `[outer, dim, inner]`.
    pub(crate) fn sum_dim(&self, x: View<'_>, dims: [usize; 3], factor: f32, mut y: ViewMut<'_>) {
        self.count("sum_dim", each(x.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes()));
        with_element!(x.dtype() => |T| self.cpu.sum_dim::<T>(x.elements(), dims, factor, y.elements()));
    }

    /// `y[o, d, i] = factor * x[o, i]`, for `y` of `[outer, dim, inner]`.
    pub(crate) fn spread_dim(&self, x: View<'_>, dims: [usize; 3], factor: f32, mut y: ViewMut<'_>) {
        self.count("spread_dim", each(y.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes()));
        with_element!(x.dtype() => |T| self.cpu.spread_dim::<T>(x.elements(), dims, factor, y.elements()));
    }

    /// `y[i] = x[ids[i]]`, of rows.
    ///
    /// # Panics
    /// If an id is that of no row.
    pub(crate) fn gather_rows(&self, x: View<'_>, ids: View<'_>, mut y: ViewMut<'_>) {
        assert_eq!(x.dtype(), y.dtype());
        self.count("gather_rows", Cost::ZERO.reads(ids.num_bytes() + y.num_bytes()).writes(y.num_bytes()));
        let (ids, cols) = (ids.u32s(), x.shape().cols());
        with_word!(x.dtype() => |W| self.cpu.gather_rows::<W>(x.words(), ids, cols, y.words()));
    }

    /// Softmax of each row. A row of nothing but negative infinity gives NaN.
    pub(crate) fn softmax(&self, x: View<'_>, mut y: ViewMut<'_>) {
        let cols = x.shape().cols();
        self.count("softmax", each(x.shape(), SOFTMAX_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes()));
        with_element!(x.dtype() => |T| self.cpu.softmax::<T>(x.elements(), cols, y.elements()));
    }

    /// In place: `dy`, the gradient of the softmax `y`, becomes that of its input.
    pub(crate) fn softmax_backward(&self, y: View<'_>, mut dy: ViewMut<'_>) {
        let cols = y.shape().cols();
        self.count("softmax_backward", each(y.shape(), 4).reads(y.num_bytes()).updates(dy.num_bytes()));
        with_element!(y.dtype() => |T| self.cpu.softmax_backward::<T>(y.elements(), cols, dy.elements()));
    }
}

/// Operations of a softmax, for each element: two exponentials, the largest value, the sum and the scale.
const SOFTMAX_OPERATIONS: usize = 2 * Cost::EXP + 4;
