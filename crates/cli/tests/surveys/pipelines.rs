//! Schedules of pipelines, simulated with equal stages.

use crate::command_folder::{CommandFolder, Gpt};
use crate::table::{Row, Section, list, within};
use trireme_schedule::pipeline::{
    Costs, Schedule, ScheduleKind, Sizes, StageCosts, Timeline, generate, simulate,
};

/// Costs of a stage: one tick for forward, two for backward.
const STAGE: StageCosts = StageCosts::of(1, 1, 1);

pub(crate) fn section(commands: &CommandFolder) -> Section {
    let rows = vec![
        bubble(commands),
        four_times_as_many(),
        in_flight(),
        interleaving(),
        zero_bubble(),
        weight_versions(),
    ];
    Section { title: "Pipelines", rows }
}

fn run(
    kind: ScheduleKind,
    (num_ranks, num_microbatches, stages_per_rank): (usize, usize, usize),
) -> Timeline {
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps: 1 };
    let costs = Costs::equal(num_ranks * stages_per_rank, STAGE).unwrap();
    simulate(&generate(kind, sizes, &costs, None).unwrap(), &costs).unwrap()
}

/// Returns the lost time relative to the work of a rank.
fn lost(kind: ScheduleKind, sizes: (usize, usize, usize)) -> f64 {
    let lost = run(kind, sizes).lost();
    lost.ticks as f64 / lost.ideal_ticks as f64
}

fn percent(fraction: f64) -> String {
    format!("{:.1} %", 100.0 * fraction)
}

fn bubble(product: &CommandFolder) -> Row {
    let found = [(4, 8), (8, 32), (64, 512)].map(|(num_ranks, num_microbatches)| {
        let formula = (num_ranks - 1) as f64 / num_microbatches as f64;
        let [gpipe, one_f_one_b] = [ScheduleKind::GPipe, ScheduleKind::OneFOneB]
            .map(|kind| lost(kind, (num_ranks, num_microbatches, 1)));
        within("lost time of GPipe", gpipe / formula, 1.0..=1.0);
        within("lost time of 1F1B", one_f_one_b / formula, 1.0..=1.0);
        (num_ranks, num_microbatches, gpipe)
    });
    let settings = "launch.workers=4 parallelism.pipeline_parallel_degree=4 training.global_batch_size=8";
    let model = Gpt { vocab_size: 256, ..Gpt::of(1024, 8, 16) };
    let idle = product.plan(model, settings).bubble();
    within("idle share of a planned pipeline", idle, 0.265..=0.285);
    Row {
        claim: "GPipe and 1F1B lose (P − 1) / M of the ideal time",
        source: "Narayanan et al. 2021, section 2.2.1",
        computed: format!(
            "{}; a planned model of 8 blocks with P = 4, M = 8 is idle for {} of its time",
            list(found, |(num_ranks, num_microbatches, lost)| {
                format!("P = {num_ranks}, M = {num_microbatches}: {}", percent(lost))
            }),
            percent(idle)
        ),
        why: "Exact with equal stages. Huang et al. 2019 (GPipe) divide by the whole time instead of the ideal one: (P − 1) / (M + P − 1), 27.3 % for the planned model, of which embedding \
              and head make stages unequal."
            .to_owned(),
    }
}

fn four_times_as_many() -> Row {
    let found = [2, 4, 8, 16, 32].map(|num_ranks| {
        let lost = lost(ScheduleKind::GPipe, (num_ranks, 4 * num_ranks, 1));
        (num_ranks, within("lost time for M = 4 P", lost, 0.0..=0.2499))
    });
    Row {
        claim: "The bubble is negligible for M ≥ 4 P",
        source: "Huang et al. 2019, section 2.3",
        computed: list(found, |(num_ranks, lost)| format!("P = {num_ranks}: {}", percent(lost))),
        why: "(P − 1) / 4 P is below 25 % for any P, and approaches it: more than negligible on many ranks."
            .to_owned(),
    }
}

fn in_flight() -> Row {
    let found = [(4, 2), (4, 16), (16, 64)].map(|(num_ranks, num_microbatches)| {
        let most = |kind| *run(kind, (num_ranks, num_microbatches, 1)).activations_max.iter().max().unwrap();
        let (one_f_one_b, gpipe) = (most(ScheduleKind::OneFOneB), most(ScheduleKind::GPipe));
        let expected = num_ranks.min(num_microbatches) as f64;
        within("microbatches in flight with 1F1B", one_f_one_b as f64, expected..=expected);
        within(
            "microbatches in flight with GPipe",
            gpipe as f64,
            num_microbatches as f64..=num_microbatches as f64,
        );
        (num_ranks, num_microbatches, one_f_one_b, gpipe)
    });
    Row {
        claim: "1F1B holds activations of at most min(P, M) microbatches, GPipe of all M",
        source: "Narayanan et al. 2019, section 3.2; Narayanan et al. 2021, section 2.2.1",
        computed: list(found, |(num_ranks, num_microbatches, one_f_one_b, gpipe)| {
            format!("P = {num_ranks}, M = {num_microbatches}: {one_f_one_b} and {gpipe}")
        }),
        why: "Counted in the schedules, on the rank that holds the most.".to_owned(),
    }
}

/// Returns the number of messages that a step sends between ranks: one for each pass of a stage whose neighbor is on another rank.
fn num_messages(schedule: &Schedule) -> usize {
    let pairs = schedule.stage_ranks.windows(2).filter(|pair| pair[0] != pair[1]).count();
    2 * pairs * schedule.num_microbatches
}

fn interleaving() -> Row {
    let (num_ranks, num_microbatches) = (8, 32);
    let plain = lost(ScheduleKind::OneFOneB, (num_ranks, num_microbatches, 1));
    let messages = |stages_per_rank| {
        let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps: 1 };
        let costs = Costs::equal(num_ranks * stages_per_rank, STAGE).unwrap();
        let kind = if stages_per_rank == 1 { ScheduleKind::OneFOneB } else { ScheduleKind::Interleaved };
        num_messages(&generate(kind, sizes, &costs, None).unwrap())
    };
    let found = [2, 4].map(|stages_per_rank| {
        let lost = lost(ScheduleKind::Interleaved, (num_ranks, num_microbatches, stages_per_rank));
        let factor = plain / lost;
        within("lost time by interleaving", factor / stages_per_rank as f64, 0.999..=1.001);
        (stages_per_rank, lost, messages(stages_per_rank) as f64 / messages(1) as f64)
    });
    Row {
        claim: "Interleaving v stages on each rank divides the bubble by v, and multiplies messages by v",
        source: "Narayanan et al. 2021, section 2.2.2",
        computed: format!(
            "P = 8, M = 32: {} with 1F1B; {}",
            percent(plain),
            list(found, |(stages_per_rank, lost, messages)| {
                format!("v = {stages_per_rank}: {}, {messages:.2} times the messages", percent(lost))
            })
        ),
        why: "Exact for the bubble. There are v P − 1 borders between stages instead of P − 1, so messages grow a little more than v times."
            .to_owned(),
    }
}

fn zero_bubble() -> Row {
    let sizes = (8, 32, 1);
    let [plain, h1, h2] = [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubbleH1, ScheduleKind::ZeroBubbleH2]
        .map(|kind| lost(kind, sizes));
    within("lost time of ZB-H1 by that of 1F1B", h1 / plain, 0.3333..=0.3334);
    within("lost time of ZB-H2", h2, 0.0..=0.0);
    let most = |kind| *run(kind, sizes).activations_max.iter().max().unwrap();
    let [held, held_h1, held_h2] =
        [ScheduleKind::OneFOneB, ScheduleKind::ZeroBubbleH1, ScheduleKind::ZeroBubbleH2].map(most);
    Row {
        claim: "Splitting backward leaves a third of 1F1B's bubble with the same memory (ZB-H1), and none with about twice the memory (ZB-H2)",
        source: "Qi et al. 2023, sections 2.1 and 2.2",
        computed: format!(
            "P = 8, M = 32: 1F1B {}, ZB-H1 {}, ZB-H2 {}; {held}, {held_h1} and {held_h2} microbatches in flight",
            percent(plain),
            percent(h1),
            percent(h2)
        ),
        why: "Exact if forward and both halves of backward take equal time. Time before the first and after the last pass of a rank \
              does not count there; with it ZB-H2 is idle, too."
            .to_owned(),
    }
}

fn weight_versions() -> Row {
    let versions = |kind: ScheduleKind, num_microbatches| {
        let sizes = Sizes { num_ranks: 4, num_microbatches, stages_per_rank: 1, num_steps: 12 };
        let costs = Costs::equal(4, STAGE).unwrap();
        generate(kind, sizes, &costs, None).unwrap().versions_kept()
    };
    let (stashed, double) = (versions(ScheduleKind::PipeDream, 1), versions(ScheduleKind::PipeDream2Bw, 4));
    let most = |versions: &[usize]| *versions.iter().max().unwrap() as f64;
    within("weight versions of PipeDream", most(&stashed), 4.0..=4.0);
    within("weight versions of PipeDream-2BW", most(&double), 2.0..=2.0);
    Row {
        claim: "PipeDream keeps up to P versions of the weights, PipeDream-2BW two",
        source: "Narayanan et al. 2019, section 3.3; Narayanan et al. 2020, section 3.1",
        computed: format!(
            "P = 4, by stage: {} and {}",
            versions_by_stage(&stashed),
            versions_by_stage(&double)
        ),
        why: "Counted in the schedules: the versions that passes still read.".to_owned(),
    }
}

fn versions_by_stage(versions: &[usize]) -> String {
    versions.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}
