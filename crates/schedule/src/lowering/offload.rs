//! Offloading: state that resides off the device is fetched ahead of its use and evicted afterwards (Ren et al., "ZeRO-Offload", 2021;
//! Rajbhandari et al., "ZeRO-Infinity", 2021, section 6; Pudipeddi et al., "Training large neural networks with constant memory", L2L,
//! 2020).

use super::insertions::{indices_of, insert, no_insertions};
use crate::action::{Action, Keep, StateClass, StateKey};
use crate::program::ProgramHeader;

/// Adds the fetches and evictions of all classes that are [fetched](crate::StateLayout::is_fetched). Activations are evicted only if more
/// than `2 * fetch_ahead` passes run before their next use.
pub(super) fn offload(header: &ProgramHeader, mut actions: Vec<Action>) -> Vec<Action> {
    let state = &header.state;
    for class in StateClass::ALL.into_iter().filter(|&class| state.is_fetched(class)) {
        let is_use = |action: Action| action.uses().contains(&class);
        actions = match class {
            StateClass::Optimizer | StateClass::Parameters => {
                swap_around(&actions, class, is_use, state.fetch_ahead)
            }
            StateClass::Gradients => swap_around(&evict_reduced(&actions), class, is_use, state.fetch_ahead),
            StateClass::Activations => swap_activations(&actions, header),
        };
    }
    actions
}

/// Adds a fetch before each use of the class and an eviction after it. The fetch starts `prefetch` uses earlier, but after the previous use
/// of the same unit's state. Between two adjacent uses, state stays in memory. The first `prefetch` fetches start at the first use, but no
/// later than the last pass. Any other fetch for an update after the last pass starts no earlier than that pass.
fn swap_around(
    actions: &[Action],
    class: StateClass,
    is_use: impl Fn(Action) -> bool,
    prefetch: usize,
) -> Vec<Action> {
    let uses = indices_of(actions, is_use);
    let last_pass = actions.iter().rposition(|action| action.is_pass()).unwrap_or(0);
    let mut insertions = no_insertions(actions);
    let stays =
        |first: usize, second: usize| first + 1 == second && actions[first].unit() == actions[second].unit();
    for (index, &place) in uses.iter().enumerate() {
        let unit = actions[place].unit();
        let state = StateKey { class, unit, microbatch: 0 };
        let ahead = match index.checked_sub(prefetch) {
            Some(earlier) => uses[earlier],
            None => uses[0].min(last_pass),
        };
        let is_step = matches!(actions[place], Action::Step { .. });
        // Updates at the end of the program do not compete with passes for memory.
        let ahead =
            if is_step && index >= prefetch && place > last_pass { ahead.max(last_pass) } else { ahead };
        let previous = uses[..index].iter().rev().find(|&&earlier| actions[earlier].unit() == unit);
        // A gradient can be fetched only after it has been reduced and evicted.
        let reduced = (class == StateClass::Gradients)
            .then(|| actions.iter().position(|action| *action == Action::Evict(state)))
            .flatten();
        let earliest = previous.copied().max(reduced).map_or(0, |place| place + 1);
        if index == 0 || !stays(uses[index - 1], place) {
            insertions[ahead.max(earliest).min(place)][0].push(Action::Fetch(state));
        }
        if uses.get(index + 1).is_some_and(|&next| stays(place, next)) {
            continue;
        }
        // The updated parameters may be gathered before they are evicted.
        let is_gathered = is_step && actions.get(place + 1) == Some(&Action::Unshard { unit });
        insertions[place + usize::from(is_gathered)][1].push(Action::Evict(state));
    }
    insert(actions, insertions)
}

/// Evicts each reduced gradient after the next reduction has begun, because the gradient's own reduction has had time to complete by then.
fn evict_reduced(actions: &[Action]) -> Vec<Action> {
    let is_reduction = |action| matches!(action, Action::ReduceGrad { .. });
    let ends = indices_of(actions, |action| is_reduction(action) || matches!(action, Action::Step { .. }));
    let mut insertions = no_insertions(actions);
    for pair in ends.windows(2) {
        if let Action::ReduceGrad { unit } = actions[pair[0]] {
            let state = StateKey { class: StateClass::Gradients, unit, microbatch: 0 };
            insertions[pair[1]][usize::from(is_reduction(actions[pair[1]]))].push(Action::Evict(state));
        }
    }
    insert(actions, insertions)
}

/// Evicts the kept activations of the first units that keep any, and fetches them [`fetch_ahead`](crate::StateLayout::fetch_ahead) passes
/// before their use.
fn swap_activations(actions: &[Action], header: &ProgramHeader) -> Vec<Action> {
    let (chain, prefetch) = (&header.chain, header.state.fetch_ahead);
    let mut is_moved = vec![false; chain.num_units];
    let kept = (0..chain.num_units).filter(|&unit| chain.keeps(unit));
    kept.take(header.state.num_offloaded_units).for_each(|unit| is_moved[unit] = true);
    let passes = indices_of(actions, Action::is_pass);
    let mut insertions = no_insertions(actions);
    for (pass, &place) in passes.iter().enumerate() {
        let Action::Forward { unit, microbatch, keep } = actions[place] else { continue };
        if keep == Keep::Nothing || !is_moved[unit] {
            continue;
        }
        let is_use = |&place: &usize| {
            let action = actions[place];
            let is_later = !matches!(action, Action::Forward { .. });
            is_later && (action.unit(), action.microbatch()) == (unit, Some(microbatch))
        };
        let later = &passes[pass + 1..];
        let Some(distance) = later.iter().position(is_use) else { continue };
        if distance > 2 * prefetch {
            let state = StateKey { class: StateClass::Activations, unit, microbatch };
            insertions[place][1].push(Action::Evict(state));
            insertions[later[distance - prefetch]][0].push(Action::Fetch(state));
        }
    }
    insert(actions, insertions)
}

#[cfg(test)]
mod tests {
    use crate::action::StateClass;
    use crate::layout::{StateLayout, Tier};
    use crate::lowering::apply_layout;
    use crate::program::UnitChain;
    use crate::single;

    fn text(chain: &UnitChain, state: StateLayout) -> String {
        let program = apply_layout(single::program(chain, 1), state).to_string();
        program.lines().collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn the_optimizer_is_fetched_an_update_ahead() {
        let state = StateLayout::zero(1).with_tier(StateClass::Optimizer, Tier::Disk);
        let expected = "units 3 microbatches 1 optimizer shard@disk, F 0 0, F 1 0, F 2 0, B 2 0, REDUCE_GRAD 2, \
                        B 1 0, REDUCE_GRAD 1, FETCH optimizer 0, B 0 0, REDUCE_GRAD 0, FETCH optimizer 1, STEP 0, \
                        UNSHARD 0, EVICT optimizer 0, FETCH optimizer 2, STEP 1, UNSHARD 1, EVICT optimizer 1, STEP 2, \
                        UNSHARD 2, EVICT optimizer 2";
        assert_eq!(text(&UnitChain::of_units(3), state), expected);
    }

    #[test]
    fn activations_are_evicted_only_if_they_can_be_fetched_ahead() {
        let state = StateLayout::UNSHARDED.with_tier(StateClass::Activations, Tier::Host);
        let chain = UnitChain { without_activations: vec![0, 3], ..UnitChain::of_units(4) };
        let expected = "units 4 microbatches 1 activations whole@host unkept 0 unkept 3, F 0 0, F 1 0, EVICT activations 1 0, F 2 0, F 3 0, B 3 0, \
                        REDUCE_GRAD 3, FETCH activations 1 0, B 2 0, REDUCE_GRAD 2, B 1 0, REDUCE_GRAD 1, B 0 0, \
                        REDUCE_GRAD 0, STEP 0, STEP 1, STEP 2, STEP 3";
        assert_eq!(text(&chain, state), expected);
    }
}
