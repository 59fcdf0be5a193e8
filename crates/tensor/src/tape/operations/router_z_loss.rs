use crate::device::DeviceError;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, has_no_gradient};
use trireme_base::DType;

/// The mean square of the logarithm of the sum of exponentials of a router's logits (`[.., num_experts]`, f32): it keeps them small (Zoph et al., "ST-MoE", 2022, section
/// 3.3). It is for [auxiliary losses](crate::tape::Recorder::apply_auxiliary_loss): it has no output.
#[derive(Debug)]
pub struct RouterZLoss;

/// The mean entropy, in nats, of scores (`[.., num_experts]`, f32, not negative) as parts of their sum. It has no gradient: it is for
/// [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct RouterEntropy;

fn log_sum(logits: &[f32]) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + logits.iter().map(|logit| (logit - max).exp()).sum::<f32>().ln()
}

/// Adds the mean over rows of what `value` makes of the elements of each.
fn add_mean(
    cx: &mut ForwardContext<'_>,
    operations: usize,
    value: impl Fn(&[f32]) -> f32 + Send + Sync + 'static,
) -> Result<(), DeviceError> {
    let shape = cx.input(0).shape();
    let (rows, cols) = (shape.rows(), shape.cols());
    let mut values = cx.empty([rows, 1], DType::F32)?;
    cx.device().for_each_row([cx.input(0)], values.view_mut(), operations * cols, move |[x], row, out| {
        out[0] = value(&x[row * cols..(row + 1) * cols]);
    });
    let mut sum = cx.empty([1], DType::F64)?;
    cx.device().sum_elements(values.view(), 1.0, sum.view_mut());
    cx.add_loss(sum, rows)
}

impl Operation for RouterZLoss {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        add_mean(cx, trireme_base::Cost::EXP + 3, |logits| log_sum(logits).powi(2))
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let shape = cx.input_shape(0);
        let (scale, cols) = (2.0 * cx.loss_scale() / shape.rows() as f32, shape.cols());
        let mut grad = cx.empty(shape, DType::F32)?;
        let operations = 2 * trireme_base::Cost::EXP + 5;
        cx.device().for_each_row([cx.input(0)], grad.view_mut(), operations, move |[logits], row, grad| {
            let logits = &logits[row * cols..(row + 1) * cols];
            let log_sum = log_sum(logits);
            let of = |logit: &f32| scale * log_sum * (logit - log_sum).exp();
            grad.iter_mut().zip(logits).for_each(|(grad, logit)| *grad = of(logit));
        });
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::INPUT_HALF
    }

    fn takes_positions(&self) -> bool {
        true
    }
}

impl Operation for RouterEntropy {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        add_mean(cx, trireme_base::Cost::EXP + 4, |scores| {
            let sum: f32 = scores.iter().sum();
            let term = |part: f32| if part > 0.0 { -part * part.ln() } else { 0.0 };
            scores.iter().map(|score| term(score / sum)).sum()
        })
    }

    has_no_gradient!();
}
