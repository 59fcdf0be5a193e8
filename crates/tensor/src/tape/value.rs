//! Values on a tape, and how operations are given them.

use super::Sharding;
use crate::shape::Shape;
use crate::tensor::Tensor;
use trireme_base::DType;

/// A value on a tape.
///
/// It is neither copied nor cloned: an operation that is given the `Var` itself is its last reader, and may compute in its
/// memory; one that is given `&Var` is not the last.
#[derive(Debug, PartialEq, Eq)]
pub struct Var(pub(super) usize);

impl Var {
    /// Names the value, to take it or its gradient off the tape.
    pub fn id(&self) -> VarId {
        VarId(self.0)
    }
}

/// Names a value of a tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VarId(pub(super) usize);

/// An input of an operation. It is neither copied nor cloned, as a `Var` is not.
#[derive(Debug)]
pub struct Argument {
    pub(super) value: usize,
    pub(super) is_last: bool,
}

impl From<Var> for Argument {
    fn from(var: Var) -> Self {
        Argument { value: var.0, is_last: true }
    }
}

impl From<&Var> for Argument {
    fn from(var: &Var) -> Self {
        Argument { value: var.0, is_last: false }
    }
}

/// The inputs of an operation, in order: an array or a tuple of `Var` and `&Var`.
pub trait Arguments {
    /// Appends them.
    fn append_to(self, arguments: &mut Vec<Argument>);
}

impl<T: Into<Argument>, const N: usize> Arguments for [T; N] {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.extend(self.map(Into::into));
    }
}

impl<T: Into<Argument>> Arguments for Vec<T> {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.extend(self.into_iter().map(Into::into));
    }
}

impl<A: Into<Argument>, B: Into<Argument>> Arguments for (A, B) {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.extend([self.0.into(), self.1.into()]);
    }
}

impl<A: Into<Argument>, B: Into<Argument>, C: Into<Argument>> Arguments for (A, B, C) {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.extend([self.0.into(), self.1.into(), self.2.into()]);
    }
}

/// Inputs of which the last one is optional.
impl<A: Into<Argument>> Arguments for (A, Option<Argument>) {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.push(self.0.into());
        arguments.extend(self.1);
    }
}

/// Inputs of which the last one is optional.
impl<A: Into<Argument>, B: Into<Argument>> Arguments for (A, B, Option<Argument>) {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.extend([self.0.into(), self.1.into()]);
        arguments.extend(self.2);
    }
}

/// What a tape holds of a value.
#[derive(Debug)]
pub(super) struct Value {
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    /// What this rank of the tensor axis has of it.
    pub(super) sharding: Sharding,
    /// `None` where it was taken or has had its last use.
    pub(super) tensor: Option<Tensor>,
    pub(super) grad: Option<Tensor>,
    pub(super) requires_grad: bool,
    /// Whether it was put on the tape from outside. Forward does not overwrite it, for it may be taken off again.
    pub(super) is_input: bool,
    /// Whether forward may run again to make it.
    pub(super) is_recomputable: bool,
    /// Halves of backward, still to run, that read it.
    pub(super) num_reads: usize,
}

impl Value {
    pub(super) fn input(tensor: Tensor, requires_grad: bool) -> Self {
        Value { is_input: true, ..Value::output(tensor, requires_grad, false) }
    }

    pub(super) fn output(tensor: Tensor, requires_grad: bool, is_recomputable: bool) -> Self {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        Value {
            shape,
            dtype,
            sharding: Sharding::Replicated,
            tensor: Some(tensor),
            grad: None,
            requires_grad,
            is_input: false,
            is_recomputable,
            num_reads: 0,
        }
    }

    pub(super) fn tensor(&self) -> &Tensor {
        self.tensor.as_ref().expect("values live until their last use")
    }
}
