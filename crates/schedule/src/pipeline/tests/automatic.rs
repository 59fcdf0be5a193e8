//! Schedules generated for costs and memory.

use super::*;

fn best_fixed(sizes: Sizes, costs: &Costs, bounds: &[u64]) -> Option<u64> {
    let kinds = fixed_kinds().filter(|kind| kind.is_synchronous());
    let schedules = kinds.filter_map(|kind| generate(kind, sizes, costs, Some(bounds)).ok());
    schedules.map(|schedule| simulate(&schedule, costs).expect("a valid schedule").makespan).min()
}

fn automatic(sizes: Sizes, costs: &Costs, bounds: &[u64]) -> u64 {
    let schedule =
        generate(ScheduleKind::Automatic, sizes, costs, Some(bounds)).expect("room for a microbatch");
    assert_eq!(validate(&schedule, costs, Some(bounds)), Ok(()));
    assert!(sums_are_in_order(&schedule), "{schedule}");
    simulate(&schedule, costs).expect("a valid schedule").makespan
}

fn uneven(stages: &[(u64, u64, u64)], send: u64) -> Costs {
    let stages = stages.iter().map(|&(forward, input, weight)| StageCosts::of(forward, input, weight));
    Costs::new(stages.collect(), send).expect("possible costs")
}

/// A cheap embedding, equal blocks, and a head that costs more: the last rank works from the arrival of the first microbatch to the end,
/// which is optimal.
#[test]
fn a_head_that_costs_more_is_never_idle() {
    let costs = uneven(&[(16, 14, 15), (20, 20, 20), (20, 20, 20), (29, 31, 26)], 2);
    let arrival = 16 + 20 + 20 + 3 * 2;
    assert_eq!(automatic(sizes(4, 8, 1), &costs, &[4; 4]), arrival + 8 * (29 + 31 + 26));
}

#[test]
fn it_beats_every_fixed_schedule_for_uneven_costs() {
    let slow_second = uneven(&[(20, 22, 18), (31, 36, 24), (18, 21, 17), (20, 20, 20)], 1);
    let slow_third = uneven(&[(20, 20, 20), (20, 20, 20), (35, 30, 35), (25, 25, 20)], 2);
    let all_differ = uneven(&[(39, 25, 38), (33, 28, 25), (30, 28, 33), (35, 37, 27)], 2);
    let folded = [
        (9, 8, 8),
        (11, 10, 9),
        (10, 12, 10),
        (12, 9, 11),
        (10, 10, 10),
        (8, 11, 12),
        (13, 10, 9),
        (15, 14, 13),
    ];
    let folded = uneven(&folded, 1);
    for (costs, stages_per_rank, bound) in
        [(&slow_second, 1, 4), (&slow_third, 1, 4), (&all_differ, 1, 7), (&folded, 2, 8), (&folded, 2, 16)]
    {
        let (sizes, bounds) = (sizes(4, 8, stages_per_rank), [bound; 4]);
        let fixed = best_fixed(sizes, costs, &bounds).expect("zb-h1 or zb-v fits");
        let found = automatic(sizes, costs, &bounds);
        assert!(
            found < fixed,
            "{costs:?}, at most {bound} in flight: {found}, where a fixed one takes {fixed}"
        );
    }
}

/// With a slow stage, the schedule that is found is as fast as ZB-H2, with half of its memory.
#[test]
fn it_finds_zb_h2s_time_in_1f1bs_memory() {
    let costs = uneven(&[(20, 22, 18), (31, 36, 24), (18, 21, 17), (20, 20, 20)], 1);
    let sizes = sizes(4, 8, 1);
    let h2 = generate(ScheduleKind::ZeroBubbleH2, sizes, &costs, None).expect("sizes that fit");
    let h2 = simulate(&h2, &costs).expect("a valid schedule");
    assert_eq!(h2.activations_max, [7; 4]);
    assert_eq!(automatic(sizes, &costs, &[4; 4]), h2.makespan);
}

#[test]
fn with_room_for_one_microbatch_it_runs_one_at_a_time() {
    let costs = uneven(&[(3, 4, 2), (5, 4, 3)], 1);
    let schedule =
        generate(ScheduleKind::Automatic, sizes(2, 3, 1), &costs, Some(&[1, 1])).expect("room for one");
    assert_eq!(simulate(&schedule, &costs).expect("a valid schedule").activations_max, [1, 1]);
    let error =
        generate(ScheduleKind::Automatic, sizes(2, 3, 1), &costs, Some(&[1, 0])).expect_err("no room");
    assert_eq!(
        error.to_string(),
        "schedule 'auto' holds 1 of activations on rank 1, but only 0 fit; one microbatch alone needs that much: recompute more, \
         use smaller microbatches, or use more ranks"
    );
}

fn any_stage() -> impl Strategy<Value = StageCosts> {
    ((1_u64..30, 1_u64..30, 0_u64..30), (1_u64..6, 0_u64..6)).prop_map(
        |((forward, input, weight), (activation, kept))| StageCosts {
            activation,
            weight_activation: kept.min(activation),
            ..StageCosts::of(forward, input, weight)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn it_is_valid_within_its_bounds_and_never_worse(
        (ranks, stages_per_rank, stages) in (1_usize..5, 1_usize..4).prop_flat_map(|(ranks, turns)| {
            (Just(ranks), Just(turns), proptest::collection::vec(any_stage(), ranks * turns))
        }),
        microbatches in 1_usize..8,
        send in 0_u64..10,
        slack in 0_u64..20,
    ) {
        let sizes = sizes(ranks, microbatches, stages_per_rank);
        // Memory for one microbatch, for any placement of its stages.
        let bounds = vec![stages.iter().map(|stage| stage.activation).sum::<u64>() + slack; ranks];
        let costs = Costs::new(stages, send).expect("possible costs");
        let found = automatic(sizes, &costs, &bounds);
        prop_assert!(best_fixed(sizes, &costs, &bounds).is_none_or(|fixed| found <= fixed));
        let longest_chain = costs.stages().iter().map(|stage| stage.forward + stage.backward_input).sum::<u64>();
        prop_assert!(found >= longest_chain);
    }
}
