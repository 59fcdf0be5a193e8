use super::attention::RotaryTable;
use crate::device::Result;
use crate::kernels::LatentHeadShape;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use std::sync::Arc;

/// Assembles the heads of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1) for
/// [`Attention`](crate::tape::Attention): `[batch, seq_len, qkv_cols]`. The inputs, of one dtype, are queries (`[batch, seq_len,
/// num_heads * (nope_dim + rotary_dim)]`), the per-head parts of keys and values (`[batch, seq_len, num_heads * (nope_dim +
/// value_dim)]`), and the part of keys that all heads share (`[batch, seq_len, rotary_dim]`). The rotary parts are rotated.
///
/// Cost: one pass over memory in forward and in backward.
#[derive(Debug, Clone)]
pub struct LatentHeads {
    /// Sizes of heads.
    pub shape: LatentHeadShape,
    /// The table that rotates heads of `rotary_dim`. It must cover every position.
    pub rotary: Arc<RotaryTable>,
}

impl Operation for LatentHeads {
    declares! { inputs: 3..=3, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let inputs = [cx.input(0), cx.input(1), cx.input(2)];
        let (shape, dtype) = (inputs[0].shape(), inputs[0].dtype());
        for (input, cols) in
            inputs.iter().zip([self.shape.query_cols(), self.shape.kv_cols(), self.shape.rotary_dim])
        {
            assert_eq!((input.shape(), input.dtype()), (shape.with_cols(cols), dtype), "{self:?}");
        }
        let mut qkv = cx.empty(shape.with_cols(self.shape.qkv_cols()), dtype)?;
        let rotary = self.rotary.at(cx.positions(shape.dims()[1]));
        cx.device().latent_heads(self.shape, inputs, rotary, qkv.view_mut());
        cx.output(qkv);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let dtype = cx.input_dtype(0);
        let grad = |input| cx.empty(cx.input_shape(input), dtype);
        let (mut d_queries, mut d_keys_values, mut d_shared) = (grad(0)?, grad(1)?, grad(2)?);
        let rotary = self.rotary.at(cx.positions(cx.input_shape(0).dims()[1]));
        let grads = [d_queries.view_mut(), d_keys_values.view_mut(), d_shared.view_mut()];
        cx.device().latent_heads_backward(self.shape, cx.grad(), rotary, grads);
        for (input, grad) in [d_queries, d_keys_values, d_shared].into_iter().enumerate() {
            cx.add_grad(input, grad)?;
        }
        Ok(())
    }
}
