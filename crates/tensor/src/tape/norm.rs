use super::{Backward, GradSink, Node, Tape, Values, Var, Vector, write_grad};
use crate::device::{Device, DeviceError};
use crate::kernels::cpu::norm::NormKind;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::tensor::{Tensor, View, ViewMut};

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

    fn apply(
        &self,
        device: &Device,
        precision: Precision,
        parameters: &dyn ParameterSource,
        x: View<'_>,
        statistics: ViewMut<'_>,
    ) -> Result<Tensor, DeviceError> {
        let mut y = device.activation_of(x.shape(), precision.dtype())?;
        let vector = |span| Vector::new(device, precision, parameters.span(span));
        let (weight, bias) = (vector(&self.weight)?, self.bias.as_ref().map(vector).transpose()?);
        let (weight, bias) = (weight.view(), bias.as_ref().map(Vector::view));
        device.norm(x, weight, bias, self.kind(), y.view_mut(), statistics);
        Ok(y)
    }
}

#[derive(Debug)]
pub(super) struct NormNode {
    op: Norm,
    x: Var,
    y: Var,
    pub(super) statistics: Tensor,
}

impl Tape {
    /// Normalises each row of `x` (`[rows, cols]`, f32); the result is in the tape's precision.
    pub fn norm(&mut self, parameters: &dyn ParameterSource, op: &Norm, x: Var) -> Result<Var, DeviceError> {
        let input = self.values.get(x);
        let mut statistics = self.device.activation([input.shape().rows(), 2])?;
        let y = op.apply(&self.device, self.precision, parameters, input, statistics.view_mut())?;
        let y = self.input(y);
        self.record(|| Node::Norm(NormNode { op: *op, x, y, statistics }));
        Ok(y)
    }
}

impl NormNode {
    /// Gives the result back.
    pub(super) fn give_back(&self, values: &mut Values) {
        values.0[self.y.0] = None;
    }

    /// Makes the result again if it was given back.
    pub(super) fn recompute(
        &mut self,
        device: &Device,
        precision: Precision,
        parameters: &dyn ParameterSource,
        values: &mut Values,
    ) -> Result<(), DeviceError> {
        if values.0[self.y.0].is_none() {
            let statistics = self.statistics.view_mut();
            values.0[self.y.0] =
                Some(self.op.apply(device, precision, parameters, values.get(self.x), statistics)?);
        }
        Ok(())
    }

    pub(super) fn backward(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<Var, DeviceError> {
        let (output, weights) = self.backward_input(cx)?;
        weights.run(cx, sink)?;
        Ok(output)
    }

    pub(super) fn backward_input(self, cx: &mut Backward<'_>) -> Result<(Var, NormWeights), DeviceError> {
        let dy = cx.take_grad(self.y);
        // The residual stream has left its gradient here already: add to it in the same pass.
        let (mut dx, accumulate) = match cx.grads[self.x.0].take() {
            Some(sum) => (sum, true),
            None => (cx.device.activation(dy.shape())?, false),
        };
        let weight = Vector::new(cx.device, cx.precision, cx.parameters.span(&self.op.weight))?;
        let rows = (cx.values.get(self.x), weight.view(), self.statistics.view());
        cx.device.norm_backward_input(rows, self.op.kind(), dy.view(), dx.view_mut(), accumulate);
        cx.grads[self.x.0] = Some(dx);
        Ok((self.y, NormWeights { node: self, dy }))
    }
}

/// The weight half of a normalisation's backward.
#[derive(Debug)]
pub(super) struct NormWeights {
    node: NormNode,
    dy: Tensor,
}

impl NormWeights {
    pub(super) fn x(&self) -> Var {
        self.node.x
    }

    pub(super) fn run(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        let NormWeights { node, dy } = self;
        if let Some(bias) = node.op.bias {
            write_grad(sink, &bias, |out, accumulate| {
                cx.device.column_sums(dy.view(), out, accumulate);
                Ok(())
            })?;
        }
        write_grad(sink, &node.op.weight, |out, accumulate| {
            let (x, statistics) = (cx.values.get(node.x), node.statistics.view());
            cx.device.norm_backward_weight(x, dy.view(), statistics, out, accumulate);
            Ok(())
        })
    }
}
