//! Sharding: sharded state is gathered where it is used in full, and freed afterwards (Rajbhandari et al., 2020, section 5; parameters as
//! in Zhao et al., "PyTorch FSDP", 2023, section 3).

use super::insertions::{indices_of, insert, no_insertions};
use crate::action::{Action, Message, MessageKind, StateClass};
use crate::program::ProgramHeader;

/// Adds the gathers and reductions of sharded state:
/// - Sharded gradients are reduced after each backward pass of their unit, so that no rank keeps a full gradient. They are gathered for the
///   updates if ranks update all parameters.
/// - If ranks update shards of unsharded parameters, the parameters are gathered after each `STEP`.
/// - Sharded parameters are gathered before they are read, and freed after. Parameters that a tied unit on another rank reads are gathered
///   after their `STEP` as well, and sent.
pub(super) fn shard(header: &ProgramHeader, mut actions: Vec<Action>) -> Vec<Action> {
    let is_sharded = |class| header.state.is_sharded(class);
    if is_sharded(StateClass::Gradients) {
        actions.retain(|action| !matches!(action, Action::ReduceGrad { .. }));
        actions = followed(&actions, |action| {
            action.completed_gradient().map(|(unit, _)| Action::ReduceGrad { unit })
        });
        if !is_sharded(StateClass::Optimizer) {
            actions = gather_grads_before_steps(&actions);
        }
    }
    match (is_sharded(StateClass::Parameters), is_sharded(StateClass::Optimizer)) {
        (true, _) => gather_to_send(&gather_around_use(header, &actions)),
        (false, true) => followed(&actions, |action| match action {
            Action::Step { unit } => Some(Action::Unshard { unit }),
            _ => None,
        }),
        (false, false) => actions,
    }
}

/// Returns the actions, each followed by the action that `by` returns for it.
fn followed(actions: &[Action], by: impl Fn(Action) -> Option<Action>) -> Vec<Action> {
    actions.iter().flat_map(|&action| [Some(action), by(action)]).flatten().collect()
}

/// Gathers each gradient one update ahead, so that the next gradient is gathered while a unit is updated.
fn gather_grads_before_steps(actions: &[Action]) -> Vec<Action> {
    let steps = indices_of(actions, |action| matches!(action, Action::Step { .. }));
    let mut insertions = no_insertions(actions);
    for (index, &step) in steps.iter().enumerate() {
        insertions[steps[index.saturating_sub(1)]][0]
            .push(Action::UnshardGrad { unit: actions[step].unit() });
    }
    insert(actions, insertions)
}

/// A range of passes during which a unit's parameters stay gathered. Passes are counted from 0; other actions do not count.
struct GatheredRange {
    unit: usize,
    first: usize,
    last: usize,
    /// The last pass of the previous range of the same unit.
    previous: Option<usize>,
}

fn gather_around_use(header: &ProgramHeader, actions: &[Action]) -> Vec<Action> {
    let places = indices_of(actions, Action::is_pass);
    let passes: Vec<Action> = places.iter().map(|&place| actions[place]).collect();
    let mut insertions = no_insertions(actions);
    for GatheredRange { unit, first, last, previous } in gathered_ranges(header, &passes) {
        let earliest = previous.map_or(0, |previous| previous + 1);
        let first = first.saturating_sub(header.state.gather_ahead).max(earliest);
        insertions[places[first]][0].push(Action::Unshard { unit });
        insertions[places[last]][1].push(Action::Reshard { unit });
    }
    insert(actions, insertions)
}

/// Gathers parameters that are sent after their update, and frees them once they are sent.
fn gather_to_send(actions: &[Action]) -> Vec<Action> {
    let send = |unit| Action::Send(Message::parameters(unit));
    followed(actions, |action| match action {
        Action::Step { unit } if actions.contains(&send(unit)) => Some(Action::Unshard { unit }),
        Action::Send(Message { kind: MessageKind::Parameters, unit, .. }) => Some(Action::Reshard { unit }),
        _ => None,
    })
}

/// Returns the ranges in the order of their first passes. A unit stays gathered between neighboring passes that read it, from its
/// recomputation to its backward pass, and from forward to backward if the layout [says so](crate::StateLayout::keep_gathered).
fn gathered_ranges(header: &ProgramHeader, passes: &[Action]) -> Vec<GatheredRange> {
    let mut ranges: Vec<GatheredRange> = Vec::new();
    let mut latest: Vec<Option<usize>> = vec![None; header.chain.num_units];
    for (pass, &action) in passes.iter().enumerate() {
        for unit in header.reads(action).filter(|&unit| header.holds(unit)) {
            let previous = latest[unit].map(|stay| ranges[stay].last);
            let is_kept = previous.is_some_and(|last| {
                let is_same_microbatch = passes[last].microbatch() == action.microbatch();
                let is_recomputed = matches!(passes[last], Action::Recompute { .. });
                last + 1 >= pass || (is_same_microbatch && (is_recomputed || header.state.keep_gathered))
            });
            match latest[unit] {
                Some(stay) if is_kept => ranges[stay].last = pass,
                _ => {
                    latest[unit] = Some(ranges.len());
                    ranges.push(GatheredRange { unit, first: pass, last: pass, previous });
                }
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use crate::action::Action;
    use crate::layout::{ClassLayout, Portion, StateLayout};
    use crate::lowering::apply_layout;
    use crate::program::UnitChain;
    use crate::single;

    fn text(chain: &UnitChain, num_microbatches: usize, state: StateLayout) -> String {
        let program = apply_layout(single::program(chain, num_microbatches), state).to_string();
        program.lines().collect::<Vec<_>>().join(", ")
    }

    const STAGE_3: StateLayout = StateLayout { gather_ahead: 0, ..StateLayout::zero(3) };

    #[test]
    fn zero_stages_1_and_2_gather_updated_parameters() {
        let expected = "units 1 microbatches 2 optimizer shard, F 0 0, B 0 0, F 0 1, B 0 1, REDUCE_GRAD 0, STEP 0, UNSHARD 0";
        assert_eq!(text(&UnitChain::of_units(1), 2, StateLayout::zero(1)), expected);
        let expected = "units 1 microbatches 2 optimizer shard gradients shard, F 0 0, B 0 0, REDUCE_GRAD 0, F 0 1, B 0 1, \
                        REDUCE_GRAD 0, STEP 0, UNSHARD 0";
        assert_eq!(text(&UnitChain::of_units(1), 2, StateLayout::zero(2)), expected);
    }

    #[test]
    fn sharded_gradients_are_gathered_for_updates_of_all_parameters() {
        let gradients = ClassLayout { portion: Portion::Shard, ..ClassLayout::default() };
        let expected = "units 3 microbatches 1 gradients shard, F 0 0, F 1 0, F 2 0, B 2 0, REDUCE_GRAD 2, B 1 0, REDUCE_GRAD 1, \
                        B 0 0, REDUCE_GRAD 0, UNSHARD_GRAD 0, UNSHARD_GRAD 1, STEP 0, UNSHARD_GRAD 2, STEP 1, STEP 2";
        assert_eq!(
            text(&UnitChain::of_units(3), 1, StateLayout { gradients, ..StateLayout::UNSHARDED }),
            expected
        );
    }

    #[test]
    fn zero_stage_3_gathers_around_use() {
        let expected = "units 3 microbatches 1 optimizer shard parameters shard gradients shard gather_ahead 0 unread 0, \
                        UNSHARD 0, F 0 0, RESHARD 0, UNSHARD 1, F 1 0, RESHARD 1, \
                        UNSHARD 2, F 2 0, B 2 0, RESHARD 2, REDUCE_GRAD 2, UNSHARD 1, B 1 0, RESHARD 1, REDUCE_GRAD 1, B 0 0, \
                        REDUCE_GRAD 0, STEP 0, STEP 1, STEP 2";
        let chain = UnitChain { without_backward_reads: vec![0], ..UnitChain::of_units(3) };
        assert_eq!(text(&chain, 1, STAGE_3), expected);
    }

    #[test]
    fn gathering_begins_ahead_but_after_the_previous_reshard() {
        let expected = "units 3 microbatches 1 optimizer shard parameters shard gradients shard ties 2:0 unread 0, \
                        UNSHARD 0, UNSHARD 1, F 0 0, RESHARD 0, UNSHARD 2, \
                        UNSHARD 0, F 1 0, RESHARD 1, F 2 0, UNSHARD 1, B 2 0, RESHARD 2, RESHARD 0, REDUCE_GRAD 2, B 1 0, \
                        RESHARD 1, REDUCE_GRAD 1, B 0 0, REDUCE_GRAD 0, STEP 0, STEP 1, STEP 2";
        let chain =
            UnitChain { ties: vec![(2, 0)], without_backward_reads: vec![0], ..UnitChain::of_units(3) };
        assert_eq!(text(&chain, 1, StateLayout::zero(3)), expected);
    }

    #[test]
    fn parameters_kept_after_forward_are_gathered_once_per_microbatch() {
        let keeping = StateLayout { keep_gathered: true, ..STAGE_3 };
        let program = apply_layout(single::program(&UnitChain::language_model(4, false), 3), keeping);
        let count = |action| program.actions.iter().filter(|found| **found == action).count();
        for unit in 0..4 {
            assert_eq!(count(Action::Unshard { unit }), 3, "{program}");
            assert_eq!(count(Action::Reshard { unit }), 3);
        }
    }
}
