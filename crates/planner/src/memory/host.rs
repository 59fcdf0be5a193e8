//! The host's memory that state takes which lives there, or passes through it on its way to a disk.

use crate::setup::MemorySetup;
use std::collections::{BTreeMap, BTreeSet};
use trireme_schedule::lowering::Tier;
use trireme_schedule::{Action, Outline, StateClass, StateOf, ZeroStage};

/// Bytes of the host's memory in use while a program is gone through.
#[derive(Debug)]
pub(super) struct Host<'a> {
    setup: &'a MemorySetup,
    outline: &'a Outline,
    /// State of a disk that is here while it is worked with.
    here: BTreeSet<StateOf>,
    /// State that is read ahead of its use.
    fetched: BTreeSet<StateOf>,
    /// Buffers of gradients that left, by their bytes: they stay, to be used again.
    free_gradients: BTreeMap<usize, usize>,
    current: usize,
    peak: usize,
}

impl<'a> Host<'a> {
    /// What lives in the host's memory all the time, and what writes of disks take.
    pub(super) fn new(setup: &'a MemorySetup, outline: &'a Outline) -> Self {
        let (here, fetched, free_gradients) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        let mut host = Host { setup, outline, here, fetched, free_gradients, current: 0, peak: 0 };
        for class in [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients] {
            if setup.places.tier(class) == Tier::Host {
                let states = (0..outline.chain.num_units).map(|unit| StateOf { class, unit, microbatch: 0 });
                let num_bytes = states.map(|state| state_bytes(setup, outline, state)).sum();
                host.take(num_bytes);
            }
        }
        let on_disk = StateClass::ALL.into_iter().filter(|&class| setup.places.tier(class) == Tier::Disk);
        host.take(on_disk.count() * setup.disk_write_bytes);
        host
    }

    pub(super) fn peak(&self) -> usize {
        self.peak
    }

    fn take(&mut self, bytes: usize) {
        self.current += bytes;
        self.peak = self.peak.max(self.current);
    }

    fn give(&mut self, bytes: usize) {
        self.current -= bytes;
    }

    /// What an action works with comes to the host, if it lives on a disk; what an update takes for a moment is there.
    pub(super) fn begin(&mut self, action: Action) {
        for &class in action.uses() {
            if class != StateClass::Activations && self.setup.places.tier(class) == Tier::Disk {
                self.bring(action.state(class));
            }
        }
        match action {
            Action::Fetch(state) if self.fetched.insert(state) => self.take(self.chunks(state)),
            Action::ReduceGrad { .. } if self.setup.places.gradients == Tier::Disk => {
                self.bring(action.state(StateClass::Gradients));
            }
            Action::Step { unit } if self.setup.is_away(StateClass::Optimizer) => {
                let scratch = self.setup.units[unit].step_scratch;
                self.take(scratch);
                self.give(scratch);
            }
            _ => (),
        }
    }

    fn bring(&mut self, state: StateOf) {
        if self.here.insert(state) {
            let bytes = state_bytes(self.setup, self.outline, state);
            let free = self.free_gradients.get_mut(&bytes).filter(|_| state.class == StateClass::Gradients);
            match free.filter(|free| **free > 0) {
                Some(free) => *free -= 1,
                None => self.take(bytes),
            }
        }
        if self.fetched.remove(&state) {
            self.give(self.chunks(state));
        }
    }

    /// Memory into which a state is read: whole chunks. Activations come straight from the host if they live there.
    fn chunks(&self, state: StateOf) -> usize {
        match self.setup.places.tier(state.class) {
            Tier::Disk => {
                state_bytes(self.setup, self.outline, state).next_multiple_of(self.setup.disk_chunk_bytes)
            }
            _ => 0,
        }
    }

    /// State goes back to its disk.
    pub(super) fn evict(&mut self, state: StateOf) {
        if self.here.remove(&state) {
            let bytes = state_bytes(self.setup, self.outline, state);
            match state.class {
                StateClass::Gradients => *self.free_gradients.entry(bytes).or_default() += 1,
                _ => self.give(bytes),
            }
        }
    }

    /// Activations leave the device.
    pub(super) fn evict_activations(&mut self, bytes: usize) {
        if self.setup.places.activations == Tier::Host {
            self.take(bytes);
        }
    }

    /// Activations are back on the device.
    pub(super) fn restore_activations(&mut self, state: StateOf, bytes: usize) {
        if self.setup.places.activations == Tier::Host {
            self.give(bytes);
        }
        if self.fetched.remove(&state) {
            self.give(self.chunks(state));
        }
    }
}

/// Bytes of a unit's state, as far as it is apart from what operations read; of activations, what a pass keeps at most.
pub(crate) fn state_bytes(setup: &MemorySetup, outline: &Outline, state: StateOf) -> usize {
    let unit = &setup.units[state.unit];
    match state.class {
        StateClass::Optimizer => {
            let is_apart = setup.gather_dtype.size() < size_of::<f32>() && setup.num_shards > 1;
            let has_masters = is_apart && outline.zero_stage < ZeroStage::Three;
            unit.optimizer_bytes + if has_masters { setup.on_device(unit.shard_len) } else { 0 }
        }
        StateClass::Parameters => setup.on_device(unit.shard_len),
        StateClass::Gradients => unit.shard_len * setup.shard_dtype(outline).size(),
        StateClass::Activations => unit.passes.record,
    }
}
