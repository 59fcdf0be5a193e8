//! Schedules and their pictures as text. The pictures can be compared with the papers' figures.

use super::*;

fn golden(kind: Kind) -> &'static str {
    match kind {
        Kind::GPipe => include_str!("golden/gpipe.txt"),
        Kind::OneFOneB => include_str!("golden/1f1b.txt"),
        Kind::Interleaved => include_str!("golden/interleaved-1f1b.txt"),
        Kind::ZeroBubbleH1 => include_str!("golden/zb-h1.txt"),
        Kind::ZeroBubbleH2 => include_str!("golden/zb-h2.txt"),
        Kind::ZeroBubbleV => include_str!("golden/zb-v.txt"),
        Kind::DualPipeV => include_str!("golden/dualpipe-v.txt"),
        Kind::BreadthFirst => include_str!("golden/breadth-first.txt"),
        Kind::PipeDream => include_str!("golden/pipedream.txt"),
        Kind::PipeDream2Bw => include_str!("golden/pipedream-2bw.txt"),
        Kind::Automatic => include_str!("golden/auto.txt"),
    }
}

/// The schedules of a golden file.
fn sizes_of(kind: Kind) -> Vec<Sizes> {
    let stages_per_rank = match kind {
        Kind::Interleaved | Kind::ZeroBubbleV | Kind::DualPipeV | Kind::BreadthFirst => 2,
        _ => 1,
    };
    let num_steps = if kind.is_synchronous() { 1 } else { 3 };
    let numbers: &[_] = match kind {
        Kind::PipeDream => &[(2, 1), (3, 1), (3, 2), (4, 4)],
        Kind::PipeDream2Bw => &[(2, 2), (3, 3), (4, 4)],
        Kind::DualPipeV => &[(2, 4), (3, 6), (4, 8)],
        Kind::Interleaved => &[(2, 4), (2, 5), (3, 6), (4, 8)],
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

/// Each schedule, and its picture below.
fn text(kind: Kind) -> String {
    let section = |sizes: Sizes| {
        let stages = (0..sizes.num_ranks * sizes.stages_per_rank).map(|stage| match kind {
            Kind::Automatic => StageCosts::of(2 + (stage == 1) as u64, 2, 1 + (stage == 0) as u64),
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
fn every_schedule_is_as_written_down() {
    for kind in Kind::ALL {
        let (found, expected) = (text(kind), golden(kind));
        assert!(found == expected, "{kind} is now\n{found}\nand was\n{expected}");
    }
}

#[test]
fn what_is_written_down_reads_back() {
    for kind in Kind::ALL {
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
