//! The experts of this rank, with exchanges of rows that overlap with computation.

use super::expert_exchange::ExpertExchange;
use super::expert_loads::Loads;
use super::grouped_linear::{GroupMatrices, GroupedLinear};
use super::input_activation::{InputActivation, differentiate, grad_and_output};
use super::shadowed_experts::{self, ShadowExchange};
use crate::device::{Result, RowGroups};
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, OperationContext, PendingExchange, ReadBy,
    declares, write_grad,
};
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use std::ops::Range;
use trireme_base::DType;

/// Two [`GroupedLinear`] layers of this rank's experts, applied to the rows of all ranks.
///
/// The inputs are the output of [`DispatchRows`](super::DispatchRows) (`[1, num_choices, cols]`), the three outputs of
/// [`GatherLoads`](super::GatherLoads), and the last output of [`GroupRows`](super::GroupRows), of which only the shape is read. The output
/// (`[1, num_choices, cols]`) holds the experts' outputs for this rank's rows; rows of dropped choices are zeros. When forward returns, the
/// last chunk is still in flight: [`ReturnRows`](super::ReturnRows) waits for it.
///
/// Rows are exchanged in chunks, each for some experts: while one chunk is computed, the next one is received and the previous one is sent
/// back (Hwang et al., "Tutel", 2023, section 3.3). Forward processes the chunks in order, backward in reverse order. Shadowed experts are
/// computed last, so that the exchange of their matrices overlaps with the other experts.
///
/// Cost: the cost of the layers. Ranks send `2 num_choices cols` elements in forward and as many in backward, except those that stay on
/// their rank. See `docs/experts.md` for the cost of shadows. The host reads the numbers of choices in each pass.
#[derive(Debug)]
pub struct LocalExperts {
    /// The first layer, which reads the rows without an activation.
    pub up: GroupedLinear,
    /// The second layer, which reads the outputs of the first.
    pub down: GroupedLinear,
    /// Settings of the exchange of rows.
    pub exchange: ExpertExchange,
}

/// Indices of the inputs.
const LOADS: usize = 1;
const STARTS: usize = 2;
const PARTS: usize = 3;
const PLACES: usize = 4;

/// Indices of saved tensors: the received rows, and the argument of the activation. The saved tensors of shadows follow.
const RECEIVED: usize = 0;
const INNER: usize = 1;
const SAVED_OF_SHADOWS: usize = 2;

/// Indices of tensors that the input half keeps: the gradients of both layers' outputs, and the activated input. The kept tensors of
/// shadows follow.
const D_OUTPUT: usize = 0;
const D_INNER: usize = 1;
const ACTIVATED: usize = 2;
const KEPT_OF_SHADOWS: usize = 3;

impl LocalExperts {
    /// Runs the input halves of both layers for groups of rows. Replaces `inner`, the argument of the activation, and `d_activated` by the
    /// results of [`differentiate`].
    pub(super) fn inner_grads(
        &self,
        cx: &OperationContext<'_>,
        [up, down]: [GroupMatrices<'_>; 2],
        dy: View<'_>,
        dx: ViewMut<'_>,
        [mut inner, mut d_activated]: [ViewMut<'_>; 2],
    ) -> Result<()> {
        self.down.input_grad(cx, down, dy, d_activated.reborrow())?;
        differentiate(cx.device(), self.down.activation, inner.reborrow(), d_activated.reborrow());
        let [d_inner, _] = grad_and_output(self.down.activation, inner, d_activated);
        self.up.input_grad(cx, up, d_inner.as_view(), dx)
    }
}

/// Returns the starts and the matrices of the experts `groups` of a layer. `starts` covers all experts of this rank.
fn group_matrices<'a>(
    cx: &'a OperationContext<'_>,
    layer: &GroupedLinear,
    starts: View<'a>,
    groups: &Range<usize>,
) -> GroupMatrices<'a> {
    let weight = cx.parameter(&layer.weight);
    let weight = weight.part(groups.start * layer.matrix_len(), layer.shape_of(groups.len()));
    GroupMatrices { starts: starts_of(starts, groups.clone()), weight }
}

/// Restricts the starts of all groups to some groups, with the end of the last one.
fn starts_of(starts: View<'_>, groups: Range<usize>) -> View<'_> {
    starts.part(groups.start, [groups.len() + 1].into())
}

/// Allocates memory for the rows of all chunks.
fn rows_of_all_chunks(cx: &OperationContext<'_>, loads: &Loads, cols: usize, dtype: DType) -> Result<Tensor> {
    cx.empty([1, loads.chunks().map(|chunk| loads.buffer_rows(&chunk)).sum(), cols], dtype)
}

/// Zeroes rows that no exchange writes but kernels read. A counting device has no such rows, because its loads are even.
pub(super) fn zero_unwritten_rows(cx: &OperationContext<'_>, all: ViewMut<'_>, rows: Range<usize>) {
    if !rows.is_empty() && !cx.device().is_counting() {
        cx.device().zero(all.into_rows(rows.start, rows.len()));
    }
}

/// The rows that [`exchange_and_compute`] processes.
struct ExchangeBuffers<'a> {
    /// The rows that this rank sends. Their results replace them.
    rows: &'a mut Tensor,
    /// The rows that this rank receives, of all chunks.
    received: &'a mut Tensor,
    /// The results of the received rows.
    results: &'a mut Tensor,
}

/// Processes rows chunk by chunk: receives rows, calls `compute` to write their results, and sends the results back to their places. The
/// exchanges of the next chunk and of the previous one overlap with the computation. The exchange of the first chunk was started by the
/// caller; the exchange of the last one is returned, to be finished.
fn exchange_and_compute(
    cx: &OperationContext<'_>,
    loads: &Loads,
    first: PendingExchange,
    chunks: impl Iterator<Item = Range<usize>>,
    buffers: ExchangeBuffers<'_>,
    mut compute: impl FnMut(&Range<usize>, View<'_>, ViewMut<'_>) -> Result<()>,
) -> Result<PendingExchange> {
    let ExchangeBuffers { rows, received, results } = buffers;
    let (axis, device, cols) = (cx.expert_axis_ops(), cx.device(), rows.shape().cols());
    let num_choices = rows.shape().rows();
    zero_unwritten_rows(cx, rows.view_mut(), num_choices - loads.num_dropped()..num_choices);
    let mut coming = Some(first);
    let mut going: Option<PendingExchange> = None;
    let mut chunks = chunks.peekable();
    while let Some(chunk) = chunks.next() {
        let exchange = coming.take().expect("the chunk was started");
        axis.send_rest(device, &exchange, rows.view(), received.view_mut())?;
        axis.finish_rows(device, exchange, received.view_mut())?;
        let chunk_rows = loads.rows(&chunk);
        zero_unwritten_rows(
            cx,
            received.view_mut(),
            chunk_rows.start + loads.num_rows(&chunk)..chunk_rows.end,
        );
        let next = chunks.peek().map(|next| loads.runs(cols, next));
        coming = next.map(|runs| axis.start_rows(device, runs, rows.view())).transpose()?;
        let (x, y) = (received.view(), results.view_mut());
        compute(
            &chunk,
            x.rows(chunk_rows.start, chunk_rows.len()),
            y.into_rows(chunk_rows.start, chunk_rows.len()),
        )?;
        if let Some(before) = going.take() {
            axis.send_rest(device, &before, results.view(), rows.view_mut())?;
            axis.finish_rows(device, before, rows.view_mut())?;
        }
        going = Some(axis.start_rows(device, loads.runs(cols, &chunk).reversed(), results.view())?);
    }
    let last = going.expect("ranks have experts");
    axis.send_rest(device, &last, results.view(), rows.view_mut())?;
    Ok(last)
}

impl Operation for LocalExperts {
    declares! { inputs: 5..=5, has_parameters, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        assert_eq!(self.up.activation, InputActivation::Identity, "the first layer reads rows as they are");
        let (first, mut rows) = (cx.take_rows_in_flight(), cx.take_or_copy_input(0)?);
        let loads = self.exchange.read(cx, cx.input(LOADS), cx.input(PLACES).shape())?;
        let shadows = ShadowExchange::start(self, cx, &loads)?;
        let empty = |cols: usize| rows_of_all_chunks(cx, &loads, cols, rows.dtype());
        let mut received = empty(rows.shape().cols())?;
        let mut inner = empty(self.up.outputs())?;
        let mut outputs = empty(self.down.outputs())?;
        let starts = cx.input(STARTS);
        let compute = |chunk: &Range<usize>, x: View<'_>, y: ViewMut<'_>| {
            let rows = loads.rows(chunk);
            let mut inner = inner.view_mut().into_rows(rows.start, rows.len());
            self.up.product(cx, group_matrices(cx, &self.up, starts, chunk), x, inner.reborrow())?;
            self.down.product(cx, group_matrices(cx, &self.down, starts, chunk), inner.as_view(), y)
        };
        let buffers = ExchangeBuffers { rows: &mut rows, received: &mut received, results: &mut outputs };
        let last = exchange_and_compute(cx, &loads, first, loads.chunks(), buffers, compute)?;
        drop(outputs);
        let of_shadows = shadows.map(|shadows| shadows.forward(self, cx, &loads, &mut rows)).transpose()?;
        cx.store_rows_in_flight(last);
        [received, inner].into_iter().for_each(|tensor| cx.save(tensor));
        of_shadows.into_iter().flatten().for_each(|tensor| cx.save(tensor));
        cx.output(rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let (first, mut rows) = (cx.take_rows_in_flight(), cx.take_output_grad());
        let mut inner = cx.take_saved(INNER);
        let has_shadows = self.exchange.num_shadowed > 0;
        let inner_of_shadows =
            has_shadows.then(|| cx.take_saved(SAVED_OF_SHADOWS + shadowed_experts::SAVED_INNER));
        let loads = self.exchange.read(cx, cx.input(LOADS), cx.input_shape(PLACES))?;
        let shadows = ShadowExchange::start(self, cx, &loads)?;
        let empty = |cols: usize| rows_of_all_chunks(cx, &loads, cols, rows.dtype());
        let mut d_outputs = empty(self.down.outputs())?;
        let mut d_activated = empty(self.down.weight.shape.cols())?;
        let mut d_received = empty(rows.shape().cols())?;
        let starts = cx.input(STARTS);
        let compute = |chunk: &Range<usize>, dy: View<'_>, dx: ViewMut<'_>| {
            let rows = loads.rows(chunk);
            let layers = [&self.up, &self.down].map(|layer| group_matrices(cx, layer, starts, chunk));
            let of_activation = [&mut inner, &mut d_activated];
            let of_activation = of_activation.map(|all| all.view_mut().into_rows(rows.start, rows.len()));
            self.inner_grads(cx, layers, dy, dx, of_activation)
        };
        let buffers = ExchangeBuffers { rows: &mut rows, received: &mut d_outputs, results: &mut d_received };
        let last = exchange_and_compute(cx, &loads, first, loads.chunks().rev(), buffers, compute)?;
        drop(d_received);
        let of_shadows = shadows.zip(inner_of_shadows).map(|(shadows, inner)| {
            let starts =
                cx.saved(SAVED_OF_SHADOWS + shadowed_experts::SAVED_STARTS).expect("forward has saved it");
            shadows.backward(self, cx, &loads, starts, &mut rows, inner)
        });
        let of_shadows = of_shadows.transpose()?;
        cx.store_rows_in_flight(last);
        let [d_inner, activated] = grad_and_output(self.down.activation, inner, d_activated);
        [d_outputs, d_inner, activated].into_iter().for_each(|tensor| cx.keep(tensor));
        of_shadows.into_iter().flatten().for_each(|tensor| cx.keep(tensor));
        cx.add_grad(0, rows)
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let loads = self.exchange.read(cx, cx.input(LOADS), cx.input_shape(PLACES))?;
        let kept = |place: usize| cx.kept(place).expect("the input half has kept it");
        let kept_of_shadows = |place: usize| kept(KEPT_OF_SHADOWS + place);
        let saved = |place: usize| cx.saved(place).expect("forward has saved it");
        let saved_of_shadows = |place: usize| saved(SAVED_OF_SHADOWS + place);
        let has_shadows = self.exchange.num_shadowed > 0;
        // The factors of each layer's weight gradient (output gradient and input), for rows of own experts and for rows of shadows.
        let of_shadows = has_shadows.then(|| {
            let down = [
                kept_of_shadows(shadowed_experts::KEPT_DY),
                kept_of_shadows(shadowed_experts::KEPT_ACTIVATED),
            ];
            let up = [
                kept_of_shadows(shadowed_experts::KEPT_D_INNER),
                saved_of_shadows(shadowed_experts::SAVED_X),
            ];
            (down, up)
        });
        let (of_down, of_up) = of_shadows.unzip();
        let down = (&self.down, [kept(D_OUTPUT), kept(ACTIVATED)], of_down);
        let up = (&self.up, [kept(D_INNER), saved(RECEIVED)], of_up);
        let num_parts = loads.axis_rank().degree;
        for (layer, factors, of_shadows) in [down, up] {
            let sum = of_shadows.map(|factors| {
                let starts = saved_of_shadows(shadowed_experts::SAVED_STARTS);
                shadowed_experts::start_sum(layer, cx, &loads, starts, factors)
            });
            let sum = sum.transpose()?;
            write_grad(sink, &layer.weight, |mut out, accumulate| {
                for chunk in loads.chunks() {
                    let rows = loads.rows(&chunk);
                    let starts = starts_of(cx.input(PARTS), chunk.start * num_parts..chunk.end * num_parts);
                    let [dy, input] = factors.map(|all| all.rows(rows.start, rows.len()));
                    let first = chunk.start * layer.matrix_len();
                    let out = out.reborrow().into_part(first, layer.shape_of(chunk.len()));
                    let groups = RowGroups { starts, num_groups: chunk.len() };
                    layer.weight_grad(cx, groups, dy, input, out, accumulate)?;
                }
                sum.map_or(Ok(()), |sum| {
                    shadowed_experts::finish_sum(layer, cx, &loads, sum, out, accumulate)
                })
            })?;
        }
        Ok(())
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        match input {
            LOADS => ReadBy::BOTH,
            STARTS => ReadBy::INPUT_HALF,
            PARTS => ReadBy::WEIGHT_HALF,
            _ => ReadBy::NEITHER,
        }
    }
}
