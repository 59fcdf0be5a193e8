use super::*;
use proptest::prelude::*;
use trireme_schedule::lowering::apply_layout;
use trireme_schedule::pipeline::{self, Costs, ScheduleKind, Sizes, StageCosts, generate, programs};
use trireme_schedule::{StateLayout, UnitChain, single};

/// Synchronous schedule kinds with their number of stages per rank.
fn kinds() -> impl Strategy<Value = (ScheduleKind, usize)> {
    prop::sample::select(ScheduleKind::synchronous(2).collect::<Vec<_>>())
}

/// Returns a schedule of stages as programs with one unit per stage, and the makespan of the schedule itself.
fn stage_programs(
    kind: (ScheduleKind, usize),
    num_ranks: usize,
    num_microbatches: usize,
    costs: &Costs,
) -> (Vec<Program>, u64) {
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank: kind.1, num_steps: 1 };
    let schedule = generate(kind.0, sizes, costs, None).unwrap();
    let timeline = pipeline::simulate(&schedule, costs).unwrap();
    let units: Vec<_> = (0..schedule.num_stages()).map(|stage| stage..stage + 1).collect();
    (programs(&schedule, costs, &units, &UnitChain::of_units(units[units.len() - 1].end)), timeline.makespan)
}

/// Returns the ticks of each stage's passes and of messages. Other actions take no time.
fn ticks(costs: &Costs) -> impl Fn(usize, Action) -> u64 {
    |_, action| match action {
        Action::Forward { unit, .. } => costs.stages()[unit].forward,
        Action::Backward { unit, .. } => {
            costs.stages()[unit].backward_input + costs.stages()[unit].backward_weight
        }
        Action::BackwardInput { unit, .. } => costs.stages()[unit].backward_input,
        Action::BackwardWeight { unit, .. } => costs.stages()[unit].backward_weight,
        Action::Send(_) => costs.send_ticks(),
        _ => 0,
    }
}

proptest! {
    #[test]
    fn programs_have_the_makespan_of_their_schedule(
        kind in kinds(), num_ranks in 1..5_usize, more in 0..5_usize, times in prop::collection::vec(1..9_u64, 3),
        send in 0..2_u64,
    ) {
        let num_stages = num_ranks * kind.1;
        let stage = StageCosts::of(times[0], times[1], times[2]);
        let costs = Costs::new(vec![stage; num_stages], send).unwrap();
        let (programs, makespan) = stage_programs(kind, num_ranks, 2 * num_ranks + more, &costs);
        prop_assert_eq!(simulate(&programs, ticks(&costs)).unwrap().makespan, makespan);
    }

    #[test]
    fn no_step_is_shorter_than_its_longest_chain(
        kind in kinds(), num_ranks in 1..5_usize, more in 0..5_usize, seed in any::<u64>(), send in 0..9_u64,
    ) {
        let equal = Costs::equal(num_ranks * kind.1, StageCosts::of(1, 1, 1)).unwrap();
        let (programs, _) = stage_programs(kind, num_ranks, 2 * num_ranks + more, &equal);
        // Actions have different durations.
        let ticks = |_: usize, action: Action| match action {
            Action::Send(_) => send,
            Action::Forward { unit, microbatch, .. } => 1 + (seed >> ((unit * 7 + microbatch) % 60)) % 16,
            Action::Backward { unit, microbatch } => 1 + (seed >> ((unit + microbatch * 5) % 60)) % 16,
            _ => 1,
        };
        let timeline = simulate(&programs, ticks).unwrap();
        let mut chains = vec![0; 2 * num_ranks + more];
        for (rank, (program, spans)) in programs.iter().zip(&timeline.ranks).enumerate() {
            prop_assert_eq!(program.actions.len(), spans.len());
            let computed: Vec<_> =
                program.actions.iter().zip(spans).filter(|(action, _)| action.stream() == Stream::Compute).collect();
            prop_assert!(computed.windows(2).all(|pair| pair[0].1.end <= pair[1].1.start), "one after the other");
            prop_assert!(computed.iter().map(|(_, span)| span.ticks()).sum::<u64>() <= timeline.makespan);
            for (&action, span) in program.actions.iter().zip(spans) {
                let is_send = matches!(action, Action::Send(_));
                if action.is_pass() || is_send {
                    chains[action.microbatch().unwrap()] += ticks(rank, action);
                    prop_assert_eq!(span.ticks(), ticks(rank, action));
                }
            }
        }
        prop_assert!(chains.iter().max().unwrap() <= &timeline.makespan, "{:?}", chains);
    }
}

fn program(text: &str) -> Program {
    text.parse().unwrap()
}

#[test]
fn messages_overlap_passes_and_receivers_wait() {
    let ranks = [
        "units 2 microbatches 1 rank 0 stage 0-1@0 stage 1-2@1\nF 0 0\nSEND_F 0 0\nRECV_B 1 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0",
        "units 2 microbatches 1 rank 1 stage 0-1@0 stage 1-2@1\nRECV_F 0 0\nF 1 0\nB 1 0\nREDUCE_GRAD 1\nSEND_B 1 0\nSTEP 1",
    ];
    let programs = ranks.map(program);
    let ticks = |rank: usize, action: Action| match action {
        Action::Forward { .. } => 10,
        Action::Backward { .. } => 20,
        Action::Send(_) => 3,
        Action::ReduceGrad { .. } => 100 * rank as u64,
        _ => 5,
    };
    let timeline = simulate(&programs, ticks).unwrap();
    let spans = |rank: usize| -> Vec<(u64, u64)> {
        timeline.ranks[rank].iter().map(|span| (span.start, span.end)).collect()
    };
    // The reduction of the second rank ends at 143, and then both ranks update.
    assert_eq!(spans(0), [(0, 10), (10, 13), (10, 46), (46, 66), (66, 66), (143, 148)]);
    assert_eq!(spans(1), [(0, 13), (13, 23), (23, 43), (43, 143), (43, 46), (143, 148)]);
    assert_eq!(timeline.makespan, 148);
}

#[test]
fn gathers_overlap_passes_that_read_other_units() {
    let program = apply_layout(single::program(&UnitChain::of_units(3), 1), StateLayout::zero(3));
    let ticks = |gather: u64| {
        move |_: usize, action: Action| match action {
            Action::Unshard { .. } => gather,
            Action::Forward { .. } | Action::Backward { .. } => 10,
            _ => 0,
        }
    };
    let makespan = |gather| simulate(std::slice::from_ref(&program), ticks(gather)).unwrap().makespan;
    assert_eq!(makespan(0), 60);
    // Passes wait only for the first gather; the others overlap with passes.
    assert_eq!(makespan(4), 64, "{program}");
    let num_gathered =
        program.actions.iter().filter(|action| matches!(action, Action::Unshard { .. })).count();
    assert!(makespan(100) >= 100 * num_gathered as u64);
}

#[test]
fn programs_that_never_end_are_refused() {
    let alone = program(
        "units 2 microbatches 1 rank 0 stage 0-1@0 stage 1-2@1\nF 0 0\nSEND_F 0 0\nRECV_B 1 0\nB 0 0\nREDUCE_GRAD 0\nSTEP 0",
    );
    let error = simulate(&[alone], |_, _| 1).unwrap_err();
    assert!(matches!(error, ProgramError::Stages { num_ranks: 1, .. }), "{error}");
    assert_eq!(simulate(&[], |_, _| 1).unwrap().makespan, 0);
}

#[test]
fn the_embedding_waits_for_the_head_that_is_tied_to_it() {
    let sizes = Sizes { num_ranks: 3, num_microbatches: 4, stages_per_rank: 1, num_steps: 1 };
    let costs = Costs::equal(3, StageCosts::of(1, 1, 1)).unwrap();
    let schedule = generate(ScheduleKind::ZeroBubbleH1, sizes, &costs, None).unwrap();
    let chain = UnitChain { ties: vec![(2, 0)], ..UnitChain::of_units(3) };
    let programs = programs(&schedule, &costs, &[0..1, 1..2, 2..3], &chain);
    let timeline = simulate(&programs, |_, _| 10).unwrap();
    let end = |rank: usize, text: &str| {
        let action = text.parse::<Action>().unwrap();
        let place = programs[rank].actions.iter().position(|found| *found == action).unwrap();
        timeline.ranks[rank][place].end
    };
    for microbatch in 0..4 {
        let sent = end(2, &format!("SEND_GRAD 0 {microbatch}"));
        assert_eq!(end(2, &format!("W 2 {microbatch}")) + 10, sent);
        assert!(end(0, &format!("W 0 {microbatch}")) >= sent + 10, "microbatch {microbatch}");
    }
    assert!(end(2, "RECV_PARAM 0") >= end(0, "SEND_PARAM 0"));
}
