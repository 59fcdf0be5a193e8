//! What an operation is.

use super::{Backward, Forward, GradSink};
use crate::device::DeviceError;
use std::fmt;
use std::sync::Arc;

/// An operation with its settings, as a model declares it: it holds no values.
///
/// Forward makes outputs of inputs. Backward has an input half, which makes the gradients of the inputs, and a weight half, which makes
/// those of parameters. The halves run one after the other, or all input halves of a tape before all weight halves, with the
/// same bits.
///
/// A new operation is one type that implements this trait, in any crate.
pub trait Operation: fmt::Debug + Send + Sync {
    /// Computes the outputs, and hands each to [`Forward::output`].
    ///
    /// # Errors
    /// If the device has no memory for them.
    fn forward(&self, cx: &mut Forward<'_>) -> Result<(), DeviceError>;

    /// Gives each input that [wants one](Backward::wants_grad) its gradient. Not called if no output has a gradient.
    ///
    /// # Errors
    /// If the device has no memory for them.
    fn backward_input(&self, cx: &mut Backward<'_>) -> Result<(), DeviceError>;

    /// Gives `sink` the gradients of the parameters. Called after the input half of the same operation.
    ///
    /// # Errors
    /// If the device or the sink has no memory.
    fn backward_weight(&self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        let _ = (cx, sink);
        Ok(())
    }

    /// Both halves. To be implemented only if one of them makes what the other can use at once.
    ///
    /// # Errors
    /// Those of the halves.
    fn backward(&self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        self.backward_input(cx)?;
        self.backward_weight(cx, sink)
    }

    /// Whether the operation has parameters, and so a weight half.
    fn has_parameters(&self) -> bool {
        false
    }

    /// Which halves of backward read the value of an input.
    fn reads_input(&self, input: usize) -> ReadBy {
        let _ = input;
        ReadBy { input_half: true, weight_half: self.has_parameters() }
    }

    /// Which halves of backward read the value of an output.
    fn reads_output(&self, output: usize) -> ReadBy {
        let _ = output;
        ReadBy::NEITHER
    }

    /// Whether the outputs are quickly computed again from the inputs, so that a tape may
    /// [give them back](super::Tape::keep_products) until backward.
    fn is_cheap(&self) -> bool {
        false
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
#[derive(Debug, Clone)]
pub enum Op {
    /// Declared by a model.
    Shared(Arc<dyn Operation>),
    /// Without settings.
    Static(&'static dyn Operation),
}

impl Op {
    pub(super) fn get(&self) -> &dyn Operation {
        match self {
            Op::Shared(operation) => &**operation,
            Op::Static(operation) => *operation,
        }
    }
}

impl<T: Operation + 'static> From<&Arc<T>> for Op {
    fn from(operation: &Arc<T>) -> Self {
        Op::Shared(Arc::<T>::clone(operation))
    }
}
