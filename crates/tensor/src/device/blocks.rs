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
        (y, to): (ViewMut<'_>, Blocks),
        blocks: (usize, usize),
    ) {
        assert_eq!(x.dtype(), y.dtype());
        let num_bytes = blocks.0 * blocks.1 * x.dtype().size();
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("copy_blocks", Cost::ZERO.reads(num_bytes).writes(num_bytes), move |cpu| {
            with_word!(x.dtype() => |W| cpu.copy_blocks::<W>((x.words(cpu), from), (y.words(cpu), to), blocks));
        });
    }

    /// Reads `x` in another order of its dims: `strides` are those of `x`, of the `dims` of `y`.
    pub(crate) fn permute(&self, (x, strides): (View<'_>, [usize; 4]), (y, dims): (ViewMut<'_>, [usize; 4])) {
        assert_eq!(x.dtype(), y.dtype());
        let cost = Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("permute", cost, move |cpu| {
            with_word!(x.dtype() => |W| cpu.permute::<W>((x.words(cpu), strides), (y.words(cpu), dims)));
        });
    }

    /// `y[o, i] = factor * sum over d of x[o, d, i]`, for `x` of `[outer, dim, inner]`.
    pub(crate) fn sum_dim(&self, x: View<'_>, dims: [usize; 3], factor: f32, y: ViewMut<'_>) {
        let cost = each(x.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("sum_dim", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.sum_dim::<T>(x.elements(cpu), dims, factor, y.elements(cpu)));
        });
    }

    /// `y[o, d, i] = factor * x[o, i]`, for `y` of `[outer, dim, inner]`.
    pub(crate) fn spread_dim(&self, x: View<'_>, dims: [usize; 3], factor: f32, y: ViewMut<'_>) {
        let cost = each(y.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("spread_dim", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.spread_dim::<T>(x.elements(cpu), dims, factor, y.elements(cpu)));
        });
    }

    /// `y[i] = x[ids[i]]`, of rows.
    ///
    /// # Panics
    /// If an id is that of no row.
    pub(crate) fn gather_rows(&self, x: View<'_>, ids: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.dtype(), y.dtype());
        let cost = Cost::ZERO.reads(ids.num_bytes() + y.num_bytes()).writes(y.num_bytes());
        let cols = x.shape().cols();
        let (x, ids, mut y) = (x.place(), ids.place(), y.into_place());
        self.issue("gather_rows", cost, move |cpu| {
            with_word!(x.dtype() => |W| cpu.gather_rows::<W>(x.words(cpu), ids.u32s(cpu), cols, y.words(cpu)));
        });
    }

    /// Softmax of each row of `[rows, cols]`. A row of nothing but negative infinity gives NaN.
    pub(crate) fn softmax(&self, x: View<'_>, y: ViewMut<'_>) {
        let cols = x.shape().cols();
        let cost = each(x.shape(), SOFTMAX_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("softmax", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.softmax::<T>(x.elements(cpu), cols, y.elements(cpu)));
        });
    }

    /// In place: `dy`, the gradient of the softmax `y`, becomes that of its input.
    pub(crate) fn softmax_backward(&self, y: View<'_>, dy: ViewMut<'_>) {
        let cols = y.shape().cols();
        let cost = each(y.shape(), 4).reads(y.num_bytes()).updates(dy.num_bytes());
        let (y, mut dy) = (y.place(), dy.into_place());
        self.issue("softmax_backward", cost, move |cpu| {
            with_element!(y.dtype() => |T| cpu.softmax_backward::<T>(y.elements(cpu), cols, dy.elements(cpu)));
        });
    }
}

/// Operations of a softmax, for each element: two exponentials, the largest value, the sum and the scale.
const SOFTMAX_OPERATIONS: usize = 2 * Cost::EXP + 4;
