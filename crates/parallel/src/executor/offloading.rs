//! Moves state between the device, the host and disks.

use super::in_flight::Kept;
use super::{Executor, OffloadState};
use crate::error::{ParallelError, Result};
use crate::offload::{Movable, OffloadOptions, OffloadStores, VisitMemory, try_each};
use trireme_schedule::{Action, Keep, Program, StateClass, StateKey};
use trireme_tensor::Device;

fn unit_state_key(class: StateClass, unit: usize) -> StateKey {
    StateKey { class, unit, microbatch: 0 }
}

impl OffloadState {
    pub(super) fn new(options: &OffloadOptions, program: &Program, device: &Device) -> Self {
        let num_units = program.header.chain.num_units;
        OffloadState {
            options: options.clone(),
            stores: OffloadStores::new(options, program, device),
            changed: vec![true; num_units],
            is_squared: vec![false; num_units],
        }
    }
}

impl Executor {
    /// Declares the maximum size of each state that will move.
    pub(super) fn declare_offload_sizes(&mut self) {
        for unit in self.program.header.held().collect::<Vec<_>>() {
            for class in [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients] {
                if self.offload.stores.moves(class) {
                    let mut num_bytes = 0;
                    self.visit_memory(unit_state_key(class, unit), &mut |part| num_bytes += part.num_bytes());
                    self.offload.stores.declare_size(unit_state_key(class, unit), num_bytes);
                }
            }
        }
        let mut keeps = vec![Keep::All; self.program.header.chain.num_units];
        for &action in &self.program.actions {
            match action {
                Action::Forward { unit, keep, .. } => keeps[unit] = keep,
                Action::Evict(state @ StateKey { class: StateClass::Activations, unit, .. }) => {
                    let kept = self.profile.units[unit].kept_bytes;
                    let num_bytes = match keeps[unit] {
                        Keep::All => kept.all,
                        Keep::Products => kept.products,
                        Keep::Input => kept.inputs,
                        Keep::Nothing => 0,
                    };
                    // Without a capacity, one rank's experts may receive the tokens of all ranks.
                    let units = self.model.table().units();
                    let is_uneven = units[unit].has_experts() && !self.profile.units[unit].has_capacity();
                    let experts = self.ranks.experts().filter(|_| is_uneven);
                    let num_ranks = experts.map_or(1, |group| group.world_size());
                    self.offload.stores.declare_size(state, num_bytes * num_ranks);
                }
                _ => (),
            }
        }
    }

    /// Calls `visit` for all memory of a state.
    fn visit_memory(&mut self, state: StateKey, visit: &mut dyn FnMut(&mut dyn Movable)) {
        let StateKey { class, unit, microbatch } = state;
        match class {
            StateClass::Optimizer => {
                self.optimization.optimizer.for_each_state_tensor(unit, |tensor| visit(tensor));
                // Master weights move with the optimizer state. Their 16-bit copies stay on the device.
                let are_masters = self.class_of_weights() == class;
                if let Some(shard) = self.parameters.memory(unit).filter(|_| are_masters) {
                    visit(shard);
                }
            }
            StateClass::Parameters => visit(self.parameters.memory(unit).expect("shards lie apart")),
            StateClass::Gradients => visit(self.gradients.memory(unit)),
            StateClass::Activations => match self.passes.in_flight.kept_slot(unit, microbatch) {
                Some(Kept::Recorded(pass)) => pass.for_each_tensor(|tensor| visit(tensor)),
                Some(Kept::Input(inputs)) => inputs.values_mut().for_each(|tensor| visit(tensor)),
                Some(Kept::InputHalfDone(_)) | None => {
                    unreachable!("forward has kept something, and backward not begun")
                }
            },
        }
    }

    pub(super) fn evict(&mut self, state: StateKey) -> Result<()> {
        let has_changed = match state.class {
            StateClass::Optimizer => {
                // If the master weights belong to the class, they are evicted with it.
                self.offload.changed[state.unit] &= self.class_of_weights() != StateClass::Optimizer;
                true
            }
            StateClass::Activations => true,
            StateClass::Parameters => std::mem::take(&mut self.offload.changed[state.unit]),
            StateClass::Gradients => {
                // The first eviction of a step follows the reduction. The second follows the update, when the gradient is no longer needed.
                let is_new = !self.offload.is_squared[state.unit];
                if is_new {
                    self.gradients.finish(state.unit)?;
                    self.sum_unit_squares(state.unit)?;
                }
                self.offload.is_squared[state.unit] = is_new;
                is_new
            }
        };
        self.evict_as(state, has_changed)
    }

    fn evict_as(&mut self, state: StateKey, has_changed: bool) -> Result<()> {
        self.with_stores(state, |offloaded, memory| offloaded.evict(state, has_changed, memory))
    }

    fn restore(&mut self, state: StateKey) -> Result<()> {
        self.with_stores(state, |offloaded, memory| offloaded.restore(state, memory))
    }

    fn with_stores(
        &mut self,
        state: StateKey,
        operation: impl FnOnce(&mut OffloadStores, VisitMemory<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut offloaded = std::mem::take(&mut self.offload.stores);
        let result = operation(&mut offloaded, &mut |visit| self.visit_memory(state, visit));
        self.offload.stores = offloaded;
        result
    }

    pub(super) fn await_state(&mut self, action: Action) -> Result<()> {
        for &class in action.uses() {
            if self.offload.stores.moves(class) {
                self.restore(action.state(class))?;
            }
        }
        Ok(())
    }

    /// Calls `work` for each unit on this rank, with its state of the class in memory. `changes` says whether `work` writes to that state.
    pub(super) fn for_each_held_unit<E: From<ParallelError>>(
        &mut self,
        class: StateClass,
        changes: bool,
        mut work: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for unit in self.program.header.held().collect::<Vec<_>>() {
            self.fetch_state(class, unit)?;
            work(self, unit)?;
            self.evict_state(class, unit, changes)?;
        }
        Ok(())
    }

    /// The class of the weights that this rank updates: parameters, or optimizer state if they are master weights.
    pub fn class_of_weights(&self) -> StateClass {
        self.program.header.state.class_of_weights()
    }

    /// Brings a unit's state of a class into memory, if it resides elsewhere. [`evict_state`](Executor::evict_state) must follow.
    ///
    /// # Errors
    /// Errors of the device, the groups and disks.
    pub fn fetch_state(&mut self, class: StateClass, unit: usize) -> Result<()> {
        // A gather after the last update may still be in flight.
        self.outside_step(|executor| executor.parameters.await_gathered_unit(unit, &mut executor.waiting))?;
        self.restore(unit_state_key(class, unit))
    }

    /// Moves a unit's state back to where it resides. `has_changed` says whether the caller has written to it.
    ///
    /// # Errors
    /// Errors of the device and disks.
    pub fn evict_state(&mut self, class: StateClass, unit: usize, has_changed: bool) -> Result<()> {
        if !self.offload.stores.moves(class) {
            return Ok(());
        }
        let has_changed = has_changed || class == self.class_of_weights() && self.offload.changed[unit];
        self.evict_as(unit_state_key(class, unit), has_changed)?;
        if has_changed && class == self.class_of_weights() {
            self.offload.changed[unit] = false;
        }
        Ok(())
    }

    /// Initializes all state that resides on a disk with zeros, one unit at a time.
    pub(super) fn write_initial_zeros(&mut self) -> Result<()> {
        for class in [StateClass::Optimizer, StateClass::Parameters] {
            if !self.offload.stores.moves(class) {
                continue;
            }
            for unit in self.program.header.held().collect::<Vec<_>>() {
                self.release(class, unit);
                self.reallocate(class, unit)?;
                let state = &self.program.header.state;
                let device = self.offload.options.device_of(state, class, &self.device).clone();
                self.visit_memory(unit_state_key(class, unit), &mut |part| device.zero(part.view_mut()));
                self.evict_state(class, unit, true)?;
            }
        }
        self.offload.options.host.trim();
        Ok(())
    }

    /// Frees the memory of a unit's state. Its contents are lost.
    pub(super) fn release(&mut self, class: StateClass, unit: usize) {
        self.visit_memory(unit_state_key(class, unit), &mut |part| part.release());
    }

    /// Allocates the memory of a unit's state again, with unspecified contents.
    pub(super) fn reallocate(&mut self, class: StateClass, unit: usize) -> Result<()> {
        try_each(&mut |visit| self.visit_memory(unit_state_key(class, unit), visit), |part| part.reallocate())
    }

    /// Describes the access to disks for users: one line for each file.
    pub fn describe_disks(&self) -> Vec<String> {
        self.offload.stores.describe()
    }

    /// Bytes read from and written to disks since the executor was created.
    pub fn disk_bytes(&self) -> [u64; 2] {
        self.offload.stores.disk_bytes()
    }
}
