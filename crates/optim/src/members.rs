//! The parameters of a unit that one rule updates, and what is here of them.

use crate::groups::ParameterSettings;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;
use trireme_tensor::{
    Category, Device, DeviceError, OptimizerState, ParameterTable, Piece, Pieces, UnitInfo, Update, View,
    ViewMut, leaf_sum,
};

/// A parameter, whether or not anything of it is here.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Member {
    /// Place in the table.
    pub(crate) parameter: usize,
    pub(crate) settings: ParameterSettings,
    /// Its elements that are here.
    pub(crate) held: Range<usize>,
    /// Its pieces, in order.
    pub(crate) pieces: Range<usize>,
    /// Leaf of the first of them, where pieces are leaves.
    first_leaf: usize,
}

/// How pieces are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// In lengths that keep threads busy.
    Anywhere,
    /// Along the leaves of the unit, so that sums and blocks are the same in any shard.
    Leaves,
}

/// Parameters with one rule.
#[derive(Debug)]
pub(crate) struct Members {
    pub(crate) list: Vec<Member>,
    pub(crate) pieces: Arc<Pieces>,
    /// One for each member, made anew in each phase.
    updates: Arc<Vec<Update>>,
    /// Two sums over each piece, of the last kernel that took them.
    sums: Vec<[f64; 2]>,
}

impl Members {
    /// The parameters `chosen` of `unit`, of whose flat buffer the elements `part` are here.
    pub(crate) fn new(
        table: &ParameterTable,
        unit: &UnitInfo,
        part: &Range<usize>,
        cut: Cut,
        chosen: Vec<(usize, ParameterSettings)>,
    ) -> Self {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut list = Vec::new();
        let mut num_elements = 0;
        for (update, (parameter, settings)) in chosen.into_iter().enumerate() {
            let info = &table.parameters()[parameter];
            let held = info.held(part).unwrap_or(0..0);
            let first = pieces.len();
            let (mut position, end) = (info.offset + held.start, info.offset + held.end);
            let first_leaf = position / unit.leaf_len().max(1);
            while position < end {
                let len = match cut {
                    Cut::Anywhere => Pieces::LEN_MAX.min(end - position),
                    Cut::Leaves => (unit.leaf_len() - position % unit.leaf_len()).min(end - position),
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
            list.push(Member { parameter, settings, held, pieces: first..pieces.len(), first_leaf });
        }
        let updates = Arc::new(Vec::with_capacity(list.len()));
        let sums = vec![[0.0; 2]; pieces.len()];
        Members { updates, list, pieces: Arc::new(Pieces::new(pieces)), sums }
    }

    /// Goes over what is here by an update for each member, which `update` gets with its index.
    pub(crate) fn update(
        &mut self,
        device: &Device,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
        noise: u32,
        update: impl FnMut(usize, &Member) -> Update,
    ) {
        let updates = self.choose(update);
        device.update((&self.pieces, &updates), parameters, grads, states, noise, None);
    }

    /// Lets a kernel take sums of each piece, and waits for them.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub(crate) fn sum_by(
        &mut self,
        device: &Device,
        kernel: impl FnOnce(&Arc<Pieces>, ViewMut<'_>),
    ) -> Result<(), DeviceError> {
        let shape = [self.sums.len(), 2].into();
        let mut sums = device.empty(shape, DType::F64, Category::Optimizer)?;
        kernel(&self.pieces, sums.view_mut());
        device.download(sums.view(), self.sums.as_flattened_mut());
        Ok(())
    }

    /// The updates of all members, each of which `update` gets with its index.
    pub(crate) fn choose(&mut self, mut update: impl FnMut(usize, &Member) -> Update) -> Arc<Vec<Update>> {
        // A kernel that has not run may still hold the list; then this writes to a copy.
        let updates = Arc::make_mut(&mut self.updates);
        updates.clear();
        updates.extend(self.list.iter().enumerate().map(|(index, member)| update(index, member)));
        Arc::clone(&self.updates)
    }

    /// One of the two sums over what is here of a member.
    pub(crate) fn sum(&self, member: &Member, which: usize) -> f64 {
        let first = member.pieces.start;
        let leaves = member.first_leaf..member.first_leaf + member.pieces.len();
        let mut leaf = |leaf: usize| self.sums[first + leaf - member.first_leaf][which];
        leaf_sum(leaves, 0.0, &mut leaf, &|left, right| left + right)
    }
}
