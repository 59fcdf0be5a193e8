use crate::device::Result;
use crate::kernels::Bags;
use crate::parameter_table::ParameterSpan;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, Sharding, TensorAxis, add_to_grad, declares,
};
use crate::tensor::Tensor;
use trireme_base::DType;

/// Looks up rows of a token table, plus rows of an optional position table. The input is ids (`[batch, seq_len]`, u32), the output is
/// `[batch, seq_len, cols]`, f32. On a context axis, a rank looks up the positions that it holds; otherwise, positions are consecutive and
/// begin at the tape's first position.
///
/// Ranks of the tensor axis may shard the rows of the token table. Each rank then looks up the ids of its shard, and the results are summed
/// over the ranks.
#[derive(Debug, Clone, Copy)]
pub struct Embedding {
    /// `[vocabulary, cols]`.
    pub tokens: ParameterSpan,
    /// `[positions, cols]`.
    pub positions: Option<ParameterSpan>,
}

impl Embedding {
    /// Looks up rows of a vocabulary-parallel table. The sum over the ranks is exact in any precision, because only one of the partial sums
    /// is not zero.
    fn forward_vocabulary_parallel(&self, cx: &ForwardContext<'_>) -> Result<Tensor> {
        let (ids, device) = (cx.input(0), cx.device());
        let (seq_len, cols) = (ids.shape().cols(), self.tokens.shape.cols());
        let mut rows = cx.empty([ids.shape().rows(), seq_len, cols], DType::F32)?;
        let bags = Bags::of_single_ids(ids).with_shard(self.tokens.shard);
        device.embedding_bag(cx.precision(), bags, cx.parameter(&self.tokens), rows.view_mut());
        let mut term = rows;
        if cx.precision().dtype() != DType::F32 {
            let mut rounded = cx.empty_partial_sum(term.shape(), cx.precision().dtype())?;
            device.convert(term.view(), rounded.view_mut());
            term = rounded;
        }
        let sum = cx.finish_temporary(cx.start_sum(term, cx.output_sharding())?)?;
        let mut y = cx.empty(sum.shape(), DType::F32)?;
        device.convert(sum.view(), y.view_mut());
        drop(sum);
        let Some(positions) = &self.positions else { return Ok(y) };
        let positions = cx.parameter_in_f32(positions)?;
        let first_row = if cx.output_sharding() == Sharding::Rows { y.shape().rows() } else { 0 };
        let first_row = first_row * cx.tensor_axis().map_or(0, |axis| axis.axis_rank().rank);
        let at = cx.positions(seq_len);
        let mut sum = cx.empty(y.shape(), DType::F32)?;
        device.add_positions(y.view(), positions.view(), first_row, at, sum.view_mut());
        Ok(sum)
    }
}

impl Operation for Embedding {
    declares! { has_parameters, reads_inputs: WEIGHT_HALF, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        if self.tokens.shard.is_some() {
            let y = self.forward_vocabulary_parallel(cx)?;
            cx.output(y);
            return Ok(());
        }
        let ids = cx.input(0);
        let (batch, seq_len) = (ids.shape().rows(), ids.shape().cols());
        let mut y = cx.empty([batch, seq_len, self.tokens.shape.cols()], DType::F32)?;
        let tables = (cx.parameter(&self.tokens), self.positions.map(|positions| cx.parameter(&positions)));
        let at = cx.positions(seq_len);
        cx.device().embedding(cx.precision(), ids, tables.0, tables.1, at, y.view_mut());
        cx.output(y);
        Ok(())
    }

    /// Tokens have no gradient.
    fn backward_input(&self, _: &mut BackwardContext<'_>) -> Result<()> {
        Ok(())
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let dy = cx.all_rows(cx.grad(), cx.output_sharding())?;
        let bags = Bags::of_single_ids(cx.input(0)).with_shard(self.tokens.shard);
        add_to_grad(cx.device(), sink, &self.tokens, |out| {
            cx.device().embedding_bag_backward(bags, dy.view(), out)
        })?;
        if let Some(positions) = &self.positions {
            let at = cx.positions(cx.input(0).shape().cols());
            add_to_grad(cx.device(), sink, positions, |out| {
                cx.device().position_backward(dy.view(), at, out)
            })?;
        }
        Ok(())
    }

    fn output_sharding(&self, axis: &TensorAxis) -> Option<Sharding> {
        self.tokens.shard.map(|_| axis.sharding_between_layers())
    }

    /// Backward computes the gradients of all rows on every rank.
    fn makes_partial_grads(&self, _: Sharding) -> bool {
        false
    }
}
