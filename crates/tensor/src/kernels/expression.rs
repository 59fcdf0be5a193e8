//! Elementwise functions and row reductions as data, which every backend can run: the CPU interprets them block by block
//! (`cpu/expression.rs`), and a GPU compiles source that is generated from them (`cuda/expression.rs`).

use smallvec::SmallVec;
use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// An f32 value of a function that a device runs, such as `2.0 * x + y.exp()`. The closure runs once, when the kernel is issued, and
/// records its operations; use [`if_less`](Expr::if_less) where Rust would use `if`. Operations on constants are computed while recording.
/// A function has at most 64 operations, inputs and constants.
#[derive(Debug, Clone, Copy)]
pub struct Expr<'f>(Value<'f>);

#[derive(Debug, Clone, Copy)]
enum Value<'f> {
    Constant(f32),
    Node(&'f NodeList, u8),
}

/// Nodes in an order in which they can be computed. As many as most functions have need no allocation.
type Nodes = SmallVec<[Node; 32]>;

/// Maximum number of nodes of an expression: the bits of a [`NodeSet`].
const NUM_NODES_MAX: usize = 64;

/// The nodes that a function has recorded so far.
#[derive(Debug, Default)]
struct NodeList(RefCell<Nodes>);

/// An operation and the indices of its operands, an input or a constant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Node {
    /// The element of an input.
    Input(u8),
    Constant(f32),
    Unary(Unary, u8),
    Binary(Binary, u8, u8),
    /// `then` if the first number is less than the second, else `otherwise`.
    IfLess {
        numbers: [u8; 2],
        then: u8,
        otherwise: u8,
    },
    /// A sum or maximum over the row.
    Reduce(Reduction, u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Unary {
    Neg,
    Exp,
    Ln,
    Ln1p,
    Sqrt,
    Sigmoid,
    Tanh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    pub(crate) fn for_each_operand(&self, mut visit: impl FnMut(u8)) {
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

impl NodeList {
    fn push(&self, node: Node) -> u8 {
        let mut nodes = self.0.borrow_mut();
        assert!(nodes.len() < NUM_NODES_MAX, "a function has more than {NUM_NODES_MAX} operations");
        nodes.push(node);
        nodes.len() as u8 - 1
    }

    fn expression(&self, node: Node) -> Expr<'_> {
        Expr(Value::Node(self, self.push(node)))
    }

    /// Returns the node of an expression.
    fn node_of(&self, expression: Expr<'_>) -> u8 {
        match expression.0 {
            Value::Node(_, node) => node,
            Value::Constant(value) => self.push(Node::Constant(value)),
        }
    }
}

impl<'f> Expr<'f> {
    fn unary(self, operation: Unary) -> Self {
        match self.0 {
            Value::Constant(x) => Expr::from(operation.apply(x)),
            Value::Node(nodes, x) => nodes.expression(Node::Unary(operation, x)),
        }
    }

    fn binary(self, operation: Binary, other: Expr<'f>) -> Self {
        match (self.0, other.0) {
            (Value::Constant(left), Value::Constant(right)) => Expr::from(operation.apply(left, right)),
            (Value::Node(nodes, _), _) | (_, Value::Node(nodes, _)) => {
                nodes.expression(Node::Binary(operation, nodes.node_of(self), nodes.node_of(other)))
            }
        }
    }

    fn reduce(self, reduction: Reduction) -> Self {
        match self.0 {
            Value::Constant(x) => panic!("a sum or maximum of the constant {x}"),
            Value::Node(nodes, x) => nodes.expression(Node::Reduce(reduction, x)),
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
        let nodes = all.iter().find_map(|expression| match expression.0 {
            Value::Node(nodes, _) => Some(nodes),
            Value::Constant(_) => None,
        });
        let Some(nodes) = nodes else {
            let [left, right, then, otherwise] = all.map(|expression| match expression.0 {
                Value::Constant(value) => value,
                Value::Node(..) => unreachable!("there is no node"),
            });
            return Expr::from(if left < right { then } else { otherwise });
        };
        let [left, right, then, otherwise] = all.map(|expression| nodes.node_of(expression));
        nodes.expression(Node::IfLess { numbers: [left, right], then, otherwise })
    }

    /// Returns the larger of two numbers; this one if either is NaN.
    pub fn max(self, other: impl Into<Expr<'f>>) -> Self {
        let other = other.into();
        self.if_less(other, other, self)
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

/// A set of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodeSet(u64);

impl NodeSet {
    fn contains(self, node: u8) -> bool {
        self.0 >> node & 1 == 1
    }

    fn insert(&mut self, node: u8) {
        self.0 |= 1 << node;
    }

    /// Returns the nodes in ascending order, in which they can be computed.
    pub(crate) fn iter(self) -> impl Iterator<Item = u8> {
        (0..NUM_NODES_MAX as u8).filter(move |&node| self.contains(node))
    }
}

/// A recorded function of the elements of a row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Expression {
    nodes: Nodes,
    /// Row scalars: constants, reductions, and what is computed from them alone.
    row_scalars: NodeSet,
    /// The node whose value is written to the output.
    pub(crate) output: u8,
}

impl Expression {
    /// Records a function of `N` inputs. An input whose `is_given` is false is the constant 1.
    pub(crate) fn record<const N: usize>(
        is_given: [bool; N],
        function: impl for<'f> FnOnce([Expr<'f>; N]) -> Expr<'f>,
    ) -> Self {
        let list = NodeList::default();
        let mut num_given = 0;
        let inputs = is_given.map(|is_given| {
            if !is_given {
                return Expr::from(1.0);
            }
            num_given += 1;
            list.expression(Node::Input(num_given - 1))
        });
        let output = list.node_of(function(inputs));
        let nodes = list.0.into_inner();
        let mut row_scalars = NodeSet::default();
        for (index, node) in nodes.iter().enumerate() {
            let mut is_row_scalar = !matches!(node, Node::Input(_));
            node.for_each_operand(|operand| is_row_scalar &= row_scalars.contains(operand));
            if is_row_scalar || matches!(node, Node::Reduce(..)) {
                row_scalars.insert(index as u8);
            }
        }
        Expression { nodes, row_scalars, output }
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(crate) fn row_scalars(&self) -> NodeSet {
        self.row_scalars
    }

    /// Returns the nodes that must be computed for each element to compute `node` from the row scalars; none if it is one of them.
    pub(crate) fn elements_of(&self, node: u8) -> NodeSet {
        let (mut needed, mut elements) = (NodeSet::default(), NodeSet::default());
        needed.insert(node);
        for index in (0..=node).rev() {
            if needed.contains(index) && !self.row_scalars.contains(index) {
                elements.insert(index);
                self.nodes[usize::from(index)].for_each_operand(|operand| needed.insert(operand));
            }
        }
        elements
    }

    /// Returns whether elements are computed separately.
    pub(crate) fn is_elementwise(&self) -> bool {
        !self.nodes.iter().any(|node| matches!(node, Node::Reduce(..)))
    }

    /// Returns the constants, in the order of their nodes.
    pub(crate) fn constants(&self) -> impl Iterator<Item = f32> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Constant(value) => Some(*value),
            _ => None,
        })
    }
}

/// How an input's elements relate to rows and columns: the distance between its elements in neighboring rows, and in neighboring columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InputLayout {
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}
