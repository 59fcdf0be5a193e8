//! Functions of elements, computed block by block.

use super::element::{Element, Floats, with_floats};
use super::simd::{LANES, SimdLevel, for_each_simd_level, sum_lanes};
use super::{Cpu, SharedSlice};
use crate::kernels::expression::{Binary, InputLayout, Node, Program, Reduction, RowStep, Unary};

/// Number of elements that are computed at a time. The values of all nodes of a typical function fit into the L1 cache.
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

fn wide<T: Element>(value: T) -> f32 {
    value.to_f32()
}

/// The inputs of a function, in the order of their numbers.
pub(crate) struct FunctionInputs<'a> {
    /// Whether the first input is the output's earlier content. It is not among `others`.
    pub(crate) reads_output: bool,
    pub(crate) others: Vec<(Floats<'a>, InputLayout)>,
    /// Number of columns of a row.
    pub(crate) cols: usize,
}

/// The values of a function's nodes for some elements of a row. The values of numbers of the row are all the same.
struct Evaluation<'a> {
    simd_level: SimdLevel,
    program: &'a Program,
    inputs: &'a FunctionInputs<'a>,
    values: Vec<Block>,
}

impl<'a> Evaluation<'a> {
    fn new(simd_level: SimdLevel, program: &'a Program, inputs: &'a FunctionInputs<'a>) -> Self {
        let values = vec![[0.0; BLOCK_LEN]; program.nodes().len()];
        Evaluation { simd_level, program, inputs, values }
    }

    /// Computes the values of `nodes` for `len` elements of a row. `own` holds the elements of the output.
    fn compute<T: Element>(&mut self, nodes: &[usize], row: usize, first: usize, len: usize, own: &[T]) {
        for &node in nodes {
            let (before, rest) = self.values.split_at_mut(node);
            let (y, of) = (&mut rest[0][..len], |node: usize| &before[node][..len]);
            match self.program.nodes()[node] {
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
                    let index = input - usize::from(self.inputs.reads_output);
                    let (elements, InputLayout { row_stride, col_stride }) = self.inputs.others[index];
                    let start = row * row_stride + first * col_stride;
                    with_floats!(elements => |x| match col_stride {
                        0 => y.fill(wide(x[start])),
                        _ => load(self.simd_level, &x[start..start + len], y),
                    });
                }
                // Computed for the row.
                Node::Reduce(..) => {}
            }
        }
    }

    /// Computes the numbers of a row.
    fn compute_row(&mut self, row: usize) {
        let program = self.program;
        for step in program.row_steps() {
            match step {
                RowStep::Number(node) => self.compute::<f32>(&[*node], row, 0, BLOCK_LEN, &[]),
                RowStep::Reduce { node, reduction, elements } => {
                    let initial = match reduction {
                        Reduction::Sum => 0.0,
                        Reduction::Max => f32::NEG_INFINITY,
                    };
                    let mut lanes = [initial; LANES];
                    for first in (0..self.inputs.cols).step_by(BLOCK_LEN) {
                        let len = BLOCK_LEN.min(self.inputs.cols - first);
                        self.compute::<f32>(elements, row, first, len, &[]);
                        let last = elements[elements.len() - 1];
                        reduce(self.simd_level, *reduction, &self.values[last][..len], &mut lanes);
                    }
                    self.values[*node].fill(match reduction {
                        Reduction::Sum => sum_lanes(lanes),
                        Reduction::Max => lanes.into_iter().fold(initial, f32::max),
                    });
                }
            }
        }
    }

    /// Computes the elements of the output from column `first` on.
    fn write<T: Element>(&mut self, row: usize, first: usize, y: &mut [T]) {
        let program = self.program;
        let nodes = program.output();
        for (index, y) in y.chunks_mut(BLOCK_LEN).enumerate() {
            self.compute(nodes, row, first + index * BLOCK_LEN, y.len(), y);
            store(self.simd_level, &self.values[nodes[nodes.len() - 1]][..y.len()], y);
        }
    }
}

impl Cpu {
    /// Computes a function into `y`, whose rows have `out_cols` columns: as many as the inputs, or one.
    pub(crate) fn function<T: Element>(
        &self,
        program: &Program,
        inputs: &FunctionInputs<'_>,
        y: &mut [T],
        out_cols: usize,
    ) {
        let evaluation = || Evaluation::new(self.simd_level, program, inputs);
        let is_flat =
            |(_, layout): &(_, InputLayout)| layout.col_stride == 1 && layout.row_stride == inputs.cols;
        if program.is_elementwise() && out_cols == inputs.cols && inputs.others.iter().all(is_flat) {
            return self.for_each_block(y, |first, y| {
                let mut evaluation = evaluation();
                evaluation.compute_row(0);
                evaluation.write(0, first, y);
            });
        }
        let (num_rows, y) = (y.len() / out_cols.max(1), SharedSlice::new(y));
        self.for_row_blocks(num_rows, inputs.cols.max(1), |first, num| {
            let mut evaluation = evaluation();
            for row in first..first + num {
                evaluation.compute_row(row);
                // SAFETY: rows do not overlap.
                evaluation.write(row, 0, unsafe { y.range(row * out_cols, out_cols) });
            }
        });
    }
}
