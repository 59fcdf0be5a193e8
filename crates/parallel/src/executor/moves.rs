//! State that moves between the device, the host and disks.

use super::in_flight::Kept;
use super::{Executor, Moves};
use crate::error::{ParallelError, Result};
use crate::offload::{Memory, Movable, OffloadOptions, Offloaded, try_each};
use trireme_schedule::{Action, Keep, Program, StateClass, StateOf};
use trireme_tensor::Device;

fn of_unit(class: StateClass, unit: usize) -> StateOf {
    StateOf { class, unit, microbatch: 0 }
}

impl Moves {
    pub(super) fn new(options: &OffloadOptions, program: &Program, device: &Device) -> Self {
        let num_units = program.outline.chain.num_units;
        Moves {
            options: options.clone(),
            offloaded: Offloaded::new(options, program, device),
            changed: vec![true; num_units],
            is_squared: vec![false; num_units],
        }
    }
}

impl Executor {
    /// Says how long each state is that will move.
    pub(super) fn expect_moves(&mut self) {
        for unit in self.program.outline.held().collect::<Vec<_>>() {
            for class in [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients] {
                if self.moves.offloaded.moves(class) {
                    let mut num_bytes = 0;
                    self.with_memory(of_unit(class, unit), &mut |part| num_bytes += part.num_bytes());
                    self.moves.offloaded.expect(of_unit(class, unit), num_bytes);
                }
            }
        }
        let mut keeps = vec![Keep::All; self.program.outline.chain.num_units];
        for &action in &self.program.actions {
            match action {
                Action::Forward { unit, keep, .. } => keeps[unit] = keep,
                Action::Evict(state @ StateOf { class: StateClass::Activations, unit, .. }) => {
                    let kept = self.rehearsal.units[unit].kept_bytes;
                    let num_bytes = match keeps[unit] {
                        Keep::All => kept.record,
                        Keep::Products => kept.products,
                        Keep::Input => kept.inputs,
                        Keep::Nothing => 0,
                    };
                    // Without a capacity, all tokens may come to the experts of one rank.
                    let units = self.model.table().units();
                    let is_uneven = units[unit].has_experts() && !self.rehearsal.units[unit].has_capacity();
                    let experts = self.ranks.experts().filter(|_| is_uneven);
                    let num_ranks = experts.map_or(1, |group| group.world_size());
                    self.moves.offloaded.expect(state, num_bytes * num_ranks);
                }
                _ => (),
            }
        }
    }

    /// Shows `visit` all memory of a state.
    fn with_memory(&mut self, state: StateOf, visit: &mut dyn FnMut(&mut dyn Movable)) {
        let StateOf { class, unit, microbatch } = state;
        match class {
            StateClass::Optimizer => {
                self.optimization.optimizer.for_each_memory(unit, |tensor| visit(tensor));
                // Master weights beside narrow copies that stay.
                let are_masters = self.class_of_weights() == class;
                if let Some(shard) = self.parameters.memory(unit).filter(|_| are_masters) {
                    visit(shard);
                }
            }
            StateClass::Parameters => visit(self.parameters.memory(unit).expect("shards lie apart")),
            StateClass::Gradients => visit(self.gradients.memory(unit)),
            StateClass::Activations => match self.passes.in_flight.pass(unit, microbatch) {
                Some(Kept::Recorded(pass)) => pass.for_each_memory(|tensor| visit(tensor)),
                Some(Kept::Input(inputs)) => inputs.values_mut().for_each(|tensor| visit(tensor)),
                Some(Kept::Halved(_)) | None => {
                    unreachable!("forward has kept something, and backward not begun")
                }
            },
        }
    }

    pub(super) fn evict(&mut self, state: StateOf) -> Result<()> {
        let has_changed = match state.class {
            StateClass::Optimizer => {
                // Masters are among it.
                self.moves.changed[state.unit] &= self.class_of_weights() != StateClass::Optimizer;
                true
            }
            StateClass::Activations => true,
            StateClass::Parameters => std::mem::take(&mut self.moves.changed[state.unit]),
            StateClass::Gradients => {
                // The second time is after the update, which needed it for the last time.
                let is_new = !self.moves.is_squared[state.unit];
                if is_new {
                    self.gradients.finish(state.unit)?;
                    self.square(state.unit)?;
                }
                self.moves.is_squared[state.unit] = is_new;
                is_new
            }
        };
        self.evict_as(state, has_changed)
    }

    fn evict_as(&mut self, state: StateOf, has_changed: bool) -> Result<()> {
        self.with_offloaded(state, |offloaded, memory| offloaded.evict(state, has_changed, memory))
    }

    fn restore(&mut self, state: StateOf) -> Result<()> {
        self.with_offloaded(state, |offloaded, memory| offloaded.restore(state, memory))
    }

    fn with_offloaded(
        &mut self,
        state: StateOf,
        go: impl FnOnce(&mut Offloaded, Memory<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut offloaded = std::mem::take(&mut self.moves.offloaded);
        let gone = go(&mut offloaded, &mut |visit| self.with_memory(state, visit));
        self.moves.offloaded = offloaded;
        gone
    }

    pub(super) fn await_state(&mut self, action: Action) -> Result<()> {
        for &class in action.uses() {
            if self.moves.offloaded.moves(class) {
                self.restore(action.state(class))?;
            }
        }
        Ok(())
    }

    /// Calls `work` for each unit that is held, with its state of the class in memory. `changes` tells whether `work` writes to that state.
    pub(super) fn for_each_held<E: From<ParallelError>>(
        &mut self,
        class: StateClass,
        changes: bool,
        mut work: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for unit in self.program.outline.held().collect::<Vec<_>>() {
            self.bring_state(class, unit)?;
            work(self, unit)?;
            self.send_state(class, unit, changes)?;
        }
        Ok(())
    }

    /// The class that what this rank steps of the parameters belongs to.
    pub fn class_of_weights(&self) -> StateClass {
        self.program.outline.state.class_of_weights()
    }

    /// Brings a unit's state of a class into memory, if it lives elsewhere. [`send_state`](Executor::send_state) comes after.
    pub fn bring_state(&mut self, class: StateClass, unit: usize) -> Result<()> {
        // What the last update has made may still be on its way to the others.
        self.outside_step(|executor| executor.parameters.ensure(unit, &mut executor.waiting))?;
        self.restore(of_unit(class, unit))
    }

    /// Brings a unit's state back to where it lives.
    pub fn send_state(&mut self, class: StateClass, unit: usize, has_changed: bool) -> Result<()> {
        if !self.moves.offloaded.moves(class) {
            return Ok(());
        }
        let has_changed = has_changed || class == self.class_of_weights() && self.moves.changed[unit];
        self.evict_as(of_unit(class, unit), has_changed)?;
        if has_changed && class == self.class_of_weights() {
            self.moves.changed[unit] = false;
        }
        Ok(())
    }

    /// Brings all state that lives on a disk there: zeros, of one unit at a time.
    pub(super) fn send_zeros(&mut self) -> Result<()> {
        for class in [StateClass::Optimizer, StateClass::Parameters] {
            if !self.moves.offloaded.moves(class) {
                continue;
            }
            for unit in self.program.outline.held().collect::<Vec<_>>() {
                self.release(class, unit);
                self.retake(class, unit)?;
                let state = &self.program.outline.state;
                let device = self.moves.options.device_of(state, class, &self.device).clone();
                self.with_memory(of_unit(class, unit), &mut |part| device.zero(part.view_mut()));
                self.send_state(class, unit, true)?;
            }
        }
        self.moves.options.host.trim();
        Ok(())
    }

    /// Gives the memory of a unit's state back, with what it holds.
    pub(super) fn release(&mut self, class: StateClass, unit: usize) {
        self.with_memory(of_unit(class, unit), &mut |part| part.release());
    }

    /// Takes memory for a unit's state again, with unspecified contents.
    pub(super) fn retake(&mut self, class: StateClass, unit: usize) -> Result<()> {
        try_each(&mut |visit| self.with_memory(of_unit(class, unit), visit), |part| part.restore())
    }

    /// What users should know of the disks that state lives on: a line for each.
    pub fn describe_disks(&self) -> Vec<String> {
        self.moves.offloaded.describe()
    }

    /// Bytes read from and written to disks since the beginning.
    pub fn disk_bytes(&self) -> [u64; 2] {
        self.moves.offloaded.disk_bytes()
    }
}
