//! Functions of single elements on a device.

use super::{Device, each};
use crate::kernels::Activation;
use crate::kernels::cpu::dropout::WordRows;
use crate::kernels::cpu::element::with_element;
use crate::tensor::{View, ViewMut};
use trireme_base::{Cost, RandomKey};

impl Device {
    /// Sets all elements to 0.
    pub fn zero(&self, x: ViewMut<'_>) {
        let mut x = x.into_place();
        self.issue("zero", Cost::ZERO.writes(x.num_bytes()), move |cpu| {
            if !cpu.threads.is_idle() {
                x.bytes(cpu).fill(0);
            }
        });
    }

    /// `y = x`, elementwise, from any of f32, bf16 and f16 to any, rounded to nearest even.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn convert(&self, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("convert", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()), move |cpu| {
            with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                cpu.convert::<X, Y>(x.elements(cpu), y.elements(cpu));
            }));
        });
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
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("copy", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()), move |cpu| {
            if !cpu.threads.is_idle() {
                y.bytes(cpu).copy_from_slice(x.bytes(cpu));
            }
        });
    }

    /// `y = activation(x)`, element by element.
    pub(crate) fn activate(&self, activation: Activation, x: View<'_>, y: ViewMut<'_>) {
        let cost = each(x.shape(), activation.num_operations()).reads(x.num_bytes()).writes(y.num_bytes());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("activate", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.activate::<T>(activation, x.elements(cpu), y.elements(cpu)));
        });
    }

    /// In place: `x` becomes `activation(x)`, and `dy` the gradient of `x`.
    pub(crate) fn activate_backward(&self, activation: Activation, x: ViewMut<'_>, dy: ViewMut<'_>) {
        let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
        let cost = each(x.shape(), num_operations).updates(x.num_bytes()).updates(dy.num_bytes());
        let (mut x, mut dy) = (x.into_place(), dy.into_place());
        self.issue("activate_backward", cost, move |cpu| {
            with_element!(x.dtype() => |T| {
                cpu.activate_backward::<T>(activation, x.elements(cpu), dy.elements(cpu));
            });
        });
    }

    /// `y = activation(gate) * up`, of `[rows, cols]`, for rows `gate | up` of `[rows, 2 cols]`.
    pub(crate) fn gate(&self, activation: Activation, gate_up: View<'_>, y: ViewMut<'_>) {
        let cols = y.shape().cols();
        let cost = each(y.shape(), activation.num_operations() + 1).reads(gate_up.num_bytes());
        let (gate_up, mut y) = (gate_up.place(), y.into_place());
        self.issue("gate", cost.writes(y.num_bytes()), move |cpu| {
            with_element!(y.dtype() => |T| {
                cpu.gate::<T>(activation, gate_up.elements(cpu), y.elements(cpu), cols);
            });
        });
    }

    /// In place: `gate_up` becomes its gradient, and `dy` the output.
    pub(crate) fn gate_backward(&self, activation: Activation, gate_up: ViewMut<'_>, dy: ViewMut<'_>) {
        let cols = dy.shape().cols();
        let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
        let cost = each(dy.shape(), num_operations).updates(gate_up.num_bytes()).updates(dy.num_bytes());
        let (mut gate_up, mut dy) = (gate_up.into_place(), dy.into_place());
        self.issue("gate_backward", cost, move |cpu| {
            with_element!(dy.dtype() => |T| {
                cpu.gate_backward::<T>(activation, gate_up.elements(cpu), dy.elements(cpu), cols);
            });
        });
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
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("map", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.map::<T>(x.elements(cpu), y.elements(cpu), function));
        });
    }

    /// Sets each element of `x` to 0 where its word of the stream lies below `rate` of its range, else divides it by `1 - rate`.
    pub(crate) fn dropout(&self, x: ViewMut<'_>, key: RandomKey, words: WordRows, rate: f32) {
        let cost = each(x.shape(), 1).updates(x.num_bytes());
        let mut x = x.into_place();
        self.issue("dropout", cost, move |cpu| {
            with_element!(x.dtype() => |T| cpu.dropout::<T>(x.elements(cpu), key, words, rate));
        });
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
        let (left, right, mut y) = (left.place(), right.place(), y.into_place());
        self.issue("zip", cost, move |cpu| {
            with_element!(y.dtype() => |T| {
                cpu.zip::<T>((left.elements(cpu), right.elements(cpu)), y.elements(cpu), function);
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
        let mut y = y.into_place();
        self.issue("map_in_place", cost, move |cpu| {
            with_element!(y.dtype() => |T| cpu.map_in_place::<T>(y.elements(cpu), function));
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
        let (mut y, x) = (y.into_place(), x.place());
        self.issue("zip_in_place", cost, move |cpu| {
            with_element!(y.dtype() => |T| with_element!(x.dtype() => |U| {
                cpu.zip_in_place::<T, U>(y.elements(cpu), x.elements(cpu), function);
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
        let cols = out.shape().cols();
        let (inputs, mut out) = (inputs.map(|input| input.place()), out.into_place());
        self.issue("for_each_row", cost, move |cpu| {
            let inputs = inputs.map(|input| input.f32s(cpu));
            cpu.for_each_row(out.f32s(cpu), cols, |row, out| compute(inputs, row, out));
        });
    }

    /// `out += term`, element by element, each sum rounded to the type of both.
    ///
    /// # Panics
    /// If the lengths or the types differ.
    pub fn add_assign(&self, out: ViewMut<'_>, term: View<'_>) {
        let cost = each(term.shape(), 1).reads(term.num_bytes()).updates(out.num_bytes());
        let (mut out, term) = (out.into_place(), term.place());
        self.issue("add_assign", cost, move |cpu| {
            with_element!(term.dtype() => |T| {
                cpu.zip_in_place::<T, T>(out.elements(cpu), term.elements(cpu), |out, term| out + term);
            });
        });
    }

    /// `y = x + bias + residual`, of rows as long as `bias`; `bias` and `residual` are f32.
    ///
    /// # Panics
    /// If the shapes differ.
    pub(crate) fn add_bias(
        &self,
        x: View<'_>,
        bias: Option<View<'_>>,
        residual: Option<View<'_>>,
        y: ViewMut<'_>,
    ) {
        assert!(x.shape() == y.shape() && residual.is_none_or(|residual| residual.shape() == y.shape()));
        let num_terms = usize::from(bias.is_some()) + usize::from(residual.is_some());
        let read_bytes = x.num_bytes() + residual.map_or(0, |residual| residual.num_bytes());
        let cost = each(x.shape(), num_terms).reads(read_bytes).writes(y.num_bytes());
        let (cols, bias, residual) =
            (x.shape().cols(), bias.map(|bias| bias.place()), residual.map(|residual| residual.place()));
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("add_bias", cost, move |cpu| {
            let (bias, residual) =
                (bias.map(|bias| bias.f32s(cpu)), residual.map(|residual| residual.f32s(cpu)));
            with_element!(x.dtype() => |T| with_element!(y.dtype() => |U| {
                cpu.add_bias::<T, U>(x.elements(cpu), bias, residual, (y.elements(cpu), cols));
            }));
        });
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
        let cols = left.shape().cols();
        let (left, right, mut sums) = (left.place(), right.place(), sums.into_place());
        self.issue("zip_sum_rows", cost, move |cpu| {
            with_element!(left.dtype() => |T| with_element!(right.dtype() => |U| {
                let operands = (left.elements(cpu), right.elements(cpu));
                cpu.zip_sum_rows::<T, U>(operands, cols, sums.f32s(cpu), function);
            }));
        });
    }
}

/// Of an activation's derivative beside the activation, and of the products with it.
const DERIVATIVE_OPERATIONS: usize = 8;
