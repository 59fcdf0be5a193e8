//! `trireme bench schedule`.

use crate::console::{MeasurementStatus, Output};
use crate::statistics::median;
use anyhow::Result;
use serde::Serialize;
use serde_json::json;
use std::io::Write;
use std::time::Instant;
use trireme_base::UnknownName;
use trireme_schedule::lowering::{apply_layout, recompute};
use trireme_schedule::pipeline::{self, Costs, Schedule, ScheduleKind, Sizes, StageCosts};
use trireme_schedule::{Keep, Program, StateLayout, UnitChain, validate_pipeline};

/// Minimum number of actions of a rank with `--units-per-stage 0`.
const NUM_ACTIONS_MIN: usize = 60_000;

/// Messages of a stage per microbatch: a send and a receive in each direction.
const MESSAGES_PER_MICROBATCH: usize = 4;

/// Actions of a unit after all microbatches: its reduction, update and all-gather.
const FINAL_ACTIONS_PER_UNIT: usize = 3;

const HELP: &str = "\
How to read it:
  Times are in milliseconds on one thread: the median over the repeats, and for
  the total, the median of the totals. generate creates the order of passes;
  check validates it; programs creates each rank's actions with its messages;
  lower adds recomputation and the gathers of ZeRO-1; prove validates the
  programs of all ranks together. Actions are those of the rank that has the
  most. All stages take about the same time, but neighbors never exactly, so
  that auto has something to optimize. pipedream and pipedream-2bw have several
  steps, each with as many microbatches as there are ranks.

Examples:
  trireme bench schedule
      All schedules for 64 ranks and 512 microbatches, with 60,000 actions per
      rank: the work that a job on many hosts does once, before its first step.
  trireme bench schedule --schedule auto --stages-per-rank 2 --repeats 9
      One schedule, measured longer.";

/// Time the generation and validation of pipeline schedules.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct ScheduleArgs {
    /// Number of pipeline ranks.
    #[arg(long, value_name = "P", default_value_t = 64, value_parser = in_range(1, 1 << 12))]
    ranks: usize,
    /// Microbatches per step.
    #[arg(long, value_name = "M", default_value_t = 512, value_parser = in_range(1, 1 << 16))]
    microbatches: usize,
    /// Stages per rank; 0 uses the fewest that the schedule supports.
    #[arg(long, value_name = "V", default_value_t = 0, value_parser = in_range(0, 1 << 10))]
    stages_per_rank: usize,
    /// Units per stage; 0 uses as many as it takes for 60,000 actions per rank.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = in_range(0, 1 << 10))]
    units_per_stage: usize,
    /// Units per recomputation segment. The first unit of a segment keeps its input, and all its units are recomputed. 0
    /// keeps everything.
    #[arg(long, value_name = "UNITS", default_value_t = 2, value_parser = in_range(0, 1 << 10))]
    recompute: usize,
    /// Name of a schedule as in a config, or all.
    #[arg(long, value_name = "NAME", default_value = "all", value_parser = parse_choice)]
    schedule: Choice,
    /// How often to generate each schedule.
    #[arg(long, value_name = "TIMES", default_value_t = 3, value_parser = in_range(1, 1000))]
    repeats: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn in_range(min: u64, max: u64) -> impl clap::builder::TypedValueParser<Value = usize> {
    use clap::builder::{RangedU64ValueParser, TypedValueParser};
    RangedU64ValueParser::<u64>::new().range(min..=max).map(|number| number as usize)
}

#[derive(Debug, Clone, Copy)]
enum Choice {
    All,
    One(ScheduleKind),
}

impl Choice {
    /// Returns the chosen schedule, or all schedules that support this number of stages per rank. 0 stands for the fewest that
    /// a schedule supports.
    fn kinds(self, stages_per_rank: usize) -> Vec<ScheduleKind> {
        let fits =
            |kind: &ScheduleKind| stages_per_rank == 0 || kind.stages_per_rank().contains(&stages_per_rank);
        match self {
            Choice::All => ScheduleKind::ALL.into_iter().filter(fits).collect(),
            Choice::One(kind) => vec![kind],
        }
    }
}

fn parse_choice(text: &str) -> Result<Choice, String> {
    if text == "all" {
        return Ok(Choice::All);
    }
    let expected = |UnknownName(names)| format!("expected all, or one of {}", names.join(", "));
    text.parse().map(Choice::One).map_err(expected)
}

/// Timings of one schedule: of a single repeat, or the medians over all repeats. The fields are keys of `--json`.
#[derive(Debug, Clone, Copy, Serialize)]
struct ScheduleReport {
    schedule: &'static str,
    stages_per_rank: usize,
    units_per_stage: usize,
    actions_per_rank: usize,
    /// Actions of all ranks together.
    actions: usize,
    generate_ms: f64,
    check_ms: f64,
    programs_ms: f64,
    lower_ms: f64,
    prove_ms: f64,
    total_ms: f64,
}

pub(super) fn run(args: &ScheduleArgs) -> Result<()> {
    let measuring = MeasurementStatus::new();
    let mut schedules = Vec::new();
    for kind in args.schedule.kinds(args.stages_per_rank) {
        measuring.show(kind.name());
        schedules.push(measure(kind, args)?);
    }
    drop(measuring);
    if !args.json {
        return print(args, &schedules);
    }
    let report = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ranks": args.ranks,
        "microbatches": args.microbatches,
        "repeats": args.repeats,
        "schedules": schedules,
    });
    Ok(writeln!(Output, "{report}")?)
}

fn measure(kind: ScheduleKind, args: &ScheduleArgs) -> Result<ScheduleReport> {
    let stages_per_rank = match args.stages_per_rank {
        0 => *kind.stages_per_rank().start(),
        given => given,
    };
    let num_ranks = args.ranks;
    let (num_microbatches, num_steps) = if kind.is_synchronous() {
        (args.microbatches, 1)
    } else {
        // The total number of microbatches is the same, rounded up to full steps. A step has the fewest microbatches that keep the
        // pipeline full.
        (num_ranks, args.microbatches.div_ceil(num_ranks))
    };
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps };
    let costs = Costs::new((0..num_ranks * stages_per_rank).map(stage_costs).collect(), 1)?;
    let mut reports = Vec::new();
    for _ in 0..args.repeats {
        reports.push(time_phases(kind, sizes, &costs, args)?);
    }
    let median_of = |phase: fn(&ScheduleReport) -> f64| median(reports.iter().map(phase));
    Ok(ScheduleReport {
        generate_ms: median_of(|made| made.generate_ms),
        check_ms: median_of(|made| made.check_ms),
        programs_ms: median_of(|made| made.programs_ms),
        lower_ms: median_of(|made| made.lower_ms),
        prove_ms: median_of(|made| made.prove_ms),
        total_ms: median_of(|made| made.total_ms),
        ..reports[0]
    })
}

/// Returns costs that differ between neighboring stages.
fn stage_costs(stage: usize) -> StageCosts {
    let stage = stage as u64;
    StageCosts::of(18 + 2 * stage % 5, 18 + 3 * stage % 5, 18 + stage % 4)
}

fn time_phases(
    kind: ScheduleKind,
    sizes: Sizes,
    costs: &Costs,
    args: &ScheduleArgs,
) -> Result<ScheduleReport> {
    let mut begin = Instant::now();
    let mut lap_ms = || std::mem::replace(&mut begin, Instant::now()).elapsed().as_secs_f64() * 1e3;
    let schedule = pipeline::generate(kind, sizes, costs, None)?;
    let generate_ms = lap_ms();
    pipeline::validate(&schedule, costs, None)?;
    let check_ms = lap_ms();
    let units_per_stage = match args.units_per_stage {
        0 => units_for_actions(&schedule, args.recompute),
        given => given,
    };
    let num_stages = schedule.num_stages();
    let units: Vec<_> =
        (0..num_stages).map(|stage| stage * units_per_stage..(stage + 1) * units_per_stage).collect();
    let chain = UnitChain::of_units(num_stages * units_per_stage);
    let programs = pipeline::programs(&schedule, costs, &units, &chain);
    let programs_ms = lap_ms();
    let keeps = keeps(num_stages * units_per_stage, args.recompute);
    let state = StateLayout::zero(1);
    let lowered = programs.into_iter().map(|program| apply_layout(recompute(program, &keeps), state));
    let programs: Vec<Program> = lowered.collect();
    let lower_ms = lap_ms();
    validate_pipeline(&programs)?;
    let prove_ms = lap_ms();
    let lengths = || programs.iter().map(|program| program.actions.len());
    Ok(ScheduleReport {
        schedule: kind.name(),
        stages_per_rank: sizes.stages_per_rank,
        units_per_stage,
        actions_per_rank: lengths().max().unwrap_or(0),
        actions: lengths().sum(),
        generate_ms,
        check_ms,
        programs_ms,
        lower_ms,
        prove_ms,
        total_ms: generate_ms + check_ms + programs_ms + lower_ms + prove_ms,
    })
}

/// Returns the units per stage with which a rank has at least [`NUM_ACTIONS_MIN`] actions. Each pass of each unit is one action.
fn units_for_actions(schedule: &Schedule, recompute: usize) -> usize {
    let num_ranks = schedule.num_ranks();
    let stages_per_rank = schedule.num_stages() / num_ranks;
    let recomputed = if recompute == 0 { 0 } else { schedule.num_microbatches };
    let per_unit =
        schedule.num_passes() / num_ranks + stages_per_rank * (recomputed + FINAL_ACTIONS_PER_UNIT);
    let messages = MESSAGES_PER_MICROBATCH * stages_per_rank * schedule.num_microbatches;
    NUM_ACTIONS_MIN.saturating_sub(messages).div_ceil(per_unit).max(1)
}

fn keeps(num_units: usize, recompute: usize) -> Vec<Keep> {
    let keep = |unit: usize| match unit.checked_rem(recompute) {
        None => Keep::All,
        Some(0) => Keep::Input,
        Some(_) => Keep::Nothing,
    };
    (0..num_units).map(keep).collect()
}

fn print(args: &ScheduleArgs, schedules: &[ScheduleReport]) -> Result<()> {
    let ScheduleArgs { ranks, microbatches, repeats, .. } = args;
    writeln!(
        Output,
        "{ranks} ranks, {microbatches} microbatches; milliseconds, medians of {repeats}\n\n\
         schedule          stages units actions/rank  generate    check  programs    lower    prove    total"
    )?;
    for schedule in schedules {
        writeln!(
            Output,
            "{:<17} {:>6} {:>5} {:>12} {:>9.1} {:>8.1} {:>9.1} {:>8.1} {:>8.1} {:>8.1}",
            schedule.schedule,
            schedule.stages_per_rank,
            schedule.units_per_stage,
            schedule.actions_per_rank,
            schedule.generate_ms,
            schedule.check_ms,
            schedule.programs_ms,
            schedule.lower_ms,
            schedule.prove_ms,
            schedule.total_ms,
        )?;
    }
    Ok(())
}
