//! Elementwise kernels.

use super::{kernel_calls, num_bytes, per_element_cost, plain_arguments};
use crate::kernels::Activation;
use crate::kernels::cpu::dropout::RandomWordRows;
use crate::view::{View, ViewMut};
use trireme_base::{Cost, RandomKey, Traffic};

kernel_calls! {
    /// Elementwise kernels.
    ElementwiseCall {
        /// Sets all elements to 0.
        pub fn zero => Zero { x: ViewMut }

        /// Computes `y = x` elementwise between any two of f32, bf16 and f16, rounded to nearest even.
        ///
        /// # Panics
        /// If the shapes differ.
        pub fn convert => Convert { x: View, y: ViewMut; assert_eq!(x.shape(), y.shape()); }

        /// Rounds `x`, f32, to `y`, bf16, up or down at random with an expected error of 0. The random bits of element `i` are a function
        /// of `seed` and `position + i`. Values that bf16 represents, infinities and NaN stay the same.
        ///
        /// # Panics
        /// If the shapes differ.
        pub fn round_stochastically => RoundStochastically {
            x: View, seed: u32, position: usize, y: ViewMut; assert_eq!(x.shape(), y.shape());
        }

        /// Computes `y = activation(x)` elementwise.
        pub(crate) fn activate => Activate { activation: Activation, x: View, y: ViewMut }

        /// Replaces `x` by `activation(x)` and `dy` by the gradient of `x`, in place.
        pub(crate) fn activate_backward => ActivateBackward { activation: Activation, x: ViewMut, dy: ViewMut }

        /// Computes `y = activation(gate) * up`. `y` is `[rows, cols]`; `gate_up` is `[rows, 2 cols]`, with rows `gate | up`.
        pub(crate) fn gate => Gate { activation: Activation, gate_up: View, y: ViewMut }

        /// Replaces `gate_up` by its gradient and `dy` by the output, in place.
        pub(crate) fn gate_backward => GateBackward { activation: Activation, gate_up: ViewMut, dy: ViewMut }

        /// Sets each element of `x` to 0 if its random word is less than `rate` times the range of words, else divides it by `1 - rate`.
        pub(crate) fn dropout => Dropout { x: ViewMut, key: RandomKey, words: RandomWordRows, rate: f32 }

        /// Computes `out += term` elementwise, rounded to the dtype of both.
        ///
        /// # Panics
        /// If the lengths or the dtypes differ.
        pub fn add_assign => AddAssign { out: ViewMut, term: View }

        /// Computes `y = x + bias + residual` for rows as long as `bias`. `bias` and `residual` are f32.
        ///
        /// Panics if the shapes differ.
        pub(crate) fn add_bias => AddBias {
            x: View, bias: Option<View>, residual: Option<View>, y: ViewMut;
            assert!(x.shape() == y.shape() && residual.is_none_or(|residual| residual.shape() == y.shape()));
        }

        /// Streams through `memory`, u32, with almost no arithmetic, to measure bandwidth: updates one part in place, copies from one part
        /// to another, and only reads or only writes the remainder. Costs nothing.
        pub(crate) fn stream => Stream { memory: ViewMut, traffic: Traffic }
    }
    {
        copy => Copy { x: View, y: ViewMut }
    }
}

plain_arguments! { Activation, RandomKey, RandomWordRows, Traffic }

/// Operations of the derivative of an activation and its products, in addition to the operations of the activation.
const DERIVATIVE_OPERATIONS: usize = 8;

/// Operations of stochastic rounding per element.
const ROUNDING_OPERATIONS: usize = 10;

impl ElementwiseCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Zero { x } => Cost::ZERO.writes(x.num_bytes()),
            Self::Stream { .. } => Cost::ZERO,
            Self::Convert { x, y } | Self::Copy { x, y } => {
                Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::RoundStochastically { x, y, .. } => {
                per_element_cost(x.shape(), ROUNDING_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::Activate { x, y, activation } => per_element_cost(x.shape(), activation.num_operations())
                .reads(x.num_bytes())
                .writes(y.num_bytes()),
            Self::ActivateBackward { x, dy, activation } => {
                let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
                per_element_cost(x.shape(), num_operations).updates(x.num_bytes()).updates(dy.num_bytes())
            }
            Self::Gate { gate_up, y, activation } => {
                let cost = per_element_cost(y.shape(), activation.num_operations() + 1);
                cost.reads(gate_up.num_bytes()).writes(y.num_bytes())
            }
            Self::GateBackward { gate_up, dy, activation } => {
                let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
                per_element_cost(dy.shape(), num_operations)
                    .updates(gate_up.num_bytes())
                    .updates(dy.num_bytes())
            }
            Self::Dropout { x, .. } => per_element_cost(x.shape(), 1).updates(x.num_bytes()),
            Self::AddAssign { out, term } => {
                per_element_cost(term.shape(), 1).reads(term.num_bytes()).updates(out.num_bytes())
            }
            Self::AddBias { x, bias, residual, y } => {
                let num_terms = usize::from(bias.is_some()) + usize::from(residual.is_some());
                per_element_cost(x.shape(), num_terms)
                    .reads(x.num_bytes() + num_bytes(residual))
                    .writes(y.num_bytes())
            }
        }
    }
}
