//! Early updates: each unit is updated as soon as its gradient is reduced, so that the gradient's memory is free for another unit (fused
//! backward and optimizer; Lv et al., "Full parameter fine-tuning for large language models with limited resources", 2023).

use super::insertions::{indices_of, insert, no_insertions};
use crate::action::Action;

/// Moves each update directly before the reduction of the next unit, so that a reduction overlaps with one backward pass. No later pass
/// reads the updated parameters: a unit's gradient is reduced after the last pass that reads the unit's parameters, and backward of a unit
/// that owns tied parameters runs after backward of their reader.
pub(super) fn update_early(actions: Vec<Action>) -> Vec<Action> {
    let is_step = |action: &Action| matches!(action, Action::Step { .. });
    let actions: Vec<Action> = actions.into_iter().filter(|action| !is_step(action)).collect();
    let reductions = indices_of(&actions, |action| matches!(action, Action::ReduceGrad { .. }));
    let mut insertions = no_insertions(&actions);
    for (index, &reduction) in reductions.iter().enumerate() {
        let step = Action::Step { unit: actions[reduction].unit() };
        match reductions.get(index + 1) {
            Some(&next) => insertions[next][0].push(step),
            None => insertions[reduction][1].push(step),
        }
    }
    insert(&actions, insertions)
}

#[cfg(test)]
mod tests {
    use crate::layout::StateLayout;
    use crate::lowering::apply_layout;
    use crate::program::UnitChain;
    use crate::single;

    #[test]
    fn each_unit_is_updated_before_the_next_reduction() {
        let chain = UnitChain { ties: vec![(2, 0)], ..UnitChain::of_units(3) };
        let early = StateLayout { updates_early: true, ..StateLayout::zero(1) };
        let text = apply_layout(single::program(&chain, 1), early).to_string();
        let expected = "units 3 microbatches 1 optimizer shard updates early ties 2:0, F 0 0, F 1 0, F 2 0, B 2 0, REDUCE_GRAD 2, B 1 0, \
                        STEP 2, UNSHARD 2, REDUCE_GRAD 1, B 0 0, STEP 1, UNSHARD 1, REDUCE_GRAD 0, STEP 0, UNSHARD 0";
        assert_eq!(text.lines().collect::<Vec<_>>().join(", "), expected);
    }
}
