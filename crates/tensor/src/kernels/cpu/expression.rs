//! An interpreter of expressions, block by block.

use super::element::{Element, Floats, with_floats};
use super::simd::{LANES, SimdLevel, for_each_simd_level, sum_lanes};
use super::{Cpu, SharedSlice};
use crate::kernels::expression::{Binary, Expression, InputLayout, Node, Reduction, Unary};
use smallvec::{SmallVec, smallvec};

/// Number of elements that are computed at a time. The values of a typical expression's nodes fit into the L1 cache.
const BLOCK_LEN: usize = 256;

type Block = [f32; BLOCK_LEN];

for_each_simd_level! {
    fn unary(operation: Unary, x: &[f32], y: &mut [f32]) {
        /// Matches outside of the loop, which then has no branches.
        macro_rules! each {
            ($($operation:ident),*) => {
                match operation {
                    $(Unary::$operation => y.iter_mut().zip(x).for_each(|(y, x)| *y = Unary::$operation.apply(*x)),)*
                }
            };
        }
        each!(Neg, Exp, Ln, Ln1p, Sqrt, Sigmoid, Tanh);
    }

    fn binary(operation: Binary, left: &[f32], right: &[f32], y: &mut [f32]) {
        macro_rules! each {
            ($($operation:ident),*) => {
                match operation {
                    $(Binary::$operation => {
                        for ((y, left), right) in y.iter_mut().zip(left).zip(right) {
                            *y = Binary::$operation.apply(*left, *right);
                        }
                    })*
                }
            };
        }
        each!(Add, Sub, Mul, Div);
    }

    fn if_less(numbers: [&[f32]; 2], then: &[f32], otherwise: &[f32], y: &mut [f32]) {
        let numbers = numbers[0].iter().zip(numbers[1]);
        for (((y, (left, right)), then), otherwise) in y.iter_mut().zip(numbers).zip(then).zip(otherwise) {
            *y = if left < right { *then } else { *otherwise };
        }
    }

    fn load<T: Element>(x: &[T], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = x.to_f32());
    }

    fn store<T: Element>(x: &[f32], y: &mut [T]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f32(*x));
    }

    fn reduce(reduction: Reduction, x: &[f32], lanes: &mut [f32; LANES]) {
        for x in x.chunks(LANES) {
            match reduction {
                Reduction::Sum => lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += x),
                Reduction::Max => lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane = if *x > *lane { *x } else { *lane }),
            }
        }
    }
}

/// The inputs of an expression.
pub(crate) struct ExpressionInputs<'a> {
    /// Whether the first input is the output's earlier content. It is not among `others`.
    pub(crate) reads_output: bool,
    pub(crate) others: SmallVec<[(Floats<'a>, InputLayout); 3]>,
    /// Number of columns of a row.
    pub(crate) cols: usize,
    /// Whether rows can be ignored.
    pub(crate) is_flat: bool,
}

/// The values of an expression's nodes for up to [`BLOCK_LEN`] elements of a row. A row scalar fills its block.
struct Interpreter<'a, 'i> {
    simd_level: SimdLevel,
    expression: &'a Expression,
    inputs: &'a ExpressionInputs<'i>,
    values: SmallVec<[Block; 16]>,
}

impl<'a, 'i> Interpreter<'a, 'i> {
    fn new(simd_level: SimdLevel, expression: &'a Expression, inputs: &'a ExpressionInputs<'i>) -> Self {
        let values = smallvec![[0.0; BLOCK_LEN]; expression.nodes().len()];
        Interpreter { simd_level, expression, inputs, values }
    }

    /// Computes a node for `len` elements of a row, from column `first` on. `own` holds these elements of the output.
    fn compute<T: Element>(&mut self, node: u8, row: usize, first: usize, len: usize, own: &[T]) {
        let (before, rest) = self.values.split_at_mut(usize::from(node));
        let (y, of) = (&mut rest[0][..len], |node: u8| &before[usize::from(node)][..len]);
        match self.expression.nodes()[usize::from(node)] {
            Node::Constant(value) => y.fill(value),
            Node::Unary(operation, x) => unary(self.simd_level, operation, of(x), y),
            Node::Binary(operation, left, right) => {
                binary(self.simd_level, operation, of(left), of(right), y);
            }
            Node::IfLess { numbers, then, otherwise } => {
                if_less(self.simd_level, numbers.map(of), of(then), of(otherwise), y);
            }
            Node::Input(0) if self.inputs.reads_output => load(self.simd_level, own, y),
            Node::Input(input) => {
                let index = usize::from(input) - usize::from(self.inputs.reads_output);
                let (elements, InputLayout { row_stride, col_stride }) = self.inputs.others[index];
                let start = row * row_stride + first * col_stride;
                with_floats!(elements => |x| match col_stride {
                    0 => {
                        load(self.simd_level, &x[start..start + 1], &mut y[..1]);
                        y.fill(y[0]);
                    }
                    _ => load(self.simd_level, &x[start..start + len], y),
                });
            }
            Node::Reduce(reduction, x) => {
                let elements = self.expression.elements_of(x);
                let initial = match reduction {
                    Reduction::Sum => 0.0,
                    Reduction::Max => f32::NEG_INFINITY,
                };
                let mut lanes = [initial; LANES];
                for first in (0..self.inputs.cols).step_by(BLOCK_LEN) {
                    let len = BLOCK_LEN.min(self.inputs.cols - first);
                    let own = own.get(first..first + len).unwrap_or_default();
                    elements.iter().for_each(|element| self.compute(element, row, first, len, own));
                    reduce(self.simd_level, reduction, &self.values[usize::from(x)][..len], &mut lanes);
                }
                self.values[usize::from(node)].fill(match reduction {
                    Reduction::Sum => sum_lanes(lanes),
                    Reduction::Max => lanes.into_iter().fold(initial, f32::max),
                });
            }
        }
    }

    /// Computes the row scalars. `own` holds the row of the output.
    fn compute_row<T: Element>(&mut self, row: usize, own: &[T]) {
        let row_scalars = self.expression.row_scalars();
        row_scalars.iter().for_each(|node| self.compute(node, row, 0, BLOCK_LEN, own));
    }

    /// Computes the elements of the output from column `first` on.
    fn write<T: Element>(&mut self, row: usize, first: usize, y: &mut [T]) {
        let output = self.expression.output;
        let elements = self.expression.elements_of(output);
        for (index, y) in y.chunks_mut(BLOCK_LEN).enumerate() {
            let first = first + index * BLOCK_LEN;
            elements.iter().for_each(|node| self.compute(node, row, first, y.len(), y));
            store(self.simd_level, &self.values[usize::from(output)][..y.len()], y);
        }
    }
}

impl Cpu {
    /// Computes an expression into `y`, whose rows have `out_cols` columns: as many as the inputs, or one.
    pub(crate) fn evaluate<T: Element>(
        &self,
        expression: &Expression,
        inputs: &ExpressionInputs<'_>,
        y: &mut [T],
        out_cols: usize,
    ) {
        let interpreter = || Interpreter::new(self.simd_level, expression, inputs);
        if inputs.is_flat {
            return self.for_each_block(y, |first, y| {
                let mut interpreter = interpreter();
                interpreter.compute_row::<T>(0, &[]);
                interpreter.write(0, first, y);
            });
        }
        let (num_rows, y) = (y.len() / out_cols.max(1), SharedSlice::new(y));
        self.for_row_blocks(num_rows, inputs.cols.max(1), |first, num| {
            let mut interpreter = interpreter();
            for row in first..first + num {
                // SAFETY: rows do not overlap.
                let y = unsafe { y.range(row * out_cols, out_cols) };
                interpreter.compute_row(row, y);
                interpreter.write(row, 0, y);
            }
        });
    }
}
