use crate::action::Action;
use crate::program::{Outline, Program, ZeroStage};

/// How the data-parallel ranks shard the training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharding {
    /// What they shard.
    pub zero_stage: ZeroStage,
    /// With stage 3: how many passes of units before its own a unit's parameters begin to be gathered. 0 gathers when
    /// they are needed, and holds the fewest at a time.
    pub prefetch: usize,
    /// With stage 3: whether parameters that forward has gathered stay until backward has read them, which saves a
    /// gathering and holds all of them at a time.
    pub keep_after_forward: bool,
}

/// Shares out the training state of a program of ZeRO stage 0 (Rajbhandari et al., 2020, section 5; for the third stage as
/// Zhao et al., "PyTorch FSDP", 2023, section 3, do).
///
/// - Stage 1 gathers each unit's parameters after its `STEP`, of which each rank has done its shard.
/// - Stage 2 reduces a unit's gradient after each of its backward passes, so that no rank keeps a whole one.
/// - Stage 3 also gathers parameters before they are read, and gives them back after.
///
/// # Panics
/// If something is sharded already.
pub fn shard(program: Program, sharding: Sharding) -> Program {
    let Program { outline, mut actions } = program;
    assert_eq!(outline.zero_stage, ZeroStage::Zero, "the program is sharded already");
    let outline = Outline { zero_stage: sharding.zero_stage, ..outline };
    if sharding.zero_stage >= ZeroStage::Two {
        actions = reduce_every_microbatch(&actions);
    }
    actions = match sharding.zero_stage {
        ZeroStage::Zero => actions,
        ZeroStage::One | ZeroStage::Two => gather_after_steps(&actions),
        ZeroStage::Three => gather_around_use(&outline, &actions, sharding),
    };
    Program { outline, actions }
}

fn reduce_every_microbatch(actions: &[Action]) -> Vec<Action> {
    let others = actions.iter().filter(|action| !matches!(action, Action::ReduceGrad { .. }));
    let with_reduction = |&action: &Action| {
        [Some(action), action.completed_gradient().map(|(unit, _)| Action::ReduceGrad { unit })]
    };
    others.flat_map(with_reduction).flatten().collect()
}

fn gather_after_steps(actions: &[Action]) -> Vec<Action> {
    let with_gathering = |&action: &Action| match action {
        Action::Step { unit } => [Some(action), Some(Action::Unshard { unit })],
        _ => [Some(action), None],
    };
    actions.iter().flat_map(with_gathering).flatten().collect()
}

/// A stretch of passes, by their places among all passes, over which a unit's parameters are there.
struct Stay {
    unit: usize,
    first: usize,
    last: usize,
    /// The last pass of the unit's stay before this one.
    previous: Option<usize>,
}

fn gather_around_use(outline: &Outline, actions: &[Action], sharding: Sharding) -> Vec<Action> {
    let is_pass = |action: &Action| action.is_pass();
    let passes: Vec<Action> = actions.iter().copied().filter(is_pass).collect();
    let stays = stays(outline, &passes, sharding.keep_after_forward);
    let mut unshards = vec![Vec::new(); passes.len()];
    let mut reshards = vec![Vec::new(); passes.len()];
    for Stay { unit, first, last, previous } in stays {
        let earliest = previous.map_or(0, |previous| previous + 1);
        unshards[first.saturating_sub(sharding.prefetch).max(earliest)].push(unit);
        reshards[last].push(unit);
    }
    let mut lowered = Vec::with_capacity(2 * actions.len());
    let mut pass = 0;
    for &action in actions {
        if !is_pass(&action) {
            lowered.push(action);
            continue;
        }
        lowered.extend(unshards[pass].iter().map(|&unit| Action::Unshard { unit }));
        lowered.push(action);
        lowered.extend(reshards[pass].iter().map(|&unit| Action::Reshard { unit }));
        pass += 1;
    }
    lowered
}

/// In order of their first passes. A unit stays from one pass to the next one that reads it if they are neighbours, from its
/// recomputation to its backward pass, and if that is asked for from forward to backward.
fn stays(outline: &Outline, passes: &[Action], keep_after_forward: bool) -> Vec<Stay> {
    let mut stays: Vec<Stay> = Vec::new();
    let mut latest: Vec<Option<usize>> = vec![None; outline.chain.num_units];
    for (pass, &action) in passes.iter().enumerate() {
        for unit in outline.reads(action) {
            let previous = latest[unit].map(|stay| stays[stay].last);
            let is_kept = previous.is_some_and(|last| {
                let is_same_microbatch = passes[last].microbatch() == action.microbatch();
                let is_recomputed = matches!(passes[last], Action::Recompute { .. });
                last + 1 >= pass || (is_same_microbatch && (is_recomputed || keep_after_forward))
            });
            match latest[unit] {
                Some(stay) if is_kept => stays[stay].last = pass,
                _ => {
                    latest[unit] = Some(stays.len());
                    stays.push(Stay { unit, first: pass, last: pass, previous });
                }
            }
        }
    }
    stays
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Chain;
    use crate::single;

    fn text(chain: &Chain, num_microbatches: usize, sharding: Sharding) -> String {
        let program = shard(single::program(chain, num_microbatches), sharding).to_string();
        program.lines().collect::<Vec<_>>().join(", ")
    }

    const STAGE_3: Sharding =
        Sharding { zero_stage: ZeroStage::Three, prefetch: 0, keep_after_forward: false };

    #[test]
    fn the_first_two_stages_gather_what_was_stepped() {
        let one = Sharding { zero_stage: ZeroStage::One, ..STAGE_3 };
        let expected = "units 1 microbatches 2 zero_stage 1, F 0 0, B 0 0, F 0 1, B 0 1, REDUCE_GRAD 0, STEP 0, UNSHARD 0";
        assert_eq!(text(&Chain::of_units(1), 2, one), expected);
        let two = Sharding { zero_stage: ZeroStage::Two, ..STAGE_3 };
        let expected = "units 1 microbatches 2 zero_stage 2, F 0 0, B 0 0, REDUCE_GRAD 0, F 0 1, B 0 1, REDUCE_GRAD 0, \
                        STEP 0, UNSHARD 0";
        assert_eq!(text(&Chain::of_units(1), 2, two), expected);
    }

    #[test]
    fn the_third_stage_gathers_around_use() {
        let expected = "units 3 microbatches 1 zero_stage 3 unread 0, UNSHARD 0, F 0 0, RESHARD 0, UNSHARD 1, F 1 0, RESHARD 1, \
                        UNSHARD 2, F 2 0, B 2 0, RESHARD 2, REDUCE_GRAD 2, UNSHARD 1, B 1 0, RESHARD 1, REDUCE_GRAD 1, B 0 0, \
                        REDUCE_GRAD 0, STEP 0, STEP 1, STEP 2";
        let chain = Chain { unread: vec![0], ..Chain::of_units(3) };
        assert_eq!(text(&chain, 1, STAGE_3), expected);
    }

    #[test]
    fn gathering_begins_ahead_and_not_before_the_last_stay_ended() {
        let expected = "units 3 microbatches 1 zero_stage 3 ties 2:0 unread 0, UNSHARD 0, UNSHARD 1, F 0 0, RESHARD 0, UNSHARD 2, \
                        UNSHARD 0, F 1 0, RESHARD 1, F 2 0, UNSHARD 1, B 2 0, RESHARD 2, RESHARD 0, REDUCE_GRAD 2, B 1 0, \
                        RESHARD 1, REDUCE_GRAD 1, B 0 0, REDUCE_GRAD 0, STEP 0, STEP 1, STEP 2";
        let chain = Chain { ties: vec![(2, 0)], unread: vec![0], ..Chain::of_units(3) };
        assert_eq!(text(&chain, 1, Sharding { prefetch: 1, ..STAGE_3 }), expected);
    }

    #[test]
    fn what_stays_after_forward_is_gathered_once_a_microbatch() {
        let keeping = Sharding { keep_after_forward: true, ..STAGE_3 };
        let program = shard(single::program(&Chain::language_model(4, false), 3), keeping);
        let count = |action| program.actions.iter().filter(|found| **found == action).count();
        for unit in 0..4 {
            assert_eq!(count(Action::Unshard { unit }), 3, "{program}");
            assert_eq!(count(Action::Reshard { unit }), 3);
        }
    }
}
