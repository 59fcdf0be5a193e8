use super::linear::{WeightLayout, weight_grad};
use crate::device::{MatmulEpilogue, Result, Transposition};
use crate::parameter_table::ParameterSpan;
use crate::precision::Precision;
use crate::tape::{BackwardContext, ForwardContext, GradSink, Operation, declares, write_grad};
use trireme_base::DType;

/// Computes router logits `x W^T` for `x` (`[.., inputs]`, of any float dtype) as `[.., num_experts]` in f32. The matmul is f32 at every
/// precision, because a small difference may change the choice of experts (Fedus et al., "Switch transformers", 2021, section 2.4). Weights
/// are rounded to the precision, so that they are the same on every layout.
///
/// Cost: `2 rows inputs num_experts` floating-point operations forward, and twice as many backward.
#[derive(Debug, Clone, Copy)]
pub struct Router {
    /// `[num_experts, inputs]`.
    pub weight: ParameterSpan,
}

impl Operation for Router {
    declares! { has_parameters, reads_inputs: WEIGHT_HALF, accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (x, weight) = (cx.input(0), cx.parameter_in_f32(&self.weight)?);
        let mut logits = cx.empty(x.shape().with_cols(self.weight.shape.rows()), DType::F32)?;
        let (left, right) = ((x, Transposition::No), (weight.view(), Transposition::Yes));
        cx.device().matmul(Precision::F32, left, right, logits.view_mut(), MatmulEpilogue::Overwrite)?;
        drop(weight);
        cx.output(logits);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        if !cx.requires_grad(0) {
            return Ok(());
        }
        let weight = cx.parameter_in_f32(&self.weight)?;
        let mut dx = cx.empty(cx.input_shape(0), cx.input_dtype(0))?;
        let (left, right) = ((cx.grad(), Transposition::No), (weight.view(), Transposition::No));
        cx.device().matmul(Precision::F32, left, right, dx.view_mut(), MatmulEpilogue::Overwrite)?;
        drop(weight);
        cx.add_grad(0, dx)
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        write_grad(sink, &self.weight, |out, accumulate| {
            let (layout, dy) = (WeightLayout::OutputsFirst, cx.grad());
            weight_grad(cx.device(), Precision::F32, layout, cx.input(0).into(), dy.into(), out, accumulate)
        })
    }
}
