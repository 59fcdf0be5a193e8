//! Copies, and kernels that are Rust functions.

use super::Device;
use crate::kernels::call::{ElementwiseCall, per_element_cost};
use crate::kernels::cpu::element::with_element;
use crate::view::{View, ViewMut};

impl Device {
    /// Computes `y = x` elementwise for equal dtypes.
    ///
    /// # Panics
    /// If the shapes or the dtypes differ.
    pub fn copy(&self, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!((x.dtype(), x.shape()), (y.dtype(), y.shape()));
        if x.dtype().size() < 8 && x.dtype().is_float() {
            return self.convert(x, y);
        }
        self.issue(ElementwiseCall::Copy { x: x.operand(), y: y.into_operand() });
    }

    /// Computes `y = function(x)` elementwise in f32, rounded to the dtype of `x` and `y`. `operations` is the number of operations of
    /// `function`, for the [cost](Device::cost).
    ///
    /// # Panics
    /// If the shapes or the dtypes differ.
    pub fn map(
        &self,
        x: View<'_>,
        y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32) -> f32 + Send + Sync + 'static,
    ) {
        assert_eq!(x.shape(), y.shape());
        let cost = per_element_cost(x.shape(), operations).reads(x.num_bytes()).writes(y.num_bytes());
        self.issue_function("map", cost, [x], y, move |cpu, [x], mut y| {
            with_element!(x.dtype() => |T| cpu.map::<T>(x.elements(cpu), y.elements(cpu), &function));
        });
    }

    /// Computes `y = function(left, right)` elementwise, like [`map`](Device::map).
    ///
    /// # Panics
    /// If the shapes or the dtypes differ.
    pub fn zip(
        &self,
        left: View<'_>,
        right: View<'_>,
        y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
    ) {
        assert!(left.shape() == y.shape() && right.shape() == y.shape());
        let read_bytes = left.num_bytes() + right.num_bytes();
        let cost = per_element_cost(left.shape(), operations).reads(read_bytes).writes(y.num_bytes());
        self.issue_function("zip", cost, [left, right], y, move |cpu, [left, right], mut y| {
            with_element!(y.dtype() => |T| {
                cpu.zip::<T>(left.elements(cpu), right.elements(cpu), y.elements(cpu), &function);
            });
        });
    }

    /// Computes `y = function(y)` elementwise in place, like [`map`](Device::map).
    pub fn map_in_place(
        &self,
        y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32) -> f32 + Send + Sync + 'static,
    ) {
        let cost = per_element_cost(y.shape(), operations).updates(y.num_bytes());
        self.issue_function("map_in_place", cost, [], y, move |cpu, [], mut y| {
            with_element!(y.dtype() => |T| cpu.map_in_place::<T>(y.elements(cpu), &function));
        });
    }

    /// Computes `y = function(y, x)` elementwise in place, like [`map`](Device::map). `x` may have another dtype.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn zip_in_place(
        &self,
        y: ViewMut<'_>,
        x: View<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
    ) {
        assert_eq!(x.shape(), y.shape());
        let cost = per_element_cost(x.shape(), operations).reads(x.num_bytes()).updates(y.num_bytes());
        self.issue_function("zip_in_place", cost, [x], y, move |cpu, [x], mut y| {
            with_element!(y.dtype() => |T| with_element!(x.dtype() => |U| {
                cpu.zip_in_place::<T, U>(y.elements(cpu), x.elements(cpu), &function);
            }));
        });
    }

    /// Runs a custom kernel: `compute` writes each row of `out`, given the elements of `inputs` and the row's index, on any thread. All
    /// tensors are f32. `operations` is the number of operations per element of `out`, for the [cost](Device::cost).
    ///
    /// # Panics
    /// If a tensor is not f32.
    pub fn for_each_row<const N: usize>(
        &self,
        inputs: [View<'_>; N],
        out: ViewMut<'_>,
        operations: usize,
        compute: impl Fn([&[f32]; N], usize, &mut [f32]) + Send + Sync + 'static,
    ) {
        let read_bytes = inputs.iter().map(View::num_bytes).sum();
        let cost = per_element_cost(out.shape(), operations).reads(read_bytes).writes(out.num_bytes());
        self.issue_function("for_each_row", cost, inputs, out, move |cpu, inputs, mut out| {
            let (inputs, cols) = (inputs.map(|input| input.f32s(cpu)), out.shape().cols());
            cpu.for_each_row(out.f32s(cpu), cols, |row, out| compute(inputs, row, out));
        });
    }

    /// Computes `sums[row] = sum of function(left, right)` over the elements of each row. `sums` is f32.
    ///
    /// # Panics
    /// If the shapes of `left` and `right` differ, or the number of sums is not the number of rows.
    pub fn zip_sum_rows(
        &self,
        left: View<'_>,
        right: View<'_>,
        sums: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
    ) {
        assert_eq!(left.shape(), right.shape());
        let read_bytes = left.num_bytes() + right.num_bytes();
        let cost = per_element_cost(left.shape(), operations + 1).reads(read_bytes).writes(sums.num_bytes());
        let inputs = [left, right];
        self.issue_function("zip_sum_rows", cost, inputs, sums, move |cpu, [left, right], mut sums| {
            let cols = left.shape().cols();
            with_element!(left.dtype() => |T| with_element!(right.dtype() => |U| {
                let (left, right) = (left.elements(cpu), right.elements(cpu));
                cpu.zip_sum_rows::<T, U>(left, right, cols, sums.f32s(cpu), &function);
            }));
        });
    }
}
