//! Copies of experts that all ranks have: matrices come from the ranks that have the experts, and gradients are added up there (He et al., "FasterMoE", 2022,
//! section 5.1). Ranks add up what each makes of its own rows, neighbours first, as the owner would: so copies change no bit.

use super::expert_exchange::Loads;
use super::grouped_linear::GroupedLinear;
use super::input_activation::in_order;
use super::own_experts::{OwnExperts, part, part_mut, zero};
use crate::device::DeviceError;
use crate::shape::Shape;
use crate::tape::{ExchangedRuns, OperationContext, PendingExchange, Runs};
use crate::tensor::{Tensor, View, ViewMut};
use std::ops::Range;
use trireme_base::{AxisPlace, DType, ExchangeKind};

/// Matrices of both layers on their way.
pub(super) struct Copies([PendingExchange; 2]);

impl Copies {
    /// Starts to send the matrices of own experts, and to receive those of others; `None` if there are no copies.
    pub(super) fn start(
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
    ) -> Result<Option<Copies>, DeviceError> {
        if loads.replicated().next().is_none() {
            return Ok(None);
        }
        let start = |layer: &GroupedLinear| {
            cx.expert_axis().start_rows(cx.device(), runs(layer, loads), cx.parameter(&layer.weight))
        };
        Ok(Some(Copies([start(&experts.into)?, start(&experts.back)?])))
    }

    /// The matrices of both layers, when they have come.
    fn finish(
        self,
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
    ) -> Result<[Tensor; 2], DeviceError> {
        let finish = |layer: &GroupedLinear, exchange: PendingExchange| {
            let (axis, device, weight) = (cx.expert_axis(), cx.device(), cx.parameter(&layer.weight));
            let mut copies = cx.empty(layer.shape_of(loads.replicated().count()), weight.dtype())?;
            axis.send_rest(device, &exchange, weight, copies.view_mut())?;
            axis.finish_rows(device, exchange, copies.view_mut())?;
            Ok::<_, DeviceError>(copies)
        };
        let [into, back] = self.0;
        Ok([finish(&experts.into, into)?, finish(&experts.back, back)?])
    }

    /// Replaces this rank's rows by what copies make of them. Returns, for backward, the rows as they were, where those of each expert begin, and what the activation
    /// reads.
    pub(super) fn forward(
        self,
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
        rows: &mut Tensor,
    ) -> Result<[Tensor; 3], DeviceError> {
        let starts = starts(cx, loads)?;
        let (x, all) = taken(cx, loads, rows.view())?;
        let empty = |cols: usize| cx.empty(all.with_cols(cols), rows.dtype());
        let (mut inner, mut made) = (empty(experts.into.outputs())?, empty(experts.back.outputs())?);
        let [into, back] = self.finish(experts, cx, loads)?;
        experts.into.product(cx, (starts.view(), into.view()), x.view(), inner.view_mut())?;
        experts.back.product(cx, (starts.view(), back.view()), inner.view(), made.view_mut())?;
        put_back(cx, loads, made.view(), rows.view_mut());
        Ok([x, starts, inner])
    }

    /// Replaces the gradients of what copies have made of this rank's rows by those of the rows. Returns, for the weight half, the gradients as they were, those of
    /// what the activation reads, and what it makes.
    pub(super) fn backward(
        self,
        experts: &OwnExperts,
        cx: &OperationContext<'_>,
        loads: &Loads,
        (grad, mut inner): (&mut Tensor, Tensor),
    ) -> Result<[Tensor; 3], DeviceError> {
        let starts = starts(cx, loads)?;
        let (dy, all) = taken(cx, loads, grad.view())?;
        let empty = |cols: usize| cx.empty(all.with_cols(cols), grad.dtype());
        let mut d_activated = empty(experts.back.weight.shape.cols())?;
        let mut dx = empty(grad.shape().cols())?;
        let [into, back] = self.finish(experts, cx, loads)?;
        let of_copies = [&into, &back].map(|copies| (starts.view(), copies.view()));
        let of_activation = [inner.view_mut(), d_activated.view_mut()];
        experts.inner_grads(cx, of_copies, (dy.view(), dx.view_mut()), of_activation)?;
        put_back(cx, loads, dx.view(), grad.view_mut());
        let [d_inner, activated] = in_order(experts.back.activation, inner, d_activated);
        Ok([dy, d_inner, activated])
    }
}

/// What ranks send of their experts' matrices, and receive of those of others, in the order of the experts.
fn runs(layer: &GroupedLinear, loads: &Loads) -> ExchangedRuns {
    let AxisPlace { rank, degree } = loads.place();
    let len = layer.first_of(1);
    let of = |owner: usize, place: fn(usize, usize) -> usize| -> Runs {
        let all = loads.replicated().enumerate().filter(|(_, (other, _))| *other == owner);
        all.map(|(copy, (_, expert))| place(copy, expert) * len..(place(copy, expert) + 1) * len).collect()
    };
    let num_copies = loads.replicated().count();
    let most = num_copies.min(layer.num_groups) * len;
    let copies_of = |owner: usize| loads.replicated().filter(|(other, _)| *other == owner).count();
    let lens = (0..degree * degree).map(|index| match [index / degree, index % degree] {
        [from, to] if from == to => 0,
        [from, _] => copies_of(from) * len,
    });
    ExchangedRuns {
        lens: lens.collect(),
        sent: (0..degree).map(|_| of(rank, |_, expert| expert)).collect(),
        received: (0..degree).map(|owner| of(owner, |copy, _| copy)).collect(),
        even: num_copies.div_ceil(degree) * len,
        most,
    }
}

/// Where the rows of each expert with copies begin, and the last ones end.
fn starts(cx: &OperationContext<'_>, loads: &Loads) -> Result<Tensor, DeviceError> {
    let ends = loads.replicated_rows().scan(0, |end, rows| {
        *end += rows.len() as u32;
        Some(*end)
    });
    let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
    let mut tensor = cx.empty([starts.len()], DType::U32)?;
    cx.device().upload(&starts, tensor.view_mut());
    Ok(tensor)
}

/// Rows of experts with copies, and where they lie among those that are taken.
fn rows_of_copies(loads: &Loads) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let mut end = 0;
    loads.replicated_rows().map(move |rows| {
        end += rows.len();
        (rows.clone(), end - rows.len()..end)
    })
}

/// This rank's rows of experts with copies, by expert, and the shape of that.
fn taken(cx: &OperationContext<'_>, loads: &Loads, rows: View<'_>) -> Result<(Tensor, Shape), DeviceError> {
    let shape = Shape::from([1, loads.replicated_room(), rows.shape().cols()]);
    let mut taken = cx.empty(shape, rows.dtype())?;
    let mut end = 0;
    for (from, to) in rows_of_copies(loads) {
        end = to.end;
        cx.device().copy(part(rows, &from), part_mut(taken.view_mut(), &to));
    }
    zero(cx, taken.view_mut(), end..shape.rows());
    Ok((taken, shape))
}

/// Puts what was made of such rows in their places.
fn put_back(cx: &OperationContext<'_>, loads: &Loads, made: View<'_>, mut rows: ViewMut<'_>) {
    for (to, from) in rows_of_copies(loads) {
        cx.device().copy(part(made, &from), part_mut(rows.reborrow(), &to));
    }
}

/// Starts the sum over the ranks of the gradients of copies' matrices, of where their rows begin, the gradient of their outputs and what they multiply with.
pub(super) fn start_sum(
    layer: &GroupedLinear,
    cx: &OperationContext<'_>,
    loads: &Loads,
    (starts, [dy, input]): (View<'_>, [View<'_>; 2]),
) -> Result<PendingExchange, DeviceError> {
    let num_copies = loads.replicated().count();
    let (axis, device) = (cx.expert_axis(), cx.device());
    let mut term = axis.empty_term(device, layer.shape_of(num_copies), DType::F32)?;
    layer.weight_grad(cx, (starts, num_copies), (dy, input), (term.view_mut(), false))?;
    axis.start_sum(device, ExchangeKind::AllReduce, term)
}

/// Writes the sum in the gradients of own experts, or adds it there.
pub(super) fn finish_sum(
    layer: &GroupedLinear,
    cx: &OperationContext<'_>,
    loads: &Loads,
    sum: PendingExchange,
    (mut out, accumulate): (ViewMut<'_>, bool),
) -> Result<(), DeviceError> {
    let (device, shape) = (cx.device(), layer.shape_of(loads.replicated().count()));
    let sum = cx.expert_axis().finish_temporary(device, sum, shape, DType::F32)?;
    for (copy, (owner, expert)) in loads.replicated().enumerate() {
        if owner == loads.place().rank {
            let of_copy = sum.view().part(layer.first_of(copy), layer.shape_of(1));
            let out = out.reborrow().into_part(layer.first_of(expert), layer.shape_of(1));
            if accumulate { device.add_assign(out, of_copy) } else { device.copy(of_copy, out) }
        }
    }
    Ok(())
}
