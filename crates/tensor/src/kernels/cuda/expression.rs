//! Source of functions of elements.

use crate::kernels::call::ExpressionCall;
use crate::kernels::expression::{Binary, Node, Program, Reduction, RowStep, Unary};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The source of a kernel, and the numbers that it is given. Constants are arguments, so that a function that differs in them alone, such
/// as a factor that changes from step to step, is not compiled again.
pub(super) struct Generated {
    pub(super) name: String,
    pub(super) source: String,
    pub(super) constants: Vec<f32>,
    /// Whether a thread computes an element. Otherwise, a block computes a row.
    pub(super) is_flat: bool,
}

/// The text of a kernel that is being written.
struct Generator<'a> {
    program: &'a Program,
    reads_output: bool,
    constants: Vec<f32>,
    is_flat: bool,
    body: String,
}

/// Writes to a string, which cannot fail.
macro_rules! emit {
    ($to:expr, $($format:tt)*) => {
        writeln!($to, $($format)*).expect("a string can be written")
    };
}

impl Generator<'_> {
    /// Writes the statement that computes a node.
    fn node(&mut self, node: usize) {
        let value = match self.program.nodes()[node] {
            // Computed for the row.
            Node::Reduce(..) => return,
            Node::Constant(value) => {
                self.constants.push(value);
                format!("constants.values[{}]", self.constants.len() - 1)
            }
            Node::Input(0) if self.reads_output => {
                let index = if self.is_flat { "col" } else { "row * out_cols + col" };
                format!("to_f32(out[{index}])")
            }
            Node::Input(input) => {
                let input = input - usize::from(self.reads_output);
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
        };
        emit!(self.body, "float v{node} = {value};");
    }

    /// Writes the statements that compute the numbers of a row.
    fn row(&mut self) {
        let program = self.program;
        for step in program.row_steps() {
            match step {
                RowStep::Number(node) => self.node(*node),
                RowStep::Reduce { node, reduction, elements } => {
                    let operation = match reduction {
                        Reduction::Sum => "Sum",
                        Reduction::Max => "Max",
                    };
                    emit!(self.body, "float v{node} = {operation}<float>::identity();");
                    emit!(self.body, "for (u64 col = threadIdx.x; col < cols; col += blockDim.x) {{");
                    elements.iter().for_each(|&element| self.node(element));
                    let last = elements[elements.len() - 1];
                    emit!(self.body, "v{node} = {operation}<float>::combine(v{node}, v{last});\n}}");
                    emit!(self.body, "v{node} = block_reduce<{operation}>(v{node});");
                }
            }
        }
    }

    /// Writes the statements that compute an element of the output.
    fn element(&mut self) {
        let program = self.program;
        let is_of_row = |node: usize| {
            program.row_steps().iter().any(
                |step| matches!(step, RowStep::Number(of) | RowStep::Reduce { node: of, .. } if *of == node),
            )
        };
        program.output().iter().filter(|&&node| !is_of_row(node)).for_each(|&node| self.node(node));
    }
}

/// Generates the kernel of a call.
pub(super) fn generate(call: &ExpressionCall) -> Generated {
    let ExpressionCall { program, reads_output, inputs, cols, output, .. } = call;
    let of_all = |input: &crate::kernels::call::FunctionInput| {
        input.layout.col_stride == 1 && input.layout.row_stride == *cols
    };
    let is_flat = program.is_elementwise() && output.shape().cols() == *cols && inputs.iter().all(of_all);
    let (constants, body) = (Vec::new(), String::new());
    let mut generator = Generator { program, reads_output: *reads_output, constants, is_flat, body };
    let out_dtype = output.dtype().name();
    let mut parameters = String::new();
    for (index, input) in inputs.iter().enumerate() {
        write!(parameters, "const {}* x{index}, ", input.operand.dtype().name()).expect("a string");
        if !is_flat {
            write!(parameters, "u64 row_stride{index}, u64 col_stride{index}, ").expect("a string");
        }
    }
    write!(parameters, "{out_dtype}* out, Constants constants, ").expect("a string");
    let last = program.output()[program.output().len() - 1];
    generator.row();
    if is_flat {
        emit!(generator.body, "FOR_EACH_ELEMENT(col, num) {{");
        generator.element();
        emit!(generator.body, "out[col] = from_f32<{out_dtype}>(v{last});\n}}");
        parameters += "u64 num";
    } else {
        emit!(generator.body, "for (u64 col = threadIdx.x; col < out_cols; col += blockDim.x) {{");
        generator.element();
        emit!(generator.body, "out[row * out_cols + col] = from_f32<{out_dtype}>(v{last});\n}}");
        // The numbers of the next row must not overtake threads that still read those of this one.
        generator.body = format!("FOR_EACH_ROW(row, rows) {{\n{}__syncthreads();\n}}\n", generator.body);
        parameters += "u64 cols, u64 out_cols, u64 rows";
    }
    let Generator { constants, body, .. } = generator;
    let num_constants = constants.len().max(1);
    let head = format!("#include \"common.cuh\"\nstruct Constants {{\nfloat values[{num_constants}];\n}};\n");
    let mut hasher = DefaultHasher::new();
    (&head, &parameters, &body).hash(&mut hasher);
    let name = format!("function_{:016x}", hasher.finish());
    let source = format!("{head}extern \"C\" __global__ void {name}({parameters}) {{\n{body}}}\n");
    Generated { name, source, constants, is_flat }
}
