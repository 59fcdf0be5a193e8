use super::super::Cuda;
use crate::kernels::call::ElementwiseCall;
use crate::kernels::cpu::dropout::threshold_and_scale;
use trireme_base::Traffic;

/// Size of `StreamVector` in `sources/elementwise.cu`.
const STREAM_VECTOR_BYTES: usize = 16;

impl Cuda {
    pub(super) fn run_elementwise(&self, call: &ElementwiseCall) {
        match call {
            ElementwiseCall::Zero { x } => self.fill(x, 0),
            ElementwiseCall::Convert { x, y } => {
                let launch = self.kernel("convert", &[x.dtype(), y.dtype()]);
                launch.arg(x).arg(y).over_elements(x.shape());
            }
            ElementwiseCall::RoundStochastically { x, seed, position, y } => {
                let launch = self.kernel("round_stochastically", &[]);
                launch.arg(x).arg(seed).arg(position).arg(y).changing().over_elements(x.shape());
            }
            ElementwiseCall::Stream { memory, traffic } => {
                let Traffic { updated, read, written } = *traffic;
                let [updated, read, written] =
                    [updated, read, written].map(|bytes| bytes / STREAM_VECTOR_BYTES);
                let num = updated.max(read).max(written);
                self.kernel("stream", &[])
                    .arg(memory)
                    .arg([updated, read, written])
                    .over_elements([num].into());
            }
            ElementwiseCall::Copy { x, y } => self.copy_on_device(*x, y),
            ElementwiseCall::Activate { x, y, activation } => {
                let launch = self.kernel("activate", &[x.dtype()]);
                launch.arg(activation).arg(x).arg(y).over_elements(x.shape());
            }
            ElementwiseCall::ActivateBackward { x, dy, activation } => {
                let launch = self.kernel("activate_backward", &[x.dtype()]);
                launch.arg(activation).arg(x).arg(dy).over_elements(x.shape());
            }
            ElementwiseCall::Gate { gate_up, y, activation } => {
                let launch = self.kernel("gate", &[y.dtype()]).arg(activation).arg(gate_up).arg(y);
                launch.arg(y.shape().cols()).over_elements(y.shape());
            }
            ElementwiseCall::GateBackward { gate_up, dy, activation } => {
                let launch = self.kernel("gate_backward", &[dy.dtype()]).arg(activation).arg(gate_up).arg(dy);
                launch.arg(dy.shape().cols()).over_elements(dy.shape());
            }
            ElementwiseCall::Dropout { x, key, words, rate } => {
                let (threshold, scale) = threshold_and_scale(*rate);
                let launch = self.kernel("dropout", &[x.dtype()]).arg(x).arg(key);
                let launch = launch.arg(words.first).arg(words.len.max(1)).arg(words.stride);
                launch.arg(threshold).arg(scale).over_elements(x.shape());
            }
            ElementwiseCall::AddAssign { out, term } => {
                let launch = self.kernel("add_assign", &[out.dtype()]);
                launch.arg(out).arg(term).over_elements(out.shape());
            }
            ElementwiseCall::AddBias { x, bias, residual, y } => {
                self.add_bias(*x, *bias, *residual, y);
            }
        }
    }
}
