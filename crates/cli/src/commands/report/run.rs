//! `trireme report run`.

use super::breakdown::Breakdown;
use super::html::loss_picture;
use super::records::{Record, Records, baseline};
use crate::commands::write_file;
use crate::console::Output;
use crate::diagnostics::print_diagnostic;
use anyhow::Result;
use std::io::Write;
use std::path::PathBuf;
use trireme_base::{Bytes, with_sources};
use trireme_train::trace::{TRACE_FILE, read};

const EXAMPLES: &str = "\
Examples:
  trireme report run runs/quickstart
      Steps, losses, speed, MFU and memory of a run, finished or still training, and where the
      time of its last traced step went, if it was trained with `[metrics] trace_interval`.
  trireme report run runs/quickstart --svg loss.svg
      The loss curves as a picture.";

/// Summarize a run; with --svg, plot its losses.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// The folder of a run.
    run_folder: PathBuf,
    /// Write a plot of the losses to an SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

pub(super) fn run(args: &RunArgs) -> Result<()> {
    let records = Records::read(&args.run_folder)?;
    let (first, last, unit) = (records.first(), records.last(), records.unit());
    let baseline = baseline(&args.run_folder);
    let mut out = Output;
    let number =
        |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), |value| format!("{value:.4}"));
    let amount = last.amount(unit).map(|amount| format!(", {}: {amount}", unit.plural()));
    writeln!(out, "steps: {}{}", last.step, amount.unwrap_or_default())?;
    let at_step = |record: &Record| format!("{} at step {}", number(record.loss), record.step);
    writeln!(out, "loss: {}, {}", at_step(first), at_step(last))?;
    if let Some((step, loss)) = records.best_validation() {
        writeln!(out, "best validation loss: {loss:.4} at step {step}")?;
    }
    if let Some(baseline) = baseline {
        writeln!(out, "bigram baseline: {baseline:.4}")?;
    }
    if let Some(speed) = records.median_speed() {
        writeln!(out, "median speed: {speed:.0} {}/s", unit.plural())?;
    }
    if let Some(mfu) = records.median_mfu() {
        writeln!(out, "median MFU: {:.1} %", 100.0 * mfu)?;
    }
    writeln!(out, "peak memory of rank 0: {}", Bytes(last.memory_peak_bytes.total as u64))?;
    if args.run_folder.join(TRACE_FILE).exists() {
        match read(&args.run_folder) {
            Ok(steps) => {
                let last = steps.last().map(|step| Breakdown::of(step).to_text());
                write!(out, "{}", last.unwrap_or_default())?;
            }
            Err(error) => print_diagnostic(&format!("warning: {}", with_sources(&error))),
        }
    }
    if let Some(path) = &args.svg {
        let title = format!("{}: {} steps", args.run_folder.display(), last.step);
        write_file(path, &loss_picture(&title, &records, baseline))?;
        writeln!(out, "written: {}", path.display())?;
    }
    Ok(())
}
