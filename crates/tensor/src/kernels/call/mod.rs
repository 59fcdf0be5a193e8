//! Kernel calls as values: a kernel, its operands, and its other arguments.
//!
//! [`Device`](crate::Device) checks the shapes of views and builds a call from them; a backend runs it. The name, the cost and the operands
//! are derived from the call, so each kernel is described once. Each file holds the calls of one area. The method of `Device` with the name
//! of the kernel documents what it computes.
//!
//! # Adding a kernel
//! The arithmetic is a function in `kernels/cpu/` within `for_each_simd_level!`, with a method of [`Cpu`](super::cpu::Cpu) that splits the
//! work into tasks by shape alone. The call is a variant in the file of its area here, with name, operands and cost. The arm that runs it
//! is in `kernels/cpu/run/`, the method that issues it in `device/`. A test in `tests/conformance/` calls the kernel, unless the test of an
//! operation does. Compare it with f64 by means of `kernels/cpu/test_support.rs`, and run `cargo xtask kernels`.
//!
//! `trireme bench kernels` times each kernel where a step calls it. The planner times kernels in isolation, outside of passes and updates,
//! except kernels that read indices, because their work depends on the values of the indices.

mod attention;
mod blocks;
mod elementwise;
mod experts;
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
pub(crate) use function::{Function, FunctionCall};
pub(crate) use grouped::GroupedCall;
pub(crate) use layers::LayerCall;
pub(crate) use matmul::MatmulCall;
pub(crate) use optimizer::OptimizerCall;
pub(crate) use quantized::QuantizedCall;
pub(crate) use sums::SumCall;

use super::{Operand, OperandMut};
use crate::shape::Shape;
use trireme_base::Cost;

/// Access of a kernel to an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    /// The kernel may also read the operand.
    Write,
}

/// A call, or a part of a call that has operands.
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

impl Operands for Operand {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        replace(self, Access::Read)
    }
}

impl Operands for OperandMut {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        OperandMut::new(replace(&self.as_operand(), Access::Write))
    }
}

impl<T: Operands> Operands for Option<T> {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        self.as_ref().map(|operands| operands.with_operands(replace))
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

/// Defines the calls of an area: the name of each, its operands and, after a semicolon, its other arguments.
macro_rules! kernel_calls {
    (
        $(#[$attribute:meta])*
        $calls:ident {
            $(
                $(#[$doc:meta])*
                $name:literal => $call:ident {
                    $($operand:ident: $operand_type:ty),* $(; $($argument:ident: $argument_type:ty),*)?
                }
            )*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug)]
        pub(crate) enum $calls {
            $($(#[$doc])* $call { $($operand: $operand_type,)* $($($argument: $argument_type,)*)? },)*
        }

        impl $calls {
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Self::$call { .. } => $name,)*
                }
            }
        }

        impl $crate::kernels::call::Operands for $calls {
            fn with_operands(&self, replace: &mut $crate::kernels::call::Replace<'_>) -> Self {
                match self {
                    $(Self::$call { $($operand,)* $($($argument,)*)? } => Self::$call {
                        $($operand: $operand.with_operands(replace),)*
                        $($($argument: Clone::clone($argument),)*)?
                    },)*
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
        #[expect(clippy::large_enum_variant, reason = "a call is made and run in place: a box would be an allocation for each kernel")]
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
    Function(FunctionCall),
    Grouped(GroupedCall),
    Layer(LayerCall),
    Matmul(MatmulCall),
    Optimizer(OptimizerCall),
    Quantized(QuantizedCall),
    Sum(SumCall)
}

/// Returns the cost of `num_operations` operations per element.
pub(crate) fn each(shape: Shape, num_operations: usize) -> Cost {
    Cost::others(&[num_operations, shape.num_elements()])
}

/// Adds the cost of writing `out`, or of accumulating into it.
fn written(cost: Cost, out: &OperandMut, accumulate: bool) -> Cost {
    if accumulate { cost.updates(out.num_bytes()) } else { cost.writes(out.num_bytes()) }
}

/// Returns the size of an operand in bytes; 0 if it is absent.
fn num_bytes(operand: &Option<Operand>) -> usize {
    operand.as_ref().map_or(0, Operand::num_bytes)
}
