use crate::device::{Expr, Result, RowInput};
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use trireme_base::{Cost, DType};

/// The router z-loss: the mean square of the log-sum-exp of router logits (`[.., num_experts]`, f32), which keeps logits small (Zoph et
/// al., "ST-MoE", 2022, section 3.3). An optional second input holds weights of the rows (`[..]`, f32); padding has weight 0. It has no
/// output: use it for [auxiliary losses](crate::tape::Recorder::apply_auxiliary_loss).
#[derive(Debug)]
pub struct RouterZLoss;

/// The mean entropy, in nats, of scores (`[.., num_experts]`, f32, not negative), normalized to sum 1. An optional second input holds
/// weights of the rows (`[..]`, f32). It has no gradient: use it for [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct RouterEntropy;

/// Returns the logarithm of the sum of exponentials of the row.
fn log_sum_exp(logit: Expr<'_>) -> Expr<'_> {
    let max = logit.row_max();
    max + (logit - max).exp().row_sum().ln()
}

/// Adds the mean over rows of `value`, weighted if there is a second input.
fn add_mean(
    cx: &mut ForwardContext<'_>,
    operations: usize,
    value: impl for<'f> FnOnce(Expr<'f>) -> Expr<'f>,
) -> Result<()> {
    let shape = cx.input(0).shape();
    let (rows, cols) = (shape.rows(), shape.cols());
    let mut values = cx.empty([rows, 1], DType::F32)?;
    let weights = (cx.num_inputs() > 1).then(|| cx.input(1));
    let inputs = [RowInput::Elements(cx.input(0)), RowInput::Rows(weights)];
    cx.device().map_rows(inputs, values.view_mut(), operations * cols, |[x, weight]| weight * value(x));
    cx.add_sum_to_loss(values.view(), 1.0, rows)
}

impl Operation for RouterZLoss {
    declares! { inputs: 1..=2, reads_inputs: INPUT_HALF, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        add_mean(cx, Cost::EXP + 3, |logit| {
            let log_sum = log_sum_exp(logit);
            log_sum * log_sum
        })
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let shape = cx.input_shape(0);
        let scale = 2.0 * cx.loss_grad_factor() / shape.rows() as f32;
        let mut grad = cx.empty(shape, DType::F32)?;
        let weights = (cx.num_inputs() > 1).then(|| cx.input(1));
        let inputs = [RowInput::Elements(cx.input(0)), RowInput::Rows(weights)];
        cx.device().map_rows(inputs, grad.view_mut(), 2 * Cost::EXP + 5, |[logit, weight]| {
            let log_sum = log_sum_exp(logit);
            scale * weight * log_sum * (logit - log_sum).exp()
        });
        cx.add_grad(0, grad)
    }
}

impl Operation for RouterEntropy {
    declares! { inputs: 1..=2, has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        add_mean(cx, Cost::EXP + 4, |score| {
            let part = score / score.row_sum();
            Expr::from(0.0).if_less(part, -part * part.ln(), 0.0).row_sum()
        })
    }
}
