//! The members of a rule: the parameters of a unit that the rule updates, and this rank's elements of them.

use crate::groups::ParameterSettings;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::updates::Update;
use trireme_tensor::{
    Category, Device, DeviceError, LeafRun, OptimizerState, ParameterTable, Piece, Pieces, StepScale, Tensor,
    UnitInfo, UpdatePass, View, ViewMut,
};

/// A parameter of a unit, whether or not this rank has elements of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct UpdatedParameter {
    pub(crate) parameter: usize,
    pub(crate) settings: ParameterSettings,
    /// This rank's elements of the parameter.
    pub(crate) held: Range<usize>,
    /// Indices of its pieces, in order.
    pub(crate) pieces: Range<usize>,
}

/// How parameters are split into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceSplit {
    /// Into pieces of at most [`Pieces::LEN_MAX`] elements, so that threads share the work.
    Anywhere,
    /// Along the leaves of the unit's summation tree, so that sums and quantization blocks do not depend on the sharding.
    Leaves,
}

#[derive(Debug)]
pub(crate) struct UpdatedParameters {
    pub(crate) list: Vec<UpdatedParameter>,
    pub(crate) pieces: Arc<Pieces>,
    /// The pieces of each member that this rank contributes to sums over all ranks, if pieces are leaves.
    counted: Arc<Vec<LeafRun>>,
    /// One for each member, recomputed for each pass.
    updates: Arc<Vec<Update>>,
    /// One for each member, recomputed in each step.
    scales: Arc<Vec<StepScale>>,
}

impl UpdatedParameters {
    /// Splits the parameters `chosen` of `unit` into pieces. This rank has the elements `part` of the unit's flat buffer.
    pub(crate) fn new(
        table: &ParameterTable,
        unit: &UnitInfo,
        part: &Range<usize>,
        split: PieceSplit,
        chosen: Vec<(usize, ParameterSettings)>,
    ) -> Self {
        let mut pieces: Vec<Piece> = Vec::new();
        let (mut list, mut counted) = (Vec::new(), Vec::new());
        let mut num_elements = 0;
        for (update, (parameter, settings)) in chosen.into_iter().enumerate() {
            let info = &table.parameters()[parameter];
            let held = info.stored(part).unwrap_or(0..0);
            let first = pieces.len();
            let (mut position, end) = (info.offset + held.start, info.offset + held.end);
            let first_leaf = position / unit.leaf_len().max(1);
            while position < end {
                let len = match split {
                    PieceSplit::Anywhere => Pieces::LEN_MAX.min(end - position),
                    PieceSplit::Leaves => (unit.leaf_len() - position % unit.leaf_len()).min(end - position),
                };
                pieces.push(Piece {
                    position,
                    start: position - part.start,
                    state: num_elements,
                    len,
                    update,
                });
                (position, num_elements) = (position + len, num_elements + len);
            }
            list.push(UpdatedParameter { parameter, settings, held, pieces: first..pieces.len() });
            let end = if info.is_first_replica() { pieces.len() } else { first };
            counted.push(LeafRun { pieces: first..end, first_leaf });
        }
        UpdatedParameters {
            updates: Arc::new(Vec::with_capacity(list.len())),
            scales: Arc::new(Vec::with_capacity(list.len())),
            list,
            pieces: Arc::new(Pieces::new(pieces)),
            counted: Arc::new(counted),
        }
    }

    /// Runs one update pass over this rank's elements, with an update for each member.
    pub(crate) fn update(
        &mut self,
        device: &Device,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
        rounding_seed: u32,
        update: impl FnMut(&UpdatedParameter) -> Update,
    ) {
        let updates = self.member_updates(update);
        let pass =
            UpdatePass { pieces: &self.pieces, updates: &updates, scales: None, rounding_seed, sums: None };
        device.update(pass, parameters, grads, states);
    }

    /// Runs a kernel that computes two sums for each piece, and adds up this rank's contribution to each member. `out` receives all first
    /// sums, followed by all second sums if it has room for both. Returns an error if the memory for the sums of pieces cannot be
    /// allocated.
    pub(crate) fn sum_by(
        &self,
        device: &Device,
        out: ViewMut<'_>,
        kernel: impl FnOnce(&Arc<Pieces>, ViewMut<'_>),
    ) -> Result<(), DeviceError> {
        let shape = [self.pieces.as_slice().len(), 2].into();
        let mut sums = device.empty(shape, DType::F64, Category::Optimizer)?;
        kernel(&self.pieces, sums.view_mut());
        device.leaf_sums(sums.view(), Arc::clone(&self.counted), out);
        Ok(())
    }

    pub(crate) fn member_updates(
        &mut self,
        update: impl FnMut(&UpdatedParameter) -> Update,
    ) -> Arc<Vec<Update>> {
        refill(&mut self.updates, self.list.iter().map(update))
    }

    /// Returns the factors by which the learning rates of all members are multiplied, computed from the sums of squares of parameters and
    /// of updates. Returns an error if the memory for the factors cannot be allocated.
    pub(crate) fn scales(
        &mut self,
        device: &Device,
        sums: [View<'_>; 2],
        scale: impl FnMut(&UpdatedParameter) -> StepScale,
    ) -> Result<Tensor, DeviceError> {
        let scales = refill(&mut self.scales, self.list.iter().map(scale));
        let mut factors = device.empty([scales.len()].into(), DType::F32, Category::Optimizer)?;
        device.step_scales(scales, sums, factors.view_mut());
        Ok(factors)
    }
}

/// Replaces the contents of a list. If a pending kernel still holds the list, a copy is written instead.
fn refill<T: Clone>(list: &mut Arc<Vec<T>>, items: impl Iterator<Item = T>) -> Arc<Vec<T>> {
    let own = Arc::make_mut(list);
    own.clear();
    own.extend(items);
    Arc::clone(list)
}
