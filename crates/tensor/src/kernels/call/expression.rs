//! Elementwise functions and row reductions.

use super::{Operands, Replace};
use crate::kernels::expression::{Expression, InputLayout};
use crate::kernels::{Operand, OperandMut};
use smallvec::SmallVec;
use trireme_base::Cost;

/// An elementwise function or a function of rows; see [`Expr`](crate::Expr).
#[derive(Debug)]
pub(crate) struct ExpressionCall {
    pub(crate) name: &'static str,
    pub(crate) cost: Cost,
    pub(crate) expression: Expression,
    /// Whether input 0 of the expression is the output's earlier content. `inputs` holds the others.
    pub(crate) reads_output: bool,
    pub(crate) inputs: SmallVec<[ExpressionInput; 3]>,
    /// Number of columns of the inputs.
    pub(crate) cols: usize,
    pub(crate) output: OperandMut,
}

#[derive(Debug)]
pub(crate) struct ExpressionInput {
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

    /// Returns whether rows can be ignored: each element of the output is computed from the elements at its place.
    pub(crate) fn is_flat(&self) -> bool {
        let is_whole = |ExpressionInput { layout, .. }: &ExpressionInput| {
            layout.col_stride == 1 && layout.row_stride == self.cols
        };
        self.expression.is_elementwise()
            && self.output.shape().cols() == self.cols
            && self.inputs.iter().all(is_whole)
    }
}

impl Operands for ExpressionInput {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        ExpressionInput { operand: self.operand.with_operands(replace), layout: self.layout }
    }
}

impl Operands for ExpressionCall {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        ExpressionCall {
            name: self.name,
            cost: self.cost,
            expression: self.expression.clone(),
            reads_output: self.reads_output,
            inputs: self.inputs.iter().map(|input| input.with_operands(replace)).collect(),
            cols: self.cols,
            output: self.output.with_operands(replace),
        }
    }
}
