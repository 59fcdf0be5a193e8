use super::{Backward, GradSink, Node, Recording, Tape, Var, Vector, write_grad};
use crate::device::{Device, DeviceError, Transpose};
use crate::fp8::{Fp8Layer, Fp8Scales, Operand};
use crate::kernels::MatmulEpilogue;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use trireme_base::DType;

/// Which dim of a stored weight is the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[inputs, outputs]`, as GPT-2 checkpoints store it.
    InputsFirst,
    /// `[outputs, inputs]`, as most others do.
    OutputsFirst,
}

/// What is applied to a linear layer's input first.
///
/// The activation belongs to the layer that reads it, not to the one that makes its argument: then only the argument is
/// saved, and backward gets the activation again in the pass that differentiates it, for one exponential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputActivation {
    /// Nothing.
    Identity,
    /// GELU, tanh approximation.
    Gelu,
    /// `silu(gate) * up` of rows `gate | up`, twice as long.
    SwiGlu,
}

/// `y = activation(x) W + bias`, plus a residual.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// The matrix.
    pub weight: ParameterSpan,
    /// How it lies in memory.
    pub layout: WeightLayout,
    /// One value an output.
    pub bias: Option<ParameterSpan>,
    /// Applied to the input first.
    pub activation: InputActivation,
}

impl Linear {
    /// Number of outputs.
    pub fn outputs(&self) -> usize {
        match self.layout {
            WeightLayout::InputsFirst => self.weight.shape.cols(),
            WeightLayout::OutputsFirst => self.weight.shape.rows(),
        }
    }

    /// How the weight is read in `x W`, and in `dy W^T`.
    fn transposes(&self) -> (Transpose, Transpose) {
        match self.layout {
            WeightLayout::InputsFirst => (Transpose::No, Transpose::Yes),
            WeightLayout::OutputsFirst => (Transpose::Yes, Transpose::No),
        }
    }

    /// How the layer works in fp8, if it does.
    fn fp8<'a>(&self, scales: Option<&'a Fp8Scales>, recording: Recording) -> Option<Fp8Layer<'a>> {
        scales?.layer(self.weight.first, recording == Recording::On)
    }
}

/// A factor of a product.
enum Factor<'a> {
    Unrounded(View<'a>),
    /// To fp8, in bf16.
    Rounded(Tensor),
}

impl Factor<'_> {
    fn view(&self) -> View<'_> {
        match self {
            Factor::Unrounded(values) => *values,
            Factor::Rounded(values) => values.view(),
        }
    }
}

/// What products read for `values`.
fn factor<'a>(
    device: &Device,
    fp8: Option<Fp8Layer<'_>>,
    operand: Operand,
    values: View<'a>,
) -> Result<Factor<'a>, DeviceError> {
    Ok(match fp8 {
        None => Factor::Unrounded(values),
        Some(layer) => Factor::Rounded(layer.quantize(device, operand, values)?),
    })
}

#[derive(Debug)]
pub(super) struct LinearNode {
    op: Linear,
    x: Var,
    residual: Option<Var>,
    y: Var,
}

impl Tape {
    /// `activation(x) W + bias + residual` for `x` of `[rows, inputs]`, in the tape's precision; `[rows, outputs]`, likewise, or f32
    /// with a residual, which is f32.
    pub fn linear(
        &mut self,
        parameters: &dyn ParameterSource,
        op: &Linear,
        x: Var,
        residual: Option<Var>,
    ) -> Result<Var, DeviceError> {
        let rows = self.values.get(x).shape().rows();
        let dtype = if residual.is_some() { DType::F32 } else { self.precision.dtype() };
        let mut y = self.device.activation_of([rows, op.outputs()], dtype)?;
        let activated = activate(&self.device, op.activation, self.values.get(x))?;
        let input = activated.as_ref().map_or(self.values.get(x), Tensor::view);
        let fp8 = op.fp8(self.fp8.as_deref(), self.recording);
        let input = factor(&self.device, fp8, Operand::Input, input)?;
        let weight = factor(&self.device, fp8, Operand::Weight, parameters.span(&op.weight))?;
        let vector = |span| Vector::new(&self.device, self.precision, parameters.span(span));
        let bias = op.bias.as_ref().map(vector).transpose()?;
        let epilogue = MatmulEpilogue::Add {
            bias: bias.as_ref().map(|bias| bias.view().f32s()),
            residual: residual.map(|residual| self.values.get(residual).f32s()),
        };
        let (left, right) = ((input.view(), Transpose::No), (weight.view(), op.transposes().0));
        self.device.matmul(self.precision, left, right, y.view_mut(), epilogue)?;
        drop(input);
        drop(activated);
        let y = self.input(y);
        self.record(|| Node::Linear(LinearNode { op: *op, x, residual, y }));
        Ok(y)
    }
}

fn activate(
    device: &Device,
    activation: InputActivation,
    x: View<'_>,
) -> Result<Option<Tensor>, DeviceError> {
    let (rows, cols) = (x.shape().rows(), x.shape().cols());
    Ok(match activation {
        InputActivation::Identity => None,
        InputActivation::Gelu => {
            let mut y = device.activation_of(x.shape(), x.dtype())?;
            device.gelu(x, y.view_mut());
            Some(y)
        }
        InputActivation::SwiGlu => {
            let mut y = device.activation_of([rows, cols / 2], x.dtype())?;
            device.swiglu(x, y.view_mut());
            Some(y)
        }
    })
}

/// The weight half of a linear layer's backward.
#[derive(Debug)]
pub(super) struct LinearWeights {
    op: Linear,
    /// What the matrix was applied to: the saved value, or what the activation made of it.
    input: SavedInput,
    dy: Tensor,
    /// The same as products read it, in fp8.
    rounded: Option<Tensor>,
}

#[derive(Debug)]
enum SavedInput {
    Value(Var),
    Activated(Tensor),
}

impl LinearNode {
    pub(super) fn backward(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<Var, DeviceError> {
        let (output, residual) = (self.y, self.residual);
        let dy = self.input_half(cx)?.run(cx, sink)?;
        if let Some(residual) = residual {
            cx.add_grad(residual, dy);
        }
        Ok(output)
    }

    pub(super) fn backward_input(self, cx: &mut Backward<'_>) -> Result<(Var, LinearWeights), DeviceError> {
        let (output, residual) = (self.y, self.residual);
        let weights = self.input_half(cx)?;
        if let Some(residual) = residual {
            cx.add_grad_copied(residual, &weights.dy)?;
        }
        Ok((output, weights))
    }

    /// Gives the gradient of `x` to it. That of a residual is the result's.
    fn input_half(self, cx: &mut Backward<'_>) -> Result<LinearWeights, DeviceError> {
        let dy = cx.take_grad(self.y);
        let fp8 = self.op.fp8(cx.fp8, Recording::On);
        let (mut d_input, rounded) = match factor(cx.device, fp8, Operand::OutputGrad, dy.view())? {
            Factor::Unrounded(dy) => (self.input_grad(cx, dy)?, None),
            Factor::Rounded(rounded) => (self.input_grad(cx, rounded.view())?, Some(rounded)),
        };
        let input = match self.op.activation {
            InputActivation::Identity => {
                cx.add_grad(self.x, d_input);
                SavedInput::Value(self.x)
            }
            InputActivation::Gelu => {
                let mut x = cx.values.take(self.x);
                cx.device.gelu_backward(x.view_mut(), d_input.view_mut());
                cx.add_grad(self.x, d_input);
                SavedInput::Activated(x)
            }
            InputActivation::SwiGlu => {
                let mut x = cx.values.take(self.x);
                cx.device.swiglu_backward(x.view_mut(), d_input.view_mut());
                cx.add_grad(self.x, x);
                SavedInput::Activated(d_input)
            }
        };
        Ok(LinearWeights { op: self.op, input, dy, rounded })
    }

    /// Gradient of what the matrix is applied to.
    fn input_grad(&self, cx: &Backward<'_>, dy: View<'_>) -> Result<Tensor, DeviceError> {
        let rows = dy.shape().rows();
        let inputs = self.op.weight.shape.num_elements() / self.op.outputs();
        let mut dx = cx.device.activation_of([rows, inputs], cx.precision.dtype())?;
        let fp8 = self.op.fp8(cx.fp8, Recording::On);
        let weight = factor(cx.device, fp8, Operand::Weight, cx.parameters.span(&self.op.weight))?;
        let (left, right) = ((dy, Transpose::No), (weight.view(), self.op.transposes().1));
        cx.device.matmul(cx.precision, left, right, dx.view_mut(), MatmulEpilogue::Overwrite)?;
        Ok(dx)
    }
}

impl LinearWeights {
    /// The value of the tape that it reads, if it is one.
    pub(super) fn x(&self) -> Option<Var> {
        match self.input {
            SavedInput::Value(x) => Some(x),
            SavedInput::Activated(_) => None,
        }
    }

    /// Gives the gradient of the result back.
    pub(super) fn run(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<Tensor, DeviceError> {
        let LinearWeights { op, input, dy, rounded } = self;
        let fp8 = op.fp8(cx.fp8, Recording::On);
        write_grad(sink, &op.weight, |out, accumulate| {
            let input = match &input {
                SavedInput::Value(x) => cx.values.get(*x),
                SavedInput::Activated(input) => input.view(),
            };
            // Rounded again rather than kept: its scale is still that of the step.
            let input = factor(cx.device, fp8, Operand::Input, input)?;
            let dy = rounded.as_ref().unwrap_or(&dy).view();
            weight_grad(cx.device, cx.precision, op.layout, input.view(), dy, out, accumulate)
        })?;
        if let Some(bias) = op.bias {
            write_grad(sink, &bias, |out, accumulate| {
                cx.device.column_sums(dy.view(), out, accumulate);
                Ok(())
            })?;
        }
        Ok(dy)
    }
}

/// `input^T dy` in the weight's layout, written or added.
pub(super) fn weight_grad(
    device: &Device,
    precision: Precision,
    layout: WeightLayout,
    input: View<'_>,
    dy: View<'_>,
    out: ViewMut<'_>,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let epilogue = if accumulate { MatmulEpilogue::Accumulate } else { MatmulEpilogue::Overwrite };
    let (left, right) = match layout {
        WeightLayout::InputsFirst => (input, dy),
        WeightLayout::OutputsFirst => (dy, input),
    };
    debug_assert_eq!(out.shape(), Shape::from([left.shape().cols(), right.shape().cols()]));
    device.matmul(precision, (left, Transpose::Yes), (right, Transpose::No), out, epilogue)
}

#[cfg(test)]
mod tests;
