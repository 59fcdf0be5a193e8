//! Programs of units, generated from schedules of stages.

use super::super::{Costs, Schedule, ScheduleKind, Sizes, StageCosts, generate, programs};
use crate::action::{Action, Keep, Message};
use crate::layout::StateLayout;
use crate::lowering::{apply_layout, recompute};
use crate::program::{Program, UnitChain};
use crate::validate::{ProgramError, validate, validate_pipeline};
use proptest::prelude::*;

/// A synchronous kind, and its stages per rank.
fn kinds() -> impl Strategy<Value = (ScheduleKind, usize)> {
    prop::sample::select(ScheduleKind::synchronous(2).collect::<Vec<_>>())
}

fn lines(program: &Program) -> String {
    program.to_string().lines().collect::<Vec<_>>().join(", ")
}

/// Returns programs of stages with two units and with one unit, alternately.
fn stage_programs(
    kind: ScheduleKind,
    num_ranks: usize,
    stages_per_rank: usize,
    num_microbatches: usize,
) -> Vec<Program> {
    stage_programs_with_tie(kind, num_ranks, stages_per_rank, num_microbatches, None)
}

/// Like [`stage_programs`], but the last unit reads the parameters of the first if `tie` is `Some`. The value of `tie` states whether the
/// last unit sends its contribution to their gradient once per step.
fn stage_programs_with_tie(
    kind: ScheduleKind,
    num_ranks: usize,
    stages_per_rank: usize,
    num_microbatches: usize,
    tie: Option<bool>,
) -> Vec<Program> {
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps: 1 };
    let num_stages = num_ranks * stages_per_rank;
    let costs = Costs::equal(num_stages, StageCosts::of(1, 1, 1)).unwrap();
    let schedule = generate(kind, sizes, &costs, None).unwrap();
    let units: Vec<_> =
        (0..num_stages).map(|stage| (3 * stage).div_ceil(2)..(3 * stage + 3).div_ceil(2)).collect();
    let last = units[num_stages - 1].end - 1;
    let ties = if tie.is_some() && last > 0 { vec![(last, 0)] } else { Vec::new() };
    let sums_ties = tie.unwrap_or(false);
    programs(
        &schedule,
        &costs,
        &units,
        &UnitChain { ties, accumulates_tied_gradients: sums_ties, ..UnitChain::of_units(last + 1) },
    )
}

#[test]
fn two_ranks_and_two_microbatches() {
    let found: Vec<String> = stage_programs(ScheduleKind::OneFOneB, 2, 1, 2).iter().map(lines).collect();
    let expected = [
        "units 3 microbatches 2 rank 0 stage 0-2@0 stage 2-3@1, F 0 0, F 1 0, SEND_F 1 0, F 0 1, F 1 1, SEND_F 1 1, RECV_B 2 0, \
         B 1 0, B 0 0, RECV_B 2 1, B 1 1, REDUCE_GRAD 1, B 0 1, REDUCE_GRAD 0, STEP 0, STEP 1",
        "units 3 microbatches 2 rank 1 stage 0-2@0 stage 2-3@1, RECV_F 1 0, F 2 0, RECV_F 1 1, B 2 0, SEND_B 2 0, F 2 1, B 2 1, \
         REDUCE_GRAD 2, SEND_B 2 1, STEP 2",
    ];
    assert_eq!(found, expected);
}

proptest! {
    #[test]
    fn programs_are_valid_and_read_back(
        (kind, stages_per_rank) in kinds(), num_ranks in 1..5_usize, more in 0..5_usize, stage in 0..3_usize, keep in 0..4_usize,
        tie in any::<Option<bool>>(),
    ) {
        let programs = stage_programs_with_tie(kind, num_ranks, stages_per_rank, 2 * num_ranks + more, tie);
        let num_units = programs[0].header.chain.num_units;
        let keeps: Vec<Keep> = (0..num_units)
            .map(|unit| if unit == 0 { Keep::Input } else { Keep::ALL[keep] })
            .map(|keep| if num_units == 1 { Keep::All } else { keep })
            .collect();
        let programs: Vec<Program> =
            programs.into_iter().map(|program| apply_layout(recompute(program, &keeps), StateLayout::zero(stage))).collect();
        prop_assert_eq!(validate_pipeline(&programs), Ok(()));
        for program in &programs {
            prop_assert_eq!(program.to_string().parse(), Ok(program.clone()));
        }
    }

    #[test]
    fn a_program_that_lost_an_action_is_refused(
        (kind, stages_per_rank) in kinds(), num_ranks in 2..4_usize, rank in 0..4_usize, at in any::<prop::sample::Index>(),
        tie in any::<Option<bool>>(),
    ) {
        let mut programs = stage_programs_with_tie(kind, num_ranks, stages_per_rank, 2 * num_ranks + 1, tie);
        let actions = &mut programs[rank % num_ranks].actions;
        let lost = actions.remove(at.index(actions.len()));
        prop_assert!(validate_pipeline(&programs).is_err(), "without {}", lost);
    }
}

#[test]
fn receiving_only_before_use_stops_one_forward_one_backward() {
    let mut programs = stage_programs(ScheduleKind::OneFOneB, 3, 1, 4);
    for program in &mut programs {
        let mut late: Vec<Action> = Vec::new();
        let mut moved = Vec::new();
        for &action in &program.actions {
            match action {
                Action::Receive(_) => late.push(action),
                _ => {
                    let is_used = |receive: &Action| match (*receive, action) {
                        (Action::Receive(message), Action::Forward { unit, microbatch, .. }) => {
                            unit > 0 && message == Message::activation(unit - 1, microbatch)
                        }
                        (Action::Receive(message), Action::Backward { unit, microbatch }) => {
                            message == Message::gradient(unit + 1, microbatch)
                        }
                        _ => false,
                    };
                    moved.extend(late.extract_if(.., |receive| is_used(receive)));
                    moved.push(action);
                }
            }
        }
        program.actions = moved;
    }
    let error = validate_pipeline(&programs).unwrap_err();
    assert!(matches!(error, ProgramError::Deadlock { .. }), "{error}");
    assert!(error.to_string().contains("waits at: send "), "{error}");
}

#[test]
fn actions_for_another_rank_are_refused() {
    let mut programs = stage_programs(ScheduleKind::GPipe, 2, 1, 2);
    programs[0].actions.insert(0, Action::Forward { unit: 2, microbatch: 0, keep: Keep::All });
    let error = validate_pipeline(&programs).unwrap_err();
    assert_eq!(
        error.to_string(),
        "action 0 (forward, unit 2, microbatch 0) does not belong to pipeline rank 0"
    );
}

#[test]
fn halves_of_backward_become_actions_of_units() {
    let found: Vec<String> = stage_programs(ScheduleKind::ZeroBubbleH1, 2, 1, 2).iter().map(lines).collect();
    let expected = [
        "units 3 microbatches 2 rank 0 stage 0-2@0 stage 2-3@1, F 0 0, F 1 0, SEND_F 1 0, F 0 1, F 1 1, SEND_F 1 1, RECV_B 2 0, \
         I 1 0, I 0 0, W 1 0, W 0 0, RECV_B 2 1, I 1 1, I 0 1, W 1 1, REDUCE_GRAD 1, W 0 1, REDUCE_GRAD 0, STEP 0, STEP 1",
        "units 3 microbatches 2 rank 1 stage 0-2@0 stage 2-3@1, RECV_F 1 0, F 2 0, RECV_F 1 1, I 2 0, SEND_B 2 0, F 2 1, I 2 1, \
         SEND_B 2 1, W 2 0, W 2 1, REDUCE_GRAD 2, STEP 2",
    ];
    assert_eq!(found, expected);
}

#[test]
fn gradients_are_summed_in_the_order_of_microbatches() {
    let mut programs = stage_programs(ScheduleKind::ZeroBubbleH1, 1, 1, 2);
    let place = |actions: &[Action], text: &str| {
        let wanted = text.parse::<Action>().unwrap();
        actions.iter().position(|action| *action == wanted).unwrap()
    };
    let actions = &mut programs[0].actions;
    let (first, second) = (place(actions, "W 0 0"), place(actions, "W 0 1"));
    actions.swap(first, second);
    let error = validate_pipeline(&programs).unwrap_err().to_string();
    assert!(error.contains("weight half of backward, unit 0, microbatch 1"), "{error}");
}

#[test]
fn a_tied_unit_sends_its_part_of_the_gradient_and_gets_the_parameters() {
    let found: Vec<String> =
        stage_programs_with_tie(ScheduleKind::ZeroBubbleH1, 2, 1, 2, Some(false)).iter().map(lines).collect();
    let expected = [
        "units 3 microbatches 2 ties 2:0 rank 0 stage 0-2@0 stage 2-3@1, F 0 0, F 1 0, SEND_F 1 0, F 0 1, F 1 1, SEND_F 1 1, \
         RECV_B 2 0, I 1 0, I 0 0, W 1 0, RECV_B 2 1, I 1 1, I 0 1, RECV_GRAD 0 0, W 0 0, W 1 1, REDUCE_GRAD 1, RECV_GRAD 0 1, \
         W 0 1, REDUCE_GRAD 0, STEP 0, STEP 1, SEND_PARAM 0",
        "units 3 microbatches 2 ties 2:0 rank 1 stage 0-2@0 stage 2-3@1, RECV_F 1 0, F 2 0, RECV_F 1 1, I 2 0, SEND_B 2 0, F 2 1, \
         I 2 1, SEND_B 2 1, W 2 0, SEND_GRAD 0 0, W 2 1, REDUCE_GRAD 2, SEND_GRAD 0 1, STEP 2, RECV_PARAM 0",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_tied_unit_may_send_its_part_of_the_gradient_once_a_step() {
    let programs = stage_programs_with_tie(ScheduleKind::ZeroBubbleH1, 2, 1, 2, Some(true));
    let found: Vec<String> = programs.iter().map(lines).collect();
    let expected = [
        "units 3 microbatches 2 ties 2:0 tied_gradient step rank 0 stage 0-2@0 stage 2-3@1, F 0 0, F 1 0, SEND_F 1 0, F 0 1, \
         F 1 1, SEND_F 1 1, RECV_B 2 0, I 1 0, I 0 0, W 1 0, W 0 0, RECV_B 2 1, I 1 1, I 0 1, W 1 1, REDUCE_GRAD 1, \
         RECV_GRAD 0 1, W 0 1, REDUCE_GRAD 0, STEP 0, STEP 1, SEND_PARAM 0",
        "units 3 microbatches 2 ties 2:0 tied_gradient step rank 1 stage 0-2@0 stage 2-3@1, RECV_F 1 0, F 2 0, RECV_F 1 1, \
         I 2 0, SEND_B 2 0, F 2 1, I 2 1, SEND_B 2 1, W 2 0, W 2 1, REDUCE_GRAD 2, SEND_GRAD 0 1, STEP 2, RECV_PARAM 0",
    ];
    assert_eq!(found, expected);
    // Refuses a contribution that is sent too early or for another microbatch.
    for (line, refused) in [
        ("W 2 0", "weight half of backward, unit 2, microbatch 0"),
        ("SEND_GRAD 0 1", "(send tied gradient, unit 0, microbatch 0) does not belong"),
    ] {
        let mut reader = programs[1].clone();
        let place = reader.actions.iter().position(|action| action.to_string() == line).unwrap();
        let removed = reader.actions.remove(place);
        if line.starts_with("SEND") {
            reader.actions.insert(place, Action::Send(Message::tied_gradient(0, 0)));
        } else {
            let last = reader.actions.len() - 1;
            reader.actions.insert(last, removed);
        }
        let error = validate(&reader, usize::MAX).unwrap_err().to_string();
        assert!(error.contains(refused), "{error}");
    }
}

/// Returns a schedule without drains and its programs, with one unit per stage.
fn asynchronous(
    kind: ScheduleKind,
    num_ranks: usize,
    num_microbatches: usize,
    num_steps: usize,
) -> (Schedule, Vec<Program>) {
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank: 1, num_steps };
    let costs = Costs::equal(num_ranks, StageCosts::of(1, 1, 1)).unwrap();
    let schedule = generate(kind, sizes, &costs, None).unwrap();
    let units: Vec<_> = (0..num_ranks).map(|stage| stage..stage + 1).collect();
    let programs = programs(&schedule, &costs, &units, &UnitChain::of_units(units[units.len() - 1].end));
    (schedule, programs)
}

#[test]
fn weights_are_stashed_before_an_update_as_long_as_they_are_read() {
    let (_, programs) = asynchronous(ScheduleKind::PipeDream, 2, 1, 3);
    let found: Vec<String> = programs.iter().map(lines).collect();
    let expected = [
        "units 2 microbatches 3 rank 0 stage 0-1@0 stage 1-2@1 steps 3 weights stashed, F 0 0, SEND_F 0 0, F 0 1, SEND_F 0 1, \
         RECV_B 1 0, B 0 0, REDUCE_GRAD 0, STASH 0, STEP 0, F 0 2, SEND_F 0 2, RECV_B 1 1, B 0 1, REDUCE_GRAD 0, UNSTASH 0, \
         STASH 0, STEP 0, RECV_B 1 2, B 0 2, REDUCE_GRAD 0, UNSTASH 0, STEP 0",
        "units 2 microbatches 3 rank 1 stage 0-1@0 stage 1-2@1 steps 3 weights stashed, RECV_F 0 0, F 1 0, RECV_F 0 1, B 1 0, \
         REDUCE_GRAD 1, SEND_B 1 0, STEP 1, F 1 1, B 1 1, REDUCE_GRAD 1, RECV_F 0 2, SEND_B 1 1, STEP 1, F 1 2, B 1 2, \
         REDUCE_GRAD 1, SEND_B 1 2, STEP 1",
    ];
    assert_eq!(found, expected);
}

proptest! {
    #[test]
    fn asynchronous_programs_are_valid_and_stash_as_many_versions_as_stated(
        is_double_buffered in any::<bool>(), num_ranks in 1..5_usize, microbatches in 0..5_usize, steps in 1..12_usize,
    ) {
        let (kind, microbatches) = if is_double_buffered {
(ScheduleKind::PipeDream2Bw, num_ranks + microbatches)
} else {
(ScheduleKind::PipeDream, 1 + microbatches)
};
        let (schedule, programs) = asynchronous(kind, num_ranks, microbatches, steps);
        prop_assert_eq!(validate_pipeline(&programs), Ok(()));
        for (rank, program) in programs.iter().enumerate() {
            prop_assert_eq!(program.to_string().parse(), Ok(program.clone()));
            let count = |(held, most): (usize, usize), action: &Action| match action {
                Action::Stash { .. } => (held + 1, most.max(held + 1)),
                Action::Unstash { .. } => (held - 1, most),
                _ => (held, most),
            };
            let (left, most) = program.actions.iter().fold((0, 0), count);
            prop_assert_eq!(left, 0);
            // `versions_kept` counts all versions from the newest one to the oldest one that is read. Versions between these that no pass
            // reads are not stashed. No such version exists if the pipeline is full for long enough.
            let stated = schedule.versions_kept()[rank];
            prop_assert!(most < stated, "{} versions in addition to the newest one, where {} are stated", most, stated);
            prop_assert!(most + 1 == stated || steps <= 2 * num_ranks);
            // Each of these actions is needed.
            for at in 0..program.actions.len() {
                let mut without = program.clone();
                if matches!(without.actions.remove(at), Action::Stash { .. } | Action::Unstash { .. } | Action::Step { .. }) {
                    prop_assert!(validate(&without, without.header.num_microbatches).is_err());
                }
            }
        }
    }
}
