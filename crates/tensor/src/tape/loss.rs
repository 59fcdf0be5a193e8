use super::linear::weight_grad;
use super::{Backward, Node, Recording, Tape, Var, WeightLayout};
use crate::device::{Device, DeviceError, Transpose};
use crate::kernels::MatmulEpilogue;
use crate::parameters::{ParameterSpan, Parameters};
use crate::tensor::{Tensor, View};

/// Bytes of logits held at once; part of the result's bits, for the weight's gradient is summed chunk by chunk.
const LOGITS_BYTES_MAX: usize = 64 << 20;

/// The output layer with the cross-entropy: `loss = -log softmax(x W^T)[target]`.
#[derive(Debug, Clone, Copy)]
pub struct LossHead {
    /// `[vocabulary, cols]`; may belong to another unit (tied to the embedding).
    pub weight: ParameterSpan,
}

impl LossHead {
    /// Rows whose logits are held at once.
    fn chunk_rows(&self, rows: usize) -> usize {
        let row_bytes = self.weight.shape.rows() * size_of::<f32>();
        (LOGITS_BYTES_MAX / row_bytes).max(16).min(rows)
    }
}

#[derive(Debug)]
pub(super) struct LossNode {
    op: LossHead,
    x: Var,
    targets: Var,
    loss_scale: f32,
}

impl Tape {
    /// The loss of predicting `targets` (u32, one a row) from `x` (`[rows, cols]`, f32).
    ///
    /// A recording tape computes nothing yet: backward makes each chunk's logits once, and takes loss and
    /// gradients from them. Without recording the loss is there at once ([`Tape::loss_sum`]). Memory: one chunk of
    /// logits, at most 64 MiB or 16 rows.
    ///
    /// Every gradient of the backward pass that starts here is multiplied by `loss_scale`; the loss itself is not.
    pub fn loss(
        &mut self,
        parameters: &Parameters,
        op: &LossHead,
        x: Var,
        targets: Var,
        loss_scale: f32,
    ) -> Result<(), DeviceError> {
        if self.recording == Recording::On {
            self.nodes.push(Node::Loss(LossNode { op: *op, x, targets, loss_scale }));
            return Ok(());
        }
        let (x, targets) = (self.values.get(x), self.values.get(targets));
        let targets = targets.part(0, [x.shape().rows()].into());
        let mut sum = 0.0;
        for_each_chunk(&self.device, op, parameters, x, |first, mut logits| {
            let targets = targets.part(first, [logits.shape().rows()].into());
            sum += losses(&self.device, &mut logits, targets, None)?;
            Ok(())
        })?;
        self.loss_sum = Some(sum);
        Ok(())
    }

    /// Logits of every row: `[rows, vocabulary]`. For generation and tests; training never holds them all.
    pub fn logits(&mut self, parameters: &Parameters, op: &LossHead, x: Var) -> Result<Var, DeviceError> {
        let x = self.values.get(x);
        let mut logits = self.device.activation([x.shape().rows(), op.weight.shape.rows()])?;
        let weight = (parameters.span(&op.weight), Transpose::Yes);
        self.device.matmul((x, Transpose::No), weight, logits.view_mut(), MatmulEpilogue::Overwrite)?;
        Ok(self.input(logits))
    }
}

fn for_each_chunk(
    device: &Device,
    op: &LossHead,
    parameters: &Parameters,
    x: View<'_>,
    mut visit: impl FnMut(usize, Tensor) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let rows = x.shape().rows();
    let chunk = op.chunk_rows(rows);
    for first in (0..rows).step_by(chunk.max(1)) {
        let num_rows = chunk.min(rows - first);
        let mut logits = device.activation([num_rows, op.weight.shape.rows()])?;
        let weight = (parameters.span(&op.weight), Transpose::Yes);
        device.matmul(
            (x.rows(first, num_rows), Transpose::No),
            weight,
            logits.view_mut(),
            MatmulEpilogue::Overwrite,
        )?;
        visit(first, logits)?;
    }
    Ok(())
}

/// Sum of the rows' losses; with a scale the logits become their gradient.
fn losses(
    device: &Device,
    logits: &mut Tensor,
    targets: View<'_>,
    gradient_scale: Option<f32>,
) -> Result<f64, DeviceError> {
    let mut losses = device.activation([logits.shape().rows()])?;
    device.cross_entropy(logits.view_mut(), targets, losses.view_mut(), gradient_scale);
    Ok(losses.view().f32s().iter().map(|&loss| f64::from(loss)).sum())
}

impl LossNode {
    /// Gradients of the mean loss over the rows, times the loss scale; returns the sum of the losses.
    pub(super) fn backward(self, cx: &mut Backward<'_>) -> Result<f64, DeviceError> {
        let (x, targets) = (cx.values.get(self.x), cx.values.get(self.targets));
        let rows = x.shape().rows();
        let scale = self.loss_scale / rows as f32;
        let mut dx = cx.device.activation(x.shape())?;
        let mut sum = 0.0;
        let target = cx.sink.target(&self.op.weight)?;
        let (mut d_weight, mut accumulate) = (target.view, target.accumulate);
        for_each_chunk(cx.device, &self.op, cx.parameters, x, |first, mut logits| {
            let num_rows = logits.shape().rows();
            let targets = targets.part(first, [num_rows].into());
            sum += losses(cx.device, &mut logits, targets, Some(scale))?;
            let weight = (cx.parameters.span(&self.op.weight), Transpose::No);
            let out = &mut dx.view_mut();
            let logits = logits.view();
            cx.device.matmul(
                (logits, Transpose::No),
                weight,
                out.rows(first, num_rows),
                MatmulEpilogue::Overwrite,
            )?;
            let input = x.rows(first, num_rows);
            let out = d_weight.reborrow();
            weight_grad(cx.device, WeightLayout::OutputsFirst, input, logits, out, accumulate)?;
            accumulate = true;
            Ok(())
        })?;
        cx.sink.grad_ready(&self.op.weight);
        cx.add_grad(self.x, dx);
        Ok(sum)
    }
}
