//! Operations that change the sharding of a value on the tensor axis.

use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, Sharding, TensorAxis, declares};

/// All-gathers a value that is sharded by rows. Its readers compute the same on every rank.
#[derive(Debug)]
pub struct AllGatherRows;

impl Operation for AllGatherRows {
    declares! { accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let whole = cx.gather_rows(cx.input(0))?;
        cx.output(whole);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let part = cx.split_rows(cx.grad())?;
        cx.add_grad(0, part)
    }

    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        Some(Sharding::Replicated)
    }
}

/// Splits a replicated value by rows: the output is this rank's shard.
#[derive(Debug)]
pub struct SplitRows;

impl Operation for SplitRows {
    declares! { accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let part = cx.split_rows(cx.input(0))?;
        cx.output(part);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let whole = cx.gather_rows(cx.grad())?;
        cx.add_grad(0, whole)
    }

    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        Some(Sharding::Rows)
    }
}

/// Replicates a value, gathering it if it is sharded by rows, for operations with sharded parameters. Its gradient is the sum over the
/// ranks. [`Linear`](crate::tape::Linear) includes this step.
#[derive(Debug)]
pub struct CopyToRanks;

impl Operation for CopyToRanks {
    declares! { accepts_sharded_rows, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let copy = match cx.input_sharding(0) {
            Sharding::Rows => cx.gather_rows(cx.input(0))?,
            _ => cx.take_or_copy_input(0)?,
        };
        cx.output(copy);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let (term, sharding) = (cx.take_output_grad(), cx.input_sharding(0));
        let sum = cx.sum_over_ranks(term, sharding)?;
        cx.add_grad(0, sum)
    }

    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        Some(Sharding::ByParameters)
    }
}

/// Sums the partial sums of operations with sharded parameters over the ranks. [`Linear`](crate::tape::Linear) includes this step.
#[derive(Debug)]
pub struct SumOverRanks;

impl Operation for SumOverRanks {
    declares! { accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let is_partial_sum = cx.tensor_axis().is_none() || cx.input_sharding(0) == Sharding::ByParameters;
        assert!(is_partial_sum, "every rank has all of what it would add up");
        let term = cx.take_or_copy_input(0)?;
        let sum = cx.sum_over_ranks(term, Sharding::Replicated)?;
        cx.output(sum);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        cx.pass_grad(0);
        Ok(())
    }

    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        Some(Sharding::Replicated)
    }
}
