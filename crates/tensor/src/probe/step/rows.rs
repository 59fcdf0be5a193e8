//! Kernels that go over rows or elements and multiply no matrices.

use super::Step;
use crate::device::DeviceError;
use crate::kernels::cpu::norm::NormKind;
use crate::kernels::{Activation, AttentionShape, IntegerFormat};
use crate::probe::StepSizes;
use crate::tensor::Tensor;
use std::time::Instant;
use trireme_base::{Category, DType, Positions};

impl Step<'_> {
    pub(super) fn norms(&mut self) -> Result<(), DeviceError> {
        let (rows, hidden) = (self.rows(), self.sizes.hidden);
        let (device, calls) = (&self.probe.device, (2 * self.sizes.num_layers + 1) as f64);
        let kind = NormKind { epsilon: 1e-5, centred: !self.sizes.is_llama };
        let (x, mut dx, mut y) =
            (self.tensor([rows, hidden])?, self.tensor([rows, hidden])?, self.activation([rows, hidden])?);
        let (weight, mut d_weight) = (self.tensor([hidden])?, self.tensor([hidden])?);
        let bias = (!self.sizes.is_llama).then(|| weight.view());
        let mut statistics = self.tensor([rows, 2])?;
        let shape = [rows, hidden];
        self.kernel(("norm: forward", calls), &shape, |_| {
            device.norm(x.view(), weight.view(), bias, kind, y.view_mut(), statistics.view_mut());
        })?;
        self.kernel(("norm: input gradient", calls), &shape, |_| {
            let saved = (x.view(), weight.view(), statistics.view());
            device.norm_backward_input(saved, kind, y.view(), dx.view_mut(), true);
        })?;
        self.kernel(("norm: weight gradient", calls), &shape, |_| {
            let (saved, out) = (statistics.view(), d_weight.view_mut());
            device.norm_backward_weight(x.view(), y.view(), saved, out, false);
        })
    }

    pub(super) fn activations(&mut self) -> Result<(), DeviceError> {
        let (rows, cols) = (self.rows(), self.sizes.intermediate);
        let (device, calls) = (&self.probe.device, self.sizes.num_layers as f64);
        let shape = [rows, cols];
        let arguments = if self.sizes.is_llama { 2 * cols } else { cols };
        let (x, mut dx) = (self.activation([rows, arguments])?, self.activation([rows, arguments])?);
        let (dy, mut y) = (self.activation([rows, cols])?, self.activation([rows, cols])?);
        // Backward works in place: every run gets what the first one got.
        let refill = |dx: &mut Tensor, y: &mut Tensor| {
            device.copy(x.view(), dx.view_mut());
            device.copy(dy.view(), y.view_mut());
        };
        if self.sizes.is_llama {
            self.kernel(("swiglu: forward", calls), &shape, |_| {
                device.gate(Activation::Silu, x.view(), y.view_mut());
            })?;
            self.kernel(("swiglu: backward", calls), &shape, |start| {
                refill(&mut dx, &mut y);
                *start = Instant::now();
                device.gate_backward(Activation::Silu, dx.view_mut(), y.view_mut());
            })
        } else {
            self.kernel(("gelu: forward", calls), &shape, |_| {
                device.activate(Activation::Gelu, x.view(), y.view_mut());
            })?;
            self.kernel(("gelu: backward", calls), &shape, |start| {
                refill(&mut dx, &mut y);
                *start = Instant::now();
                device.activate_backward(Activation::Gelu, dx.view_mut(), y.view_mut());
            })
        }
    }

    /// Gradients of biases.
    pub(super) fn column_sums(&mut self) -> Result<(), DeviceError> {
        let StepSizes { attention, hidden, num_layers, intermediate, .. } = *self.sizes;
        let (device, rows) = (&self.probe.device, self.rows());
        let (attention_calls, mlp_calls) = (
            num_layers * usize::from(self.sizes.attention_bias),
            num_layers * usize::from(self.sizes.mlp_bias),
        );
        let norm_calls = if self.sizes.is_llama { 0 } else { 2 * num_layers + 1 };
        let mlp_cols = if self.sizes.is_llama { 2 * intermediate } else { intermediate };
        for (name, cols, dtype, calls) in [
            ("column sums: qkv", attention.qkv_cols(), self.dtype(), attention_calls),
            ("column sums: mlp in", mlp_cols, self.dtype(), mlp_calls),
            ("column sums: residual", hidden, DType::F32, attention_calls + mlp_calls),
            ("column sums: norm", hidden, self.dtype(), norm_calls),
        ] {
            if calls == 0 {
                continue;
            }
            let (x, mut sums) = (self.probe.random([rows, cols], dtype)?, self.tensor([cols])?);
            self.kernel((name, calls as f64), &[rows, cols], |_| {
                device.column_sums(x.view(), sums.view_mut(), false);
            })?;
        }
        Ok(())
    }

    pub(super) fn embedding(&mut self) -> Result<(), DeviceError> {
        let StepSizes { hidden, vocabulary, is_llama, attention: AttentionShape { seq_len, .. }, .. } =
            *self.sizes;
        let (device, rows, precision) = (&self.probe.device, self.rows(), self.precision);
        let mut ids = device.zeros([rows].into(), DType::U32, Category::Activations)?;
        // Spread over the table, as those of a text are.
        let spread = |index: usize| (index.wrapping_mul(0x9e37_79b1) % vocabulary) as u32;
        device.upload(&(0..rows).map(spread).collect::<Vec<u32>>(), ids.view_mut());
        let mut table = self.tensor([vocabulary, hidden])?;
        let (mut positions, mut x) = (self.tensor([seq_len, hidden])?, self.tensor([rows, hidden])?);
        let shape = [rows, hidden];
        let (learned, at) = (!is_llama, Positions::run(0, seq_len));
        self.kernel(("embedding: forward", 1.0), &shape, |_| {
            let positions = learned.then(|| positions.view());
            device.embedding(precision, ids.view(), table.view(), positions, at, x.view_mut());
        })?;
        self.kernel(("embedding: table gradient", 1.0), &shape, |_| {
            device.embedding_backward(ids.view(), x.view(), table.view_mut());
        })?;
        if learned {
            self.kernel(("embedding: position gradient", 1.0), &shape, |_| {
                device.position_backward(x.view(), at, positions.view_mut());
            })?;
        }
        Ok(())
    }

    /// What goes over all parameters, for those of a block and those of the token embedding.
    pub(super) fn whole_buffers(&mut self) -> Result<(), DeviceError> {
        let StepSizes { attention, hidden, num_layers, intermediate, vocabulary, is_llama, is_tied, .. } =
            *self.sizes;
        let mlp = (if is_llama { 3 } else { 2 }) * intermediate;
        let block = hidden * (attention.qkv_cols() + attention.output_cols() + mlp);
        let tables = if is_tied { 1 } else { 2 };
        for (part, num, calls) in [("block", block, num_layers), ("embedding", vocabulary * hidden, tables)] {
            self.optimizers(part, num, calls as f64)?;
        }
        let (wide, mut narrow) = (self.tensor([block])?, self.probe.random([block], DType::Bf16)?);
        self.kernel(("convert: f32 to bf16", 0.0), &[block], |_| {
            self.probe.device.convert(wide.view(), narrow.view_mut());
        })?;
        self.integers(&wide, &mut narrow)
    }

    /// Rounding to integers for messages, and back.
    fn integers(&mut self, wide: &Tensor, narrow: &mut Tensor) -> Result<(), DeviceError> {
        let (device, num) = (&self.probe.device, wide.shape().num_elements());
        for (format, name) in [(IntegerFormat::Int8, "int8"), (IntegerFormat::Int4, "int4")] {
            let num_bytes = format.num_bytes(num);
            let mut message = device.empty([num_bytes].into(), DType::U8, Category::Communication)?;
            let to = (&format!("quantize: f32 to {name}")[..], 0.0);
            self.kernel(to, &[num], |_| {
                device.quantize(wide.view(), format, message.view_mut());
            })?;
            let from = (&format!("dequantize: {name} to bf16")[..], 0.0);
            self.kernel(from, &[num], |_| {
                device.dequantize(message.view(), format, narrow.view_mut());
            })?;
        }
        Ok(())
    }
}
