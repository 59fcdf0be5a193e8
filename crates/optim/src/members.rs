//! The parameters of a unit that one rule updates, and what is here of them.

use crate::groups::ParameterSettings;
use std::ops::Range;
use trireme_tensor::{
    Device, OptimizerState, ParameterTable, Piece, Pieces, UnitInfo, Update, View, ViewMut, leaf_sum,
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
    pub(crate) pieces: Pieces,
    /// One for each member, made anew in each phase.
    updates: Vec<Update>,
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
        let sums = vec![[0.0; 2]; pieces.len()];
        Members { updates: Vec::with_capacity(list.len()), list, pieces: Pieces::new(pieces), sums }
    }

    /// Goes over what is here by an update for each member, which `update` gets with its index.
    pub(crate) fn update(
        &mut self,
        device: &Device,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        states: &mut [OptimizerState],
        noise: u32,
        mut update: impl FnMut(usize, &Member) -> Update,
    ) {
        self.updates.clear();
        self.updates.extend(self.list.iter().enumerate().map(|(index, member)| update(index, member)));
        device.update((&self.pieces, &self.updates), parameters, grads, states, noise, &mut self.sums);
    }

    /// Where a kernel other than [`Device::update`] puts the sums of pieces.
    pub(crate) fn pieces_and_sums(&mut self) -> (&Pieces, &mut [[f64; 2]]) {
        (&self.pieces, &mut self.sums)
    }

    /// One of the two sums of the last update over what is here of a member.
    pub(crate) fn sum(&self, member: &Member, which: usize) -> f64 {
        let first = member.pieces.start;
        let leaves = member.first_leaf..member.first_leaf + member.pieces.len();
        let mut leaf = |leaf: usize| self.sums[first + leaf - member.first_leaf][which];
        leaf_sum(leaves, 0.0, &mut leaf, &|left, right| left + right)
    }
}
