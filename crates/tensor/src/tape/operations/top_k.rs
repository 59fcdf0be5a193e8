use crate::device::Result;
use crate::kernels::RoutingRule;
use crate::parameter_table::ParameterSpan;
use crate::tape::{BackwardContext, ForwardContext, GradSink, Operation, ReadBy, declares, write_grad};
use trireme_base::DType;

/// The experts that are chosen for each token by their scores (`[.., num_experts]`, f32): their weights (f32), and which they are (u32), two
/// outputs of `[.., num_choices]`, from the largest on. Of equal scores the first comes first; NaN counts as no larger than any number. Weights that are divided by their
/// sum are 0 if all are. A second input weighs the rows (`[..]`, f32): a row of weight 0, such as padding, is given to no expert. Its weights are 0, and its ids are
/// `num_experts`.
///
/// Cost: `num_choices` searches of each row, which pass over what was found before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopK {
    /// How many, of which groups, and what their weights are.
    pub rule: RoutingRule,
    /// Added to scores where they are compared, but not to weights: `[num_experts]`. Its gradient is no derivative, but how often each expert was
    /// chosen, less the even part: an optimizer that lowers it by the sign of that balances loads (Wang et al., "Auxiliary-loss-free load balancing
    /// strategy for mixture-of-experts", 2024).
    pub bias: Option<ParameterSpan>,
}

impl TopK {
    /// The `k` largest elements of each row as they are.
    pub fn largest(k: usize) -> Self {
        TopK { rule: RoutingRule::largest(k), bias: None }
    }
}

impl Operation for TopK {
    declares! { inputs: 1..=2, takes_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape().with_cols(self.rule.num_choices);
        let (mut values, mut ids) = (cx.empty(shape, DType::F32)?, cx.empty(shape, DType::U32)?);
        let bias = self.bias.as_ref().map(|bias| cx.parameter_in_f32(bias)).transpose()?;
        let row_weights = (cx.num_inputs() > 1).then(|| cx.input(1));
        let by = (self.rule, bias.as_ref().map(|bias| bias.view()), row_weights);
        cx.device().top_k(cx.input(0), by, [values.view_mut(), ids.view_mut()]);
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
