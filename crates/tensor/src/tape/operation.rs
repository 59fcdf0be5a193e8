//! The trait `Operation`, and the contexts of its passes.

use super::{Sharding, Tape, TensorAxis};
use crate::device::Result;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::tensor::ViewMut;
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

/// An operation with its settings, as a model declares it: it holds no values.
///
/// Forward makes outputs of inputs. Backward has an input half, which makes the gradients of the inputs, and a weight half, which makes
/// those of parameters. The halves run one after the other, or all input halves of a tape before all weight halves, with the
/// same bits.
///
/// A new operation is one type that implements this trait, in any crate. Its passes fail if the device or the sink has no memory for what they make.
pub trait Operation: fmt::Debug + Send + Sync {
    /// Computes the outputs, and hands each to [`ForwardContext::output`].
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()>;

    /// Gives each input that [wants one](BackwardContext::requires_grad) its gradient. Not called if no output has a gradient.
    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()>;

    /// Gives `sink` the gradients of the parameters. Called after the input half of the same operation.
    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let _ = (cx, sink);
        Ok(())
    }

    /// Both halves. To be implemented only if one of them makes what the other can use at once, or if values can travel while they compute.
    fn backward(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        self.backward_input(cx)?;
        self.backward_weight(cx, sink)
    }

    /// How many inputs the operation takes.
    fn num_inputs(&self) -> RangeInclusive<usize> {
        1..=1
    }

    /// Whether the operation has parameters, and so a weight half.
    fn has_parameters(&self) -> bool {
        false
    }

    /// Whether gradients of outputs of 16 bits may be f32, as some operations make them.
    fn takes_f32_grads(&self) -> bool {
        false
    }

    /// Which halves of backward read the value of an input. A tape may have given other values back.
    fn reads_input(&self, input: usize) -> ReadBy {
        let _ = input;
        ReadBy::NEITHER
    }

    /// Which halves of backward read the value of an output.
    fn reads_output(&self, output: usize) -> ReadBy {
        let _ = output;
        ReadBy::NEITHER
    }

    /// Whether an input may lie in [rows](Sharding::Rows): each row of the outputs then depends on no other row of the input, or the
    /// operation gathers the others by itself.
    fn takes_rows(&self, input: usize) -> bool {
        let _ = input;
        false
    }

    /// Whether the operation is right where ranks of the context axis have parts of the positions, dim 1 of its inputs: what it makes of a
    /// position depends on no other one, or it takes in the others by itself.
    fn takes_positions(&self) -> bool {
        self.takes_rows(0)
    }

    /// What exchanges this rank's positions of an input for its heads, or its heads of the only output for its positions, where ranks of
    /// the context axis do so: an operation that needs all positions, but of some heads only. Asked for inputs of floats, of which
    /// there are so many.
    fn head_exchange(&self, operand: Operand, num_float_inputs: usize) -> Option<Op> {
        let _ = (operand, num_float_inputs);
        None
    }

    /// What a rank of the tensor axis has of the outputs, if that does not follow from what it has of the inputs.
    fn output_sharding(&self, axis: &TensorAxis) -> Option<Sharding> {
        let _ = axis;
        None
    }

    /// Whether a rank makes only a term of the gradients of parameters that are not cut, where ranks have this of the outputs.
    fn makes_grad_terms(&self, outputs: Sharding) -> bool {
        outputs != Sharding::Replicated
    }

    /// Whether a tape may [drop](super::Tape::keep_products) the outputs after forward, and run forward again before backward:
    /// it should be cheap. Backward must read every input, and forward must neither compute in the memory of an input nor
    /// add to the loss.
    fn is_recomputable(&self) -> bool {
        false
    }
}

/// Implements methods of an [`Operation`] that return a constant, at the beginning of its `impl`: any of these, in any order.
///
/// | declaration | meaning |
/// |---|---|
/// | `inputs: 2..=3` | [`num_inputs`](Operation::num_inputs) |
/// | `has_parameters` | [`has_parameters`](Operation::has_parameters) is true |
/// | `has_no_gradient` | outputs are orders, counts or means for metrics; implies `takes_positions` |
/// | `reads_inputs: INPUT_HALF` | [`reads_input`](Operation::reads_input) is this [`ReadBy`] for every input |
/// | `reads_outputs: INPUT_HALF` | [`reads_output`](Operation::reads_output), for every output |
/// | `takes_rows` | [`takes_rows`](Operation::takes_rows) is true for every input |
/// | `takes_positions` | [`takes_positions`](Operation::takes_positions) is true |
///
/// ```ignore
/// impl Operation for Mul {
///     declares! { inputs: 2..=2, reads_inputs: INPUT_HALF, takes_rows }
///
///     fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
/// ```
///
/// A method whose result depends on the operation's settings or on the number of the input is written as a method.
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

        $crate::tape::declares! { takes_positions }
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
    (@ takes_rows) => {
        fn takes_rows(&self, _: usize) -> bool {
            true
        }
    };
    // `has_parameters` and `takes_positions`.
    (@ $name:ident) => {
        fn $name(&self) -> bool {
            true
        }
    };
}
pub(crate) use declares;

/// What an operation reads or makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    /// The input of this number.
    Input(usize),
    /// Its output.
    Output,
}

/// The common context of an operation's forward and backward: the device, parameters and the [state of the pass](super::PassState). [`ForwardContext`]
/// and [`BackwardContext`] dereference to it. Methods of all three fail if there is no memory for what they return or make, and those that exchange values
/// with other ranks as [`AxisOps::start`](super::AxisOps::start).
pub struct OperationContext<'a> {
    pub(super) tape: &'a mut Tape,
    pub(super) parameters: &'a dyn ParameterSource,
    /// Of the operation's term of the loss, if it has one.
    pub(super) loss_weight: f32,
}

/// What forward of one operation works with.
pub struct ForwardContext<'a> {
    pub(super) common: OperationContext<'a>,
    pub(super) inputs: Range<usize>,
    /// Where the next output goes, and the next saved tensor: at the end of the tape's lists, or where they were before.
    pub(super) next_output: usize,
    pub(super) next_saved: usize,
    /// Of a node whose operation runs again: where its outputs and saved tensors end.
    pub(super) ends: Option<[usize; 2]>,
    pub(super) sharding: Sharding,
    pub(super) operation: &'a dyn Operation,
}

/// What backward of one operation works with.
pub struct BackwardContext<'a> {
    pub(super) common: OperationContext<'a>,
    pub(super) node: usize,
    pub(super) running: Halves,
}

/// Where the gradient of a span of parameters goes.
#[derive(Debug)]
pub struct GradTarget<'a> {
    /// Memory of the span's shape.
    pub view: ViewMut<'a>,
    /// Whether it already holds a part of this microbatch's gradient, to be added to.
    pub accumulate: bool,
}

/// Takes gradients of parameters during backward.
pub trait GradSink {
    /// Where to put a contribution to the gradient of `span`.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>>;

    /// The contribution is written.
    fn grad_ready(&mut self, span: &ParameterSpan);

    /// Whether what comes next is only this rank's term of a sum over the ranks of the tensor axis, as far as parameters are not cut.
    fn expect_terms(&mut self, are_terms: bool) {
        let _ = are_terms;
    }
}

/// The halves of an operation's backward that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Halves {
    Both,
    Input,
    Weight,
}

impl Halves {
    /// Returns how many of them read a value.
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

/// An operation that tapes can record: shared, so that recording allocates nothing.
///
/// Made from `&Arc<T>`, or from a `&'static T`: a constant expression, such as `&Relu` or `&Mean { dim: 1 }`.
#[derive(Debug, Clone)]
pub struct Op(Held);

#[derive(Debug, Clone)]
enum Held {
    Shared(Arc<dyn Operation>),
    Static(&'static dyn Operation),
}

impl Op {
    pub(super) fn get(&self) -> &dyn Operation {
        match &self.0 {
            Held::Shared(operation) => &**operation,
            Held::Static(operation) => *operation,
        }
    }
}

impl<T: Operation + 'static> From<&Arc<T>> for Op {
    fn from(operation: &Arc<T>) -> Self {
        Op(Held::Shared(Arc::<T>::clone(operation)))
    }
}

impl<T: Operation> From<&'static T> for Op {
    fn from(operation: &'static T) -> Self {
        Op(Held::Static(operation))
    }
}
