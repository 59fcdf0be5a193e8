//! Values on a tape, and how operations are given them.

use crate::tensor::Tensor;

/// A value on a tape.
///
/// It is neither copied nor cloned: an operation that is given the `Var` itself is its last reader, and may compute in its
/// memory; one that is given `&Var` is not the last.
#[derive(Debug, PartialEq, Eq)]
pub struct Var(pub(super) usize);

impl Var {
    /// The value's place on its tape, for whoever takes it or its gradient off the tape.
    pub fn place(&self) -> Place {
        Place(self.0)
    }
}

/// The place of a value on a tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place(pub(super) usize);

/// An input of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Operand {
    pub(super) value: usize,
    pub(super) is_last: bool,
}

impl From<Var> for Operand {
    fn from(var: Var) -> Self {
        Operand { value: var.0, is_last: true }
    }
}

impl From<&Var> for Operand {
    fn from(var: &Var) -> Self {
        Operand { value: var.0, is_last: false }
    }
}

/// The inputs of an operation, in order: an array or a tuple of `Var` and `&Var`.
pub trait Operands {
    /// Appends them.
    fn append_to(self, operands: &mut Vec<Operand>);
}

impl<T: Into<Operand>, const N: usize> Operands for [T; N] {
    fn append_to(self, operands: &mut Vec<Operand>) {
        operands.extend(self.map(Into::into));
    }
}

impl<T: Into<Operand>> Operands for Vec<T> {
    fn append_to(self, operands: &mut Vec<Operand>) {
        operands.extend(self.into_iter().map(Into::into));
    }
}

impl<A: Into<Operand>, B: Into<Operand>> Operands for (A, B) {
    fn append_to(self, operands: &mut Vec<Operand>) {
        operands.extend([self.0.into(), self.1.into()]);
    }
}

impl<A: Into<Operand>, B: Into<Operand>, C: Into<Operand>> Operands for (A, B, C) {
    fn append_to(self, operands: &mut Vec<Operand>) {
        operands.extend([self.0.into(), self.1.into(), self.2.into()]);
    }
}

/// What a tape holds of a value.
#[derive(Debug)]
pub(super) struct Value {
    /// `None` where it was taken or has had its last use.
    pub(super) tensor: Option<Tensor>,
    pub(super) grad: Option<Tensor>,
    pub(super) wants_grad: bool,
    /// Whether it must keep its contents whoever reads it: it was put on the tape from outside.
    pub(super) is_input: bool,
    /// Halves of backward, still to run, that read it.
    pub(super) num_reads: usize,
}

impl Value {
    pub(super) fn tensor(&self) -> &Tensor {
        self.tensor.as_ref().expect("values live until their last use")
    }
}
