//! What state leaves the device so that a step fits into a given memory.

use crate::sizes::StateSizes;
use std::collections::{BTreeMap, BTreeSet};
use trireme_base::MemoryUse;
use trireme_schedule::{Action, Program, StateClass, StateLayout, StateOf, Tier};

/// How much longer a byte takes to a disk than to the host's memory: a fast disk moves 2 GB a second, a bus 20.
const DISK_COST: u64 = 10;

/// Bytes that a worker has to stay within.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBounds {
    /// Of the device.
    pub device: usize,
    /// Of the host's memory for state that is not on the device.
    pub host: usize,
    /// Of the machine's memory, which both of these are part of. Memory that several workers map counts for the one that it belongs to.
    pub machine: usize,
}

impl MemoryBounds {
    /// Bytes by which a step passes the bound that it passes most; 0 if it fits.
    pub fn excess(&self, prediction: &MemoryUse) -> usize {
        self.device_excess(prediction).max(prediction.host.saturating_sub(self.host))
    }

    /// Whether a step fits.
    pub fn hold(&self, prediction: &MemoryUse) -> bool {
        self.excess(prediction) == 0
    }

    /// As `excess`, of the bounds that hold if less lies on the device.
    fn device_excess(&self, prediction: &MemoryUse) -> usize {
        let machine = prediction.on_machine().saturating_sub(self.machine);
        machine.max(prediction.total().saturating_sub(self.device))
    }

    /// What a step may take of the device, if it differs from the one predicted only there.
    pub(crate) fn device_total(&self, prediction: &MemoryUse) -> usize {
        let beside = prediction.on_machine() as isize - prediction.total() as isize;
        self.device.min(self.machine.saturating_add_signed(-beside))
    }
}

/// Bytes that a step moves between the device, or the host where that updates, and other places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Traffic {
    pub(crate) host: u64,
    pub(crate) disk: u64,
}

impl Traffic {
    fn cost(self) -> u64 {
        self.host + DISK_COST * self.disk
    }
}

/// How state lies, and what that takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Placing {
    pub(crate) state: StateLayout,
    pub(crate) traffic: Traffic,
    pub(crate) prediction: MemoryUse,
}

/// The places of the classes in `open` with which a step takes no more than `bounds`, and moves least; `program` makes the program of a
/// choice, and `run` finds what that takes. The other classes stay where `given` has them.
///
/// Which state is idle for how long follows from the program: of activations the first blocks' are, for theirs are kept first and
/// used last, so as many blocks as are needed leave, from the first on (Huang et al., "SwapAdvisor", 2020, swaps by the same
/// lifetimes, found by search); parameters, gradients and the optimizer's state are idle through all passes of other units, and
/// leave as classes. Combinations of places are tried in the order of what they move at least, until the rest moves more than one
/// that fits. Cost: at most 81 runs, times the logarithm of the blocks. If nothing fits, the places that pass their bounds least.
///
/// # Errors
/// Those of `run`.
pub(crate) fn fit_places<E>(
    sizes: &StateSizes,
    (given, open): (StateLayout, &[StateClass]),
    bounds: MemoryBounds,
    program: impl Fn(StateLayout) -> Program,
    run: impl Fn(StateLayout) -> Result<MemoryUse, E>,
) -> Result<Placing, E> {
    let search = Search { sizes, bounds, open, program: &program, run: &run };
    let stays = search.placing(given)?;
    if bounds.hold(&stays.prediction) {
        return Ok(stays);
    }
    let mut all = combinations(given, open, program(given).outline.num_microbatches);
    // Those were run above.
    all.retain(|&state| state != given || search.has_open_blocks(given));
    all.sort_by_cached_key(|&state| search.cost_min(state));
    let mut best: Option<Placing> = None;
    let mut smallest = stays;
    for state in all {
        if best.as_ref().is_some_and(|best| best.traffic.cost() <= search.cost_min(state)) {
            break;
        }
        let found = search.with_fewest_blocks(state)?;
        let is_cheaper = |best: &Placing| found.traffic.cost() < best.traffic.cost();
        if bounds.hold(&found.prediction) && best.as_ref().is_none_or(is_cheaper) {
            best = Some(found);
        }
        let rank = |placing: &Placing| (bounds.excess(&placing.prediction), placing.prediction.total());
        smallest = if rank(&found) < rank(&smallest) { found } else { smallest };
    }
    Ok(best.unwrap_or(smallest))
}

/// Every choice for the open classes that the layout allows.
fn combinations(given: StateLayout, open: &[StateClass], num_microbatches: usize) -> Vec<StateLayout> {
    let mut all = vec![given];
    for &class in open {
        let with = |state: &StateLayout| {
            let state = *state;
            let can_live = move |tier: &Tier| state.can_live(class, *tier, num_microbatches);
            let tiers = Tier::ALL.into_iter().filter(can_live);
            tiers.map(move |tier| state.with_tier(class, tier)).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

struct Search<'a, P, R> {
    sizes: &'a StateSizes,
    bounds: MemoryBounds,
    open: &'a [StateClass],
    program: &'a P,
    run: &'a R,
}

impl<E, P: Fn(StateLayout) -> Program, R: Fn(StateLayout) -> Result<MemoryUse, E>> Search<'_, P, R> {
    fn placing(&self, state: StateLayout) -> Result<Placing, E> {
        Ok(Placing { state, traffic: self.traffic(state), prediction: (self.run)(state)? })
    }

    fn traffic(&self, state: StateLayout) -> Traffic {
        traffic(self.sizes, &(self.program)(state))
    }

    /// Whether it is open of how many blocks the activations leave.
    fn has_open_blocks(&self, state: StateLayout) -> bool {
        self.open.contains(&StateClass::Activations) && state.is_away(StateClass::Activations)
    }

    /// What a step moves at least with these places, of however many blocks the activations leave.
    fn cost_min(&self, state: StateLayout) -> u64 {
        let num_moved = if self.has_open_blocks(state) { 1 } else { state.num_moved };
        self.traffic(StateLayout { num_moved, ..state }).cost()
    }

    /// These places, with the activations of no more blocks away than it takes to fit; or of all, if that does not suffice.
    fn with_fewest_blocks(&self, state: StateLayout) -> Result<Placing, E> {
        let all = self.placing(state)?;
        let fits = |placing: &Placing| self.bounds.device_excess(&placing.prediction) == 0;
        if !self.has_open_blocks(state) || !fits(&all) {
            return Ok(all);
        }
        // So many suffice, and so many do not.
        let (mut enough, mut too_few) = (self.sizes.units.len(), 0);
        let mut found = all;
        while enough - too_few > 1 {
            let num_moved = too_few + (enough - too_few) / 2;
            let placing = self.placing(StateLayout { num_moved, ..state })?;
            if fits(&placing) {
                (enough, found) = (num_moved, placing);
            } else {
                too_few = num_moved;
            }
        }
        Ok(found)
    }
}

/// What a step moves. Where the host updates, it takes gradients from the device and gives parameters back.
fn traffic(sizes: &StateSizes, program: &Program) -> Traffic {
    let layout = program.outline.state;
    let mut traffic = Traffic::default();
    let mut add = |tier: Tier, bytes: usize| match tier {
        Tier::Device => (),
        Tier::Host => traffic.host += bytes as u64,
        Tier::Disk => traffic.disk += bytes as u64,
    };
    let elements = |unit: usize, bytes: usize| sizes.units[unit].shard_len * bytes;
    let bytes_of = |activations: &BTreeMap<StateOf, usize>, state: StateOf| {
        activations.get(&state).copied().unwrap_or_else(|| sizes.of(state))
    };
    let mut stepped = BTreeSet::new();
    let mut activations = BTreeMap::new();
    for &action in &program.actions {
        match action {
            Action::Forward { unit, keep, .. } => {
                let kept = keep.kept_bytes(&sizes.units[unit].passes);
                activations.insert(action.state(StateClass::Activations), kept);
            }
            Action::Fetch(state) => add(layout.of(state.class).tier, bytes_of(&activations, state)),
            Action::Evict(state) => {
                let is_stepped = stepped.contains(&state.unit);
                // What did not change since it was fetched is on its disk already.
                let has_changed = match state.class {
                    StateClass::Optimizer | StateClass::Activations => true,
                    StateClass::Parameters => is_stepped,
                    StateClass::Gradients => !is_stepped,
                };
                add(layout.of(state.class).tier, if has_changed { bytes_of(&activations, state) } else { 0 });
            }
            Action::Unshard { unit } if layout.is_away(StateClass::Parameters) => {
                add(Tier::Host, elements(unit, sizes.gather_bytes));
            }
            Action::ReduceGrad { unit } if layout.is_away(StateClass::Gradients) => {
                add(Tier::Host, elements(unit, sizes.gradient_bytes));
            }
            Action::Step { unit } => {
                stepped.insert(unit);
                if layout.is_away(StateClass::Optimizer) {
                    let has_gradients = layout.is_away(StateClass::Gradients);
                    let gradients = if has_gradients { 0 } else { sizes.gradient_bytes };
                    add(Tier::Host, elements(unit, gradients + sizes.gather_bytes));
                }
            }
            _ => (),
        }
    }
    traffic
}

#[cfg(test)]
mod tests;
