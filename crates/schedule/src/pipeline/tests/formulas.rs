//! Bubbles and activations, exactly as published.

use super::*;

/// Costs of passes for which formulas are checked.
fn stages() -> [StageCosts; 5] {
    [
        EQUAL,
        StageCosts::of(2, 1, 1),
        StageCosts::of(10, 12, 8),
        StageCosts::of(7, 9, 5),
        StageCosts::of(3, 5, 3),
    ]
}

fn ranks_and_microbatches() -> impl Iterator<Item = (usize, usize)> {
    (1..=6).flat_map(|ranks| (1..=14).map(move |microbatches| (ranks, microbatches)))
}

fn assert_bubble(kind: ScheduleKind, sizes: Sizes, stage: StageCosts, ticks: u64) {
    let (_, timeline) = validated(kind, sizes, stage);
    let ideal_ticks =
        (sizes.num_microbatches * sizes.stages_per_rank * sizes.num_steps) as u64 * stage.total();
    assert_eq!(timeline.lost(), LostTime { ticks, ideal_ticks }, "{kind} {sizes:?} {stage:?}");
}

fn one_less(number: usize) -> u64 {
    number as u64 - 1
}

/// Returns whether lost time divided by ideal time is exactly `numerator / denominator`.
fn is_fraction(bubble: LostTime, numerator: u64, denominator: u64) -> bool {
    bubble.ticks * denominator == numerator * bubble.ideal_ticks
}

#[test]
fn gpipe_and_1f1b_lose_p_minus_1_over_m() {
    for (ranks, microbatches) in ranks_and_microbatches() {
        for stage in stages() {
            for kind in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
                let sizes = sizes(ranks, microbatches, 1);
                assert_bubble(kind, sizes, stage, one_less(ranks) * stage.total());
                let (_, timeline) = validated(kind, sizes, stage);
                assert!(is_fraction(timeline.lost(), one_less(ranks), microbatches as u64));
                let idle = one_less(ranks) as f64 / (microbatches + ranks - 1) as f64;
                assert!((timeline.bubble() - idle).abs() < 1e-12, "{kind}: {} {idle}", timeline.bubble());
                assert_eq!(timeline.makespan, timeline.extent(0), "the first rank works from begin to end");
            }
        }
    }
}

#[test]
fn several_stages_per_rank_divide_the_bubble() {
    for (ranks, microbatches) in
        ranks_and_microbatches().filter(|(ranks, microbatches)| microbatches >= ranks)
    {
        for stages_per_rank in 2..=4 {
            let sizes = sizes(ranks, microbatches, stages_per_rank);
            for kind in [ScheduleKind::Interleaved, ScheduleKind::BreadthFirst] {
                for stage in stages() {
                    assert_bubble(kind, sizes, stage, one_less(ranks) * stage.total());
                }
                let (_, timeline) = validated(kind, sizes, EQUAL);
                let (numerator, denominator) = (one_less(ranks), microbatches * stages_per_rank);
                assert!(is_fraction(timeline.lost(), numerator, denominator as u64), "{kind} {sizes:?}");
            }
        }
    }
}

#[test]
fn zb_h1_loses_a_third_of_1f1b_and_zb_h2_nothing() {
    let is_short = |stage: &StageCosts| stage.backward_weight <= stage.forward.min(stage.backward_input);
    for (ranks, microbatches) in ranks_and_microbatches() {
        let sizes = sizes(ranks, microbatches, 1);
        for stage in stages().into_iter().filter(is_short) {
            let StageCosts { forward, backward_input, backward_weight, .. } = stage;
            let critical = forward + backward_input;
            if microbatches >= ranks {
                let ticks = one_less(ranks) * (critical - backward_weight);
                assert_bubble(ScheduleKind::ZeroBubbleH1, sizes, stage, ticks);
            }
            if microbatches >= 2 * ranks - 1 {
                let ticks = one_less(ranks) * (critical - 2 * backward_weight);
                assert_bubble(ScheduleKind::ZeroBubbleH2, sizes, stage, ticks);
            }
        }
    }
    let (_, of_1f1b) = validated(ScheduleKind::OneFOneB, sizes(4, 8, 1), EQUAL);
    let (_, of_h1) = validated(ScheduleKind::ZeroBubbleH1, sizes(4, 8, 1), EQUAL);
    assert_eq!(3 * of_h1.lost().ticks, of_1f1b.lost().ticks);
    // Ranks that wait before their first pass or after their last are idle nevertheless.
    let (_, of_h2) = validated(ScheduleKind::ZeroBubbleH2, sizes(4, 8, 1), EQUAL);
    assert!(of_h2.lost().ticks == 0 && of_h2.bubble() > 0.1, "{}", of_h2.bubble());
}

#[test]
fn folded_schedules_have_the_published_bubble() {
    for (ranks, microbatches) in ranks_and_microbatches() {
        let sizes = sizes(ranks, microbatches, 2);
        for stage in [EQUAL, StageCosts::of(5, 5, 5)] {
            if microbatches >= 2 * ranks - 1 {
                assert_bubble(ScheduleKind::ZeroBubbleV, sizes, stage, 0);
            }
            if microbatches >= 2 * ranks {
                assert_bubble(ScheduleKind::DualPipeV, sizes, stage, one_less(ranks) * stage.forward);
            }
        }
    }
}

/// Returns the lost ticks if each forward that is directly followed by a backward runs as one pass with it, so that both results are
/// available at the end of the pair. The first such pair of the last rank runs as two passes, as in the authors' program.
fn bubble_of_pairs(schedule: &Schedule, stage: StageCosts) -> u64 {
    let num_stages = schedule.num_stages();
    let backward = stage.backward_input + stage.backward_weight;
    let mut ends = std::collections::BTreeMap::new();
    let mut num_done = vec![0; schedule.num_ranks()];
    let mut free = vec![(0, 0); schedule.num_ranks()];
    let key = |pass: Pass| (pass.kind == PassKind::Forward, pass.stage, pass.microbatch);
    let needs = |pass: Pass| match pass.kind {
        PassKind::Forward => pass.stage.checked_sub(1).map(|before| (true, before, pass.microbatch)),
        PassKind::BackwardWeight => None,
        _ if pass.stage + 1 == num_stages => Some((true, pass.stage, pass.microbatch)),
        _ => Some((false, pass.stage + 1, pass.microbatch)),
    };
    while (0..schedule.num_ranks()).any(|rank| num_done[rank] < schedule.ranks[rank].len()) {
        for rank in 0..schedule.num_ranks() {
            let left = &schedule.ranks[rank][num_done[rank]..];
            let is_pair = matches!(left, [first, second, ..] if first.kind == PassKind::Forward
                && second.kind == PassKind::Backward
                && (rank + 1 < schedule.num_ranks() || second.microbatch > 0));
            let group = &left[..left.len().min(if is_pair { 2 } else { 1 })];
            let ready: Option<Vec<u64>> =
                group.iter().filter_map(|&pass| needs(pass)).map(|key| ends.get(&key).copied()).collect();
            let Some(ready) = ready.filter(|_| !group.is_empty()) else { continue };
            let start = ready.into_iter().max().unwrap_or(0).max(free[rank].1);
            let ticks = |pass: &Pass| match pass.kind {
                PassKind::Forward => stage.forward,
                PassKind::Backward => backward,
                PassKind::BackwardInput => stage.backward_input,
                _ => stage.backward_weight,
            };
            let end = start + group.iter().map(ticks).sum::<u64>();
            ends.extend(
                group
                    .iter()
                    .filter(|pass| pass.kind != PassKind::BackwardWeight)
                    .map(|&pass| (key(pass), end)),
            );
            free[rank] = (if num_done[rank] == 0 { start } else { free[rank].0 }, end);
            num_done[rank] += group.len();
        }
    }
    let ideal = (2 * schedule.num_microbatches) as u64 * stage.total();
    free.into_iter().map(|(begin, end)| end - begin).max().unwrap_or(0) - ideal
}

#[test]
fn dualpipe_v_with_pairs_as_one_loses_what_its_authors_say() {
    for ranks in 1..=6 {
        for microbatches in 2 * ranks..=2 * ranks + 5 {
            for stage in [EQUAL, StageCosts::of(5, 5, 5)] {
                let (schedule, _) = validated(ScheduleKind::DualPipeV, sizes(ranks, microbatches, 2), stage);
                let backward = stage.backward_input + stage.backward_weight;
                let pair = stage.forward + backward;
                let published = one_less(ranks) * (pair + backward - 3 * stage.backward_weight);
                assert_eq!(bubble_of_pairs(&schedule, stage), published, "{ranks} {microbatches} {stage:?}");
            }
        }
    }
}

#[test]
fn activations_in_flight_are_as_published() {
    for (ranks, microbatches) in ranks_and_microbatches() {
        let held = |kind, stages_per_rank| {
            let (_, timeline) = validated(kind, sizes(ranks, microbatches, stages_per_rank), EQUAL);
            timeline.activations_max
        };
        let on_each = |number: usize| vec![number as u64; ranks];
        let by_rank = |number: &dyn Fn(usize) -> usize| -> Vec<u64> {
            (0..ranks).map(|rank| number(rank) as u64).collect()
        };
        assert_eq!(held(ScheduleKind::GPipe, 1), on_each(microbatches));
        assert_eq!(held(ScheduleKind::OneFOneB, 1), by_rank(&|rank| microbatches.min(ranks - rank)));
        assert_eq!(held(ScheduleKind::ZeroBubbleH1, 1), on_each(microbatches.min(ranks)));
        assert_eq!(held(ScheduleKind::ZeroBubbleH2, 1), on_each(microbatches.min(2 * ranks - 1)));
        assert_eq!(held(ScheduleKind::BreadthFirst, 3), on_each(3 * microbatches));
        if microbatches % ranks == 0 {
            let ahead = |rank| 2 * (ranks - rank - 1) + 2 * ranks + 1;
            assert_eq!(
                held(ScheduleKind::Interleaved, 3),
                by_rank(&|rank| ahead(rank).min(3 * microbatches))
            );
        }
        if microbatches >= 2 * ranks - 1 {
            assert_eq!(held(ScheduleKind::ZeroBubbleV, 2), on_each(2 * ranks));
        }
        if microbatches >= 2 * ranks {
            assert_eq!(held(ScheduleKind::DualPipeV, 2), on_each(2 * ranks + 1));
        }
    }
}

#[test]
fn the_input_half_frees_its_part() {
    let stage = StageCosts { activation: 10, weight_activation: 3, ..EQUAL };
    let (_, timeline) = validated(ScheduleKind::ZeroBubbleH1, sizes(4, 8, 1), stage);
    // Rank r holds r delayed weight halves, and 4 - r microbatches before their input halves.
    let expected: Vec<u64> = (0..4).map(|rank| 10 * (4 - rank) + 3 * rank).collect();
    assert_eq!(timeline.activations_max, expected);
}

#[test]
fn messages_delay_the_passes_that_wait_for_them() {
    let costs = Costs::new(vec![StageCosts::of(10, 10, 10); 2], 4).expect("possible costs");
    let schedule = generate(ScheduleKind::GPipe, sizes(2, 1, 1), &costs, None).expect("sizes that fit");
    let timeline = simulate(&schedule, &costs).expect("a valid schedule");
    assert_eq!(timeline.ranks[1][0], PassInterval { start: 14, end: 24 });
    assert_eq!(timeline.makespan, 10 + 4 + 30 + 4 + 20);
    assert_eq!(timeline.busy, [timeline.makespan - 38; 2]);
    // Stages of one rank have no messages between them.
    let folded = generate(ScheduleKind::ZeroBubbleV, sizes(1, 1, 2), &costs, None).expect("sizes that fit");
    assert_eq!(simulate(&folded, &costs).expect("a valid schedule").makespan, 60);
}
