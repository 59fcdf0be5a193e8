//! The parameters of a unit that are updated elementwise.
//!
//! A rule may need sums over full parameters, such as squared norms. The ranks compute these sums together in up to two exchanges, before
//! the update. The index of an exchange is called `phase`.

use crate::members::UpdatedParameters;
use crate::rules::Rule;
use crate::step::UnitStep;
use trireme_tensor::{DeviceError, OptimizerState, Tensor, UpdatePass, View, ViewMut};

#[derive(Debug)]
pub(crate) struct ElementwiseUpdate {
    pub(crate) rule: Box<dyn Rule>,
    pub(crate) members: UpdatedParameters,
    pub(crate) states: Vec<OptimizerState>,
}

impl ElementwiseUpdate {
    /// Returns the number of sums in exchange `phase`.
    pub(crate) fn num_sums(&self, phase: usize) -> usize {
        self.rule.num_sums()[phase] * self.members.list.len()
    }

    /// Computes this rank's contribution to the sums of exchange `phase`.
    pub(crate) fn compute_sums(
        &mut self,
        phase: usize,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        if self.num_sums(phase) == 0 {
            return Ok(());
        }
        let rule = &self.rule;
        let states = if rule.sums_pass_changes_states(phase) { &mut self.states[..] } else { &mut [] };
        let updates = &self.members.member_updates(|member| rule.sums_pass(phase, member, step));
        self.members.sum_by(step.device, sums, |pieces, sums| {
            let pass = UpdatePass {
                pieces,
                updates,
                scales: None,
                rounding_seed: step.rounding_seed,
                sums: Some(sums),
            };
            step.device.update(pass, parameters, grads, states);
        })
    }

    /// Updates this rank's elements with the `sums` of each exchange.
    pub(crate) fn apply(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        [first, second]: [View<'_>; 2],
    ) -> Result<(), DeviceError> {
        let ElementwiseUpdate { rule, members, states } = self;
        let len = members.list.len();
        // The first exchange begins with the sums of squares of parameters. The sums of squares of updates follow in the same exchange, or
        // are in the second one.
        let sums = match rule.num_sums() {
            [0, _] => None,
            [1, _] => Some([first, second]),
            _ => Some([0, len].map(|start| first.part(start, [len].into()))),
        };
        let scales = sums.map(|sums| members.scales(step.device, sums, |member| rule.scale(member, step)));
        let scales = scales.transpose()?;
        let updates = &members.member_updates(|member| rule.update(member, step));
        let scales = scales.as_ref().map(Tensor::view);
        let pass = UpdatePass {
            pieces: &members.pieces,
            updates,
            scales,
            rounding_seed: step.rounding_seed,
            sums: None,
        };
        step.device.update(pass, parameters, grads, states);
        Ok(())
    }
}
