//! Rows of tokens on their way to the ranks that have their experts, and back (Lepikhin et al., "GShard", 2020, section 3.3), without padding.

use super::experts::Capacity;
use crate::device::{Device, Result};
use crate::parameter_table::ParameterId;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, declares};
use crate::tensor::Tensor;
use trireme_base::DType;

/// Tells all ranks of the expert axis how many choices each expert has. The inputs are the first and the last output of [`GroupRows`](crate::tape::GroupRows); of the
/// last one only the shape is read. The outputs, all u32, are:
///
/// - a table (`[degree + 1, num_experts + 2]`): a row of each rank, with how many choices of each expert it has, how many it has in all, and how many of them an expert takes at most; and
///   a row with 1 for each expert that is [shadowed](crate::tape::ShadowedExperts) and 0 for the others;
/// - where the rows of each of this rank's experts begin, and where the last ones end (`[own_experts + 1]`);
/// - where the rows of each rank begin among those (`[own_experts * degree + 1]`): rows are ordered by expert, and those of an expert by the rank
///   that has sent them. Shadowed experts have none.
///
/// Ranks have equally many experts, in their order. They may have different numbers of tokens.
///
/// Cost: the host reads the numbers of choices of this rank, and one all-gather of `4 (num_experts + 2)` bytes a rank.
#[derive(Debug)]
pub struct GatherLoads(pub ExpertExchange);

/// How rows travel to the experts of all ranks, and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertExchange {
    /// Experts of all ranks.
    pub num_experts: usize,
    /// That of [`GroupRows`](crate::tape::GroupRows).
    pub capacity: Option<Capacity>,
    /// In how many chunks the rows for a rank travel, each for some of its experts; at most as many as it has. One chunk travels while another one is computed.
    pub num_chunks: usize,
    /// How many experts of this layer are [shadowed](crate::tape::ShadowedExperts): their rows do not travel.
    pub num_shadowed: usize,
    /// What tells the layer from others: the first parameter of its experts on this rank.
    pub layer: ParameterId,
}

/// Starts to send the first chunk of rows, ordered by expert (`[1, num_choices, cols]`), to the ranks that have their experts, and passes the rows on to
/// [`OwnExperts`](super::OwnExperts). What is computed between the two does not wait for what travels, forward and backward. The other inputs are the first output of
/// [`GatherLoads`] and the last one of [`GroupRows`](crate::tape::GroupRows), of which only the shape is read.
///
/// Cost: the host reads the numbers of choices. Rows are copied from where they are to what is sent.
#[derive(Debug)]
pub struct DispatchRows(pub ExpertExchange);

/// Waits for the last chunk of rows that [`OwnExperts`](super::OwnExperts) sends back. The inputs are its output (`[1, num_choices, cols]`), the first output of
/// [`GatherLoads`], and the last one of [`GroupRows`](crate::tape::GroupRows), of which only the shape is read. The output has the shape of the first input.
///
/// Cost: as [`DispatchRows`], from what comes to where it belongs.
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
    declares! { inputs: 3..=3, takes_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let loads = self.0.read(cx, cx.input(1), cx.input(2).shape());
        let first = loads.chunks().next().expect("ranks have experts");
        let runs = loads.runs(cx.input(0).shape().cols(), &first);
        let exchange = cx.expert_axis().start_rows(cx.device(), runs, cx.input(0))?;
        cx.leave_rows_in_flight(exchange);
        let rows = cx.take_or_copy_input(0)?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let (exchange, mut grad) = (cx.take_rows_in_flight(), cx.take_output_grad());
        cx.expert_axis().finish_rows(cx.device(), exchange, grad.view_mut())?;
        cx.add_grad(0, grad)
    }
}

impl Operation for ReturnRows {
    declares! { inputs: 3..=3, takes_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (exchange, mut rows) = (cx.take_rows_in_flight(), cx.take_or_copy_input(0)?);
        cx.expert_axis().finish_rows(cx.device(), exchange, rows.view_mut())?;
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let loads = self.0.read(cx, cx.input(1), cx.input_shape(2));
        let last = loads.chunks().next_back().expect("ranks have experts");
        let runs = loads.runs(cx.grad().shape().cols(), &last);
        let exchange = cx.expert_axis().start_rows(cx.device(), runs, cx.grad())?;
        cx.leave_rows_in_flight(exchange);
        cx.pass_grad(0);
        Ok(())
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}
