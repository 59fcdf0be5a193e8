//! Functions of single elements on a device.

use super::{Device, each};
use crate::kernels::cpu::element::with_element;
use crate::tensor::{View, ViewMut};
use trireme_base::RandomKey;

impl Device {
    /// `y = function(x)`, element by element: computed in f32, and rounded to the type of both. `operations` are those of
    /// `function`.
    ///
    /// # Panics
    /// If the shapes or the types differ.
    pub fn map(
        &self,
        x: View<'_>,
        mut y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32) -> f32 + Sync,
    ) {
        assert_eq!(x.shape(), y.shape());
        self.count("map", each(x.shape(), operations).reads(x.num_bytes()).writes(y.num_bytes()));
        with_element!(x.dtype() => |T| self.cpu.map::<T>(x.elements(), y.elements(), function));
    }

    /// Sets element `i` of `x` to 0 where word `first + i` of the stream lies below `rate` of its range, else divides it by
    /// `1 - rate`.
    pub(crate) fn dropout(&self, mut x: ViewMut<'_>, key: RandomKey, first: u64, rate: f32) {
        self.count("dropout", each(x.shape(), 1).updates(x.num_bytes()));
        with_element!(x.dtype() => |T| self.cpu.dropout::<T>(x.elements(), key, first, rate));
    }

    /// `y = function(left, right)`, as [`map`](Device::map).
    ///
    /// # Panics
    /// If the shapes or the types differ.
    pub fn zip(
        &self,
        (left, right): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert!(left.shape() == y.shape() && right.shape() == y.shape());
        self.count(
            "zip",
            each(left.shape(), operations).reads(left.num_bytes() + right.num_bytes()).writes(y.num_bytes()),
        );
        with_element!(y.dtype() => |T| {
            self.cpu.zip::<T>((left.elements(), right.elements()), y.elements(), function);
        });
    }

    /// `y = function(y)`, as [`map`](Device::map), in the memory of `y`.
    pub fn map_in_place(&self, mut y: ViewMut<'_>, operations: usize, function: impl Fn(f32) -> f32 + Sync) {
        self.count("map_in_place", each(y.shape(), operations).updates(y.num_bytes()));
        with_element!(y.dtype() => |T| self.cpu.map_in_place::<T>(y.elements(), function));
    }

    /// `y = function(y, x)`, as [`map`](Device::map), in the memory of `y`; `x` may have another type.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn zip_in_place(
        &self,
        mut y: ViewMut<'_>,
        x: View<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert_eq!(x.shape(), y.shape());
        self.count("zip_in_place", each(x.shape(), operations).reads(x.num_bytes()).updates(y.num_bytes()));
        with_element!(y.dtype() => |T| with_element!(x.dtype() => |U| {
            self.cpu.zip_in_place::<T, U>(y.elements(), x.elements(), function);
        }));
    }

    /// Lets `compute` write each row of `out` by its index and the elements of `inputs`, on any thread: the kernel of an operation of
    /// one's own. All are f32. `operations` are those of an element, for the [cost](Device::cost).
    ///
    /// # Panics
    /// If something is not f32.
    pub fn for_each_row<const N: usize>(
        &self,
        inputs: [View<'_>; N],
        mut out: ViewMut<'_>,
        operations: usize,
        compute: impl Fn([&[f32]; N], usize, &mut [f32]) + Sync,
    ) {
        let read_bytes = inputs.iter().map(View::num_bytes).sum();
        self.count("for_each_row", each(out.shape(), operations).reads(read_bytes).writes(out.num_bytes()));
        let cols = out.shape().cols();
        let inputs = inputs.map(|input| input.f32s());
        self.cpu.for_each_row(out.f32s(), cols, |row, out| compute(inputs, row, out));
    }

    /// `out += term`, element by element, each sum rounded to the type of both.
    ///
    /// # Panics
    /// If the lengths or the types differ.
    pub fn add_assign(&self, mut out: ViewMut<'_>, term: View<'_>) {
        self.count("add_assign", each(term.shape(), 1).reads(term.num_bytes()).updates(out.num_bytes()));
        with_element!(term.dtype() => |T| {
            self.cpu.zip_in_place::<T, T>(out.elements(), term.elements(), |out, term| out + term);
        });
    }

    /// `sums[row] = sum of function(left, right)` over the elements of each row; `sums` is f32.
    ///
    /// # Panics
    /// If the shapes of `left` and `right` differ, or there are not as many sums as rows.
    pub fn zip_sum_rows(
        &self,
        (left, right): (View<'_>, View<'_>),
        mut sums: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert_eq!(left.shape(), right.shape());
        let read_bytes = left.num_bytes() + right.num_bytes();
        self.count(
            "zip_sum_rows",
            each(left.shape(), operations + 1).reads(read_bytes).writes(sums.num_bytes()),
        );
        let cols = left.shape().cols();
        with_element!(left.dtype() => |T| with_element!(right.dtype() => |U| {
            let operands = (left.elements(), right.elements());
            self.cpu.zip_sum_rows::<T, U>(operands, cols, sums.f32s(), function);
        }));
    }
}
