use super::input_activation::{InputActivation, activate, activation_grad};
use crate::cow_tensor::CowTensor;
use crate::declaration::{Initial, Parameter};
use crate::device::{Device, MatmulEpilogue, MatmulOperand, Result, Transposition};
use crate::fp8::{Fp8Layer, Fp8Tensor, LinearOperand};
use crate::parameter_table::{ParameterSpan, ParameterTable};
use crate::precision::Precision;
use crate::tape::axis::PendingValue;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, ReadBy, Sharding, TensorAxis, declares, write_grad,
};
use crate::tensor::Tensor;
use crate::view::ViewMut;
use trireme_base::DType;

/// The order of the dims of a stored weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    /// `[inputs, outputs]`, as in GPT-2 checkpoints.
    InputsFirst,
    /// `[outputs, inputs]`, as in most other checkpoints.
    OutputsFirst,
}

/// `y = activation(x) W + bias + residual` for `x` (`[.., inputs]`, in the tape's precision) and an optional residual (`[.., outputs]`,
/// f32). The output is `[.., outputs]`: in the tape's precision, or in f32 with a residual.
///
/// If ranks of the tensor axis shard the weight by its outputs (column-parallel), each computes its outputs of all rows of `x`, and the
/// gradient of `x` is summed over the ranks. If they shard it by its inputs (row-parallel), `y` is summed over the ranks in the tape's
/// precision, and bias and residual are added once. The exchanged value has `rows * inputs` elements in the first case and `rows * outputs`
/// in the second. Without sequence parallelism, it is all-reduced in one of the two passes; with it, it is all-gathered in one pass and
/// reduce-scattered in the other.
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// The weight matrix.
    pub weight: ParameterSpan,
    /// Order of its dims.
    pub layout: WeightLayout,
    /// One value per output.
    pub bias: Option<ParameterSpan>,
    /// Applied to the input first.
    pub activation: InputActivation,
}

/// Sharding of a layer over the ranks of the tensor axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Not sharded.
    Unsharded,
    /// Sharded by its outputs.
    ColumnParallel,
    /// Sharded by its inputs.
    RowParallel,
}

impl Linear {
    /// Declares a layer with the parameters `{name}.weight`, `[inputs, outputs]`, and `{name}.bias`, which is initialized to 0.
    pub fn new(
        table: &mut ParameterTable,
        name: &str,
        [inputs, outputs]: [usize; 2],
        weight: Initial,
        activation: InputActivation,
    ) -> Self {
        Linear {
            weight: table.add(Parameter::matrix(format!("{name}.weight"), &[inputs, outputs], weight)),
            layout: WeightLayout::InputsFirst,
            bias: Some(table.add(Parameter::vector(format!("{name}.bias"), outputs, Initial::ZEROS))),
            activation,
        }
    }

    /// Returns the number of outputs.
    pub fn outputs(&self) -> usize {
        match self.layout {
            WeightLayout::InputsFirst => self.weight.shape.cols(),
            WeightLayout::OutputsFirst => self.weight.shape.rows(),
        }
    }

    fn role(&self) -> Role {
        let outputs_dim = match self.layout {
            WeightLayout::InputsFirst => 1,
            WeightLayout::OutputsFirst => 0,
        };
        match self.weight.shard {
            None => Role::Unsharded,
            Some(part) if part.dim == outputs_dim => Role::ColumnParallel,
            Some(_) => Role::RowParallel,
        }
    }

    /// Returns the sharding to pass to `all_rows`: `input`, the input's sharding, for a column-parallel layer, which needs the rows of all
    /// ranks; otherwise `Replicated`, so that no rows are gathered.
    fn gather_sharding(&self, input: Sharding) -> Sharding {
        if self.role() == Role::ColumnParallel { input } else { Sharding::Replicated }
    }

    /// Returns the transposition of the weight in `x W` and in `dy W^T`.
    fn transposes(&self) -> (Transposition, Transposition) {
        match self.layout {
            WeightLayout::InputsFirst => (Transposition::No, Transposition::Yes),
            WeightLayout::OutputsFirst => (Transposition::Yes, Transposition::No),
        }
    }

    /// Computes the gradient of the activated input from `dy`. Starts the sum over the ranks if the layer is column-parallel.
    fn input_grad(&self, cx: &BackwardContext<'_>, dy: MatmulOperand<'_>) -> Result<PendingValue> {
        let inputs = self.weight.shape.num_elements() / self.outputs();
        let is_partial_sum = self.role() == Role::ColumnParallel;
        let (shape, dtype) = (dy.elements().shape().with_cols(inputs), cx.input_dtype(0));
        let mut dx =
            if is_partial_sum { cx.empty_partial_sum(shape, dtype)? } else { cx.empty(shape, dtype)? };
        let fp8 = cx.fp8_layer(self.weight.first);
        let weight = CowTensor::Borrowed(cx.parameter(&self.weight));
        let weight = matmul_operand(cx.device(), fp8, LinearOperand::Weight, weight)?;
        let (left, right) = ((dy, Transposition::No), (weight.view(), self.transposes().1));
        cx.device().matmul(cx.precision(), left, right, dx.view_mut(), MatmulEpilogue::Overwrite)?;
        if is_partial_sum { cx.start_sum(dx, cx.input_sharding(0)) } else { Ok(PendingValue::Ready(dx)) }
    }

    /// Runs the input half. Returns the gradient of the input if it is pending, which only happens without an activation.
    /// `is_separate_pass` is true if the weight half runs in a separate pass over the tape.
    fn input_half(
        &self,
        cx: &mut BackwardContext<'_>,
        is_separate_pass: bool,
    ) -> Result<Option<PendingValue>> {
        let fp8 = cx.fp8_layer(self.weight.first);
        let dy = self.output_grad_of_all_rows(cx, is_separate_pass)?;
        let dy = matmul_operand(cx.device(), fp8, LinearOperand::OutputGrad, dy)?;
        // With an activation, the pass also computes the activated input that the weight half reads.
        let is_needed = cx.requires_grad(0) || self.activation != InputActivation::Identity;
        let d_input = if is_needed { Some(self.input_grad(cx, dy.view())?) } else { None };
        let kept_grad = dy.into_tensors();
        let mut pending = None;
        match (self.activation, d_input) {
            (_, None) => {}
            (InputActivation::Identity, Some(PendingValue::Ready(d_input))) => cx.add_grad(0, d_input)?,
            (InputActivation::Identity, d_input) => pending = d_input,
            (activation, Some(d_input)) => {
                let d_input = cx.finish_exchange(d_input)?;
                activation_grad(cx, activation, d_input)?;
            }
        }
        kept_grad.into_iter().flatten().for_each(|tensor| cx.keep(tensor));
        if cx.num_inputs() > 1 {
            cx.pass_grad(1);
        }
        Ok(pending)
    }

    fn finish_input_half(cx: &mut BackwardContext<'_>, d_input: Option<PendingValue>) -> Result<()> {
        let Some(d_input) = d_input else { return Ok(()) };
        let d_input = cx.finish_exchange(d_input)?;
        cx.add_grad(0, d_input)
    }

    /// Runs the weight half. `rows` is a pending gather of the input's rows.
    fn weight_half(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
        rows: Option<PendingValue>,
    ) -> Result<()> {
        let fp8 = cx.fp8_layer(self.weight.first);
        let (activated, kept_grad) = self.kept_indices();
        write_grad(sink, &self.weight, |out, accumulate| {
            let activated = activated.and_then(|place| cx.kept(place));
            let input = match rows {
                Some(rows) => CowTensor::Owned(cx.finish_temporary(rows)?),
                // The input is gathered and quantized again instead of being kept. Its scale does not change within a step.
                None => {
                    let input = activated.unwrap_or_else(|| cx.input(0));
                    cx.all_rows(input, self.gather_sharding(cx.input_sharding(0)))?
                }
            };
            let input = matmul_operand(cx.device(), fp8, LinearOperand::Input, input)?;
            let kept = cx.kept(kept_grad);
            let dy = match fp8 {
                None => MatmulOperand::Values(kept.unwrap_or_else(|| cx.grad())),
                Some(fp8) => {
                    let [codes, reciprocal] = [kept, cx.kept(kept_grad + 1)];
                    let has_kept = "the input half has quantized it";
                    let [codes, reciprocal] = [codes.expect(has_kept), reciprocal.expect(has_kept)];
                    MatmulOperand::Fp8(fp8.view_of_parts(LinearOperand::OutputGrad, codes, reciprocal))
                }
            };
            weight_grad(cx.device(), cx.precision(), self.layout, input.view(), dy, out, accumulate)
        })?;
        if let Some(bias) = &self.bias {
            write_grad(sink, bias, |out, accumulate| {
                cx.device().column_sums(cx.grad(), out, accumulate);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns the output gradient of all rows, in the tape's precision if it is gathered. If `is_kept`, the result can be kept for the
    /// weight half; otherwise, it may borrow memory that later exchanges need.
    fn output_grad_of_all_rows<'a>(
        &self,
        cx: &'a BackwardContext<'_>,
        is_kept: bool,
    ) -> Result<CowTensor<'a>> {
        let (dy, dtype) = (cx.grad(), cx.precision().dtype());
        if self.role() != Role::RowParallel || cx.output_sharding() != Sharding::Rows {
            return Ok(CowTensor::Borrowed(dy));
        }
        let gather = if dy.dtype() == dtype {
            cx.start_gather(dy)?
        } else {
            let mut rounded = cx.empty(dy.shape(), dtype)?;
            cx.device().convert(dy, rounded.view_mut());
            cx.start_gather(rounded.view())?
        };
        let all = if is_kept { cx.finish_exchange(gather)? } else { cx.finish_temporary(gather)? };
        Ok(CowTensor::Owned(all))
    }

    /// Returns the indices at which the input half keeps the activated input and the gathered or quantized output gradient. A quantized
    /// gradient takes two: codes, then the reciprocal of their scale.
    fn kept_indices(&self) -> (Option<usize>, usize) {
        match self.activation {
            InputActivation::Identity => (None, 0),
            InputActivation::Elementwise(_) | InputActivation::Gated(_) => (Some(0), 1),
        }
    }
}

/// A matmul operand that may own its memory.
enum CowOperand<'a> {
    Values(CowTensor<'a>),
    Fp8(Fp8Tensor),
}

impl CowOperand<'_> {
    fn view(&self) -> MatmulOperand<'_> {
        match self {
            CowOperand::Values(values) => MatmulOperand::Values(values.view()),
            CowOperand::Fp8(quantized) => MatmulOperand::Fp8(quantized.view()),
        }
    }

    /// Returns the tensors that it owns.
    fn into_tensors(self) -> [Option<Tensor>; 2] {
        match self {
            CowOperand::Values(CowTensor::Borrowed(_)) => [None, None],
            CowOperand::Values(CowTensor::Owned(values)) => [Some(values), None],
            CowOperand::Fp8(quantized) => quantized.into_parts().map(Some),
        }
    }
}

/// Returns `values` as a matmul operand: quantized if the layer computes in fp8.
fn matmul_operand<'a>(
    device: &Device,
    fp8: Option<Fp8Layer<'_>>,
    operand: LinearOperand,
    values: CowTensor<'a>,
) -> Result<CowOperand<'a>> {
    Ok(match fp8 {
        None => CowOperand::Values(values),
        Some(layer) => CowOperand::Fp8(layer.quantize(device, operand, values.view())?),
    })
}

impl Operation for Linear {
    declares! { inputs: 1..=2, has_parameters, accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (x, device) =
            (cx.all_rows(cx.input(0), self.gather_sharding(cx.input_sharding(0)))?, cx.device());
        let residual = (cx.num_inputs() > 1).then(|| cx.input(1));
        let is_partial_sum = self.role() == Role::RowParallel;
        assert!(
            !is_partial_sum || cx.input_sharding(0) == Sharding::ByParameters,
            "{self:?} reads what was not cut"
        );
        let dtype = if residual.is_some() && !is_partial_sum { DType::F32 } else { cx.precision().dtype() };
        let shape = x.view().shape().with_cols(self.outputs());
        let mut y =
            if is_partial_sum { cx.empty_partial_sum(shape, dtype)? } else { cx.empty(shape, dtype)? };
        let input = activate(device, self.activation, x.view())?.map_or(x, CowTensor::Owned);
        let fp8 = cx.fp8_layer(self.weight.first);
        let input = matmul_operand(device, fp8, LinearOperand::Input, input)?;
        let weight = CowTensor::Borrowed(cx.parameter(&self.weight));
        let weight = matmul_operand(device, fp8, LinearOperand::Weight, weight)?;
        let bias = self.bias.as_ref().map(|bias| cx.parameter_in_f32(bias)).transpose()?;
        let bias_view = bias.as_ref().map(|bias| bias.view());
        let epilogue = if is_partial_sum {
            MatmulEpilogue::Overwrite
        } else {
            MatmulEpilogue::Add { bias: bias_view, residual }
        };
        let (left, right) = ((input.view(), Transposition::No), (weight.view(), self.transposes().0));
        device.matmul(cx.precision(), left, right, y.view_mut(), epilogue)?;
        drop((input, weight));
        if is_partial_sum {
            y = cx.finish_row_parallel(y, bias_view, residual)?;
        }
        drop(bias);
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let d_input = self.input_half(cx, true)?;
        Self::finish_input_half(cx, d_input)
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        self.weight_half(cx, sink, None)
    }

    /// Overlaps the gather of the input's rows with the computation of the input gradient (Korthikanti et al., 2022, section 4.2.2), and
    /// the exchange of the input gradient with the computation of the weight gradient.
    fn backward(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let is_read_as_it_is = self.activation == InputActivation::Identity;
        let has_part = self.gather_sharding(cx.input_sharding(0)) == Sharding::Rows;
        let rows = (is_read_as_it_is && has_part).then(|| cx.start_gather(cx.input(0))).transpose()?;
        let d_input = self.input_half(cx, false)?;
        self.weight_half(cx, sink, rows)?;
        Self::finish_input_half(cx, d_input)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 0 { self.activation.read_by() } else { ReadBy::NEITHER }
    }

    fn output_sharding(&self, axis: &TensorAxis) -> Option<Sharding> {
        match self.role() {
            Role::Unsharded => None,
            Role::ColumnParallel => Some(Sharding::ByParameters),
            Role::RowParallel => Some(axis.sharding_between_layers()),
        }
    }
}

/// Writes or adds `input^T dy` in the weight's layout.
pub(super) fn weight_grad(
    device: &Device,
    precision: Precision,
    layout: WeightLayout,
    input: MatmulOperand<'_>,
    dy: MatmulOperand<'_>,
    out: ViewMut<'_>,
    accumulate: bool,
) -> Result<()> {
    let epilogue = if accumulate { MatmulEpilogue::Accumulate } else { MatmulEpilogue::Overwrite };
    let (left, right) = match layout {
        WeightLayout::InputsFirst => (input, dy),
        WeightLayout::OutputsFirst => (dy, input),
    };
    debug_assert_eq!(out.shape(), [left.elements().shape().cols(), right.elements().shape().cols()].into());
    device.matmul(precision, (left, Transposition::Yes), (right, Transposition::No), out, epilogue)
}

#[cfg(test)]
mod tests;
