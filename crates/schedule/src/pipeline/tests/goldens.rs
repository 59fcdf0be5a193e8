//! Schedules and their pictures as text. The pictures can be compared with the papers' figures.

use super::*;

/// The sections of all kinds, each below a line `# NAME`.
const GOLDEN: &str = include_str!("golden.txt");

/// Returns the section of a kind; empty if there is none yet.
fn golden(kind: ScheduleKind) -> &'static str {
    let heading = format!("# {kind}\n\n");
    let section = GOLDEN.split_once(&heading).map_or("", |(_, rest)| rest);
    section.split_once("\n# ").map_or(section, |(section, _)| section)
}

/// Returns the sizes of the schedules in a section.
fn sizes_of(kind: ScheduleKind) -> Vec<Sizes> {
    let stages_per_rank = match kind {
        ScheduleKind::Interleaved
        | ScheduleKind::ZeroBubbleV
        | ScheduleKind::DualPipeV
        | ScheduleKind::BreadthFirst => 2,
        _ => 1,
    };
    let num_steps = if kind.is_synchronous() { 1 } else { 3 };
    let numbers: &[_] = match kind {
        ScheduleKind::PipeDream => &[(2, 1), (3, 1), (3, 2), (4, 4)],
        ScheduleKind::PipeDream2Bw => &[(2, 2), (3, 3), (4, 4)],
        ScheduleKind::DualPipeV => &[(2, 4), (3, 6), (4, 8)],
        ScheduleKind::Interleaved => &[(2, 4), (2, 5), (3, 6), (4, 8)],
        _ => &[(2, 4), (3, 5), (4, 8)],
    };
    let sizes = |&(num_ranks, num_microbatches): &(usize, usize)| Sizes {
        num_ranks,
        num_microbatches,
        stages_per_rank,
        num_steps,
    };
    numbers.iter().map(sizes).collect()
}

/// Returns each schedule, with its picture below.
fn text(kind: ScheduleKind) -> String {
    let section = |sizes: Sizes| {
        let stages = (0..sizes.num_ranks * sizes.stages_per_rank).map(|stage| match kind {
            ScheduleKind::Automatic => StageCosts::of(2 + (stage == 1) as u64, 2, 1 + (stage == 0) as u64),
            _ => EQUAL,
        });
        let costs = Costs::new(stages.collect(), 0).expect("possible costs");
        let schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
        let timeline = simulate(&schedule, &costs).expect("a valid schedule");
        format!("{schedule}\n{}", draw_text(&schedule, &timeline, 140))
    };
    sizes_of(kind).into_iter().map(section).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_schedule_matches_its_golden_text() {
    for kind in ScheduleKind::ALL {
        let (found, expected) = (text(kind), golden(kind));
        assert!(found == expected, "{kind} is now\n{found}\nand was\n{expected}");
    }
}

#[test]
fn golden_schedules_parse_and_print_unchanged() {
    for kind in ScheduleKind::ALL {
        let schedules = golden(kind).split("ranks ").skip(1).map(|section| {
            let lines = section.lines().take_while(|line| !line.is_empty());
            format!("ranks {}\n", lines.collect::<Vec<_>>().join("\n"))
        });
        for text in schedules {
            let schedule: Schedule = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
            assert_eq!(schedule.to_string(), text);
        }
    }
}
