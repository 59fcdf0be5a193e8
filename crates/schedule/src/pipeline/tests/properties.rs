//! Properties that hold for all sizes and costs.

use super::*;

fn any_costs(num_stages: usize) -> impl Strategy<Value = Costs> {
    let stage = (1_u64..20, 1_u64..20, 0_u64..20, 0_u64..5);
    let stages = proptest::collection::vec(stage, num_stages);
    (stages, 0_u64..15).prop_map(|(stages, send)| {
        let stage = |(forward, input, weight, update)| StageCosts {
            update,
            ..StageCosts::of(forward, input, weight)
        };
        Costs::new(stages.into_iter().map(stage).collect(), send).expect("possible costs")
    })
}

/// A kind with sizes that fit it, and costs.
fn any_case() -> impl Strategy<Value = (ScheduleKind, Sizes, Costs)> {
    let kind = proptest::sample::select(fixed_kinds().collect::<Vec<_>>());
    (kind, 1_usize..9, 1_usize..25, 2_usize..5, 1_usize..4).prop_flat_map(
        |(kind, num_ranks, microbatches, turns, steps)| {
            let stages_per_rank = match kind {
                ScheduleKind::Interleaved | ScheduleKind::BreadthFirst => turns,
                ScheduleKind::ZeroBubbleV | ScheduleKind::DualPipeV => 2,
                _ => 1,
            };
            let num_microbatches = match kind {
                ScheduleKind::DualPipeV => microbatches + 2 * num_ranks - 1,
                ScheduleKind::PipeDream2Bw => microbatches + num_ranks - 1,
                _ => microbatches,
            };
            let num_steps = if kind.is_synchronous() { 1 } else { steps };
            let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps };
            (Just(kind), Just(sizes), any_costs(num_ranks * stages_per_rank))
        },
    )
}

proptest! {
    #[test]
    fn schedules_are_valid_with_any_costs_and_read_back((kind, sizes, costs) in any_case()) {
        let schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
        prop_assert_eq!(validate(&schedule, &costs, None), Ok(()), "{}", schedule);
        prop_assert!(sums_are_in_order(&schedule), "{}", schedule);
        prop_assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }

    #[test]
    fn no_schedule_is_faster_than_its_longest_dependency_chain((kind, sizes, costs) in any_case()) {
        let schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
        let timeline = simulate(&schedule, &costs).expect("a valid schedule");
        let chain: u64 = costs.stages().iter().map(|stage| stage.forward + stage.backward_input).sum();
        prop_assert!(timeline.makespan >= chain);
        for rank in 0..sizes.num_ranks {
            prop_assert!(timeline.extent(rank) >= timeline.busy[rank]);
            prop_assert!(timeline.busy[rank] <= timeline.makespan);
            prop_assert!(timeline.ranks[rank].windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }

    #[test]
    fn one_activation_less_is_too_little((kind, sizes, costs) in any_case()) {
        let schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
        let mut bounds = simulate(&schedule, &costs).expect("a valid schedule").activations_max;
        prop_assert_eq!(validate(&schedule, &costs, Some(&bounds)), Ok(()));
        prop_assert_eq!(generate(kind, sizes, &costs, Some(&bounds)), Ok(schedule.clone()));
        let last = bounds.len() - 1;
        bounds[last] -= 1;
        let refused = validate(&schedule, &costs, Some(&bounds));
        let is_refused = matches!(refused, Err(ScheduleError::Pass { place, fault: PassFault::TooManyActivations { .. }, .. }) if place.rank == last);
        prop_assert!(is_refused, "{:?}", refused);
        let memory = generate(kind, sizes, &costs, Some(&bounds));
        let is_memory = matches!(memory, Err(GenerateError::Memory { .. }));
        prop_assert!(is_memory, "{:?}", memory);
    }

    #[test]
    fn a_pass_lost_doubled_or_elsewhere_is_refused(
        (kind, sizes, costs) in any_case(),
        rank in any::<prop::sample::Index>(),
        index in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
    ) {
        let schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
        let rank = rank.index(sizes.num_ranks);
        let index = index.index(schedule.ranks[rank].len());
        let pass = schedule.ranks[rank][index];

        let mut lost = schedule.clone();
        lost.ranks[rank].remove(index);
        prop_assert!(validate(&lost, &costs, None).is_err(), "without {}\n{}", pass, lost);

        let mut doubled = schedule.clone();
        doubled.ranks[rank].push(pass);
        prop_assert!(validate(&doubled, &costs, None).is_err(), "{} twice\n{}", pass, doubled);

        let other = other.index(sizes.num_ranks);
        if other != rank {
            let mut elsewhere = lost;
            elsewhere.ranks[other].push(pass);
            prop_assert!(validate(&elsewhere, &costs, None).is_err(), "{} on rank {}", pass, other);
        }
    }

    #[test]
    fn any_order_runs_or_is_refused(
        (kind, sizes, costs) in any_case(),
        swaps in proptest::collection::vec(any::<(prop::sample::Index, prop::sample::Index, prop::sample::Index)>(), 1..6),
    ) {
        let mut schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
        for (rank, first, second) in swaps {
            let passes = &mut schedule.ranks[rank.index(sizes.num_ranks)];
            let len = passes.len();
            passes.swap(first.index(len), second.index(len));
        }
        match validate(&schedule, &costs, None) {
            Ok(()) => prop_assert!(simulate(&schedule, &costs).is_ok()),
            Err(error) => prop_assert!(draw_error(&schedule, &costs, &error, 100).contains('^')),
        }
    }

    #[test]
    fn malformed_text_is_refused_without_a_panic(
        text in "(ranks|rank| |0|1|9999999999999|placement|,|:|\n|F|B 0 0|microbatches|steps|weights stashed){0,30}"
    ) {
        if let Ok(schedule) = text.parse::<Schedule>() {
            let costs = Costs::equal(schedule.num_stages(), EQUAL).expect("possible costs");
            let _ = validate(&schedule, &costs, None);
        }
    }
}
