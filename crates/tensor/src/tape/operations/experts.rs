//! Sorting tokens by their experts, and combining the outputs of experts.

use crate::device::Result;
use crate::kernels::GroupLimit;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, Sharding, TensorAxis, declares};
use trireme_base::DType;

/// Sorts the choices of tokens by expert, stably. From ids (`[.., k]`, u32), computes the first position of each expert and the end of the
/// last one (`[num_groups + 1]`), the choice at each position (`[num_choices]`), and the position of each choice (with the shape of the
/// ids), all u32. Choices are numbered like the elements of the ids. Choices beyond an expert's [`Capacity`] are dropped: they come last,
/// after the end of the last expert, as do choices of no expert (id `num_groups`).
///
/// Cost: a counting sort of the ids.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupRows {
    /// Number of experts.
    pub num_groups: usize,
    /// Capacity of each expert; unlimited if absent.
    pub capacity: Option<Capacity>,
}

/// The number of choices that an expert accepts from each sample: a multiple of an even load, rounded up. The expert accepts the first
/// choices in the order of positions (Lepikhin et al., "GShard", 2020, section 2.2, whose groups of tokens are samples here). The limit
/// applies per sample, so the dropped choices of a sample do not depend on other samples. Choices of no expert, as for padding, do not
/// count in the load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capacity {
    /// Multiple of an even load.
    pub factor: f64,
}

impl Capacity {
    /// Returns the limit for the choices of each sample. The shape of ids is `[samples, positions, k]`, or `[positions, k]` for one sample.
    pub fn limit(self, ids: Shape) -> GroupLimit {
        let num_samples = if ids.dims().len() > 2 { ids.dims()[0] } else { 1 };
        GroupLimit { rows_per_capacity: ids.num_elements() / num_samples.max(1), factor: self.factor }
    }

    /// Returns the maximum number of rows of one expert over all samples.
    pub(super) fn num_rows(self, ids: Shape, num_experts: usize) -> usize {
        let limit = self.limit(ids);
        let capacity = limit.capacity(limit.rows_per_capacity, num_experts);
        ids.num_elements() / limit.rows_per_capacity.max(1) * capacity.min(limit.rows_per_capacity)
    }
}

/// The fraction of choices that no expert takes. The inputs are the first position of each expert and the position of each choice (`[..,
/// k]`), from [`GroupRows`]. An optional third input holds weights of the tokens for the mean (`[..]`, f32). It has no gradient: use it for
/// [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct DroppedChoices;

/// Copies the rows of tokens once per choice, in the order of [`GroupRows`]. The inputs are `x` (`[.., cols]`), the choice at each
/// position, and the position of each choice; the output is `[1, num_choices, cols]`.
#[derive(Debug)]
pub struct PermuteRows;

/// Combines the outputs of experts: sums the weighted rows of each token, as `[.., cols]`. The inputs are `x` (`[num_choices, cols]`), the
/// choice at each position, the position of each choice (`[.., k]`), weights (`[.., k]`, f32) and an optional residual (f32), with which
/// the output is f32. Sums are f32, in the order of the choices.
#[derive(Debug, Clone, Copy, Default)]
pub struct CombineRows {
    /// Whether rows are partial sums on each rank of the tensor axis, because the weights of experts are row-parallel. The ranks then sum
    /// the combined rows, once per token.
    pub sums_over_ranks: bool,
}

impl Operation for GroupRows {
    declares! { has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let ids = cx.input(0);
        let limit = self.capacity.map_or(GroupLimit::NONE, |capacity| capacity.limit(ids.shape()));
        let mut starts = cx.empty([self.num_groups + 1], DType::U32)?;
        let mut order = cx.empty([ids.shape().num_elements()], DType::U32)?;
        let mut places = cx.empty(ids.shape(), DType::U32)?;
        cx.device().group_rows(ids, limit, starts.view_mut(), [order.view_mut(), places.view_mut()]);
        [starts, order, places].into_iter().for_each(|ids| cx.output(ids));
        Ok(())
    }
}

impl Operation for DroppedChoices {
    declares! { inputs: 2..=3, has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let weights = (cx.num_inputs() > 2).then(|| cx.input(2));
        let mut sum = cx.empty([1], DType::F64)?;
        cx.device().ungrouped_rows(cx.input(0), cx.input(1), weights, sum.view_mut());
        let num_choices = cx.input(1).shape().num_elements();
        cx.add_loss(sum, num_choices)
    }
}

impl Operation for PermuteRows {
    declares! { inputs: 3..=3, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (x, order, num_choices) = (cx.input(0), cx.input(1), cx.input(2).shape().cols());
        let mut rows = cx.empty([1, order.shape().num_elements(), x.shape().cols()], x.dtype())?;
        cx.device().permute_rows(x, order, num_choices, None, rows.view_mut());
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut dx = cx.empty(cx.input_shape(0), cx.input_dtype(0))?;
        cx.device().combine_rows(cx.grad(), cx.input(2), None, None, dx.view_mut());
        cx.add_grad(0, dx)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 2 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}

impl Operation for CombineRows {
    declares! { inputs: 4..=5, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (x, places, weights) = (cx.input(0), cx.input(2), Some(cx.input(3)));
        let (residual, shape) =
            ((cx.num_inputs() > 4).then(|| cx.input(4)), places.shape().with_cols(x.shape().cols()));
        let y = if self.sums_over_ranks {
            let mut term = cx.empty_partial_sum(shape, x.dtype())?;
            cx.device().combine_rows(x, places, weights, None, term.view_mut());
            cx.finish_row_parallel(term, None, residual)?
        } else {
            let dtype = if residual.is_some() { DType::F32 } else { x.dtype() };
            let mut y = cx.empty(shape, dtype)?;
            cx.device().combine_rows(x, places, weights, residual, y.view_mut());
            y
        };
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let num_choices = cx.input(2).shape().cols();
        let dy = cx.all_rows(
            cx.grad(),
            if self.sums_over_ranks { cx.output_sharding() } else { Sharding::Replicated },
        )?;
        let like =
            |input| cx.requires_grad(input).then(|| cx.empty(cx.input_shape(input), cx.input_dtype(input)));
        let [mut d_weights, mut dx] = [like(3).transpose()?, like(0).transpose()?];
        if let Some(d_weights) = &mut d_weights {
            cx.device().row_products(cx.input(0), cx.input(2), dy.view(), d_weights.view_mut());
        }
        if let Some(dx) = &mut dx {
            let (order, weights) = (cx.input(1), Some(cx.input(3)));
            cx.device().permute_rows(dy.view(), order, num_choices, weights, dx.view_mut());
        }
        drop(dy);
        for (input, grad) in [(3, d_weights), (0, dx)] {
            grad.map_or(Ok(()), |grad| cx.add_grad(input, grad))?;
        }
        if cx.num_inputs() > 4 {
            cx.pass_grad(4);
        }
        Ok(())
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input < 4 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }

    fn accepts_sharded_rows(&self, input: usize) -> bool {
        self.sums_over_ranks && input == 4
    }

    fn output_sharding(&self, axis: &TensorAxis) -> Option<Sharding> {
        self.sums_over_ranks.then(|| axis.sharding_between_layers())
    }
}
