use crate::device::Result;
use crate::kernels::Bags;
use crate::parameter_table::ParameterSpan;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, Sharding, TensorAxis, add_to_grad, declares,
};
use crate::view::View;
use std::ops::RangeInclusive;
use trireme_base::DType;

/// Sums or averages rows of a table over each bag of ids (`[batch, bag]`, u32). The output is `[batch, cols]`, f32.
///
/// Ranks of the tensor axis may shard the rows of the table. They then sum their results.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingBag {
    /// `[num_rows, cols]`.
    pub table: ParameterSpan,
    /// Whether to divide by the number of ids. The mean of an empty bag is 0.
    pub is_mean: bool,
    /// Whether there is a second input, `[batch]` in u32: the number of ids of each bag that are not padding.
    pub is_padded: bool,
}

impl EmbeddingBag {
    fn bags<'a>(&self, ids: View<'a>, lens: Option<View<'a>>) -> Bags<View<'a>> {
        let bag_len = ids.shape().cols();
        Bags { ids, bag_len, lens, is_mean: self.is_mean, shard: None }.with_shard(self.table.shard)
    }
}

impl Operation for EmbeddingBag {
    declares! { has_parameters, reads_inputs: WEIGHT_HALF }

    fn num_inputs(&self) -> RangeInclusive<usize> {
        if self.is_padded { 2..=2 } else { 1..=1 }
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let bags = self.bags(cx.input(0), self.is_padded.then(|| cx.input(1)));
        let shape = [cx.input(0).shape().rows(), self.table.shape.cols()];
        let mut y = cx.empty(shape, DType::F32)?;
        cx.device().embedding_bag(cx.precision(), bags, cx.parameter(&self.table), y.view_mut());
        if self.table.shard.is_some() {
            y = cx.sum_over_ranks(y, Sharding::Replicated)?;
        }
        cx.output(y);
        Ok(())
    }

    /// Ids have no gradient.
    fn backward_input(&self, _: &mut BackwardContext<'_>) -> Result<()> {
        Ok(())
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let bags = self.bags(cx.input(0), self.is_padded.then(|| cx.input(1)));
        add_to_grad(cx.device(), sink, &self.table, |out| {
            cx.device().embedding_bag_backward(bags, cx.grad(), out)
        })
    }

    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        self.table.shard.map(|_| Sharding::Replicated)
    }
}
