//! `trireme report run`.

use super::curves::{Curves, Point};
use crate::console::Output;
use crate::statistics::median;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use trireme_base::Bytes;
use trireme_data::{Corpus, bigram_baseline};
use trireme_train::config::Config;

/// No record comes near this length.
const LINE_BYTES_MAX: u64 = 1 << 16;

const EXAMPLES: &str = "\
Examples:
  trireme report run runs/quickstart
      Steps, losses, speed and memory of a run, finished or still training.
  trireme report run runs/quickstart --svg loss.svg
      The loss curves as a picture.";

/// Summarize a run, and plot its losses.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// The folder of a run.
    run_folder: PathBuf,
    /// Write a plot of the losses to an SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// What the report reads of a line of `metrics.jsonl`. Numbers that are not finite are `null` there.
#[derive(Debug, Deserialize)]
struct Record {
    step: u64,
    loss: Option<f64>,
    /// Records of earlier versions have only tokens.
    samples: Option<u64>,
    samples_per_second: Option<f64>,
    tokens: Option<u64>,
    tokens_per_second: Option<f64>,
    validation_loss: Option<f64>,
    memory_peak_bytes: MemoryPeak,
}

#[derive(Debug, Deserialize)]
struct MemoryPeak {
    total: Option<u64>,
}

/// Runs `trireme report run`.
pub(super) fn run(args: &RunArgs) -> Result<()> {
    let records = read(&args.run_folder)?;
    let (Some(first), Some(last)) = (records.first(), records.last()) else {
        bail!("{} has no recorded steps yet", args.run_folder.display());
    };
    let baseline = baseline(&args.run_folder);
    let validations = || records.iter().filter_map(|record| Some((record.step, record.validation_loss?)));
    let best = validations().min_by(|a, b| a.1.total_cmp(&b.1));
    let mut out = Output;
    let number =
        |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), |value| format!("{value:.4}"));
    let (unit, amount) = match (last.tokens, last.samples) {
        (Some(tokens), _) => ("tokens", Some(tokens)),
        (None, samples) => ("samples", samples),
    };
    let amount = amount.map(|amount| format!(", {unit}: {amount}"));
    writeln!(out, "steps: {}{}", last.step, amount.unwrap_or_default())?;
    writeln!(
        out,
        "loss: {} at step {}, {} at step {}",
        number(first.loss),
        first.step,
        number(last.loss),
        last.step
    )?;
    if let Some((step, loss)) = best {
        writeln!(out, "best validation loss: {loss:.4} at step {step}")?;
    }
    if let Some(baseline) = baseline {
        writeln!(out, "bigram baseline: {baseline:.4}")?;
    }
    let speed = |record: &Record| record.tokens_per_second.or(record.samples_per_second);
    let speeds: Vec<f64> = records.iter().filter_map(speed).collect();
    if !speeds.is_empty() {
        writeln!(out, "median speed: {:.0} {unit}/s", median(speeds))?;
    }
    if let Some(total) = last.memory_peak_bytes.total {
        writeln!(out, "peak memory of rank 0: {}", Bytes(total))?;
    }
    if let Some(path) = &args.svg {
        let training =
            records.iter().filter_map(|record| Some(Point { step: record.step, loss: record.loss? }));
        let curves = Curves {
            title: format!("{}: {} steps", args.run_folder.display(), last.step),
            training: training.collect(),
            validation: validations().map(|(step, loss)| Point { step, loss }).collect(),
            baseline,
        };
        std::fs::write(path, curves.to_svg()).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(out, "written: {}", path.display())?;
    }
    Ok(())
}

/// The records of a run; the last line may be one that is being written.
fn read(run_folder: &Path) -> Result<Vec<Record>> {
    let path = run_folder.join("metrics.jsonl");
    let file = match File::open(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!(
            "{} has no metrics.jsonl; expected the folder of a run, such as runs/NAME, with [metrics] jsonl = true",
            run_folder.display()
        ),
        file => file.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let mut reader = BufReader::new(file);
    let (mut records, mut line) = (Vec::new(), Vec::new());
    for number in 1.. {
        line.clear();
        let read = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        read.with_context(|| format!("cannot read {}", path.display()))?;
        if !line.ends_with(b"\n") && (line.len() as u64) < LINE_BYTES_MAX {
            break;
        }
        let record = serde_json::from_slice(&line);
        records.push(
            record.with_context(|| format!("line {number} of {} is not a step record", path.display()))?,
        );
    }
    Ok(records)
}

/// What counting pairs of tokens achieves on the run's text, if that can be found from here.
fn baseline(run_folder: &Path) -> Option<f64> {
    let config = Config::load(&run_folder.join("config.toml"), &[], None).ok()?;
    let corpus = Corpus::open(&config.data().folder).ok()?;
    bigram_baseline(&corpus.train, &corpus.validation?).ok()
}
