//! The trait [`Operation`] and the contexts of its passes.
//!
//! # Cost
//! The cost of an operation is the cost of the kernel calls that it issues, so it declares none. A function that is passed to a kernel
//! ([`Pointwise`](super::Pointwise), [`ElementLoss`](super::ElementLoss), [`Device::map`](crate::Device::map)) states its operations per
//! element. Matmuls that backward computes for the second time are counted as recomputed
//! ([`Cost::recomputes`](trireme_base::Cost::recomputes)), and MFU excludes them.

use super::{Sharding, Tape, TensorAxis};
use crate::device::Result;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::view::ViewMut;
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// A differentiable operation with its settings, as a model declares it. It holds no values.
///
/// Forward computes outputs from inputs. Backward has an input half, which computes the gradients of the inputs, and a weight half, which
/// computes the gradients of parameters. The halves run one after the other, or all input halves of a tape run before all weight halves,
/// with the same bits.
///
/// To add an operation, implement this trait for a type in any crate.
pub trait Operation: fmt::Debug + Send + Sync {
    /// Computes the outputs and passes each to [`ForwardContext::output`], in order.
    ///
    /// # Errors
    /// If the device has no memory for a result, or if an exchange with other ranks fails.
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()>;

    /// Adds a gradient to each input that [requires one](BackwardContext::requires_grad). Not called if no output has a gradient.
    ///
    /// # Errors
    /// As [`forward`](Operation::forward).
    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()>;

    /// Writes the gradients of the parameters to `sink`. Called after the input half of the same operation.
    ///
    /// # Errors
    /// As [`forward`](Operation::forward), and if `sink` has no memory for a gradient.
    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let _ = (cx, sink);
        Ok(())
    }

    /// Runs both halves. Override it only if one half computes values that the other can use at once, or to overlap communication with
    /// computation.
    ///
    /// # Errors
    /// As [`backward_weight`](Operation::backward_weight).
    fn backward(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        self.backward_input(cx)?;
        self.backward_weight(cx, sink)
    }

    /// Returns the valid numbers of inputs.
    fn num_inputs(&self) -> RangeInclusive<usize> {
        1..=1
    }

    /// Returns whether the operation has parameters, and thus a weight half.
    fn has_parameters(&self) -> bool {
        false
    }

    /// Returns whether the operation accepts f32 gradients of its 16-bit outputs, as some operations produce them.
    fn accepts_f32_grads(&self) -> bool {
        false
    }

    /// Returns which halves of backward read the value of an input. The tape may free other values.
    fn reads_input(&self, input: usize) -> ReadBy {
        let _ = input;
        ReadBy::NEITHER
    }

    /// Returns which halves of backward read the value of an output.
    fn reads_output(&self, output: usize) -> ReadBy {
        let _ = output;
        ReadBy::NEITHER
    }

    /// Returns whether an input may be sharded by [rows](Sharding::Rows): each output row depends only on the same row of the input, or the
    /// operation gathers the other rows itself.
    fn accepts_sharded_rows(&self, input: usize) -> bool {
        let _ = input;
        false
    }

    /// Returns whether the operation is correct when ranks of the context axis shard the positions, dim 1 of its inputs: each output
    /// position depends only on the same input position, or the operation communicates itself.
    fn accepts_sharded_positions(&self) -> bool {
        self.accepts_sharded_rows(0)
    }

    /// Returns the operation that the tape inserts if ranks of the context axis exchange heads (Ulysses): at an input, it exchanges
    /// positions for heads; at the only output, heads for positions. Operations that need all positions, but not all heads, implement this
    /// method. Results for inputs that are not floats are ignored. `num_float_inputs` is the number of float inputs, and 1 for the output.
    fn head_exchange(&self, operand: InputOrOutput, num_float_inputs: usize) -> Option<Op> {
        let _ = (operand, num_float_inputs);
        None
    }

    /// Returns the sharding of the outputs on the tensor axis, if it does not follow from the sharding of the inputs.
    fn output_sharding(&self, axis: &TensorAxis) -> Option<Sharding> {
        let _ = axis;
        None
    }

    /// Returns whether each rank computes only a partial sum of the gradients of replicated parameters, given the sharding of the outputs.
    fn makes_partial_grads(&self, outputs: Sharding) -> bool {
        outputs != Sharding::Replicated
    }

    /// Returns whether a tape may [free](super::Tape::free_recomputable) the outputs after forward and run forward again before backward.
    /// Forward should be cheap. Backward must read every input, and forward must neither write to an input's memory nor add to the loss.
    fn is_recomputable(&self) -> bool {
        false
    }
}

/// Implements methods of an [`Operation`] that return a constant, at the start of its `impl`. Takes any of these declarations, in any
/// order:
///
/// | declaration | meaning |
/// |---|---|
/// | `inputs: 2..=3` | [`num_inputs`](Operation::num_inputs) |
/// | `has_parameters` | [`has_parameters`](Operation::has_parameters) is true |
/// | `has_no_gradient` | the input half does nothing, as for permutations, counts and metrics; implies `accepts_sharded_positions` |
/// | `reads_inputs: INPUT_HALF` | [`reads_input`](Operation::reads_input) is this [`ReadBy`] for every input |
/// | `reads_outputs: INPUT_HALF` | [`reads_output`](Operation::reads_output), for every output |
/// | `accepts_sharded_rows` | [`accepts_sharded_rows`](Operation::accepts_sharded_rows) is true for every input |
/// | `accepts_sharded_positions` | [`accepts_sharded_positions`](Operation::accepts_sharded_positions) is true |
///
/// ```ignore
/// impl Operation for Mul {
///     declares! { inputs: 2..=2, reads_inputs: INPUT_HALF, accepts_sharded_rows }
///
///     fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
/// ```
///
/// Write a method out if its result depends on the operation's settings or on the index of the input.
macro_rules! declares {
    ($($name:ident $(: $value:tt $(..= $last:expr)?)?),+) => {
        $($crate::tape::declares! { @ $name $($value $(..= $last)?)? })+
    };
    (@ inputs $first:tt ..= $last:expr) => {
        fn num_inputs(&self) -> ::std::ops::RangeInclusive<usize> {
            $first..=$last
        }
    };
    (@ has_no_gradient) => {
        fn backward_input(&self, _: &mut $crate::tape::BackwardContext<'_>) -> $crate::device::Result<()> {
            Ok(())
        }

        $crate::tape::declares! { accepts_sharded_positions }
    };
    (@ reads_inputs $halves:tt) => {
        fn reads_input(&self, _: usize) -> $crate::tape::ReadBy {
            $crate::tape::ReadBy::$halves
        }
    };
    (@ reads_outputs $halves:tt) => {
        fn reads_output(&self, _: usize) -> $crate::tape::ReadBy {
            $crate::tape::ReadBy::$halves
        }
    };
    (@ accepts_sharded_rows) => {
        fn accepts_sharded_rows(&self, _: usize) -> bool {
            true
        }
    };
    // `has_parameters` and `accepts_sharded_positions`.
    (@ $name:ident) => {
        fn $name(&self) -> bool {
            true
        }
    };
}
pub(crate) use declares;

/// An input or the output of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputOrOutput {
    /// The input at this index.
    Input(usize),
    /// The only output.
    Output,
}

/// The context that forward and backward of an operation share: the device, parameters and the [state of the pass](super::PassState).
/// [`ForwardContext`] and [`BackwardContext`] dereference to it. Methods of all three fail if there is no memory for their results; methods
/// that communicate fail like [`AxisOps::start`](super::AxisOps::start).
pub struct OperationContext<'a> {
    pub(super) tape: &'a mut Tape,
    pub(super) parameters: &'a dyn ParameterSource,
    /// Weight of the operation's loss term, if it has one.
    pub(super) loss_weight: f32,
}

/// The context of an operation's forward.
pub struct ForwardContext<'a> {
    pub(super) common: OperationContext<'a>,
    pub(super) inputs: Range<usize>,
    /// Indices of the next output and of the next saved tensor: the ends of the tape's lists, or the original indices in a recomputation.
    pub(super) next_output: usize,
    pub(super) next_saved: usize,
    /// In a recomputation, the ends of the node's outputs and of its saved tensors.
    pub(super) ends: Option<[usize; 2]>,
    pub(super) sharding: Sharding,
    pub(super) operation: &'a dyn Operation,
}

/// The context of an operation's backward.
pub struct BackwardContext<'a> {
    pub(super) common: OperationContext<'a>,
    pub(super) node: usize,
    pub(super) running: Halves,
}

/// Memory for the gradient of a span of parameters.
#[derive(Debug)]
pub struct GradTarget<'a> {
    /// Memory with the shape of the span.
    pub view: ViewMut<'a>,
    /// Whether the memory already holds a part of this microbatch's gradient, so that the caller must add to it.
    pub accumulate: bool,
}

/// A receiver of parameter gradients during backward.
pub trait GradSink {
    /// Returns the memory for a contribution to the gradient of `span`.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>>;

    /// Reports that a contribution to the gradient of `span` is written.
    fn grad_ready(&mut self, span: &ParameterSpan);

    /// Reports whether the next gradients of replicated parameters are only this rank's partial sums, to be reduced over the tensor axis.
    fn expect_partial_grads(&mut self, are_partial: bool) {
        let _ = are_partial;
    }
}

/// The halves of an operation's backward that are running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Halves {
    Both,
    Input,
    Weight,
}

impl Halves {
    /// Returns the number of running halves that read a value.
    pub(super) fn reads(self, by: ReadBy) -> usize {
        let input_half = by.input_half && self != Halves::Weight;
        let weight_half = by.weight_half && self != Halves::Input;
        usize::from(input_half) + usize::from(weight_half)
    }
}

/// The halves of backward that read a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadBy {
    /// The input half.
    pub input_half: bool,
    /// The weight half.
    pub weight_half: bool,
}

impl ReadBy {
    /// Both halves read the value.
    pub const BOTH: ReadBy = ReadBy { input_half: true, weight_half: true };
    /// Backward does not read the value.
    pub const NEITHER: ReadBy = ReadBy { input_half: false, weight_half: false };
    /// Only the input half reads the value.
    pub const INPUT_HALF: ReadBy = ReadBy { input_half: true, weight_half: false };
    /// Only the weight half reads the value.
    pub const WEIGHT_HALF: ReadBy = ReadBy { input_half: false, weight_half: true };

    pub(super) fn count(self) -> usize {
        usize::from(self.input_half) + usize::from(self.weight_half)
    }
}

/// An operation that tapes can record. Shared, so that recording does not allocate.
///
/// Convert from `&Arc<T>`, or from `&'static T` for a constant expression such as `&Relu` or `&Mean { dim: 1 }`.
#[derive(Debug, Clone)]
pub struct Op(OpHandle);

#[derive(Debug, Clone)]
enum OpHandle {
    Shared(Arc<dyn Operation>),
    Static(&'static dyn Operation),
}

impl Op {
    pub(super) fn get(&self) -> &dyn Operation {
        match &self.0 {
            OpHandle::Shared(operation) => &**operation,
            OpHandle::Static(operation) => *operation,
        }
    }
}

impl<T: Operation + 'static> From<&Arc<T>> for Op {
    fn from(operation: &Arc<T>) -> Self {
        Op(OpHandle::Shared(Arc::<T>::clone(operation)))
    }
}

impl<T: Operation> From<&'static T> for Op {
    fn from(operation: &'static T) -> Self {
        Op(OpHandle::Static(operation))
    }
}
