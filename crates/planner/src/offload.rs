//! What state leaves the device so that a step fits into a given memory.

use crate::memory::{kept, state_bytes};
use crate::predict;
use crate::setup::MemorySetup;
use crate::usage::Prediction;
use std::collections::{BTreeMap, BTreeSet};
use trireme_schedule::lowering::{Offload, Tier};
use trireme_schedule::{Action, Outline, Program, StateClass, StateOf, ZeroStage};

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
    /// No bounds.
    pub const NONE: MemoryBounds = MemoryBounds { device: usize::MAX, host: usize::MAX, machine: usize::MAX };

    /// Bytes by which a step passes the bound that it passes most; 0 if it fits.
    pub fn excess(&self, prediction: &Prediction) -> usize {
        self.device_excess(prediction).max(prediction.host.saturating_sub(self.host))
    }

    /// Whether a step fits.
    pub fn hold(&self, prediction: &Prediction) -> bool {
        self.excess(prediction) == 0
    }

    /// As `excess`, of the bounds that hold if less lies on the device.
    fn device_excess(&self, prediction: &Prediction) -> usize {
        let machine = prediction.on_machine().saturating_sub(self.machine);
        machine.max(prediction.total().saturating_sub(self.device))
    }

    /// What a step may take of the device, if it differs from the one predicted only there.
    pub(crate) fn device_total(&self, prediction: &Prediction) -> usize {
        let beside = prediction.on_machine() as isize - prediction.total() as isize;
        self.device.min(self.machine.saturating_add_signed(-beside))
    }
}

/// Bytes that a step moves between the device, or the host where that updates, and other places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// To and from the host's memory.
    pub host: u64,
    /// To and from disks.
    pub disk: u64,
}

impl Traffic {
    fn cost(self) -> u64 {
        self.host + DISK_COST * self.disk
    }
}

/// Places of state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placing {
    /// Where each class lives.
    pub places: Offload,
    /// What a step moves.
    pub traffic: Traffic,
    /// What a step takes.
    pub prediction: Prediction,
}

/// The places of the classes in `open` with which `program` takes no more than `bounds`, as [`predict`](crate::predict)
/// counts, and moves least; `program` makes the program of a choice. Where `setup` has other classes, they stay.
///
/// Which state is idle for how long follows from the program: of activations the first blocks' are, for theirs are kept
/// first and used last, so as many blocks as are needed leave, from the first on (Huang et al., "SwapAdvisor", 2020, swaps by
/// the same lifetimes, found by search); parameters, gradients and the optimizer's state are idle through all passes of other units,
/// and leave as classes. All combinations of places are looked at. Cost: at most 81 programs, times the logarithm of the blocks.
/// If nothing fits, the places that pass their bounds least.
pub fn fit_places(
    setup: &MemorySetup,
    open: &[StateClass],
    bounds: MemoryBounds,
    program: impl Fn(Offload) -> Program,
) -> Placing {
    let search = Search { setup, bounds, program: &program };
    let stays = search.placing(setup.places);
    if bounds.hold(&stays.prediction) {
        return stays;
    }
    let outline = program(setup.places).outline;
    let mut best: Option<Placing> = None;
    let mut smallest = stays;
    for places in combinations(setup.places, open, &outline) {
        let found = search.with_fewest_blocks(places, open);
        let is_cheaper = |best: &Placing| found.traffic.cost() < best.traffic.cost();
        if bounds.hold(&found.prediction) && best.as_ref().is_none_or(is_cheaper) {
            best = Some(found);
        }
        let rank = |placing: &Placing| (bounds.excess(&placing.prediction), placing.prediction.total());
        smallest = if rank(&found) < rank(&smallest) { found } else { smallest };
    }
    best.unwrap_or(smallest)
}

/// Every choice for the open classes that the layout allows.
fn combinations(given: Offload, open: &[StateClass], outline: &Outline) -> Vec<Offload> {
    let mut all = vec![given];
    for &class in open {
        let with = |places: &Offload| {
            let places = *places;
            let tiers = Tier::ALL.into_iter().filter(move |&tier| is_possible(class, tier, outline));
            tiers.map(move |tier| places.with(class, tier)).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(with).collect();
    }
    all
}

fn is_possible(class: StateClass, tier: Tier, outline: &Outline) -> bool {
    let stage_min = match class {
        StateClass::Optimizer => ZeroStage::One,
        StateClass::Parameters => ZeroStage::Three,
        StateClass::Gradients => ZeroStage::Two,
        StateClass::Activations => ZeroStage::Zero,
    };
    let is_summed = class == StateClass::Gradients && outline.num_microbatches > 1;
    tier == Tier::Device || outline.zero_stage >= stage_min && !(is_summed && tier == Tier::Disk)
}

struct Search<'a, P> {
    setup: &'a MemorySetup,
    bounds: MemoryBounds,
    program: &'a P,
}

impl<P: Fn(Offload) -> Program> Search<'_, P> {
    fn placing(&self, places: Offload) -> Placing {
        let setup = MemorySetup { places, ..self.setup.clone() };
        let program = (self.program)(places);
        Placing { places, traffic: traffic(&setup, &program), prediction: predict(&setup, &program) }
    }

    /// These places, with the activations of no more blocks away than it takes to fit; or of all, if that does not suffice.
    fn with_fewest_blocks(&self, places: Offload, open: &[StateClass]) -> Placing {
        let all = self.placing(places);
        let is_open = open.contains(&StateClass::Activations) && places.activations != Tier::Device;
        let fits = |placing: &Placing| self.bounds.device_excess(&placing.prediction) == 0;
        if !is_open || !fits(&all) {
            return all;
        }
        // So many suffice, and so many do not.
        let (mut enough, mut too_few) = (self.setup.units.len(), 0);
        let mut found = all;
        while enough - too_few > 1 {
            let num_units = too_few + (enough - too_few) / 2;
            let placing = self.placing(Offload { num_units, ..places });
            if fits(&placing) {
                (enough, found) = (num_units, placing);
            } else {
                too_few = num_units;
            }
        }
        found
    }
}

/// What a step moves. Where the host updates, it takes gradients from the device and gives parameters back.
fn traffic(setup: &MemorySetup, program: &Program) -> Traffic {
    let outline = &program.outline;
    let (places, mut traffic) = (setup.places, Traffic::default());
    let mut add = |tier: Tier, bytes: usize| match tier {
        Tier::Device => (),
        Tier::Host => traffic.host += bytes as u64,
        Tier::Disk => traffic.disk += bytes as u64,
    };
    let elements = |unit: usize, bytes: usize| setup.units[unit].shard_len * bytes;
    let bytes_of = |activations: &BTreeMap<StateOf, usize>, state: StateOf| {
        activations.get(&state).copied().unwrap_or_else(|| state_bytes(setup, outline, state))
    };
    let mut stepped = BTreeSet::new();
    let mut activations = BTreeMap::new();
    for &action in &program.actions {
        match action {
            Action::Forward { unit, keep, .. } => {
                activations
                    .insert(action.state(StateClass::Activations), kept(&setup.units[unit].passes, keep));
            }
            Action::Fetch(state) => add(places.tier(state.class), bytes_of(&activations, state)),
            Action::Evict(state) => {
                let is_stepped = stepped.contains(&state.unit);
                // What did not change since it was fetched is on its disk already.
                let has_changed = match state.class {
                    StateClass::Optimizer | StateClass::Activations => true,
                    StateClass::Parameters => is_stepped,
                    StateClass::Gradients => !is_stepped,
                };
                add(places.tier(state.class), if has_changed { bytes_of(&activations, state) } else { 0 });
            }
            Action::Unshard { unit } if places.parameters != Tier::Device => {
                add(Tier::Host, elements(unit, setup.gather_dtype.size()));
            }
            Action::ReduceGrad { unit } if places.gradients != Tier::Device => {
                add(Tier::Host, elements(unit, setup.shard_dtype(outline).size()));
            }
            Action::Step { unit } => {
                stepped.insert(unit);
                if places.optimizer != Tier::Device {
                    let has_gradients = places.gradients != Tier::Device;
                    let gradients = if has_gradients { 0 } else { setup.shard_dtype(outline).size() };
                    add(Tier::Host, elements(unit, gradients + setup.gather_dtype.size()));
                }
            }
            _ => (),
        }
    }
    traffic
}

#[cfg(test)]
mod tests;
