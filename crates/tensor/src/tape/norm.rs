use super::{Backward, Node, Tape, Var};
use crate::device::DeviceError;
use crate::kernels::cpu::norm::NormKind;
use crate::parameters::{ParameterSource, ParameterSpan};
use crate::tensor::Tensor;

/// A normalisation of rows.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// One weight a column.
    pub weight: ParameterSpan,
    /// One bias a column.
    pub bias: Option<ParameterSpan>,
    /// Added to the variance or mean square.
    pub epsilon: f32,
    /// Layer normalisation, which subtracts the mean; else RMS normalisation.
    pub centred: bool,
}

impl Norm {
    fn kind(&self) -> NormKind {
        NormKind { epsilon: self.epsilon, centred: self.centred }
    }
}

#[derive(Debug)]
pub(super) struct NormNode {
    op: Norm,
    x: Var,
    y: Var,
    statistics: Tensor,
}

impl Tape {
    /// Normalises each row of `x` (`[rows, cols]`, f32); the result is in the tape's precision.
    pub fn norm(&mut self, parameters: &dyn ParameterSource, op: &Norm, x: Var) -> Result<Var, DeviceError> {
        let input = self.values.get(x);
        let shape = input.shape();
        let mut y = self.device.activation_of(shape, self.precision.dtype())?;
        let mut statistics = self.device.activation([shape.rows(), 2])?;
        let (weight, bias) = (parameters.span(&op.weight), op.bias.map(|bias| parameters.span(&bias)));
        self.device.norm(input, weight, bias, op.kind(), y.view_mut(), statistics.view_mut());
        let y = self.input(y);
        self.record(|| Node::Norm(NormNode { op: *op, x, y, statistics }));
        Ok(y)
    }
}

impl NormNode {
    pub(super) fn backward(self, cx: &mut Backward<'_>) -> Result<Var, DeviceError> {
        let dy = cx.take_grad(self.y);
        self.backward_input(cx, &dy)?;
        self.backward_weight(cx, &dy)?;
        Ok(self.y)
    }

    fn backward_input(&self, cx: &mut Backward<'_>, dy: &Tensor) -> Result<(), DeviceError> {
        // The residual stream has left its gradient here already: add to it in the same pass.
        let (mut dx, accumulate) = match cx.grads[self.x.0].take() {
            Some(sum) => (sum, true),
            None => (cx.device.activation(dy.shape())?, false),
        };
        let weight = cx.parameters.span(&self.op.weight);
        let rows = (cx.values.get(self.x), weight, self.statistics.view());
        cx.device.norm_backward_input(rows, self.op.kind(), dy.view(), dx.view_mut(), accumulate);
        cx.grads[self.x.0] = Some(dx);
        Ok(())
    }

    fn backward_weight(&self, cx: &mut Backward<'_>, dy: &Tensor) -> Result<(), DeviceError> {
        if let Some(bias) = self.op.bias {
            cx.write_grad(&bias, |device, _, out, accumulate| {
                device.column_sums(dy.view(), out, accumulate);
                Ok(())
            })?;
        }
        cx.write_grad(&self.op.weight, |device, values, out, accumulate| {
            let x = values.get(self.x);
            device.norm_backward_weight(x, dy.view(), self.statistics.view(), out, accumulate);
            Ok(())
        })
    }
}
