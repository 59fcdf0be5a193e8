use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use crate::view::View;
use trireme_base::DType;

/// The router z-loss: the mean square of the log-sum-exp of router logits (`[.., num_experts]`, f32), which keeps logits small (Zoph et
/// al., "ST-MoE", 2022, section 3.3). An optional second input holds weights of the rows (`[..]`, f32); padding has weight 0. It has no
/// output: use it for [auxiliary losses](crate::tape::Recorder::apply_auxiliary_loss).
#[derive(Debug)]
pub struct RouterZLoss;

/// The mean entropy, in nats, of scores (`[.., num_experts]`, f32, not negative), normalized to sum 1. An optional second input holds
/// weights of the rows (`[..]`, f32). It has no gradient: use it for [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct RouterEntropy;

fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + logits.iter().map(|logit| (logit - max).exp()).sum::<f32>().ln()
}

/// Returns the weights of rows. Without an input for them, returns an empty view, for which [`weight_of`] is 1.
pub(super) fn row_weights(input: Option<View<'_>>) -> View<'_> {
    input.unwrap_or_else(|| View::from_f32s(&[], [0].into()))
}

pub(super) fn weight_of(weights: &[f32], row: usize) -> f32 {
    weights.get(row).copied().unwrap_or(1.0)
}

/// Adds the mean over rows of `value`, weighted if there is a second input.
fn add_mean(
    cx: &mut ForwardContext<'_>,
    operations: usize,
    value: impl Fn(&[f32]) -> f32 + Send + Sync + 'static,
) -> Result<()> {
    let shape = cx.input(0).shape();
    let (rows, cols) = (shape.rows(), shape.cols());
    let mut values = cx.empty([rows, 1], DType::F32)?;
    let inputs = [cx.input(0), row_weights((cx.num_inputs() > 1).then(|| cx.input(1)))];
    cx.device().for_each_row(inputs, values.view_mut(), operations * cols, move |[x, weights], row, out| {
        out[0] = weight_of(weights, row) * value(&x[row * cols..(row + 1) * cols]);
    });
    cx.add_sum_to_loss(values.view(), 1.0, rows)
}

impl Operation for RouterZLoss {
    declares! { inputs: 1..=2, reads_inputs: INPUT_HALF, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        add_mean(cx, trireme_base::Cost::EXP + 3, |logits| log_sum_exp(logits).powi(2))
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let shape = cx.input_shape(0);
        let (scale, cols) = (2.0 * cx.loss_grad_factor() / shape.rows() as f32, shape.cols());
        let mut grad = cx.empty(shape, DType::F32)?;
        let operations = 2 * trireme_base::Cost::EXP + 5;
        let inputs = [cx.input(0), row_weights((cx.num_inputs() > 1).then(|| cx.input(1)))];
        cx.device().for_each_row(inputs, grad.view_mut(), operations, move |[logits, weights], row, grad| {
            let logits = &logits[row * cols..(row + 1) * cols];
            let log_sum = log_sum_exp(logits);
            let scale = scale * weight_of(weights, row) * log_sum;
            let of = |logit: &f32| scale * (logit - log_sum).exp();
            grad.iter_mut().zip(logits).for_each(|(grad, logit)| *grad = of(logit));
        });
        cx.add_grad(0, grad)
    }
}

impl Operation for RouterEntropy {
    declares! { inputs: 1..=2, has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        add_mean(cx, trireme_base::Cost::EXP + 4, |scores| {
            let sum: f32 = scores.iter().sum();
            let term = |part: f32| if part > 0.0 { -part * part.ln() } else { 0.0 };
            scores.iter().map(|score| term(score / sum)).sum()
        })
    }
}
