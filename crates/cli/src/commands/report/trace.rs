//! `trireme report trace`.

use super::comparison::{Comparison, TimeFractions};
use crate::commands::write_file;
use crate::console::{Output, columns};
use anyhow::{Result, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use trireme_schedule::pipeline::{Picture, draw_svg_together, draw_text_together};
use trireme_train::trace::{TRACE_FILE, read};

const HELP: &str = "\
How to read it:
  F, B and U are forward, backward and the update, followed by the number of the
  microbatch; dots are idle time. The upper picture is the step as measured. The
  lower one simulates the same programs with the mean duration of each pass and
  instant messages: the cost of the schedule itself. Both have the same scale.
  The ratio of their times shows what is lost in addition.

  The bubble is the part of all workers' time, from the first pass to the last, in
  which they run none. The table of workers shows where each worker's time went:
    passes    forward and backward
    waiting   for an activation or a gradient from another worker
    sending   handing over messages
    reducing  waiting for the gradients of all workers, at the end
    updates   the optimizer
    other     gathering, moving state, and overhead between actions

  The list below says where the time of all workers went, and adds up to 100 %.
  MFU and HFU count the operations of matrix products that the model needs, and
  those that were executed, with recomputation, relative to the peak of all devices:
    kernels below the peak   products run below the peak, other kernels, updates
    exposed communication    waiting for messages that were on their way, sending
    pipeline bubble          waiting for workers that still compute
    outside of the step      reading samples, and what surrounds the program

Examples:
  trireme train my.toml --set metrics.trace_interval=10
      Writes runs/my/trace.json, which traces every tenth step and keeps the last eight.
  trireme report trace runs/my
      The last of these steps.
  trireme report trace runs/my --step 20 --svg step.svg
      Another step, also as a picture.

The file is in Chrome's trace format: open it in chrome://tracing or
ui.perfetto.dev to see every action of every worker.";

/// Draw a step as measured, next to what its schedule alone would take.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct TraceArgs {
    /// The folder of a run that was trained with `[metrics] trace_interval`.
    run_folder: PathBuf,
    /// Step to draw. By default, the last one.
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Write the drawing to an SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(super) fn run(args: &TraceArgs) -> Result<()> {
    let steps = read(&args.run_folder)?;
    let comparisons = steps.iter().map(Comparison::new).collect::<Result<Vec<_>>>()?;
    let drawn = match args.step {
        Some(step) => comparisons.iter().find(|comparison| comparison.step == step),
        None => comparisons.last(),
    };
    let Some(drawn) = drawn else {
        let numbers: Vec<String> = steps.iter().map(|step| step.step.to_string()).collect();
        let listed = if numbers.is_empty() { "none".to_owned() } else { numbers.join(", ") };
        bail!("{} does not contain this step; it has {listed}", args.run_folder.join(TRACE_FILE).display());
    };
    let titles = titles(drawn);
    let columns = columns();
    let per_column = drawn.measured_time.max(drawn.simulated_time) as f64 / columns as f64;
    let mut text = format!("{}\n", headline(&args.run_folder, drawn));
    text += draw_text_together(&pictures(drawn, &titles), columns).trim_end();
    text += &format!(
        "; 1 column: {}\n\n{}\n{}\n{}",
        time(per_column),
        ranks_table(&drawn.time_fractions),
        drawn.breakdown.to_text(),
        steps_table(&comparisons)
    );
    if let Some(path) = &args.svg {
        write_file(path, &to_svg(&args.run_folder, drawn))?;
    }
    Ok(Output.write_all(text.as_bytes())?)
}

pub(super) fn to_svg(run_folder: &Path, drawn: &Comparison) -> String {
    draw_svg_together(&headline(run_folder, drawn), &pictures(drawn, &titles(drawn)), "ns")
}

fn headline(run_folder: &Path, drawn: &Comparison) -> String {
    let replicas = match drawn.data_degree {
        1 => String::new(),
        degree => format!(", the first of {degree} data-parallel pipelines"),
    };
    format!("{}: step {}{replicas}", run_folder.display(), drawn.step)
}

fn titles(drawn: &Comparison) -> [String; 2] {
    [
        format!("measured, {}", time(drawn.measured_time as f64)),
        format!("simulated with the mean of each pass, {}", time(drawn.simulated_time as f64)),
    ]
}

fn pictures<'a>(drawn: &'a Comparison, titles: &'a [String; 2]) -> [Picture<'a>; 2] {
    let [measured, simulated] = titles;
    [(measured, &drawn.measured), (simulated, &drawn.simulated)].map(|(title, picture)| Picture {
        title,
        schedule: &picture.schedule,
        timeline: &picture.timeline,
    })
}

fn ranks_table(shares: &[TimeFractions]) -> String {
    let mut text = "rank    passes   waiting   sending  reducing   updates     other\n".to_owned();
    for (rank, shares) in shares.iter().enumerate() {
        let TimeFractions { passes, waiting, sending, reducing, updates } = *shares;
        let parts = [passes, waiting, sending, reducing, updates, shares.other()];
        let columns: String = parts.map(|part| format!("{:8.1} %", 100.0 * part)).concat();
        text += &format!("{rank:4}{columns}\n");
    }
    text
}

fn steps_table(comparisons: &[Comparison]) -> String {
    let mut text = "    step    measured   simulated   ratio  bubble measured  simulated\n".to_owned();
    for comparison in comparisons {
        let times = [comparison.measured_time, comparison.simulated_time];
        let [measured, simulated] = times.map(|nanoseconds| time(nanoseconds as f64));
        let (step, ratio) = (comparison.step, comparison.ratio());
        text += &format!("{step:8}{measured:>12}{simulated:>12}{ratio:8.3}");
        let [measured, simulated] = [&comparison.measured, &comparison.simulated];
        text += &format!("{:15.1} %{:9.1} %\n", 100.0 * measured.bubble, 100.0 * simulated.bubble);
    }
    text
}

/// Formats nanoseconds in microseconds, milliseconds or seconds, such as `1.25 ms`.
fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        short if short < 1e6 => format!("{:.1} us", short / 1e3),
        middle if middle < 1e9 => format!("{:.2} ms", middle / 1e6),
        long => format!("{:.2} s", long / 1e9),
    }
}
