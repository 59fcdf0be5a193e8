//! Shadows of experts: copies that all ranks have. Matrices come from the ranks that have the experts, and gradients are added up there (He et al., "FasterMoE", 2022,
//! section 5.1). Ranks add up what each makes of its own rows, neighbours first, as the owner would: so shadows change no bit.

use super::expert_loads::Loads;
use super::grouped_linear::GroupedLinear;
use super::input_activation::grad_and_output;
use super::own_experts::{OwnExperts, zero};
use crate::device::{DeviceError, Result};
use crate::tape::{ExchangedRuns, OperationContext, PendingExchange, Runs};
use crate::tensor::{Tensor, View, ViewMut};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;
use trireme_base::{AxisPlace, DType, ExchangeKind};

/// Matrices of both layers on their way.
pub(super) struct Shadows([PendingExchange; 2]);

/// Places of what backward needs of shadows' forward: this rank's rows of shadowed experts, by expert; where those of each expert begin, and the
/// last ones end; and what the activation reads.
pub(super) const SAVED_X: usize = 0;
pub(super) const SAVED_STARTS: usize = 1;
pub(super) const SAVED_INNER: usize = 2;

/// Places of what the weight half needs of the input half of shadows' backward: the gradients of the outputs of the second layer, and of the first
/// one; and the output of the activation.
pub(super) const KEPT_DY: usize = 0;
pub(super) const KEPT_D_INNER: usize = 1;
pub(super) const KEPT_ACTIVATED: usize = 2;

impl Shadows {
    /// Starts to send the matrices of own experts, and to receive those of others; `None` if no expert is shadowed.
    pub(super) fn start(
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
    ) -> Result<Option<Shadows>> {
        if experts.exchange.num_shadowed == 0 {
            return Ok(None);
        }
        let start = |layer: &GroupedLinear| {
            cx.expert_axis().start_rows(cx.device(), runs(layer, loads), cx.parameter(&layer.weight))
        };
        Ok(Some(Shadows([start(&experts.into)?, start(&experts.back)?])))
    }

    /// The matrices of both layers, when they have come.
    fn finish(self, experts: &OwnExperts, cx: &OperationContext<'_>, loads: &Loads) -> Result<[Tensor; 2]> {
        let finish = |layer: &GroupedLinear, exchange: PendingExchange| {
            let (axis, device, weight) = (cx.expert_axis(), cx.device(), cx.parameter(&layer.weight));
            let mut shadows = cx.empty(layer.shape_of(loads.shadowed().count()), weight.dtype())?;
            axis.send_rest(device, &exchange, weight, shadows.view_mut())?;
            axis.finish_rows(device, exchange, shadows.view_mut())?;
            Ok::<_, DeviceError>(shadows)
        };
        let [into, back] = self.0;
        Ok([finish(&experts.into, into)?, finish(&experts.back, back)?])
    }

    /// Replaces this rank's rows of shadowed experts by what shadows make of them; returns what backward needs.
    pub(super) fn forward(
        self,
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
        rows: &mut Tensor,
    ) -> Result<[Tensor; 3]> {
        let (x, starts) = (taken(cx, loads, rows.view())?, starts(cx, loads)?);
        let empty = |cols: usize| cx.empty(x.shape().with_cols(cols), rows.dtype());
        let (mut inner, mut made) = (empty(experts.into.outputs())?, empty(experts.back.outputs())?);
        let [into, back] = self.finish(experts, cx, loads)?;
        experts.into.product(cx, (starts.view(), into.view()), x.view(), inner.view_mut())?;
        experts.back.product(cx, (starts.view(), back.view()), inner.view(), made.view_mut())?;
        put_back(cx, loads, made.view(), rows.view_mut());
        Ok([x, starts, inner])
    }

    /// Replaces the gradients of what shadows have made of this rank's rows by those of the rows; returns what the weight half needs.
    pub(super) fn backward(
        self,
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
        starts: View<'_>,
        (grad, mut inner): (&mut Tensor, Tensor),
    ) -> Result<[Tensor; 3]> {
        let dy = taken(cx, loads, grad.view())?;
        let empty = |cols: usize| cx.empty(dy.shape().with_cols(cols), grad.dtype());
        let mut d_activated = empty(experts.back.weight.shape.cols())?;
        let mut dx = empty(grad.shape().cols())?;
        let [into, back] = self.finish(experts, cx, loads)?;
        let layers = [&into, &back].map(|shadows| (starts, shadows.view()));
        let of_activation = [inner.view_mut(), d_activated.view_mut()];
        experts.inner_grads(cx, layers, (dy.view(), dx.view_mut()), of_activation)?;
        put_back(cx, loads, dx.view(), grad.view_mut());
        let [d_inner, activated] = grad_and_output(experts.back.activation, inner, d_activated);
        Ok([dy, d_inner, activated])
    }
}

/// What ranks send of their experts' matrices, and receive of those of others, in the order of the experts.
fn runs(layer: &GroupedLinear, loads: &Loads) -> ExchangedRuns {
    let AxisPlace { rank, degree } = loads.axis_place();
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

/// Where the rows of each shadowed expert begin, and the last ones end.
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

/// This rank's rows of shadowed experts, and where they lie among those that are taken.
fn rows_of_shadows(loads: &Loads) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut end = 0;
    loads.shadowed_rows().map(move |rows| {
        end += rows.len();
        (rows.clone(), end - rows.len()..end)
    })
}

/// Takes this rank's rows of shadowed experts from all of its rows, by expert: `[1, room, cols]`.
fn taken(cx: &OperationContext<'_>, loads: &Loads, rows: View<'_>) -> Result<Tensor> {
    let room = loads.shadowed_room();
    let mut taken = cx.empty([1, room, rows.shape().cols()], rows.dtype())?;
    let mut end = 0;
    for (from, to) in rows_of_shadows(loads) {
        end = to.end;
        let from = rows.rows(from.start, from.len());
        cx.device().copy(from, taken.view_mut().into_rows(to.start, to.len()));
    }
    zero(cx, taken.view_mut(), end..room);
    Ok(taken)
}

/// Puts what was made of such rows in their places.
fn put_back(cx: &OperationContext<'_>, loads: &Loads, made: View<'_>, mut rows: ViewMut<'_>) {
    for (to, from) in rows_of_shadows(loads) {
        cx.device().copy(made.rows(from.start, from.len()), rows.rows(to.start, to.len()));
    }
}

/// Computes this rank's term of the gradients of shadows' matrices, from where their rows begin, the gradient of their outputs and what they were multiplied with, and starts the sum over the ranks.
pub(super) fn start_sum(
    layer: &GroupedLinear,
    cx: &OperationContext<'_>,
    loads: &Loads,
    (starts, [dy, input]): (View<'_>, [View<'_>; 2]),
) -> Result<PendingExchange> {
    let num_shadows = loads.shadowed().count();
    let (axis, device) = (cx.expert_axis(), cx.device());
    let mut term = axis.empty_term(device, layer.shape_of(num_shadows), DType::F32)?;
    layer.weight_grad(cx, (starts, num_shadows), (dy, input), (term.view_mut(), false))?;
    axis.start_sum(device, ExchangeKind::AllReduce, term)
}

/// Writes the sum to the gradients of own experts, or adds it there.
pub(super) fn finish_sum(
    layer: &GroupedLinear,
    cx: &OperationContext<'_>,
    loads: &Loads,
    sum: PendingExchange,
    (mut out, accumulate): (ViewMut<'_>, bool),
) -> Result<()> {
    let (device, len) = (cx.device(), layer.matrix_len());
    let shape = layer.shape_of(loads.shadowed().count());
    let sum = cx.expert_axis().finish_temporary(device, sum, shape, DType::F32)?;
    for (shadow, (owner, expert)) in loads.shadowed().enumerate() {
        if owner == loads.axis_place().rank {
            let of_shadow = sum.view().part(shadow * len, layer.shape_of(1));
            let out = out.reborrow().into_part(expert * len, layer.shape_of(1));
            if accumulate { device.add_assign(out, of_shadow) } else { device.copy(of_shadow, out) }
        }
    }
    Ok(())
}
