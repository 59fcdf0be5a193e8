use crate::device::DeviceError;
use crate::parameter_table::ParameterSpan;
use crate::tape::{BackwardContext, ForwardContext, GradSink, Operation, ReadBy, add_to_grad};
use trireme_base::DType;

/// Rows of a table by token id, plus rows of a second table by position: of ids (`[batch, seq_len]`, u32), as `[batch, seq_len, cols]`,
/// f32. Positions begin at the tape's first position.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// `[vocabulary, cols]`.
    pub tokens: ParameterSpan,
    /// `[positions, cols]`.
    pub positions: Option<ParameterSpan>,
}

impl Operation for Embedding {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let ids = cx.input(0);
        let (batch, seq_len) = (ids.shape().rows(), ids.shape().cols());
        let mut y = cx.empty([batch, seq_len, self.tokens.shape.cols()], DType::F32)?;
        let tables = (cx.parameter(&self.tokens), self.positions.map(|positions| cx.parameter(&positions)));
        let first = (seq_len, cx.first_position());
        cx.device().embedding(cx.precision(), ids, tables.0, tables.1, first, y.view_mut());
        cx.output(y);
        Ok(())
    }

    /// Tokens have no gradient.
    fn backward_input(&self, _: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn backward_weight(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        add_to_grad(cx.device(), sink, &self.tokens, |out| {
            cx.device().embedding_backward(cx.input(0), cx.grad(), out)
        })?;
        if let Some(positions) = &self.positions {
            let seq_len = cx.input(0).shape().cols();
            add_to_grad(cx.device(), sink, positions, |out| {
                cx.device().position_backward(cx.grad(), seq_len, out)
            })?;
        }
        Ok(())
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::WEIGHT_HALF
    }
}
