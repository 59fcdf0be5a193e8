use crate::device::Result;
use crate::kernels::RoutingRule;
use crate::parameter_table::ParameterSpan;
use crate::tape::{BackwardContext, ForwardContext, GradSink, Operation, ReadBy, declares, write_grad};
use trireme_base::DType;

/// Chooses the top experts of each token by their scores (`[.., num_experts]`, f32). The outputs are their weights (f32) and indices (u32),
/// `[.., num_choices]` each, in descending order. Of equal scores, the lower index comes first; NaN is never larger than a number. If
/// weights are normalized by their sum and all scores are 0, the weights are 0. An optional second input holds weights of the rows (`[..]`,
/// f32): a row of weight 0, such as padding, chooses no expert. Its weights are 0, and its indices are `num_experts`.
///
/// Cost: `num_choices` searches over each row, each of which skips the earlier choices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopK {
    /// Number of choices, groups of experts, and the weights of choices.
    pub rule: RoutingRule,
    /// Added to scores for the comparison, but not to weights: `[num_experts]`. Its gradient is no derivative: it is how often each expert
    /// was chosen, minus the mean. An optimizer that lowers the bias by the sign of this gradient balances loads (Wang et al.,
    /// "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024).
    pub bias: Option<ParameterSpan>,
}

impl TopK {
    /// Chooses the `k` largest elements of each row, with the elements as weights.
    pub fn largest(k: usize) -> Self {
        TopK { rule: RoutingRule::largest(k), bias: None }
    }
}

impl Operation for TopK {
    declares! { inputs: 1..=2, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape().with_cols(self.rule.num_choices);
        let (mut values, mut ids) = (cx.empty(shape, DType::F32)?, cx.empty(shape, DType::U32)?);
        let bias = self.bias.as_ref().map(|bias| cx.parameter_in_f32(bias)).transpose()?;
        let row_weights = (cx.num_inputs() > 1).then(|| cx.input(1));
        let bias_view = bias.as_ref().map(|bias| bias.view());
        let outputs = [values.view_mut(), ids.view_mut()];
        cx.device().top_k(cx.input(0), self.rule, bias_view, row_weights, outputs);
        drop(bias);
        cx.output(values);
        cx.output(ids);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut dx = cx.empty(cx.input_shape(0), DType::F32)?;
        let found = [cx.output(1), cx.grad()];
        cx.device().top_k_backward(cx.input(0), self.rule, found, dx.view_mut());
        cx.add_grad(0, dx)
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let Some(bias) = &self.bias else { return Ok(()) };
        write_grad(sink, bias, |out, accumulate| {
            cx.device().excess_loads(cx.output(1), out, accumulate);
            Ok(())
        })
    }

    fn has_parameters(&self) -> bool {
        self.bias.is_some()
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 0 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn reads_output(&self, output: usize) -> ReadBy {
        if output == 1 {
            ReadBy { input_half: true, weight_half: self.bias.is_some() }
        } else {
            ReadBy::NEITHER
        }
    }
}
