//! The experts of this rank, with rows that come from all ranks and go back while others are computed.

use super::expert_exchange::{ExpertExchange, Loads};
use super::grouped_linear::GroupedLinear;
use super::input_activation::{InputActivation, differentiate, in_order};
use crate::device::DeviceError;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, OperationContext, PendingExchange, ReadBy,
    write_grad,
};
use crate::tensor::{Tensor, View, ViewMut};
use std::ops::{Range, RangeInclusive};
use trireme_base::DType;

/// Two [`GroupedLinear`] layers, one after the other, on the ranks that have them: between [`DispatchRows`](super::DispatchRows) and [`ReturnRows`](super::ReturnRows). The
/// inputs are the output of the first one, the outputs of [`GatherLoads`](super::GatherLoads), and the last output of [`GroupRows`](super::GroupRows), of which
/// only the shape is read. The output has the rows of the input, as experts make them; those that no expert takes are zeros. The last chunk is still on its way to them, which
/// [`ReturnRows`](super::ReturnRows) ends.
///
/// Rows travel in chunks, each of some experts: while one is computed, the next one comes and the one before goes back (Hwang et al., "Tutel", 2023, section 3.3).
/// Forward goes through them in order, backward in the reverse one.
///
/// Cost: that of the layers, and `2 num_choices cols` elements sent forward and as many backward, less what stays on the rank.
#[derive(Debug)]
pub struct OwnExperts {
    /// Reads the rows as they are.
    pub into: GroupedLinear,
    /// Reads what that makes.
    pub back: GroupedLinear,
    /// How rows travel.
    pub exchange: ExpertExchange,
}

/// Memory for rows of all chunks.
fn empty(cx: &OperationContext<'_>, loads: &Loads, cols: usize, dtype: DType) -> Result<Tensor, DeviceError> {
    let num_rows = loads.chunks().map(|chunk| loads.rows(&chunk).len()).sum();
    cx.empty([1, num_rows, cols], dtype)
}

/// The elements of some rows.
fn part<'a>(all: View<'a>, rows: &Range<usize>) -> View<'a> {
    let cols = all.shape().cols();
    all.part(rows.start * cols, [1, rows.len(), cols].into())
}

fn part_mut<'a>(all: ViewMut<'a>, rows: &Range<usize>) -> ViewMut<'a> {
    let cols = all.shape().cols();
    all.into_part(rows.start * cols, [1, rows.len(), cols].into())
}

/// Makes rows zeros, if there are any.
fn zero(cx: &OperationContext<'_>, all: ViewMut<'_>, rows: Range<usize>) {
    if !rows.is_empty() && !cx.device().is_counting() {
        cx.device().zero(part_mut(all, &rows));
    }
}

/// Lets the rows of `outside` come in `come`, chunk by chunk, and what `compute` makes of them in `go` go back to their places: while one chunk is computed,
/// the next one and the one before travel. The exchange of the first chunk was started before; that of the last one is returned, to be finished.
fn stream(
    cx: &OperationContext<'_>,
    loads: &Loads,
    first: PendingExchange,
    chunks: impl Iterator<Item = Range<usize>>,
    (outside, come, go): (&mut Tensor, &mut Tensor, &mut Tensor),
    mut compute: impl FnMut(&Range<usize>, View<'_>, ViewMut<'_>) -> Result<(), DeviceError>,
) -> Result<PendingExchange, DeviceError> {
    let (axis, device, cols) = (cx.expert_axis(), cx.device(), outside.shape().cols());
    let num_choices = outside.shape().rows();
    zero(cx, outside.view_mut(), num_choices - loads.num_dropped()..num_choices);
    let mut coming = Some(first);
    let mut going: Option<PendingExchange> = None;
    let mut chunks = chunks.peekable();
    while let Some(chunk) = chunks.next() {
        let exchange = coming.take().expect("the chunk was started");
        axis.send_rest(device, &exchange, outside.view(), come.view_mut())?;
        axis.finish_rows(device, exchange, come.view_mut())?;
        let rows = loads.rows(&chunk);
        zero(cx, come.view_mut(), rows.start + loads.num_rows(&chunk)..rows.end);
        let next = chunks.peek().map(|next| loads.runs(cols, next));
        coming = next.map(|runs| axis.start_rows(device, runs, outside.view())).transpose()?;
        compute(&chunk, part(come.view(), &rows), part_mut(go.view_mut(), &rows))?;
        if let Some(before) = going.take() {
            axis.send_rest(device, &before, go.view(), outside.view_mut())?;
            axis.finish_rows(device, before, outside.view_mut())?;
        }
        going = Some(axis.start_rows(device, loads.runs(cols, &chunk).reversed(), go.view())?);
    }
    let last = going.expect("ranks have experts");
    axis.send_rest(device, &last, go.view(), outside.view_mut())?;
    Ok(last)
}

impl Operation for OwnExperts {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        5..=5
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (first, mut rows) = (cx.take_rows_under_way(), cx.take_or_copy_input(0)?);
        let loads = self.exchange.read(cx, cx.input(1), cx.input(4).shape());
        let empty = |cols: usize| empty(cx, &loads, cols, rows.dtype());
        let mut received = empty(rows.shape().cols())?;
        let mut inner = empty(self.into.outputs())?;
        let mut made = empty(self.back.outputs())?;
        let starts = cx.input(2);
        let compute = |chunk: &Range<usize>, x: View<'_>, y: ViewMut<'_>| {
            let rows = loads.rows(chunk);
            self.into.product(cx, (starts, chunk), x, part_mut(inner.view_mut(), &rows))?;
            self.back.product(cx, (starts, chunk), part(inner.view(), &rows), y)
        };
        let tensors = (&mut rows, &mut received, &mut made);
        let last = stream(cx, &loads, first, loads.chunks(), tensors, compute)?;
        drop(made);
        cx.leave_rows_under_way(last);
        [received, inner].into_iter().for_each(|tensor| cx.save(tensor));
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        assert_eq!(self.into.activation, InputActivation::Identity, "the first layer reads rows as they are");
        let (first, mut grad, mut inner) =
            (cx.take_rows_under_way(), cx.take_output_grad(), cx.take_saved(1));
        let loads = self.exchange.read(cx, cx.input(1), cx.input_shape(4));
        let empty = |cols: usize| empty(cx, &loads, cols, grad.dtype());
        let mut d_made = empty(self.back.outputs())?;
        let mut d_activated = empty(self.back.weight.shape.cols())?;
        let mut d_received = empty(grad.shape().cols())?;
        let starts = cx.input(2);
        let compute = |chunk: &Range<usize>, dy: View<'_>, dx: ViewMut<'_>| {
            let rows = loads.rows(chunk);
            let (inner, d_activated) = (&mut inner, &mut d_activated);
            self.back.input_grad(cx, (starts, chunk), dy, part_mut(d_activated.view_mut(), &rows))?;
            let [x, dy] = [&mut *inner, &mut *d_activated].map(|all| part_mut(all.view_mut(), &rows));
            differentiate(cx.device(), self.back.activation, x, dy);
            let is_first = matches!(self.back.activation, InputActivation::Gated(_));
            let d_inner = if is_first { inner } else { d_activated };
            self.into.input_grad(cx, (starts, chunk), part(d_inner.view(), &rows), dx)
        };
        let tensors = (&mut grad, &mut d_made, &mut d_received);
        let last = stream(cx, &loads, first, loads.chunks().rev(), tensors, compute)?;
        drop(d_received);
        cx.leave_rows_under_way(last);
        cx.keep(d_made);
        let of_layers = in_order(self.back.activation, inner, d_activated);
        of_layers.into_iter().for_each(|tensor| cx.keep(tensor));
        cx.add_grad(0, grad)
    }

    fn backward_weight(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let loads = self.exchange.read(cx, cx.input(1), cx.input_shape(4));
        let kept = |place: usize| cx.kept(place).expect("the input half has kept it");
        let received = cx.saved(0).expect("forward has saved it");
        for (layer, dy, input) in [(&self.back, kept(0), kept(2)), (&self.into, kept(1), received)] {
            write_grad(sink, &layer.weight, |mut out, accumulate| {
                loads.chunks().try_for_each(|chunk| {
                    let rows = loads.rows(&chunk);
                    let factors = (part(dy, &rows), part(input, &rows));
                    layer.weight_grad(cx, (cx.input(3), &chunk), factors, (out.reborrow(), accumulate))
                })
            })?;
        }
        Ok(())
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        match input {
            1 => ReadBy { input_half: true, weight_half: true },
            2 => ReadBy::INPUT_HALF,
            3 => ReadBy::WEIGHT_HALF,
            _ => ReadBy::NEITHER,
        }
    }

    fn takes_positions(&self) -> bool {
        true
    }
}
