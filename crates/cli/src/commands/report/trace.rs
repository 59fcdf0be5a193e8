//! `trireme report trace`.

use super::comparison::{Comparison, Shares};
use crate::console::{Output, columns};
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use trireme_schedule::pipeline::{Picture, draw_svg_together, draw_text_together};
use trireme_train::trace::{TRACE_FILE, read};

const HELP: &str = "\
How to read it:
  F, B and U are forward, backward and the update, with the number of the
  microbatch; dots are time in which a worker waits. Above is the step as it was
  measured, below the same programs with each pass as long as it was in the mean
  and messages that take no time: what the schedule itself costs. Both have one
  scale. The ratio of their times is what is lost beside that.

  The bubble is idle time by what the busiest worker works in its passes; the
  table of workers says what each one's time went to:
    passes    forward and backward
    waiting   for an activation or a gradient of another worker
    sending   giving messages away
    reducing  waiting for the gradients of all workers, at the end
    updates   the optimizer
    other     gathering, moving state, and what is between actions

Examples:
  trireme train my.toml --set metrics.trace_interval=10
      Writes runs/my/trace.json, with a step in ten, the last eight of them.
  trireme report trace runs/my
      The last of these steps.
  trireme report trace runs/my --step 20 --svg step.svg
      Another one, and as a picture.

The file is in Chrome's format as well: open it in chrome://tracing or
ui.perfetto.dev for every action of every worker.";

/// Draw a step as it was measured, beside what its schedule alone would take.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct TraceArgs {
    /// A run's folder, with the trace that trace_interval of its metrics asks for.
    run_folder: PathBuf,
    /// The step to draw; the last one without it.
    #[arg(long, value_name = "N")]
    step: Option<u64>,
    /// Write the drawing to a file as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Runs `trireme report trace`.
pub(super) fn run(args: &TraceArgs) -> Result<()> {
    let steps = read(&args.run_folder)?;
    let comparisons = steps.iter().map(Comparison::new).collect::<Result<Vec<_>>>()?;
    let drawn = match args.step {
        Some(step) => comparisons.iter().find(|comparison| comparison.step == step),
        None => comparisons.last(),
    };
    let Some(drawn) = drawn else {
        let numbers: Vec<String> = steps.iter().map(|step| step.step.to_string()).collect();
        bail!("{} has no such step; it has {}", path(args), listed(&numbers));
    };
    let titles = titles(drawn);
    let pictures = pictures(drawn, &titles);
    let columns = columns();
    let longest = drawn.measured_time.max(drawn.simulated_time);
    let per_column = longest as f64 / columns as f64;
    let mut text = format!("{}\n", headline(&args.run_folder, drawn));
    text += draw_text_together(&pictures, columns).trim_end();
    text += &format!(
        "; 1 column: {}\n\n{}\n{}",
        time(per_column),
        ranks_table(&drawn.shares),
        steps_table(&comparisons)
    );
    if let Some(path) = &args.svg {
        let svg = draw_svg_together(&headline(&args.run_folder, drawn), &pictures, "ns");
        std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(Output.write_all(text.as_bytes())?)
}

fn path(args: &TraceArgs) -> String {
    args.run_folder.join(TRACE_FILE).display().to_string()
}

fn listed(numbers: &[String]) -> String {
    if numbers.is_empty() { "none".to_owned() } else { numbers.join(", ") }
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
        format!("simulated from the mean of each pass, {}", time(drawn.simulated_time as f64)),
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

/// What each rank's time went to.
fn ranks_table(shares: &[Shares]) -> String {
    let mut text = "rank    passes   waiting   sending  reducing   updates     other\n".to_owned();
    for (rank, shares) in shares.iter().enumerate() {
        let Shares { passes, waiting, sending, reducing, updates } = *shares;
        let parts = [passes, waiting, sending, reducing, updates, shares.other()];
        let columns: String = parts.map(|part| format!("{:8.1} %", 100.0 * part)).concat();
        text += &format!("{rank:4}{columns}\n");
    }
    text
}

/// Measured and simulated times of all steps.
fn steps_table(comparisons: &[Comparison]) -> String {
    let mut text = "    step    measured   simulated   ratio  bubble measured  simulated\n".to_owned();
    for comparison in comparisons {
        let times = [comparison.measured_time, comparison.simulated_time];
        let [measured, simulated] = times.map(|nanoseconds| time(nanoseconds as f64));
        let bubbles = [&comparison.measured, &comparison.simulated].map(|picture| 100.0 * picture.bubble);
        text += &format!(
            "{:8}{measured:>12}{simulated:>12}{:8.3}{:15.1} %{:9.1} %\n",
            comparison.step,
            comparison.ratio(),
            bubbles[0],
            bubbles[1]
        );
    }
    text
}

/// Nanoseconds as people read them.
fn time(nanoseconds: f64) -> String {
    match nanoseconds {
        short if short < 1e6 => format!("{:.1} us", short / 1e3),
        middle if middle < 1e9 => format!("{:.2} ms", middle / 1e6),
        long => format!("{:.2} s", long / 1e9),
    }
}
