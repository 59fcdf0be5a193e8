//! Source of elementwise functions and row reductions.

use crate::kernels::call::{ExpressionCall, ExpressionInput};
use crate::kernels::expression::{Binary, Node, Reduction, Unary};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Writes a line to a string, which cannot fail.
macro_rules! emit {
    ($to:expr, $($format:tt)*) => {
        writeln!($to, $($format)*).expect("a string can be written")
    };
}

/// The text of a kernel that is being written.
struct Generator<'a> {
    call: &'a ExpressionCall,
    is_flat: bool,
    num_constants: usize,
    body: String,
}

/// Returns the name of a call's kernel. Constants are arguments, so that the name does not depend on them: a function whose factor changes
/// from step to step is compiled once.
pub(super) fn kernel_name(call: &ExpressionCall) -> String {
    let mut hasher = DefaultHasher::new();
    for node in call.expression.nodes() {
        let node = if let Node::Constant(_) = node { &Node::Constant(0.0) } else { node };
        hash_node(node, &mut hasher);
    }
    let dtypes = call.inputs.iter().map(|input| input.operand.dtype());
    dtypes.chain([call.output.dtype()]).for_each(|dtype| dtype.name().hash(&mut hasher));
    (call.expression.output, call.reads_output, call.is_flat()).hash(&mut hasher);
    format!("expression_{:016x}", hasher.finish())
}

fn hash_node(node: &Node, hasher: &mut DefaultHasher) {
    std::mem::discriminant(node).hash(hasher);
    match *node {
        Node::Input(input) => input.hash(hasher),
        Node::Constant(_) => {}
        Node::Unary(operation, x) => (operation, x).hash(hasher),
        Node::Binary(operation, left, right) => (operation, left, right).hash(hasher),
        Node::IfLess { numbers, then, otherwise } => (numbers, then, otherwise).hash(hasher),
        Node::Reduce(reduction, x) => (reduction, x).hash(hasher),
    }
}

/// Returns the source of a call's kernel.
pub(super) fn generate(call: &ExpressionCall) -> String {
    let is_flat = call.is_flat();
    let mut generator = Generator { call, is_flat, num_constants: 0, body: String::new() };
    let out_dtype = call.output.dtype().name();
    let output = call.expression.output;
    generator.row_scalars();
    let parameters = generator.parameters();
    if is_flat {
        emit!(generator.body, "FOR_EACH_ELEMENT(col, num) {{");
        generator.elements_of(output);
        emit!(generator.body, "out[col] = from_f32<{out_dtype}>(v{output});\n}}");
    } else {
        emit!(generator.body, "for (u64 col = threadIdx.x; col < out_cols; col += blockDim.x) {{");
        generator.elements_of(output);
        emit!(generator.body, "out[row * out_cols + col] = from_f32<{out_dtype}>(v{output});\n}}");
        generator.body = format!("FOR_EACH_ROW(row, rows) {{\n{}__syncthreads();\n}}\n", generator.body);
    }
    let (name, body, num_constants) = (kernel_name(call), &generator.body, generator.num_constants.max(1));
    format!(
        "#include \"common.cuh\"\nstruct Constants {{\nfloat values[{num_constants}];\n}};\n\
         extern \"C\" __global__ void {name}({parameters}) {{\n{body}}}\n"
    )
}

impl Generator<'_> {
    fn parameters(&self) -> String {
        let of_input = |(index, input): (usize, &ExpressionInput)| {
            let strides = if self.is_flat {
                String::new()
            } else {
                format!("u64 row_stride{index}, u64 col_stride{index}, ")
            };
            format!("const {}* x{index}, {strides}", input.operand.dtype().name())
        };
        let inputs: String = self.call.inputs.iter().enumerate().map(of_input).collect();
        let counts = if self.is_flat { "u64 num" } else { "u64 cols, u64 out_cols, u64 rows" };
        format!("{inputs}{}* out, Constants constants, {counts}", self.call.output.dtype().name())
    }

    /// Writes the statement that computes a node.
    fn node(&mut self, node: u8) {
        let value = match self.call.expression.nodes()[usize::from(node)] {
            Node::Constant(_) => {
                self.num_constants += 1;
                format!("constants.values[{}]", self.num_constants - 1)
            }
            Node::Input(0) if self.call.reads_output => {
                let index = if self.is_flat { "col" } else { "row * out_cols + col" };
                format!("to_f32(out[{index}])")
            }
            Node::Input(input) => {
                let input = input - u8::from(self.call.reads_output);
                if self.is_flat {
                    format!("to_f32(x{input}[col])")
                } else {
                    format!("to_f32(x{input}[row * row_stride{input} + col * col_stride{input}])")
                }
            }
            Node::Unary(operation, x) => match operation {
                Unary::Neg => format!("-v{x}"),
                Unary::Exp => format!("expf(v{x})"),
                Unary::Ln => format!("logf(v{x})"),
                Unary::Ln1p => format!("log1pf(v{x})"),
                Unary::Sqrt => format!("sqrtf(v{x})"),
                Unary::Sigmoid => format!("sigmoid(v{x})"),
                Unary::Tanh => format!("tanhf(v{x})"),
            },
            Node::Binary(operation, left, right) => {
                let operator = match operation {
                    Binary::Add => '+',
                    Binary::Sub => '-',
                    Binary::Mul => '*',
                    Binary::Div => '/',
                };
                format!("v{left} {operator} v{right}")
            }
            Node::IfLess { numbers: [left, right], then, otherwise } => {
                format!("v{left} < v{right} ? v{then} : v{otherwise}")
            }
            Node::Reduce(reduction, x) => return self.reduction(node, reduction, x),
        };
        emit!(self.body, "float v{node} = {value};");
    }

    /// Writes a loop over the row.
    fn reduction(&mut self, node: u8, reduction: Reduction, x: u8) {
        let operation = match reduction {
            Reduction::Sum => "Sum",
            Reduction::Max => "Max",
        };
        emit!(self.body, "float v{node} = {operation}<float>::identity();");
        emit!(self.body, "for (u64 col = threadIdx.x; col < cols; col += blockDim.x) {{");
        self.elements_of(x);
        emit!(self.body, "v{node} = {operation}<float>::combine(v{node}, v{x});\n}}");
        emit!(self.body, "v{node} = block_reduce<{operation}>(v{node});");
    }

    fn row_scalars(&mut self) {
        self.call.expression.row_scalars().iter().for_each(|node| self.node(node));
    }

    /// Writes the statements that compute a node for an element.
    fn elements_of(&mut self, node: u8) {
        self.call.expression.elements_of(node).iter().for_each(|node| self.node(node));
    }
}
