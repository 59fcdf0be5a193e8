//! Exchange of momentum instead of gradients, for 1-bit Adam and 0/1 Adam.
//!
//! While their second moment is frozen, the update is linear in the momentum. So each rank adds its own gradient to the shared momentum,
//! and the ranks average the results as they would average gradients, compressed with error feedback (Tang et al., "1-bit Adam", 2021,
//! algorithm 1; Lu et al., "Maximizing communication efficiency for large-scale training via 0/1 Adam", 2022, algorithm 1 with an exchange
//! in every step, so replicas never differ).
//!
//! In a step of [`ReducedQuantity::Momentum`], each rank calls [`Optimizer::gradient_to_momentum`] with its own gradient, the results are
//! summed over the ranks, and each rank calls [`Optimizer::step_from_momentum`]. A rank that has the sum of all gradients may call
//! [`Optimizer::step_unit`] in any step instead: the result is the same, except for rounding. The norm over the gradients of all ranks is
//! not known before momentum is exchanged, so such steps cannot clip by it.

use crate::elementwise::ElementwiseUpdate;
use crate::members::UpdatedParameter;
use crate::optimizer::{Optimizer, UnitUpdate, rounding_seed};
use crate::rules::Rule;
use crate::step::{StepSettings, UnitStep};
use trireme_tensor::updates::Update;
use trireme_tensor::{Device, View, ViewMut};

/// The quantity that ranks sum in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReducedQuantity {
    /// Gradients, in full precision.
    Gradients,
    /// Momentum, which may be compressed.
    Momentum,
}

impl Optimizer {
    /// Returns whether there are steps in which ranks may sum momentum.
    pub fn exchanges_momentum(&self) -> bool {
        self.options.name.exchanges_momentum()
    }

    /// Returns the quantity that ranks sum for a unit in update `step` of the run, counted from 1. This is momentum, with two exceptions: a
    /// parameter of the unit updates its second moment in this step, or no parameter of the unit has a momentum, for example because all
    /// are frozen. The result is the same on all ranks, whichever part of the unit they store.
    pub fn reduced_quantity(&self, unit: usize, step: u64) -> ReducedQuantity {
        let updates_second = self.units[unit].iter().filter_map(|share| match share {
            UnitUpdate::Elementwise(share) => Some((share.rule.compressed_adam()?, &share.members.list)),
            _ => None,
        });
        let updates_second = updates_second.flat_map(|(rule, members)| {
            let number = |member: &UpdatedParameter| step - self.starts[member.parameter];
            members.iter().map(move |member| rule.updates_second_moment(number(member)))
        });
        let mut updates_second = updates_second.peekable();
        if updates_second.peek().is_none() || updates_second.any(|is_update| is_update) {
            ReducedQuantity::Gradients
        } else {
            ReducedQuantity::Momentum
        }
    }

    /// Replaces this rank's gradient of its part of a unit by the momentum that results from it. The optimizer's state does not change.
    /// Frozen parameters have neither gradient nor momentum: their elements become 0. `settings.grad_scale` turns this rank's sum of
    /// gradients into its mean gradient, without dividing by the number of ranks.
    ///
    /// # Panics
    /// If ranks exchange gradients in this step, or if lengths differ.
    pub fn gradient_to_momentum(
        &mut self,
        device: &Device,
        unit: usize,
        mut grads: ViewMut<'_>,
        settings: StepSettings,
    ) {
        let len = grads.shape().num_elements();
        self.check_lengths(unit, len, len);
        let part = &self.parts[unit];
        for info in &self.table.parameters()[self.table.units()[unit].parameters.clone()] {
            if self.options.is_frozen(&info.name)
                && let Some(held) = info.stored(part)
            {
                let start = info.offset + held.start - part.start;
                device.zero(grads.reborrow().into_part(start, [held.len()].into()));
            }
        }
        let none = View::from_f32s(&[], [0].into());
        let to_momentum = |rule: &dyn Rule, member: &UpdatedParameter, step: &UnitStep<'_>| {
            rule.compressed_adam().map(|rule| Update::FrozenAdamMomentum(rule.adam_step(member, step)))
        };
        self.update_elements(device, unit, grads, none, settings, to_momentum);
    }

    /// Updates this rank's part of a unit from the sum of all ranks' momentum. `settings.grad_scale` turns the sum into the mean.
    ///
    /// # Panics
    /// If ranks exchange gradients in this step, or if lengths differ.
    pub fn step_from_momentum(
        &mut self,
        device: &Device,
        unit: usize,
        parameters: ViewMut<'_>,
        momentum: View<'_>,
        settings: StepSettings,
    ) {
        self.check_lengths(unit, parameters.shape().num_elements(), momentum.shape().num_elements());
        let from_momentum = |rule: &dyn Rule, member: &UpdatedParameter, step: &UnitStep<'_>| {
            Some(match rule.compressed_adam() {
                Some(rule) => Update::FrozenAdamFromMomentum(rule.adam_step(member, step)),
                None => rule.update(member, step),
            })
        };
        self.update_elements(device, unit, parameters, momentum, settings, from_momentum);
    }

    fn update_elements(
        &mut self,
        device: &Device,
        unit: usize,
        mut parameters: ViewMut<'_>,
        grads: View<'_>,
        settings: StepSettings,
        update: impl Fn(&dyn Rule, &UpdatedParameter, &UnitStep<'_>) -> Option<Update>,
    ) {
        assert_eq!(
            self.reduced_quantity(unit, settings.step),
            ReducedQuantity::Momentum,
            "step {}",
            settings.step
        );
        let rounding_seed = rounding_seed(unit, settings.step);
        let step = UnitStep { device, table: &self.table, settings, starts: &self.starts, rounding_seed };
        for unit_update in &mut self.units[unit] {
            let UnitUpdate::Elementwise(ElementwiseUpdate { rule, members, states, .. }) = unit_update else {
                unreachable!("an optimizer that exchanges momentum has rules for elements")
            };
            // The biases that balance experts have no momentum: their gradients are exchanged unchanged.
            let rule = &**rule;
            if members.list.iter().any(|member| update(rule, member, &step).is_none()) {
                continue;
            }
            members.update(
                device,
                parameters.reborrow(),
                grads,
                states,
                step.rounding_seed,
                |member: &UpdatedParameter| update(rule, member, &step).expect("it has one for all members"),
            );
        }
    }
}
