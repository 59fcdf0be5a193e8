use crate::device::{Expr, Result, RowInput};
use crate::tape::{BackwardContext, ForwardContext, Operation, OperationContext, ReadBy, declares};
use crate::tensor::Tensor;
use crate::view::View;
use trireme_base::{DType, ExchangeKind};

/// The load-balancing loss `num_experts * sum over e of f_e P_e`, where `f_e` is the fraction of all choices that go to expert `e`, and
/// `P_e` is the mean over tokens of the expert's share of a token's scores (Fedus et al., "Switch transformers", 2021, section 2.2,
/// generalized to several choices). It is 1 at even loads. The inputs are scores (`[.., num_experts]`, f32, not negative) and the chosen
/// experts (`[.., num_choices]`, u32; `num_experts` means none) of all tokens of a microbatch. An optional third input holds weights of the
/// rows for the mean (`[..]`, f32). It has no output: use it for [auxiliary losses](crate::tape::Recorder::apply_auxiliary_loss).
///
/// Ranks of the context axis all-reduce their loads in forward: `4 num_experts` bytes each.
#[derive(Debug)]
pub struct BalanceLoss;

/// Added to sums of scores to avoid a division by 0.
const SCORE_EPSILON: f32 = 1e-20;

/// The maximum load of an expert relative to an even load, from the chosen experts (u32; `num_experts` means none). It has no gradient: use
/// it for [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct PeakLoad {
    /// Number of experts.
    pub num_experts: usize,
}

/// Computes the relative excess load of each expert, `load / even load - 1` (`[num_experts]`, f32), over all ranks of the context axis; 0
/// for all experts if there are no choices.
fn relative_excess(cx: &OperationContext<'_>, ids: View<'_>, num_experts: usize) -> Result<Tensor> {
    let mut loads = cx.empty([num_experts], DType::F32)?;
    cx.device().expert_loads(ids, loads.view_mut());
    if let Some(axis) = cx.context_axis() {
        for ops in [&axis.ring, &axis.heads].into_iter().flatten() {
            let mut sum = cx.empty([num_experts], DType::F32)?;
            ops.exchange(cx.device(), ExchangeKind::AllReduce, loads.view(), sum.view_mut())?;
            loads = sum;
        }
    }
    let mut excess = cx.empty([num_experts], DType::F32)?;
    let loads = loads.view().part(0, [1, num_experts].into());
    let out = excess.view_mut().into_part(0, [1, num_experts].into());
    cx.device().map_rows([RowInput::Elements(loads)], out, 3, |[load]| {
        let even = load.row_sum() / num_experts as f32;
        Expr::from(0.0).if_less(even, load / even - 1.0, 0.0)
    });
    Ok(excess)
}

/// Returns the mean of the experts' excess loads, weighted by a row's scores, and the sum of the scores.
fn mean_excess<'f>(score: Expr<'f>, excess: Expr<'f>) -> (Expr<'f>, Expr<'f>) {
    let sum = score.row_sum() + SCORE_EPSILON;
    ((score * excess).row_sum() / sum, sum)
}

impl Operation for BalanceLoss {
    declares! { inputs: 2..=3, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape();
        let excess = relative_excess(cx, cx.input(1), shape.cols())?;
        let mut values = cx.empty([shape.rows(), 1], DType::F32)?;
        let weights = (cx.num_inputs() > 2).then(|| cx.input(2));
        let inputs =
            [RowInput::Elements(cx.input(0)), RowInput::Columns(excess.view()), RowInput::Rows(weights)];
        cx.device().map_rows(inputs, values.view_mut(), 3 * shape.cols(), |[score, excess, weight]| {
            weight * (1.0 + mean_excess(score, excess).0)
        });
        cx.save(excess);
        cx.add_sum_to_loss(values.view(), 1.0, shape.rows())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let shape = cx.input_shape(0);
        let scale = cx.loss_grad_factor() / shape.rows() as f32;
        let mut grad = cx.empty(shape, DType::F32)?;
        let excess = cx.saved(0).expect("forward has saved the loads");
        let weights = (cx.num_inputs() > 2).then(|| cx.input(2));
        let inputs = [RowInput::Elements(cx.input(0)), RowInput::Columns(excess), RowInput::Rows(weights)];
        cx.device().map_rows(inputs, grad.view_mut(), 6, |[score, excess, weight]| {
            let (mean, sum) = mean_excess(score, excess);
            scale * weight / sum * (excess - mean)
        });
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::NEITHER } else { ReadBy::INPUT_HALF }
    }
}

impl Operation for PeakLoad {
    declares! { has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let excess = relative_excess(cx, cx.input(0), self.num_experts)?;
        let mut peak = cx.empty([1, 1], DType::F32)?;
        let excess = excess.view().part(0, [1, self.num_experts].into());
        cx.device().map_rows([RowInput::Elements(excess)], peak.view_mut(), 1, |[excess]| {
            1.0 + excess.row_max().max(0.0)
        });
        cx.add_sum_to_loss(peak.view(), 1.0, 1)
    }
}
