//! The experts of this rank, with rows that come from all ranks and go back while others are computed.

use super::copies_of_experts::{self as copies, Copies};
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
/// Forward goes through them in order, backward in the reverse one. Experts that all ranks have copies of are computed at last: their matrices travel meanwhile.
///
/// Cost: that of the layers, and `2 num_choices cols` elements sent forward and as many backward, less what stays on the rank. A rank sends the matrices of its experts that others
/// have copies of to each of them, forward and backward, and all ranks add up their gradients.
#[derive(Debug)]
pub struct OwnExperts {
    /// Reads the rows as they are.
    pub into: GroupedLinear,
    /// Reads what that makes.
    pub back: GroupedLinear,
    /// How rows travel.
    pub exchange: ExpertExchange,
}

impl OwnExperts {
    /// The input halves of both layers, for groups of rows: `inner`, which the activation reads, and memory for the gradient of what it makes become what
    /// [`in_order`] says.
    pub(super) fn inner_grads(
        &self,
        cx: &OperationContext<'_>,
        [into, back]: [(View<'_>, View<'_>); 2],
        (dy, dx): (View<'_>, ViewMut<'_>),
        [mut inner, mut d_activated]: [ViewMut<'_>; 2],
    ) -> Result<(), DeviceError> {
        self.back.input_grad(cx, back, dy, d_activated.reborrow())?;
        differentiate(cx.device(), self.back.activation, inner.reborrow(), d_activated.reborrow());
        let [d_inner, _] = in_order(self.back.activation, inner, d_activated);
        self.into.input_grad(cx, into, d_inner.as_view(), dx)
    }
}

/// Where some of the groups of a layer begin, and their matrices.
fn groups<'a>(
    cx: &'a OperationContext<'_>,
    layer: &GroupedLinear,
    starts: View<'a>,
    groups: &Range<usize>,
) -> (View<'a>, View<'a>) {
    let weight = cx.parameter(&layer.weight);
    let starts = starts_of(starts, groups.clone());
    (starts, weight.part(layer.first_of(groups.start), layer.shape_of(groups.len())))
}

/// Where some groups begin, and where the last of them ends, of the starts of all.
fn starts_of(starts: View<'_>, groups: Range<usize>) -> View<'_> {
    starts.part(groups.start, [groups.len() + 1].into())
}

/// Memory for rows of all chunks.
fn empty(cx: &OperationContext<'_>, loads: &Loads, cols: usize, dtype: DType) -> Result<Tensor, DeviceError> {
    let num_rows = loads.chunks().map(|chunk| loads.rows(&chunk).len()).sum();
    cx.empty([1, num_rows, cols], dtype)
}

/// The elements of some rows.
pub(super) fn part<'a>(all: View<'a>, rows: &Range<usize>) -> View<'a> {
    let cols = all.shape().cols();
    all.part(rows.start * cols, [1, rows.len(), cols].into())
}

pub(super) fn part_mut<'a>(all: ViewMut<'a>, rows: &Range<usize>) -> ViewMut<'a> {
    let cols = all.shape().cols();
    all.into_part(rows.start * cols, [1, rows.len(), cols].into())
}

/// Makes rows zeros, if there are any.
pub(super) fn zero(cx: &OperationContext<'_>, all: ViewMut<'_>, rows: Range<usize>) {
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
        let copies = Copies::start(self, cx, &loads)?;
        let empty = |cols: usize| empty(cx, &loads, cols, rows.dtype());
        let mut received = empty(rows.shape().cols())?;
        let mut inner = empty(self.into.outputs())?;
        let mut made = empty(self.back.outputs())?;
        let starts = cx.input(2);
        let compute = |chunk: &Range<usize>, x: View<'_>, y: ViewMut<'_>| {
            let rows = loads.rows(chunk);
            self.into.product(
                cx,
                groups(cx, &self.into, starts, chunk),
                x,
                part_mut(inner.view_mut(), &rows),
            )?;
            self.back.product(cx, groups(cx, &self.back, starts, chunk), part(inner.view(), &rows), y)
        };
        let tensors = (&mut rows, &mut received, &mut made);
        let last = stream(cx, &loads, first, loads.chunks(), tensors, compute)?;
        drop(made);
        let of_copies = copies.map(|copies| copies.forward(self, cx, &loads, &mut rows)).transpose()?;
        cx.leave_rows_under_way(last);
        [received, inner]
            .into_iter()
            .chain(of_copies.into_iter().flatten())
            .for_each(|tensor| cx.save(tensor));
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        assert_eq!(self.into.activation, InputActivation::Identity, "the first layer reads rows as they are");
        let (first, mut grad, mut inner) =
            (cx.take_rows_under_way(), cx.take_output_grad(), cx.take_saved(1));
        let inner_of_copies = (self.exchange.num_replicated > 0).then(|| cx.take_saved(4));
        let loads = self.exchange.read(cx, cx.input(1), cx.input_shape(4));
        let copies = Copies::start(self, cx, &loads)?;
        let empty = |cols: usize| empty(cx, &loads, cols, grad.dtype());
        let mut d_made = empty(self.back.outputs())?;
        let mut d_activated = empty(self.back.weight.shape.cols())?;
        let mut d_received = empty(grad.shape().cols())?;
        let starts = cx.input(2);
        let compute = |chunk: &Range<usize>, dy: View<'_>, dx: ViewMut<'_>| {
            let rows = loads.rows(chunk);
            let [inner, d_activated] =
                [&mut inner, &mut d_activated].map(|all| part_mut(all.view_mut(), &rows));
            self.inner_grads(
                cx,
                [&self.into, &self.back].map(|layer| groups(cx, layer, starts, chunk)),
                (dy, dx),
                [inner, d_activated],
            )
        };
        let tensors = (&mut grad, &mut d_made, &mut d_received);
        let last = stream(cx, &loads, first, loads.chunks().rev(), tensors, compute)?;
        drop(d_received);
        let of_copies = match copies.zip(inner_of_copies) {
            Some((copies, inner)) => Some(copies.backward(self, cx, &loads, (&mut grad, inner))?),
            None => None,
        };
        cx.leave_rows_under_way(last);
        cx.keep(d_made);
        let of_layers = in_order(self.back.activation, inner, d_activated);
        of_layers.into_iter().chain(of_copies.into_iter().flatten()).for_each(|tensor| cx.keep(tensor));
        cx.add_grad(0, grad)
    }

    fn backward_weight(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let loads = self.exchange.read(cx, cx.input(1), cx.input_shape(4));
        let kept = |place: usize| cx.kept(place).expect("the input half has kept it");
        let saved = |place: usize| cx.saved(place).expect("forward has saved it");
        let has_copies = self.exchange.num_replicated > 0;
        // The gradient of the outputs, and what is multiplied with, of the rows of own experts, and of those of copies.
        let back = ([kept(0), kept(2)], has_copies.then(|| [kept(3), kept(5)]));
        let into = ([kept(1), saved(0)], has_copies.then(|| [kept(4), saved(2)]));
        let num_parts = loads.place().degree;
        for (layer, ([dy, input], of_copies)) in [(&self.back, back), (&self.into, into)] {
            let sum = of_copies.map(|factors| copies::start_sum(layer, cx, &loads, (saved(3), factors)));
            let sum = sum.transpose()?;
            write_grad(sink, &layer.weight, |mut out, accumulate| {
                for chunk in loads.chunks() {
                    let rows = loads.rows(&chunk);
                    let starts = starts_of(cx.input(3), chunk.start * num_parts..chunk.end * num_parts);
                    let (first, shape) = (layer.first_of(chunk.start), layer.shape_of(chunk.len()));
                    let out = (out.reborrow().into_part(first, shape), accumulate);
                    layer.weight_grad(
                        cx,
                        (starts, chunk.len()),
                        (part(dy, &rows), part(input, &rows)),
                        out,
                    )?;
                }
                sum.map_or(Ok(()), |sum| copies::finish_sum(layer, cx, &loads, sum, (out, accumulate)))
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
