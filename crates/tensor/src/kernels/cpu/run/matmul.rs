use super::Cpu;
use crate::kernels::call::MatmulCall;
use crate::kernels::cpu::matmul::{Epilogue, MatmulSizes, Matrix, fp8_scratch_words};
use crate::kernels::{Operand, OperandMut};
use crate::shape::Shape;
use trireme_base::DType;

impl Cpu {
    pub(super) fn run_matmul(&self, call: MatmulCall) {
        let MatmulCall::Matmul {
            left,
            right,
            bias,
            residual,
            mut out,
            scratch,
            precision,
            fp8,
            transposed,
            accumulate,
        } = call;
        let inner = if transposed[0] { left.shape().rows() } else { left.shape().cols() };
        let size = MatmulSizes { rows: out.shape().rows(), cols: out.shape().cols(), inner };
        let mut scratch = scratch.as_operand();
        let mut factors = [left, right];
        for (factor, scaling) in factors.iter_mut().zip(fp8.iter().flatten()) {
            let (values, rest) = split_fp8_scratch(scratch, factor.shape());
            let mut rounded = OperandMut::new(values);
            let reciprocal = scaling.reciprocal.f32s(self)[0];
            self.dequantize_fp8(factor.bytes(self), reciprocal, scaling.format, rounded.elements(self));
            (*factor, scratch) = (values, rest);
        }
        let matrix = |index: usize| {
            let factor = factors[index];
            Matrix::row_major(factor.floats(self), factor.shape().cols(), transposed[index])
        };
        let [bias, residual] = [bias, residual].map(|operand| self.optional_f32s(operand));
        let epilogue = Epilogue { accumulate, bias, residual };
        let factors = (matrix(0), matrix(1));
        let mut scratch = OperandMut::new(scratch);
        self.matmul(precision, size, factors, out.floats(self), epilogue, scratch.u32s(self));
    }
}

/// Splits scratch memory into the bf16 values of an fp8 operand, and the rest.
fn split_fp8_scratch(scratch: Operand, shape: Shape) -> (Operand, Operand) {
    let num_bytes = fp8_scratch_words(shape.num_elements()) * size_of::<u32>();
    let rest_bytes = scratch.num_bytes() - num_bytes;
    let rest = (Shape::from([rest_bytes / size_of::<u32>()]), DType::U32);
    let values = scratch.part(0..shape.num_elements() * DType::Bf16.size(), (shape, DType::Bf16));
    (values, scratch.part(num_bytes..scratch.num_bytes(), rest))
}
