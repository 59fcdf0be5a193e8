//! Kernel calls as values: a kernel and its arguments, some of which are operands.
//!
//! A method of [`Device`](crate::Device) makes a call from views; a backend runs it. The method, the name, the cost and the operands are
//! derived from the call, so each kernel is described once. Each file holds the calls of one area.
//!
//! # Adding a kernel
//! The arithmetic is a function in `kernels/cpu/` within `for_each_simd_level!`, with a method of [`Cpu`](super::cpu::Cpu) that splits the
//! work into tasks by shape alone. The call is a variant in the file of its area here, with its documentation, arguments, checks of their
//! shapes, and cost. A kernel that needs scratch memory, or arguments that are not made from views alone, has a hand-written method in
//! `device/`. The match arm that runs the call is in `kernels/cpu/run/`. If no test of an operation calls the kernel, add a test to
//! `tests/conformance/`. Compare the results with f64 by means of `kernels/cpu/test_support.rs`, and run `cargo xtask kernels`.
//!
//! `trireme bench kernels` times each kernel within a training step. The planner [replays](crate::RecordedCalls::replay) recorded calls in
//! isolation. It cannot replay kernels that read indices, because their work depends on the values of the indices.

mod attention;
mod blocks;
mod elementwise;
mod experts;
mod expression;
mod function;
mod grouped;
mod layers;
mod matmul;
mod optimizer;
mod quantized;
mod sums;

pub(crate) use attention::AttentionCall;
pub(crate) use blocks::BlockCall;
pub(crate) use elementwise::ElementwiseCall;
pub(crate) use experts::ExpertCall;
pub(crate) use expression::{ExpressionCall, ExpressionInput};
pub(crate) use function::{Function, FunctionCall};
pub(crate) use grouped::GroupedCall;
pub(crate) use layers::LayerCall;
pub(crate) use matmul::MatmulCall;
pub(crate) use optimizer::OptimizerCall;
pub(crate) use quantized::QuantizedCall;
pub(crate) use sums::SumCall;

use super::{Operand, OperandMut};
use crate::shape::Shape;
use crate::view::{View, ViewMut};
use trireme_base::Cost;

/// Access of a kernel to an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// The kernel may also read the operand.
    Write,
}

/// A call, or an argument of a call, with the operands that it contains. Arguments such as numbers contain none.
pub(crate) trait Operands: Sized {
    /// Returns a copy in which each operand is replaced by the result of `replace`.
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self;

    fn for_each_operand(&self, visit: &mut dyn FnMut(&Operand, Access)) {
        self.with_operands(&mut |operand, access| {
            visit(operand, access);
            *operand
        });
    }
}

/// A function that returns the operand to put in place of the given one.
pub(crate) type Replace<'a> = dyn FnMut(&Operand, Access) -> Operand + 'a;

/// A parameter of a generated method of [`Device`](crate::Device), which becomes an argument of a call.
pub(crate) trait IntoArgument {
    /// The argument of the call: an [`Operand`] for a [`View`].
    type Argument: Operands;

    fn into_argument(self) -> Self::Argument;
}

impl Operands for Operand {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        replace(self, Access::Read)
    }
}

impl IntoArgument for View<'_> {
    type Argument = Operand;

    fn into_argument(self) -> Operand {
        self.operand()
    }
}

impl Operands for OperandMut {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        OperandMut::new(replace(&self.as_operand(), Access::Write))
    }
}

impl IntoArgument for ViewMut<'_> {
    type Argument = OperandMut;

    fn into_argument(self) -> OperandMut {
        self.into_operand()
    }
}

impl<T: Operands> Operands for Option<T> {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        self.as_ref().map(|operands| operands.with_operands(replace))
    }
}

impl<T: IntoArgument> IntoArgument for Option<T> {
    type Argument = Option<T::Argument>;

    fn into_argument(self) -> Self::Argument {
        self.map(T::into_argument)
    }
}

impl<T: Operands> Operands for Vec<T> {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        self.iter().map(|operands| operands.with_operands(replace)).collect()
    }
}

impl<T: Operands, const N: usize> Operands for [T; N] {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        std::array::from_fn(|index| self[index].with_operands(replace))
    }
}

impl<T: IntoArgument, const N: usize> IntoArgument for [T; N] {
    type Argument = [T::Argument; N];

    fn into_argument(self) -> Self::Argument {
        self.map(T::into_argument)
    }
}

/// Implements [`Operands`] and [`IntoArgument`] for types without operands.
macro_rules! plain_arguments {
    ($($argument:ty),* $(,)?) => {$(
        impl $crate::kernels::call::Operands for $argument {
            fn with_operands(&self, _replace: &mut $crate::kernels::call::Replace<'_>) -> Self {
                Clone::clone(self)
            }
        }

        impl $crate::kernels::call::IntoArgument for $argument {
            type Argument = Self;

            fn into_argument(self) -> Self {
                self
            }
        }
    )*};
}

use plain_arguments;

plain_arguments! { bool, f32, f64, u32, usize }

/// Implements [`Operands`] and [`IntoArgument`] for structs that are generic over their arrays and have a method `map`.
macro_rules! array_structs {
    ($($arrays:ident),*) => {$(
        impl $crate::kernels::call::Operands for $arrays<$crate::kernels::Operand> {
            fn with_operands(&self, replace: &mut $crate::kernels::call::Replace<'_>) -> Self {
                self.map(|operand| $crate::kernels::call::Operands::with_operands(&operand, replace))
            }
        }

        impl $crate::kernels::call::IntoArgument for $arrays<$crate::view::View<'_>> {
            type Argument = $arrays<$crate::kernels::Operand>;

            fn into_argument(self) -> Self::Argument {
                self.map($crate::view::View::operand)
            }
        }
    )*};
}

use array_structs;

/// Defines the calls of an area. Each `fn` becomes a method of `Device` with the given parameters. The method converts them to the
/// arguments of a call, checks the arguments, and issues the call. The statements after the semicolon are the checks; they see operands
/// instead of views. Calls of the second list are issued by methods in `device/`, which allocate scratch memory, choose between kernels, or
/// convert parameters that do not implement [`IntoArgument`].
macro_rules! kernel_calls {
    (
        $(#[$attribute:meta])*
        $calls:ident {
            $(
                $(#[$doc:meta])*
                $visibility:vis fn $name:ident => $call:ident { $($argument:ident: $type:ty),* $(,)? $(; $($check:tt)*)? }
            )*
        }
        $({
            $(
                $(#[$doc_hand_written:meta])*
                $name_hand_written:ident => $call_hand_written:ident { $($argument_hand_written:ident: $type_hand_written:ty),* $(,)? }
            )*
        })?
    ) => {
        pub(crate) use call::$calls;

        /// Here, `View` and `ViewMut` name the operand types, so that the types of parameters also serve as the types of arguments.
        mod call {
            #[allow(unused_imports, reason = "arguments may all be operands and numbers")]
            use super::*;
            use $crate::kernels::{Operand as View, OperandMut as ViewMut};

            $(#[$attribute])*
            #[derive(Debug)]
            pub(crate) enum $calls {
                $($call { $($argument: $type),* },)*
                $($($(#[$doc_hand_written])* $call_hand_written { $($argument_hand_written: $type_hand_written),* },)*)?
            }
        }

        impl $crate::Device {
            $(
                $(#[$doc])*
                $visibility fn $name(&self, $($argument: $type),*) {
                    $(let $argument = $crate::kernels::call::IntoArgument::into_argument($argument);)*
                    $($($check)*)?
                    self.issue($calls::$call { $($argument),* });
                }
            )*
        }

        impl $calls {
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Self::$call { .. } => stringify!($name),)*
                    $($(Self::$call_hand_written { .. } => stringify!($name_hand_written),)*)?
                }
            }
        }

        impl $crate::kernels::call::Operands for $calls {
            fn with_operands(&self, replace: &mut $crate::kernels::call::Replace<'_>) -> Self {
                match self {
                    $(Self::$call { $($argument),* } => Self::$call {
                        $($argument: $crate::kernels::call::Operands::with_operands($argument, replace)),*
                    },)*
                    $($(Self::$call_hand_written { $($argument_hand_written),* } => Self::$call_hand_written {
                        $($argument_hand_written: $crate::kernels::call::Operands::with_operands($argument_hand_written, replace)),*
                    },)*)?
                }
            }
        }
    };
}
use kernel_calls;

/// Defines [`Call`], with one variant per area of kernels.
macro_rules! areas {
    ($($area:ident($calls:ident)),*) => {
        /// A kernel with its operands and arguments.
        #[derive(Debug)]
        pub(crate) enum Call {
            $($area($calls),)*
        }

        $(impl From<$calls> for Call {
            fn from(call: $calls) -> Self {
                Call::$area(call)
            }
        })*

        impl Call {
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Call::$area(call) => call.name(),)*
                }
            }

            /// Returns the operations and the memory traffic of the call.
            pub(crate) fn cost(&self) -> Cost {
                match self {
                    $(Call::$area(call) => call.cost(),)*
                }
            }
        }

        impl Clone for Call {
            fn clone(&self) -> Self {
                self.with_operands(&mut |operand, _| *operand)
            }
        }

        impl Operands for Call {
            fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
                match self {
                    $(Call::$area(call) => Call::$area(call.with_operands(replace)),)*
                }
            }
        }
    };
}

areas! {
    Attention(AttentionCall),
    Block(BlockCall),
    Elementwise(ElementwiseCall),
    Expert(ExpertCall),
    Expression(ExpressionCall),
    Function(FunctionCall),
    Grouped(GroupedCall),
    Layer(LayerCall),
    Matmul(MatmulCall),
    Optimizer(OptimizerCall),
    Quantized(QuantizedCall),
    Sum(SumCall)
}

/// Returns the cost of `num_operations` operations per element.
pub(crate) fn per_element_cost(shape: Shape, num_operations: usize) -> Cost {
    Cost::others(&[num_operations, shape.num_elements()])
}

/// Adds the cost of writing `out`, or of accumulating into it.
fn with_output_traffic(cost: Cost, out: &OperandMut, accumulate: bool) -> Cost {
    if accumulate { cost.updates(out.num_bytes()) } else { cost.writes(out.num_bytes()) }
}

/// Returns the size of an operand in bytes; 0 if it is absent.
fn num_bytes(operand: &Option<Operand>) -> usize {
    operand.as_ref().map_or(0, Operand::num_bytes)
}
