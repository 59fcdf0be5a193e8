//! Chooses which state is offloaded, so that a step fits into a given memory.

use crate::sizes::ModelSizes;
use std::collections::{BTreeMap, BTreeSet};
use trireme_base::MemoryUse;
use trireme_schedule::{Action, Program, StateClass, StateKey, StateLayout, Tier};

/// Cost of moving a byte to or from disk, relative to host memory: a fast disk moves 2 GB/s, a bus 20 GB/s.
const DISK_COST: u64 = 10;

/// Memory bounds of a worker, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBounds {
    /// Bound on memory of the device.
    pub device: usize,
    /// Bound on host memory for state that is not on the device.
    pub host: usize,
    /// Bound on memory of the machine, which includes the other two, unless the device has memory of its own. Memory that several workers
    /// map is counted for the worker that owns it.
    pub machine: usize,
}

impl MemoryBounds {
    /// Returns the largest number of bytes by which a step exceeds one of the bounds; 0 if it fits.
    pub fn excess(&self, prediction: &MemoryUse) -> usize {
        self.device_excess(prediction).max(prediction.host.saturating_sub(self.host))
    }

    /// Returns whether a step fits.
    pub fn admit(&self, prediction: &MemoryUse) -> bool {
        self.excess(prediction) == 0
    }

    /// Like [`excess`](MemoryBounds::excess), without the bound on host memory, because moving state off the device cannot satisfy it.
    fn device_excess(&self, prediction: &MemoryUse) -> usize {
        let machine = prediction.on_machine().saturating_sub(self.machine);
        machine.max(prediction.total().saturating_sub(self.device))
    }

    /// Returns the bytes of device memory that a step may use if all its other memory is as predicted.
    pub(crate) fn device_budget(&self, prediction: &MemoryUse) -> usize {
        let other_bytes = prediction.on_machine() as isize - prediction.total() as isize;
        self.device.min(self.machine.saturating_add_signed(-other_bytes))
    }
}

/// Bytes that a step moves to and from host memory or disk. The other end of a transfer is the device. If the host runs the updates, the
/// other end of a transfer to or from disk may also be host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct OffloadTraffic {
    pub(crate) host: u64,
    pub(crate) disk: u64,
}

impl OffloadTraffic {
    fn cost(self) -> u64 {
        self.host + DISK_COST * self.disk
    }
}

/// A layout of state, with its traffic and its memory use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LayoutCandidate {
    pub(crate) state: StateLayout,
    pub(crate) traffic: OffloadTraffic,
    pub(crate) prediction: MemoryUse,
}

/// Returns the layout with the least traffic among those that keep a step within `bounds`. A byte to or from disk counts as [`DISK_COST`]
/// bytes. The search changes only the tiers of the classes in `open`, and the number of units whose activations are offloaded if
/// activations are open. `program` generates the program of a layout, and `run` returns its memory use. If no layout fits, returns the
/// layout that exceeds the bounds least.
///
/// The program determines how long state is idle. The activations of the first units are idle longest, because backward uses them last.
/// Therefore the activations of as many units as needed are offloaded, starting with the first unit. (SwapAdvisor, Huang et al., 2020, also
/// considers idle times, but searches for a swap plan.) Parameters, gradients and optimizer state are idle during all passes of other
/// units, so each of these classes is offloaded for all units. Combinations of tiers are tried in ascending order of their minimum traffic.
/// The search ends when no remaining combination has less traffic than the best one that fits.
///
/// Cost: at most 81 runs, times the logarithm of the number of units.
///
/// # Errors
/// Errors of `run`.
pub(crate) fn fit_layout<E>(
    sizes: &ModelSizes,
    given: StateLayout,
    open: &[StateClass],
    bounds: MemoryBounds,
    program: impl Fn(StateLayout) -> Program,
    run: impl Fn(StateLayout) -> Result<MemoryUse, E>,
) -> Result<LayoutCandidate, E> {
    let search = Search { sizes, bounds, open, program: &program, run: &run };
    let unchanged = search.candidate(given)?;
    if bounds.admit(&unchanged.prediction) {
        return Ok(unchanged);
    }
    let mut all = combinations(given, open, program(given).header.num_microbatches);
    // `given` was run above. It is tried again only if the search may choose the number of offloaded units.
    all.retain(|&state| state != given || search.may_choose_num_offloaded(given));
    all.sort_by_cached_key(|&state| search.cost_min(state));
    let mut best: Option<LayoutCandidate> = None;
    let mut smallest = unchanged;
    for state in all {
        if best.as_ref().is_some_and(|best| best.traffic.cost() <= search.cost_min(state)) {
            break;
        }
        let found = search.with_fewest_offloaded(state)?;
        let is_cheaper = |best: &LayoutCandidate| found.traffic.cost() < best.traffic.cost();
        if bounds.admit(&found.prediction) && best.as_ref().is_none_or(is_cheaper) {
            best = Some(found);
        }
        let rank =
            |placing: &LayoutCandidate| (bounds.excess(&placing.prediction), placing.prediction.total());
        smallest = if rank(&found) < rank(&smallest) { found } else { smallest };
    }
    Ok(best.unwrap_or(smallest))
}

/// Returns all combinations of tiers for the open classes that the layout allows.
fn combinations(given: StateLayout, open: &[StateClass], num_microbatches: usize) -> Vec<StateLayout> {
    let mut all = vec![given];
    for &class in open {
        let with = |state: &StateLayout| {
            let state = *state;
            let can_reside = move |tier: &Tier| state.can_reside(class, *tier, num_microbatches);
            let tiers = Tier::ALL.into_iter().filter(can_reside);
            tiers.map(move |tier| state.with_tier(class, tier)).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

struct Search<'a, P, R> {
    sizes: &'a ModelSizes,
    bounds: MemoryBounds,
    open: &'a [StateClass],
    program: &'a P,
    run: &'a R,
}

impl<E, P: Fn(StateLayout) -> Program, R: Fn(StateLayout) -> Result<MemoryUse, E>> Search<'_, P, R> {
    fn candidate(&self, state: StateLayout) -> Result<LayoutCandidate, E> {
        Ok(LayoutCandidate { state, traffic: self.traffic(state), prediction: (self.run)(state)? })
    }

    fn traffic(&self, state: StateLayout) -> OffloadTraffic {
        traffic(self.sizes, &(self.program)(state))
    }

    /// Returns whether the search may choose the number of units whose activations are offloaded.
    fn may_choose_num_offloaded(&self, state: StateLayout) -> bool {
        self.open.contains(&StateClass::Activations) && state.is_offloaded(StateClass::Activations)
    }

    /// Returns the minimum traffic cost of this layout over all numbers of offloaded units that the search may choose.
    fn cost_min(&self, state: StateLayout) -> u64 {
        let num_moved = if self.may_choose_num_offloaded(state) { 1 } else { state.num_offloaded_units };
        self.traffic(StateLayout { num_offloaded_units: num_moved, ..state }).cost()
    }

    /// Returns this layout with the smallest number of offloaded units that satisfies the bounds on device and machine memory. Returns the
    /// layout unchanged if it exceeds these bounds, or if the search may not choose the number.
    fn with_fewest_offloaded(&self, state: StateLayout) -> Result<LayoutCandidate, E> {
        let all = self.candidate(state)?;
        let fits = |placing: &LayoutCandidate| self.bounds.device_excess(&placing.prediction) == 0;
        if !self.may_choose_num_offloaded(state) || !fits(&all) {
            return Ok(all);
        }
        // Binary search: `enough` offloaded units satisfy the bounds, and `too_few` do not.
        let (mut enough, mut too_few) = (self.sizes.units.len(), 0);
        let mut found = all;
        while enough - too_few > 1 {
            let num_moved = too_few + (enough - too_few) / 2;
            let candidate = self.candidate(StateLayout { num_offloaded_units: num_moved, ..state })?;
            if fits(&candidate) {
                (enough, found) = (num_moved, candidate);
            } else {
                too_few = num_moved;
            }
        }
        Ok(found)
    }
}

/// Returns the traffic of a step. If the host runs the updates, it receives gradients from the device and returns parameters.
fn traffic(sizes: &ModelSizes, program: &Program) -> OffloadTraffic {
    let layout = program.header.state;
    let mut traffic = OffloadTraffic::default();
    let mut add = |tier: Tier, bytes: usize| match tier {
        Tier::Device => (),
        Tier::Host => traffic.host += bytes as u64,
        Tier::Disk => traffic.disk += bytes as u64,
    };
    let elements = |unit: usize, bytes: usize| sizes.units[unit].shard_len * bytes;
    let bytes_of = |activations: &BTreeMap<StateKey, usize>, state: StateKey| {
        activations.get(&state).copied().unwrap_or_else(|| sizes.state_bytes(state))
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
                // State that is unchanged since its fetch is still on disk.
                let has_changed = match state.class {
                    StateClass::Optimizer | StateClass::Activations => true,
                    StateClass::Parameters => is_stepped,
                    StateClass::Gradients => !is_stepped,
                };
                add(layout.of(state.class).tier, if has_changed { bytes_of(&activations, state) } else { 0 });
            }
            Action::Unshard { unit } if layout.is_offloaded(StateClass::Parameters) => {
                add(Tier::Host, elements(unit, sizes.gathered_bytes_per_element));
            }
            Action::ReduceGrad { unit } if layout.is_offloaded(StateClass::Gradients) => {
                add(Tier::Host, elements(unit, sizes.gradient_bytes_per_element));
            }
            Action::Step { unit } => {
                stepped.insert(unit);
                if layout.is_offloaded(StateClass::Optimizer) {
                    let has_gradients = layout.is_offloaded(StateClass::Gradients);
                    let gradients = if has_gradients { 0 } else { sizes.gradient_bytes_per_element };
                    add(Tier::Host, elements(unit, gradients + sizes.gathered_bytes_per_element));
                }
            }
            _ => (),
        }
    }
    traffic
}

#[cfg(test)]
mod tests;
