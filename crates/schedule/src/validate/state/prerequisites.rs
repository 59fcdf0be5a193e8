//! Prerequisites of actions.

use super::{Activations, Parameters, State, UnitState};
use crate::action::{Action, Keep, Message, MessageKind, StateClass, StateKey};

impl State<'_> {
    /// Returns the missing fetch if state that an action uses is evicted.
    fn missing_state(&self, action: Action) -> Option<Action> {
        let mut states = action.uses().iter().map(|&class| action.state(class));
        states.find(|state| self.evicted.contains(state)).map(Action::Fetch)
    }

    /// Returns the missing stash if the version of the parameters that a pass reads no longer exists.
    fn missing_version(&self, action: Action) -> Option<Action> {
        let microbatch = action.microbatch().filter(|_| action.is_pass())?;
        let unit = &self.units[action.unit()];
        let version = match action {
            Action::Forward { .. } => self.header.version_read(microbatch, unit.num_stepped),
            _ => unit.version_read[microbatch],
        };
        let is_there = version == unit.num_stepped || unit.stashed.contains(&version);
        (!is_there).then_some(Action::Stash { unit: action.unit() })
    }

    /// Returns the first missing prerequisite of `action`.
    pub(super) fn first_missing(&self, action: Action) -> Option<Action> {
        let is_whole = |unit: &usize| self.units[*unit].parameters == Parameters::Full;
        if let Some(unit) = self.header.reads(action).find(|unit| !is_whole(unit)) {
            return Some(Action::Unshard { unit });
        }
        if let Some(missing) = self.missing_state(action).or_else(|| self.missing_version(action)) {
            return Some(missing);
        }
        match action {
            Action::Forward { unit, microbatch, .. } => {
                let below = unit.checked_sub(1)?;
                let missing = if self.holds(below) {
                    Action::Forward { unit: below, microbatch, keep: Keep::All }
                } else {
                    Action::Receive(Message::activation(below, microbatch))
                };
                (self.activations(below, microbatch) == Activations::Absent).then_some(missing)
            }
            Action::Send(message) => self.missing_for_send(message),
            Action::Receive(message) => self.missing_for_receive(message),
            Action::Recompute { unit, microbatch } => match self.activations(unit, microbatch) {
                Activations::Kept(Keep::Nothing) => {
                    let below = unit.checked_sub(1)?;
                    // Activations that were received from another rank are freed after forward.
                    let missing = Action::Recompute { unit: below, microbatch };
                    let is_there =
                        self.holds(below) && self.activations(below, microbatch) == Activations::Complete;
                    (!is_there).then_some(missing)
                }
                Activations::Kept(_) => None,
                _ => Some(Action::Forward { unit, microbatch, keep: Keep::All }),
            },
            Action::BackwardInput { unit, microbatch } => self.missing_for_input_half(unit, microbatch),
            Action::BackwardWeight { unit, microbatch } => {
                let missing = Action::BackwardInput { unit, microbatch };
                let is_early = self.activations(unit, microbatch) != Activations::Halved;
                is_early.then_some(missing).or_else(|| self.missing_for_gradient(unit, microbatch))
            }
            Action::Backward { unit, microbatch } => {
                let missing = self.missing_for_input_half(unit, microbatch);
                missing.or_else(|| self.missing_for_gradient(unit, microbatch))
            }
            Action::ReduceGrad { unit } => {
                // An unsharded gradient is reduced once, when all microbatches have added to it.
                let UnitState { num_added, has_unreduced, .. } = self.units[unit];
                let is_once = !self.header.state.is_sharded(StateClass::Gradients);
                let is_complete = num_added > 0 && num_added.is_multiple_of(self.microbatches_per_step);
                let is_early = !is_complete && (is_once || !has_unreduced);
                is_early.then(|| self.completion(unit, num_added))
            }
            Action::Step { unit } => {
                let num_stepped = self.units[unit].num_stepped;
                let is_reduced = |unit: &usize| self.units[*unit].num_reduced > num_stepped;
                let is_awaited = |other: &usize| !self.header.state.updates_early || *other == unit;
                if let Some(unit) = self.held().filter(is_awaited).find(|unit| !is_reduced(unit)) {
                    return Some(Action::ReduceGrad { unit });
                }
                let is_separate = self.gathers_grads && !self.units[unit].has_gathered_grad;
                is_separate.then_some(Action::UnshardGrad { unit })
            }
            Action::UnshardGrad { unit } => {
                let UnitState { num_reduced, num_stepped, .. } = self.units[unit];
                (num_reduced <= num_stepped).then_some(Action::ReduceGrad { unit })
            }
            Action::Unstash { unit } => self.units[unit].stashed.is_empty().then_some(Action::Stash { unit }),
            Action::Evict(StateKey { class: StateClass::Activations, unit, microbatch }) => {
                let is_kept = matches!(
                    self.activations(unit, microbatch),
                    Activations::Kept(_) | Activations::Complete
                );
                let missing = Action::Forward { unit, microbatch, keep: Keep::All };
                (!is_kept).then_some(missing)
            }
            Action::Evict(StateKey { class: StateClass::Gradients, unit, .. }) => {
                let reduction = Action::ReduceGrad { unit };
                (!self.is_done(reduction)).then_some(reduction)
            }
            Action::Unshard { .. }
            | Action::Reshard { .. }
            | Action::Fetch(_)
            | Action::Evict(_)
            | Action::Stash { .. } => None,
        }
    }

    /// Returns the missing action that produces the content of a message to send.
    fn missing_for_send(&self, Message { kind, unit, microbatch }: Message) -> Option<Action> {
        match kind {
            MessageKind::Activation => {
                let missing = Action::Forward { unit, microbatch, keep: Keep::All };
                (self.activations(unit, microbatch) == Activations::Absent).then_some(missing)
            }
            MessageKind::Gradient => {
                let missing = Action::Backward { unit, microbatch };
                (!self.activations(unit, microbatch).has_input_gradient()).then_some(missing)
            }
            MessageKind::TiedGradient => {
                let first = if self.header.chain.accumulates_tied_gradients { 0 } else { microbatch };
                (first..=microbatch).find_map(|microbatch| self.missing_for_tied_grad(microbatch))
            }
            MessageKind::Parameters => {
                let step = Action::Step { unit };
                match self.units[unit].parameters {
                    _ if !self.is_done(step) => Some(step),
                    Parameters::Full => None,
                    _ => Some(Action::Unshard { unit }),
                }
            }
        }
    }

    /// Returns the missing prerequisite of a receive. For parameters, this is a backward pass that still reads the old parameters.
    fn missing_for_receive(&self, Message { kind, unit, microbatch }: Message) -> Option<Action> {
        match kind {
            MessageKind::Gradient => {
                // A gradient cannot arrive before the output that it belongs to.
                let below = unit - 1;
                let missing = Action::Forward { unit: below, microbatch, keep: Keep::All };
                (self.activations(below, microbatch) == Activations::Absent).then_some(missing)
            }
            MessageKind::Parameters => {
                let last = self.header.num_microbatches - 1;
                (0..=last).find_map(|microbatch| self.missing_for_tied_grad(microbatch))
            }
            MessageKind::Activation | MessageKind::TiedGradient => None,
        }
    }

    /// Returns the action that completes a unit's gradient for a microbatch.
    fn completion(&self, unit: usize, microbatch: usize) -> Action {
        match self.activations(unit, microbatch) {
            Activations::Halved => Action::BackwardWeight { unit, microbatch },
            _ => Action::Backward { unit, microbatch },
        }
    }

    /// Returns the missing action that computes the tied unit's contribution to the owner's gradient on this rank.
    fn missing_for_tied_grad(&self, microbatch: usize) -> Option<Action> {
        let reader = self.tie.as_ref()?.reader;
        let is_early = self.activations(reader, microbatch) != Activations::Freed;
        is_early.then(|| self.completion(reader, microbatch))
    }

    /// Returns the missing prerequisite of adding a microbatch to a unit's gradient. For example, earlier microbatches must have been
    /// added, because gradients are summed in a fixed order.
    fn missing_for_gradient(&self, unit: usize, microbatch: usize) -> Option<Action> {
        let UnitState { num_added, has_unreduced, num_stepped, .. } = self.units[unit];
        if num_added != microbatch {
            return Some(self.completion(unit, num_added));
        }
        if num_stepped < microbatch / self.microbatches_per_step {
            return Some(Action::Step { unit });
        }
        if let Some(tie) = self.tie.as_ref().filter(|tie| tie.owner == unit) {
            let missing = if tie.is_across {
                let receive = Action::Receive(Message::tied_gradient(unit, microbatch));
                let is_sent = self.header.sends_tied_gradient(microbatch);
                (is_sent && !self.is_done(receive)).then_some(receive)
            } else {
                self.missing_for_tied_grad(microbatch)
            };
            if missing.is_some() {
                return missing;
            }
        }
        let is_unreduced = self.header.state.is_sharded(StateClass::Gradients) && has_unreduced;
        is_unreduced.then_some(Action::ReduceGrad { unit })
    }

    fn missing_for_input_half(&self, unit: usize, microbatch: usize) -> Option<Action> {
        let above = unit + 1;
        if above < self.header.chain.num_units && !self.activations(above, microbatch).has_input_gradient() {
            return Some(if self.holds(above) {
                Action::Backward { unit: above, microbatch }
            } else {
                Action::Receive(Message::gradient(above, microbatch))
            });
        }
        match self.activations(unit, microbatch) {
            Activations::Complete => None,
            Activations::Kept(_) => Some(Action::Recompute { unit, microbatch }),
            _ => Some(Action::Forward { unit, microbatch, keep: Keep::All }),
        }
    }
}
