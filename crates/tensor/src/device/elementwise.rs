//! Functions of single elements on a device.

use super::Device;
use crate::kernels::Activation;
use crate::kernels::call::{ElementwiseCall, each};
use crate::kernels::cpu::dropout::WordRows;
use crate::kernels::cpu::element::with_element;
use crate::tensor::{View, ViewMut};
use trireme_base::RandomKey;

impl Device {
    /// Sets all elements to 0.
    pub fn zero(&self, x: ViewMut<'_>) {
        self.issue(ElementwiseCall::Zero { x: x.into_operand() });
    }

    /// `y = x`, elementwise, from any of f32, bf16 and f16 to any, rounded to nearest even.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn convert(&self, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        self.issue(ElementwiseCall::Convert { x: x.operand(), y: y.into_operand() });
    }

    /// `y = x`, element by element, of one type.
    ///
    /// # Panics
    /// If the shapes or the types differ.
    pub fn copy(&self, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!((x.dtype(), x.shape()), (y.dtype(), y.shape()));
        if x.dtype().size() < 8 && x.dtype().is_float() {
            return self.convert(x, y);
        }
        self.issue(ElementwiseCall::Copy { x: x.operand(), y: y.into_operand() });
    }

    /// `y = activation(x)`, element by element.
    pub(crate) fn activate(&self, activation: Activation, x: View<'_>, y: ViewMut<'_>) {
        self.issue(ElementwiseCall::Activate { x: x.operand(), y: y.into_operand(), activation });
    }

    /// In place: `x` becomes `activation(x)`, and `dy` the gradient of `x`.
    pub(crate) fn activate_backward(&self, activation: Activation, x: ViewMut<'_>, dy: ViewMut<'_>) {
        let (x, dy) = (x.into_operand(), dy.into_operand());
        self.issue(ElementwiseCall::ActivateBackward { x, dy, activation });
    }

    /// `y = activation(gate) * up`, of `[rows, cols]`, for rows `gate | up` of `[rows, 2 cols]`.
    pub(crate) fn gate(&self, activation: Activation, gate_up: View<'_>, y: ViewMut<'_>) {
        let (gate_up, y) = (gate_up.operand(), y.into_operand());
        self.issue(ElementwiseCall::Gate { gate_up, y, activation });
    }

    /// In place: `gate_up` becomes its gradient, and `dy` the output.
    pub(crate) fn gate_backward(&self, activation: Activation, gate_up: ViewMut<'_>, dy: ViewMut<'_>) {
        let (gate_up, dy) = (gate_up.into_operand(), dy.into_operand());
        self.issue(ElementwiseCall::GateBackward { gate_up, dy, activation });
    }

    /// `y = function(x)`, element by element: computed in f32, and rounded to the type of both. `operations` are those of
    /// `function`.
    ///
    /// # Panics
    /// If the shapes or the types differ.
    pub fn map(
        &self,
        x: View<'_>,
        y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32) -> f32 + Send + Sync + 'static,
    ) {
        assert_eq!(x.shape(), y.shape());
        let cost = each(x.shape(), operations).reads(x.num_bytes()).writes(y.num_bytes());
        self.issue_function("map", cost, [x], y, move |cpu, [x], mut y| {
            with_element!(x.dtype() => |T| cpu.map::<T>(x.elements(cpu), y.elements(cpu), &function));
        });
    }

    /// Sets each element of `x` to 0 where its word of the stream lies below `rate` of its range, else divides it by `1 - rate`.
    pub(crate) fn dropout(&self, x: ViewMut<'_>, key: RandomKey, words: WordRows, rate: f32) {
        self.issue(ElementwiseCall::Dropout { x: x.into_operand(), key, words, rate });
    }

    /// `y = function(left, right)`, as [`map`](Device::map).
    ///
    /// # Panics
    /// If the shapes or the types differ.
    pub fn zip(
        &self,
        (left, right): (View<'_>, View<'_>),
        y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
    ) {
        assert!(left.shape() == y.shape() && right.shape() == y.shape());
        let read_bytes = left.num_bytes() + right.num_bytes();
        let cost = each(left.shape(), operations).reads(read_bytes).writes(y.num_bytes());
        self.issue_function("zip", cost, [left, right], y, move |cpu, [left, right], mut y| {
            with_element!(y.dtype() => |T| {
                cpu.zip::<T>((left.elements(cpu), right.elements(cpu)), y.elements(cpu), &function);
            });
        });
    }

    /// `y = function(y)`, as [`map`](Device::map), in the memory of `y`.
    pub fn map_in_place(
        &self,
        y: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32) -> f32 + Send + Sync + 'static,
    ) {
        let cost = each(y.shape(), operations).updates(y.num_bytes());
        self.issue_function("map_in_place", cost, [], y, move |cpu, [], mut y| {
            with_element!(y.dtype() => |T| cpu.map_in_place::<T>(y.elements(cpu), &function));
        });
    }

    /// `y = function(y, x)`, as [`map`](Device::map), in the memory of `y`; `x` may have another type.
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
        let cost = each(x.shape(), operations).reads(x.num_bytes()).updates(y.num_bytes());
        self.issue_function("zip_in_place", cost, [x], y, move |cpu, [x], mut y| {
            with_element!(y.dtype() => |T| with_element!(x.dtype() => |U| {
                cpu.zip_in_place::<T, U>(y.elements(cpu), x.elements(cpu), &function);
            }));
        });
    }

    /// Lets `compute` write each row of `out` by its index and the elements of `inputs`, on any thread: the kernel of an operation of
    /// one's own. All are f32. `operations` are those of an element, for the [cost](Device::cost).
    ///
    /// # Panics
    /// If something is not f32.
    pub fn for_each_row<const N: usize>(
        &self,
        inputs: [View<'_>; N],
        out: ViewMut<'_>,
        operations: usize,
        compute: impl Fn([&[f32]; N], usize, &mut [f32]) + Send + Sync + 'static,
    ) {
        let read_bytes = inputs.iter().map(View::num_bytes).sum();
        let cost = each(out.shape(), operations).reads(read_bytes).writes(out.num_bytes());
        self.issue_function("for_each_row", cost, inputs, out, move |cpu, inputs, mut out| {
            let (inputs, cols) = (inputs.map(|input| input.f32s(cpu)), out.shape().cols());
            cpu.for_each_row(out.f32s(cpu), cols, |row, out| compute(inputs, row, out));
        });
    }

    /// `out += term`, element by element, each sum rounded to the type of both.
    ///
    /// # Panics
    /// If the lengths or the types differ.
    pub fn add_assign(&self, out: ViewMut<'_>, term: View<'_>) {
        self.issue(ElementwiseCall::AddAssign { out: out.into_operand(), term: term.operand() });
    }

    /// `y = x + bias + residual`, of rows as long as `bias`; `bias` and `residual` are f32.
    ///
    /// Panics if the shapes differ.
    pub(crate) fn add_bias(
        &self,
        x: View<'_>,
        bias: Option<View<'_>>,
        residual: Option<View<'_>>,
        y: ViewMut<'_>,
    ) {
        assert!(x.shape() == y.shape() && residual.is_none_or(|residual| residual.shape() == y.shape()));
        let [bias, residual] = [bias, residual].map(|view| view.map(View::operand));
        self.issue(ElementwiseCall::AddBias { x: x.operand(), bias, residual, y: y.into_operand() });
    }

    /// `sums[row] = sum of function(left, right)` over the elements of each row; `sums` is f32.
    ///
    /// # Panics
    /// If the shapes of `left` and `right` differ, or there are not as many sums as rows.
    pub fn zip_sum_rows(
        &self,
        (left, right): (View<'_>, View<'_>),
        sums: ViewMut<'_>,
        operations: usize,
        function: impl Fn(f32, f32) -> f32 + Send + Sync + 'static,
    ) {
        assert_eq!(left.shape(), right.shape());
        let read_bytes = left.num_bytes() + right.num_bytes();
        let cost = each(left.shape(), operations + 1).reads(read_bytes).writes(sums.num_bytes());
        let inputs = [left, right];
        self.issue_function("zip_sum_rows", cost, inputs, sums, move |cpu, [left, right], mut sums| {
            let cols = left.shape().cols();
            with_element!(left.dtype() => |T| with_element!(right.dtype() => |U| {
                let operands = (left.elements(cpu), right.elements(cpu));
                cpu.zip_sum_rows::<T, U>(operands, cols, sums.f32s(cpu), &function);
            }));
        });
    }
}
