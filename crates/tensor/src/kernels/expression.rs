//! Functions of elements as data, which every backend can run: loops on the CPU (`cpu/expression.rs`), and generated source on a GPU
//! (`cuda/expression.rs`).

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A number in f32 that a function computes from the elements of its inputs, such as `2.0 * x + y.exp()`. A closure that takes and returns
/// expressions runs once, to record what it computes; operations between constants are computed at once.
#[derive(Debug, Clone, Copy)]
pub struct Expr<'f>(Value<'f>);

#[derive(Debug, Clone, Copy)]
enum Value<'f> {
    Constant(f32),
    Node(&'f Recording, usize),
}

/// The nodes that a function has recorded so far.
#[derive(Debug, Default)]
struct Recording(RefCell<Vec<Node>>);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Node {
    /// The element of an input.
    Input(usize),
    Constant(f32),
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    /// `then` if the first number is less than the second, else `otherwise`.
    IfLess {
        numbers: [usize; 2],
        then: usize,
        otherwise: usize,
    },
    /// A sum or maximum over the row.
    Reduce(Reduction, usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unary {
    Neg,
    Exp,
    Ln,
    Ln1p,
    Sqrt,
    Sigmoid,
    Tanh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reduction {
    Sum,
    Max,
}

impl Unary {
    #[inline(always)]
    pub(crate) fn apply(self, x: f32) -> f32 {
        match self {
            Unary::Neg => -x,
            Unary::Exp => super::exp(x),
            Unary::Ln => x.ln(),
            Unary::Ln1p => x.ln_1p(),
            Unary::Sqrt => x.sqrt(),
            Unary::Sigmoid => super::sigmoid(x),
            Unary::Tanh => super::tanh(x),
        }
    }
}

impl Binary {
    #[inline(always)]
    pub(crate) fn apply(self, left: f32, right: f32) -> f32 {
        match self {
            Binary::Add => left + right,
            Binary::Sub => left - right,
            Binary::Mul => left * right,
            Binary::Div => left / right,
        }
    }
}

impl Node {
    /// Calls `visit` with the nodes that this one is computed from.
    pub(crate) fn for_each_operand(&self, mut visit: impl FnMut(usize)) {
        match *self {
            Node::Input(_) | Node::Constant(_) => {}
            Node::Unary(_, x) | Node::Reduce(_, x) => visit(x),
            Node::Binary(_, left, right) => [left, right].into_iter().for_each(visit),
            Node::IfLess { numbers: [left, right], then, otherwise } => {
                [left, right, then, otherwise].into_iter().for_each(visit);
            }
        }
    }
}

impl Recording {
    fn push(&self, node: Node) -> Expr<'_> {
        let mut nodes = self.0.borrow_mut();
        nodes.push(node);
        Expr(Value::Node(self, nodes.len() - 1))
    }

    /// Returns the node of an expression.
    fn node_of(&self, expression: Expr<'_>) -> usize {
        match expression.0 {
            Value::Node(_, node) => node,
            Value::Constant(value) => {
                self.push(Node::Constant(value));
                self.0.borrow().len() - 1
            }
        }
    }
}

impl<'f> Expr<'f> {
    fn unary(self, operation: Unary) -> Self {
        match self.0 {
            Value::Constant(x) => Expr::from(operation.apply(x)),
            Value::Node(recording, x) => recording.push(Node::Unary(operation, x)),
        }
    }

    fn binary(self, operation: Binary, other: Expr<'f>) -> Self {
        match (self.0, other.0) {
            (Value::Constant(left), Value::Constant(right)) => Expr::from(operation.apply(left, right)),
            (Value::Node(recording, _), _) | (_, Value::Node(recording, _)) => {
                let node = Node::Binary(operation, recording.node_of(self), recording.node_of(other));
                recording.push(node)
            }
        }
    }

    fn reduce(self, reduction: Reduction) -> Self {
        match self.0 {
            Value::Constant(x) => panic!("a sum or maximum of the constant {x}"),
            Value::Node(recording, x) => recording.push(Node::Reduce(reduction, x)),
        }
    }

    /// Returns `e^self`.
    pub fn exp(self) -> Self {
        self.unary(Unary::Exp)
    }

    /// Returns the natural logarithm.
    pub fn ln(self) -> Self {
        self.unary(Unary::Ln)
    }

    /// Returns `ln(1 + self)`, also if the number is small.
    pub fn ln_1p(self) -> Self {
        self.unary(Unary::Ln1p)
    }

    /// Returns the square root.
    pub fn sqrt(self) -> Self {
        self.unary(Unary::Sqrt)
    }

    /// Returns `1 / (1 + e^-self)`.
    pub fn sigmoid(self) -> Self {
        self.unary(Unary::Sigmoid)
    }

    /// Returns the hyperbolic tangent.
    pub fn tanh(self) -> Self {
        self.unary(Unary::Tanh)
    }

    /// Returns the magnitude.
    pub fn abs(self) -> Self {
        self.if_less(0.0, -self, self)
    }

    /// Returns `then` if this number is less than `other`, else `otherwise`, also if a number is NaN. Both are computed.
    pub fn if_less(
        self,
        other: impl Into<Expr<'f>>,
        then: impl Into<Expr<'f>>,
        otherwise: impl Into<Expr<'f>>,
    ) -> Self {
        let all = [self, other.into(), then.into(), otherwise.into()];
        let recording = all.iter().find_map(|expression| match expression.0 {
            Value::Node(recording, _) => Some(recording),
            Value::Constant(_) => None,
        });
        let Some(recording) = recording else {
            let [left, right, then, otherwise] = all.map(|expression| match expression.0 {
                Value::Constant(value) => value,
                Value::Node(..) => unreachable!("there is no node"),
            });
            return Expr::from(if left < right { then } else { otherwise });
        };
        let [left, right, then, otherwise] = all.map(|expression| recording.node_of(expression));
        recording.push(Node::IfLess { numbers: [left, right], then, otherwise })
    }

    /// Returns the sum over the row: over the last dim.
    ///
    /// # Panics
    /// For a constant.
    pub fn row_sum(self) -> Self {
        self.reduce(Reduction::Sum)
    }

    /// Returns the maximum over the row; negative infinity if the row is empty. Ignores NaN.
    ///
    /// # Panics
    /// For a constant.
    pub fn row_max(self) -> Self {
        self.reduce(Reduction::Max)
    }
}

impl From<f32> for Expr<'_> {
    fn from(value: f32) -> Self {
        Expr(Value::Constant(value))
    }
}

impl Neg for Expr<'_> {
    type Output = Self;

    fn neg(self) -> Self {
        self.unary(Unary::Neg)
    }
}

/// Implements operators between expressions and numbers.
macro_rules! operators {
    ($($operator:ident $method:ident),*) => {$(
        impl<'f> $operator for Expr<'f> {
            type Output = Expr<'f>;

            fn $method(self, other: Expr<'f>) -> Expr<'f> {
                self.binary(Binary::$operator, other)
            }
        }

        impl<'f> $operator<f32> for Expr<'f> {
            type Output = Expr<'f>;

            fn $method(self, other: f32) -> Expr<'f> {
                self.binary(Binary::$operator, other.into())
            }
        }

        impl<'f> $operator<Expr<'f>> for f32 {
            type Output = Expr<'f>;

            fn $method(self, other: Expr<'f>) -> Expr<'f> {
                Expr::from(self).binary(Binary::$operator, other)
            }
        }
    )*};
}

operators! { Add add, Sub sub, Mul mul, Div div }

/// A function of elements.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Program {
    nodes: Vec<Node>,
    /// The steps that are computed once per row, in order.
    row_steps: Vec<RowStep>,
    /// The nodes that are computed for each element of the output, in order. The last one is the output.
    output: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RowStep {
    /// A node that is computed from other numbers of the row.
    Number(usize),
    /// A node that reduces the last of `elements`, which are computed for each element, in order.
    Reduce { node: usize, reduction: Reduction, elements: Vec<usize> },
}

impl Program {
    /// Records a function of the elements of `N` inputs. An input that `is_given` says is absent is 1.
    pub(crate) fn record<const N: usize>(
        is_given: [bool; N],
        function: impl for<'f> FnOnce([Expr<'f>; N]) -> Expr<'f>,
    ) -> Self {
        let recording = Recording::default();
        let mut num_given = 0;
        let inputs = is_given.map(|is_given| {
            if !is_given {
                return Expr::from(1.0);
            }
            num_given += 1;
            recording.push(Node::Input(num_given - 1))
        });
        let output = recording.node_of(function(inputs));
        let nodes = recording.0.into_inner();
        let mut is_of_row = Vec::with_capacity(nodes.len());
        for node in &nodes {
            let mut of_row = true;
            node.for_each_operand(|operand| of_row &= is_of_row[operand]);
            is_of_row.push(match node {
                Node::Input(_) => false,
                Node::Reduce(..) => true,
                _ => of_row,
            });
        }
        let row_steps = (0..nodes.len()).filter(|&node| is_of_row[node]).map(|node| match nodes[node] {
            Node::Reduce(reduction, operand) => {
                let elements = elements_of(&nodes, &is_of_row, operand);
                RowStep::Reduce { node, reduction, elements }
            }
            _ => RowStep::Number(node),
        });
        let row_steps = row_steps.collect();
        let output = elements_of(&nodes, &is_of_row, output);
        Program { nodes, row_steps, output }
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(crate) fn row_steps(&self) -> &[RowStep] {
        &self.row_steps
    }

    pub(crate) fn output(&self) -> &[usize] {
        &self.output
    }

    /// Returns whether elements are computed separately.
    pub(crate) fn is_elementwise(&self) -> bool {
        !self.row_steps.iter().any(|step| matches!(step, RowStep::Reduce { .. }))
    }
}

/// Returns the nodes that must be computed for each element to compute `last`, which comes last.
fn elements_of(nodes: &[Node], is_of_row: &[bool], last: usize) -> Vec<usize> {
    let mut is_needed = vec![false; last + 1];
    is_needed[last] = true;
    for node in (0..=last).rev().filter(|&node| !is_of_row[node]) {
        if is_needed[node] {
            nodes[node].for_each_operand(|operand| is_needed[operand] = true);
        }
    }
    (0..=last).filter(|&node| is_needed[node] && (node == last || !is_of_row[node])).collect()
}

/// How an input's elements relate to rows and columns: the distance between its elements in neighboring rows, and in neighboring columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InputLayout {
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}
