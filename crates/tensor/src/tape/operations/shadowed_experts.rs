//! Shadowed experts, of which all ranks have copies (He et al., "FasterMoE", 2022, section 5.1). Each owner broadcasts the matrices of its
//! shadowed experts. An all-reduce sums their gradients, and each owner uses the sums for its experts. Without shadowing, an owner adds the
//! gradients for the rows of each rank in the same order as the all-reduce, so shadowing does not change any bits.

use super::expert_loads::Loads;
use super::grouped_linear::{GroupMatrices, GroupedLinear};
use super::input_activation::grad_and_output;
use super::local_experts::{LocalExperts, zero_unwritten_rows};
use crate::device::{DeviceError, Result, RowGroups};
use crate::tape::{ExchangedRuns, OperationContext, PendingExchange, Runs};
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use trireme_base::{AxisRank, DType, ExchangeKind};

/// Pending exchanges of the matrices of both layers.
pub(super) struct ShadowExchange([PendingExchange; 2]);

/// Indices of the tensors that [`ShadowExchange::forward`] returns to be saved: this rank's rows of shadowed experts, by expert; the first
/// row of each expert and the end of the last one; and the argument of the activation.
pub(super) const SAVED_X: usize = 0;
pub(super) const SAVED_STARTS: usize = 1;
pub(super) const SAVED_INNER: usize = 2;

/// Indices of the tensors that [`ShadowExchange::backward`] returns to be kept for the weight half: the output gradients of the second
/// layer and of the first layer, and the activated input.
pub(super) const KEPT_DY: usize = 0;
pub(super) const KEPT_D_INNER: usize = 1;
pub(super) const KEPT_ACTIVATED: usize = 2;

impl ShadowExchange {
    /// Starts to send the matrices of this rank's shadowed experts and to receive the matrices of other ranks' shadowed experts. Returns
    /// `None` if no expert is shadowed.
    pub(super) fn start(
        experts: &LocalExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
    ) -> Result<Option<ShadowExchange>> {
        if experts.exchange.num_shadowed == 0 {
            return Ok(None);
        }
        let start = |layer: &GroupedLinear| {
            cx.expert_axis_ops().start_rows(cx.device(), runs(layer, loads), cx.parameter(&layer.weight))
        };
        Ok(Some(ShadowExchange([start(&experts.up)?, start(&experts.down)?])))
    }

    /// Waits for the matrices of both layers.
    fn finish(self, experts: &LocalExperts, cx: &OperationContext<'_>, loads: &Loads) -> Result<[Tensor; 2]> {
        let finish = |layer: &GroupedLinear, exchange: PendingExchange| {
            let (axis, device, weight) = (cx.expert_axis_ops(), cx.device(), cx.parameter(&layer.weight));
            let mut shadows = cx.empty(layer.shape_of(loads.shadowed().count()), weight.dtype())?;
            axis.send_rest(device, &exchange, weight, shadows.view_mut())?;
            axis.finish_rows(device, exchange, shadows.view_mut())?;
            Ok::<_, DeviceError>(shadows)
        };
        let [up, down] = self.0;
        Ok([finish(&experts.up, up)?, finish(&experts.down, down)?])
    }

    /// Replaces this rank's rows of shadowed experts by the experts' outputs. Returns the tensors that backward needs.
    pub(super) fn forward(
        self,
        experts: &LocalExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
        rows: &mut Tensor,
    ) -> Result<[Tensor; 3]> {
        let (x, starts) = (gather_shadowed_rows(cx, loads, rows.view())?, starts(cx, loads)?);
        let empty = |cols: usize| cx.empty(x.shape().with_cols(cols), rows.dtype());
        let (mut inner, mut outputs) = (empty(experts.up.outputs())?, empty(experts.down.outputs())?);
        let [up, down] = self.finish(experts, cx, loads)?;
        let [up_groups, down_groups] =
            [&up, &down].map(|shadows| GroupMatrices { starts: starts.view(), weight: shadows.view() });
        experts.up.product(cx, up_groups, x.view(), inner.view_mut())?;
        experts.down.product(cx, down_groups, inner.view(), outputs.view_mut())?;
        scatter_shadowed_rows(cx, loads, outputs.view(), rows.view_mut());
        Ok([x, starts, inner])
    }

    /// Replaces the output gradients of this rank's rows of shadowed experts by the gradients of the rows. Returns the tensors that the
    /// weight half needs.
    pub(super) fn backward(
        self,
        experts: &LocalExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
        starts: View<'_>,
        grad: &mut Tensor,
        mut inner: Tensor,
    ) -> Result<[Tensor; 3]> {
        let dy = gather_shadowed_rows(cx, loads, grad.view())?;
        let empty = |cols: usize| cx.empty(dy.shape().with_cols(cols), grad.dtype());
        let mut d_activated = empty(experts.down.weight.shape.cols())?;
        let mut dx = empty(grad.shape().cols())?;
        let [up, down] = self.finish(experts, cx, loads)?;
        let layers = [&up, &down].map(|shadows| GroupMatrices { starts, weight: shadows.view() });
        let of_activation = [inner.view_mut(), d_activated.view_mut()];
        experts.inner_grads(cx, layers, dy.view(), dx.view_mut(), of_activation)?;
        scatter_shadowed_rows(cx, loads, dx.view(), grad.view_mut());
        let [d_inner, activated] = grad_and_output(experts.down.activation, inner, d_activated);
        Ok([dy, d_inner, activated])
    }
}

/// Returns the elements of matrices that each rank sends and receives, in the order of the experts.
fn runs(layer: &GroupedLinear, loads: &Loads) -> ExchangedRuns {
    let AxisRank { rank, degree } = loads.axis_rank();
    let len = layer.matrix_len();
    let mut own = Runs::new();
    let mut received: SmallVec<[Runs; 8]> = smallvec![Runs::new(); degree];
    for (shadow, (owner, expert)) in loads.shadowed().enumerate() {
        received[owner].push(shadow * len..(shadow + 1) * len);
        if owner == rank {
            own.push(expert * len..(expert + 1) * len);
        }
    }
    let num_shadows = loads.shadowed().count();
    let lens = (0..degree).flat_map(|from| {
        let sent = received[from].len() * len;
        (0..degree).map(move |to| if from == to { 0 } else { sent })
    });
    ExchangedRuns {
        lens: lens.collect(),
        even_len: num_shadows.div_ceil(degree) * len,
        len_max: num_shadows.min(layer.num_groups) * len,
        sent: smallvec![own; degree],
        received,
    }
}

/// Returns the first row of each shadowed expert and the end of the last one.
fn starts(cx: &OperationContext<'_>, loads: &Loads) -> Result<Tensor> {
    let ends = loads.shadowed_rows().scan(0, |end, rows| {
        *end += rows.len() as u32;
        Some(*end)
    });
    let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
    let mut tensor = cx.empty([starts.len()], DType::U32)?;
    cx.device().upload(&starts, tensor.view_mut());
    Ok(tensor)
}

/// Returns this rank's rows of each shadowed expert, and their range among the rows of all shadowed experts.
fn rows_of_shadows(loads: &Loads) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut end = 0;
    loads.shadowed_rows().map(move |rows| {
        end += rows.len();
        (rows.clone(), end - rows.len()..end)
    })
}

/// Gathers this rank's rows of shadowed experts, by expert: `[1, room, cols]`.
fn gather_shadowed_rows(cx: &OperationContext<'_>, loads: &Loads, rows: View<'_>) -> Result<Tensor> {
    let room = loads.shadowed_buffer_rows();
    let mut taken = cx.empty([1, room, rows.shape().cols()], rows.dtype())?;
    let mut end = 0;
    for (from, to) in rows_of_shadows(loads) {
        end = to.end;
        let from = rows.rows(from.start, from.len());
        cx.device().copy(from, taken.view_mut().into_rows(to.start, to.len()));
    }
    zero_unwritten_rows(cx, taken.view_mut(), end..room);
    Ok(taken)
}

/// Copies `outputs`, the results for this rank's rows of shadowed experts, to the places of these rows in `rows`.
fn scatter_shadowed_rows(cx: &OperationContext<'_>, loads: &Loads, outputs: View<'_>, mut rows: ViewMut<'_>) {
    for (to, from) in rows_of_shadows(loads) {
        cx.device().copy(outputs.rows(from.start, from.len()), rows.rows(to.start, to.len()));
    }
}

/// Computes this rank's partial sum of the gradients of the shadowed experts' matrices, from the first rows of the experts, the output
/// gradients and the inputs. Starts the sum over the ranks.
pub(super) fn start_sum(
    layer: &GroupedLinear,
    cx: &OperationContext<'_>,
    loads: &Loads,
    starts: View<'_>,
    [dy, input]: [View<'_>; 2],
) -> Result<PendingExchange> {
    let num_shadows = loads.shadowed().count();
    let (axis, device) = (cx.expert_axis_ops(), cx.device());
    let mut term = axis.empty_partial_sum(device, layer.shape_of(num_shadows), DType::F32)?;
    let groups = RowGroups { starts, num_groups: num_shadows };
    layer.weight_grad(cx, groups, dy, input, term.view_mut(), false)?;
    axis.start_sum(device, ExchangeKind::AllReduce, term)
}

/// Writes or adds the sum to the gradients of this rank's experts.
pub(super) fn finish_sum(
    layer: &GroupedLinear,
    cx: &OperationContext<'_>,
    loads: &Loads,
    sum: PendingExchange,
    mut out: ViewMut<'_>,
    accumulate: bool,
) -> Result<()> {
    let (device, len) = (cx.device(), layer.matrix_len());
    let shape = layer.shape_of(loads.shadowed().count());
    let sum = cx.expert_axis_ops().finish_temporary(device, sum, shape, DType::F32)?;
    for (shadow, (owner, expert)) in loads.shadowed().enumerate() {
        if owner == loads.axis_rank().rank {
            let of_shadow = sum.view().part(shadow * len, layer.shape_of(1));
            let out = out.reborrow().into_part(expert * len, layer.shape_of(1));
            if accumulate { device.add_assign(out, of_shadow) } else { device.copy(of_shadow, out) }
        }
    }
    Ok(())
}
