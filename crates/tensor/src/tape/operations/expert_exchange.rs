//! Dispatch of tokens to the ranks of their experts, and the return of the results (Lepikhin et al., "GShard", 2020, section 3.3), without
//! padding.

use super::experts::Capacity;
use crate::device::{Device, Result};
use crate::parameter_table::ParameterId;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, declares};
use crate::tensor::Tensor;
use trireme_base::DType;

/// All-gathers the number of choices of each expert over the ranks of the expert axis. The inputs are the first and the last output of
/// [`GroupRows`](crate::tape::GroupRows); only the shape of the latter is read. The outputs, all u32, are:
///
/// - a table (`[degree + 1, num_experts + 2]`): one row per rank with its number of choices of each expert, its total number of choices,
///   and the maximum number of its choices that one expert accepts; and a last row with 1 for each [shadowed](crate::tape::ShadowedExperts)
///   expert and 0 for the others;
/// - the first row of each of this rank's experts and the end of the last one (`[own_experts + 1]`);
/// - the first row of each source rank within each expert (`[own_experts * degree + 1]`): rows are ordered by expert, then by source rank.
///   Shadowed experts have no rows.
///
/// Every rank has the same number of experts, in the order of the ranks. Ranks may have different numbers of tokens.
///
/// Cost: the host reads this rank's numbers of choices, and one all-gather of `4 (num_experts + 2)` bytes per rank.
#[derive(Debug)]
pub struct GatherLoads(pub ExpertExchange);

/// Settings of the exchange of rows with the experts of all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertExchange {
    /// Number of experts over all ranks.
    pub num_experts: usize,
    /// Capacity of experts, as in [`GroupRows`](crate::tape::GroupRows).
    pub capacity: Option<Capacity>,
    /// Number of chunks per rank, each for some of its experts; at most the number of experts per rank. One chunk is in flight while
    /// another one is computed.
    pub num_chunks: usize,
    /// Number of [shadowed](crate::tape::ShadowedExperts) experts of this layer. Their rows are not exchanged.
    pub num_shadowed: usize,
    /// Identifies the layer: the first parameter of its experts on this rank.
    pub layer: ParameterId,
}

/// Starts to send the first chunk of rows, ordered by expert (`[1, num_choices, cols]`), to the ranks of their experts, and passes the rows
/// on to [`LocalExperts`](super::LocalExperts). Computation between the two operations overlaps with the exchange, in forward and in
/// backward. The other inputs are the first output of [`GatherLoads`] and the last one of [`GroupRows`](crate::tape::GroupRows), of which
/// only the shape is read.
///
/// Cost: the host reads the numbers of choices. Rows are copied into messages.
#[derive(Debug)]
pub struct DispatchRows(pub ExpertExchange);

/// Waits for the last chunk of rows that [`LocalExperts`](super::LocalExperts) sends back. The inputs are its output (`[1, num_choices,
/// cols]`), the first output of [`GatherLoads`], and the last one of [`GroupRows`](crate::tape::GroupRows), of which only the shape is
/// read. The output has the shape of the first input.
///
/// Cost: as for [`DispatchRows`]; rows are copied from messages to their places.
#[derive(Debug)]
pub struct ReturnRows(pub ExpertExchange);

fn upload(device: &Device, numbers: &[u32], shape: &[usize]) -> Result<Tensor> {
    let mut tensor = device.activation_of(Shape::new(shape), DType::U32)?;
    device.upload(numbers, tensor.view_mut());
    Ok(tensor)
}

impl Operation for GatherLoads {
    declares! { inputs: 2..=2, has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let loads = self.0.gather(cx, cx.input(0), cx.input(1).shape())?;
        let (device, (table, shape)) = (cx.device(), loads.table());
        let [starts, segments] = loads.starts();
        let made = [
            upload(device, &table, &shape)?,
            upload(device, &starts, &[starts.len()])?,
            upload(device, &segments, &[segments.len()])?,
        ];
        made.into_iter().for_each(|numbers| cx.output(numbers));
        Ok(())
    }
}

impl Operation for DispatchRows {
    declares! { inputs: 3..=3, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let loads = self.0.read(cx, cx.input(1), cx.input(2).shape())?;
        let first = loads.chunks().next().expect("ranks have experts");
        let runs = loads.runs(cx.input(0).shape().cols(), &first);
        let exchange = cx.expert_axis_ops().start_rows(cx.device(), runs, cx.input(0))?;
        cx.store_rows_in_flight(exchange);
        let rows = cx.take_or_copy_input(0)?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let (exchange, mut grad) = (cx.take_rows_in_flight(), cx.take_output_grad());
        cx.expert_axis_ops().finish_rows(cx.device(), exchange, grad.view_mut())?;
        cx.add_grad(0, grad)
    }
}

impl Operation for ReturnRows {
    declares! { inputs: 3..=3, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (exchange, mut rows) = (cx.take_rows_in_flight(), cx.take_or_copy_input(0)?);
        cx.expert_axis_ops().finish_rows(cx.device(), exchange, rows.view_mut())?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let loads = self.0.read(cx, cx.input(1), cx.input_shape(2))?;
        let last = loads.chunks().next_back().expect("ranks have experts");
        let runs = loads.runs(cx.grad().shape().cols(), &last);
        let exchange = cx.expert_axis_ops().start_rows(cx.device(), runs, cx.grad())?;
        cx.store_rows_in_flight(exchange);
        cx.pass_grad(0);
        Ok(())
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}
