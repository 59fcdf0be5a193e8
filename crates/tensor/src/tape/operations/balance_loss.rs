use crate::device::DeviceError;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, OperationContext, ReadBy, has_no_gradient};
use crate::tensor::{Tensor, View};
use std::ops::RangeInclusive;
use trireme_base::{DType, ExchangeKind};

/// How unevenly tokens go to experts: `num_experts * sum over e of f_e P_e`, where `f_e` is the part of all choices that expert `e` has, and `P_e` the mean of its part of
/// the scores of a token (Fedus et al., "Switch transformers", 2021, section 2.2, for more than one choice); 1 if all have as many. Of scores (`[..,
/// num_experts]`, f32, not negative) and the experts that were chosen (`[.., num_choices]`, u32), over all tokens of a microbatch. It is for
/// [auxiliary losses](crate::tape::Recorder::apply_auxiliary_loss): it has no output.
///
/// Ranks of the context axis add up their loads: `4 num_experts` bytes each, forward.
#[derive(Debug)]
pub struct BalanceLoss;

/// Added to sums of scores, which may all be 0.
const NO_SCORE: f32 = 1e-20;

/// The largest part of the choices that an expert has, relative to an even one: of the experts that were chosen (u32). It has no gradient: it is for
/// [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct PeakLoad {
    /// Number of experts.
    pub num_experts: usize,
}

/// How often each expert was chosen, less the even part, on all ranks of the context axis.
fn excess_loads(cx: &OperationContext<'_>, ids: View<'_>, num_experts: usize) -> Result<Tensor, DeviceError> {
    let mut loads = cx.empty([num_experts], DType::F32)?;
    cx.device().excess_loads(ids, loads.view_mut(), false);
    let Some(axis) = cx.context() else { return Ok(loads) };
    for ops in [&axis.ring, &axis.heads].into_iter().flatten() {
        let mut sum = cx.empty([num_experts], DType::F32)?;
        ops.exchange(cx.device(), ExchangeKind::AllReduce, loads.view(), sum.view_mut())?;
        loads = sum;
    }
    Ok(loads)
}

/// The choices of all ranks of the context axis.
fn num_choices(cx: &OperationContext<'_>, ids: Shape) -> usize {
    ids.num_elements() * cx.context_place().degree()
}

impl Operation for BalanceLoss {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (shape, num_choices) = (cx.input(0).shape(), num_choices(cx, cx.input(1).shape()));
        let loads = excess_loads(cx, cx.input(1), shape.cols())?;
        let factor = shape.cols() as f32 / num_choices as f32;
        let mut values = cx.empty([shape.rows(), 1], DType::F32)?;
        let inputs = [cx.input(0), loads.view()];
        let cols = shape.cols();
        cx.device().for_each_row(inputs, values.view_mut(), 3 * cols, move |[scores, loads], row, value| {
            let scores = &scores[row * cols..(row + 1) * cols];
            let sum = scores.iter().sum::<f32>() + NO_SCORE;
            let product: f32 = scores.iter().zip(loads).map(|(score, load)| score * load).sum();
            value[0] = 1.0 + factor * product / sum;
        });
        let mut sum = cx.empty([1], DType::F64)?;
        cx.device().sum_elements(values.view(), 1.0, sum.view_mut());
        cx.save(loads);
        cx.add_loss(sum, shape.rows())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let (shape, num_choices) = (cx.input_shape(0), num_choices(cx, cx.input_shape(1)));
        let scale = cx.loss_scale() * shape.cols() as f32 / num_choices as f32 / shape.rows() as f32;
        let mut grad = cx.empty(shape, DType::F32)?;
        let inputs = [cx.input(0), cx.saved(0).expect("forward has saved the loads")];
        let cols = shape.cols();
        cx.device().for_each_row(inputs, grad.view_mut(), 6, move |[scores, loads], row, grad| {
            let scores = &scores[row * cols..(row + 1) * cols];
            let sum = scores.iter().sum::<f32>() + NO_SCORE;
            let product: f32 = scores.iter().zip(loads).map(|(score, load)| score * load).sum();
            let mean = product / sum;
            grad.iter_mut().zip(loads).for_each(|(grad, load)| *grad = scale * (load - mean) / sum);
        });
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 0 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}

impl Operation for PeakLoad {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let even = num_choices(cx, cx.input(0).shape()) as f32 / self.num_experts as f32;
        let loads = excess_loads(cx, cx.input(0), self.num_experts)?;
        let mut peak = cx.empty([1, 1], DType::F32)?;
        cx.device().for_each_row([loads.view()], peak.view_mut(), 1, move |[loads], _, peak| {
            peak[0] = 1.0 + loads.iter().copied().fold(0.0, f32::max) / even;
        });
        let mut sum = cx.empty([1], DType::F64)?;
        cx.device().sum_elements(peak.view(), 1.0, sum.view_mut());
        cx.add_loss(sum, 1)
    }

    has_no_gradient!();
}
