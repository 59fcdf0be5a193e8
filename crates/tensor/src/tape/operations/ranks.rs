//! What brings values from one sharding on the tensor axis to another.

use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, Sharding, TensorAxis, declares};

/// All rows of a value that lies in rows. Its readers compute the same on every rank.
#[derive(Debug)]
pub struct AllGatherRows;

impl Operation for AllGatherRows {
    declares! { takes_rows }

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

/// This rank's part of the rows of a value that every rank has.
#[derive(Debug)]
pub struct SplitRows;

impl Operation for SplitRows {
    declares! { takes_positions }

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

/// A value that every rank has, or all rows of one that lies in rows, for operations that work on this rank's parts of parameters: its gradient is the sum of what ranks
/// make of it. [`Linear`](crate::tape::Linear) does the same by itself.
#[derive(Debug)]
pub struct CopyToRanks;

impl Operation for CopyToRanks {
    declares! { takes_rows, takes_positions }

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
        Some(Sharding::Cut)
    }
}

/// The sum over the ranks of what they have made by their parts of parameters. [`Linear`](crate::tape::Linear) does the same by itself.
#[derive(Debug)]
pub struct SumOverRanks;

impl Operation for SumOverRanks {
    declares! { takes_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let is_term = cx.axis().is_none() || cx.input_sharding(0) == Sharding::Cut;
        assert!(is_term, "every rank has all of what it would add up");
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
