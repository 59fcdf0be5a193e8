//! Functions of elements.

use super::{Operands, Replace};
use crate::kernels::expression::{InputLayout, Program};
use crate::kernels::{Operand, OperandMut};
use std::sync::Arc;
use trireme_base::Cost;

/// A function of the elements of `inputs`, row by row; see [`Expr`](crate::Expr).
#[derive(Debug)]
pub(crate) struct ExpressionCall {
    pub(crate) name: &'static str,
    pub(crate) cost: Cost,
    pub(crate) program: Arc<Program>,
    /// Whether input 0 of the program is the output's earlier content. `inputs` holds the others.
    pub(crate) reads_output: bool,
    pub(crate) inputs: Vec<FunctionInput>,
    /// Number of columns of the inputs.
    pub(crate) cols: usize,
    pub(crate) output: OperandMut,
}

#[derive(Debug)]
pub(crate) struct FunctionInput {
    pub(crate) operand: Operand,
    pub(crate) layout: InputLayout,
}

impl ExpressionCall {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn cost(&self) -> Cost {
        self.cost
    }
}

impl Operands for FunctionInput {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        FunctionInput { operand: self.operand.with_operands(replace), layout: self.layout }
    }
}

impl Operands for ExpressionCall {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        ExpressionCall {
            name: self.name,
            cost: self.cost,
            program: Arc::clone(&self.program),
            reads_output: self.reads_output,
            inputs: self.inputs.with_operands(replace),
            cols: self.cols,
            output: self.output.with_operands(replace),
        }
    }
}
