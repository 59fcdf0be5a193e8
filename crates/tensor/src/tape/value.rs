//! Values on a tape and arguments of operations.

use super::Sharding;
use crate::shape::Shape;
use crate::tensor::Tensor;
use trireme_base::DType;

/// A value on a tape.
///
/// It cannot be cloned. An operation that takes the `Var` by value is its last reader and may compute in its memory; passing `&Var` keeps
/// the value.
#[derive(Debug, PartialEq, Eq)]
pub struct Var(pub(super) usize);

impl Var {
    /// Returns an identifier with which the value or its gradient can be taken from the tape.
    pub fn id(&self) -> VarId {
        VarId(self.0)
    }
}

/// Identifies a value of a tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VarId(pub(super) usize);

/// An input of an operation. Like a [`Var`], it cannot be cloned.
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

/// The inputs of an operation, in order: an array, a vector or a tuple of `Var` and `&Var`.
pub trait Arguments {
    /// Appends the inputs to `arguments`.
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

/// Inputs with an optional last one.
impl<A: Into<Argument>> Arguments for (A, Option<Argument>) {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.push(self.0.into());
        arguments.extend(self.1);
    }
}

/// Inputs with an optional last one.
impl<A: Into<Argument>, B: Into<Argument>> Arguments for (A, B, Option<Argument>) {
    fn append_to(self, arguments: &mut Vec<Argument>) {
        arguments.extend([self.0.into(), self.1.into()]);
        arguments.extend(self.2);
    }
}

/// A value of a tape, with its gradient.
#[derive(Debug)]
pub(super) struct Value {
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    /// Sharding of the value on the tensor axis.
    pub(super) sharding: Sharding,
    /// `None` if the value was taken or after its last use.
    pub(super) tensor: Option<Tensor>,
    pub(super) grad: Option<Tensor>,
    pub(super) requires_grad: bool,
    /// Whether the caller put the value on the tape. Forward does not overwrite such values, because the caller may take them again.
    pub(super) is_input: bool,
    /// Whether forward can recompute the value.
    pub(super) is_recomputable: bool,
    /// Number of pending backward halves that read the value.
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
