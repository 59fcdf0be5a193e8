use super::input_activation::{InputActivation, activate, activation_grad};
use crate::cow_tensor::CowTensor;
use crate::device::{Result, RowGroups, Transposition};
use crate::fp8::LinearOperand;
use crate::parameter_table::ParameterSpan;
use crate::shape::Shape;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, OperationContext, ReadBy, declares, write_grad,
};
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};

/// Linear layers of groups of rows, such as experts on the tokens routed to them: `y[i] = W[g] f(x[i])`, where `g` is the group of row `i`.
/// The inputs are `x` (`[.., inputs]`), whose rows are ordered by group, and the first row of each group (`[num_groups + 1]`, u32; the last
/// number is the end of the last group). Groups may be empty. Rows after the last group give zeros. An optional third input
/// (`[num_groups * parts + 1]`, u32) splits each group into `parts` parts: it holds the first row of each part and the end of the last one.
/// The weight gradient is then the sum of the gradients of the parts, in the order of a reduction over that many ranks.
///
/// Cost: `2 rows inputs outputs` floating-point operations forward and twice as many backward, without padding. A group has the same bits
/// as a separate layer.
#[derive(Debug, Clone, Copy)]
pub struct GroupedLinear {
    /// The matrices, `[outputs, inputs]` each, stacked vertically.
    pub weight: ParameterSpan,
    /// Number of groups.
    pub num_groups: usize,
    /// Applied to the input first.
    pub activation: InputActivation,
}

/// Groups of rows and their matrices.
#[derive(Debug, Clone, Copy)]
pub(super) struct GroupMatrices<'a> {
    /// The first row of each group, and the end of the last one.
    pub(super) starts: View<'a>,
    /// The matrices of the groups, stacked vertically.
    pub(super) weight: View<'a>,
}

impl GroupedLinear {
    /// Returns the number of outputs of a group.
    ///
    /// # Panics
    /// If the rows of the weight are not divisible by the number of groups.
    pub fn outputs(&self) -> usize {
        let (rows, num_groups) = (self.weight.shape.rows(), self.num_groups);
        assert!(rows.is_multiple_of(num_groups), "{num_groups} groups of {rows} outputs");
        self.weight.shape.rows() / self.num_groups
    }

    /// Returns the shape of the stacked matrices of `num_groups` groups.
    pub(super) fn shape_of(&self, num_groups: usize) -> Shape {
        [num_groups * self.outputs(), self.weight.shape.cols()].into()
    }

    pub(super) fn matrix_len(&self) -> usize {
        self.shape_of(1).num_elements()
    }

    /// Computes the outputs of `groups`.
    pub(super) fn product(
        &self,
        cx: &OperationContext<'_>,
        groups: GroupMatrices<'_>,
        x: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        let activated = activate(cx.device(), self.activation, x)?;
        let input = activated.as_ref().map_or(x, Tensor::view);
        self.multiply(cx, groups, input, LinearOperand::Input, Transposition::Yes, y)
    }

    /// Computes the gradient of the activated input of [`product`](GroupedLinear::product) from the gradient of the outputs.
    pub(super) fn input_grad(
        &self,
        cx: &OperationContext<'_>,
        groups: GroupMatrices<'_>,
        dy: View<'_>,
        d_activated: ViewMut<'_>,
    ) -> Result<()> {
        self.multiply(cx, groups, dy, LinearOperand::OutputGrad, Transposition::No, d_activated)
    }

    /// Multiplies `rows`, which are the matmul operand `operand`, by the matrices of their groups.
    fn multiply(
        &self,
        cx: &OperationContext<'_>,
        groups: GroupMatrices<'_>,
        rows: View<'_>,
        operand: LinearOperand,
        transpose: Transposition,
        out: ViewMut<'_>,
    ) -> Result<()> {
        let (device, GroupMatrices { starts, weight }) = (cx.device(), groups);
        let rows = self.operand(cx, operand, rows)?;
        let weight = self.operand(cx, LinearOperand::Weight, weight)?;
        device.grouped_matmul(cx.precision(), starts, rows.view(), (weight.view(), transpose), out)
    }

    /// Returns a matmul operand, rounded to fp8 if the layer computes in it. Kernels of groups multiply the values in bf16 on all devices.
    fn operand<'a>(
        &self,
        cx: &OperationContext<'_>,
        operand: LinearOperand,
        values: View<'a>,
    ) -> Result<CowTensor<'a>> {
        Ok(match cx.fp8_layer(self.weight.first) {
            None => CowTensor::Borrowed(values),
            Some(layer) => CowTensor::Owned(layer.round(cx.device(), operand, values)?),
        })
    }

    /// Writes or adds the gradients of the matrices of `groups` to `out`, from the gradient `dy` of the outputs and the activated input.
    pub(super) fn weight_grad(
        &self,
        cx: &OperationContext<'_>,
        groups: RowGroups<'_>,
        dy: View<'_>,
        input: View<'_>,
        out: ViewMut<'_>,
        accumulate: bool,
    ) -> Result<()> {
        // The operands are quantized again instead of being kept. Their scales do not change within a step.
        let input = self.operand(cx, LinearOperand::Input, input)?;
        let dy = self.operand(cx, LinearOperand::OutputGrad, dy)?;
        cx.device().grouped_transposed_matmul(
            cx.precision(),
            groups,
            dy.view(),
            input.view(),
            out,
            accumulate,
        )
    }
}

impl Operation for GroupedLinear {
    declares! { inputs: 2..=3, has_parameters, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (x, starts) = (cx.input(0), cx.input(1));
        let mut y = cx.empty(x.shape().with_cols(self.outputs()), cx.precision().dtype())?;
        let groups = GroupMatrices { starts, weight: cx.parameter(&self.weight) };
        self.product(cx, groups, x, y.view_mut())?;
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        if !cx.requires_grad(0) && self.activation == InputActivation::Identity {
            return Ok(());
        }
        let inputs = self.weight.shape.cols();
        let mut d_activated = cx.empty(cx.grad().shape().with_cols(inputs), cx.input_dtype(0))?;
        let groups = GroupMatrices { starts: cx.input(1), weight: cx.parameter(&self.weight) };
        self.input_grad(cx, groups, cx.grad(), d_activated.view_mut())?;
        activation_grad(cx, self.activation, d_activated)
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        write_grad(sink, &self.weight, |out, accumulate| {
            let input = match self.activation {
                InputActivation::Identity => cx.input(0),
                _ => cx.kept(0).expect("the input half has kept it"),
            };
            let starts = cx.input(cx.num_inputs() - 1);
            let groups = RowGroups { starts, num_groups: self.num_groups };
            self.weight_grad(cx, groups, cx.grad(), input, out, accumulate)
        })
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        match input {
            0 => self.activation.read_by(),
            1 => ReadBy::BOTH,
            _ => ReadBy::WEIGHT_HALF,
        }
    }
}
