use super::Cpu;
use crate::kernels::Operand;
use crate::kernels::call::MatmulCall;
use crate::kernels::cpu::matmul::{Epilogue, MatmulSizes, Matrix};

impl Cpu {
    pub(super) fn run_matmul(&self, call: MatmulCall) {
        let MatmulCall::Matmul {
            left,
            right,
            bias,
            residual,
            mut out,
            mut scratch,
            precision,
            transposed,
            accumulate,
        } = call;
        let inner = if transposed[0] { left.shape().rows() } else { left.shape().cols() };
        let size = MatmulSizes { rows: out.shape().rows(), cols: out.shape().cols(), inner };
        let matrix = |factor: Operand, is_transposed| {
            Matrix::row_major(factor.floats(self), factor.shape().cols(), is_transposed)
        };
        let factors = (matrix(left, transposed[0]), matrix(right, transposed[1]));
        let [bias, residual] = [bias, residual].map(|operand| self.optional_f32s(operand));
        let epilogue = Epilogue { accumulate, bias, residual };
        self.matmul(precision, size, factors, out.floats(self), epilogue, scratch.u32s(self));
    }
}
