//! `trireme report html`.
//!
//! `loaded_run.rs` reads the folder of a run, `downsampling.rs` reduces the points of curves, `chart.rs` and `memory.rs` draw, and
//! `page.rs` joins the parts. The page contains its style and its script, and its Content-Security-Policy keeps browsers from loading
//! anything. `.ci/look` opens a page in Chromium. It fails if the console is not empty, a chart is missing, or pointing at a chart shows
//! nothing.

mod chart;
mod charts;
mod configs;
mod downsampling;
mod facts;
mod hues;
mod loaded_run;
mod memory;
mod page;

pub(super) use charts::loss_picture;

use crate::console::Output;
use crate::diagnostics::print_diagnostic;
use anyhow::{Context, Result, bail};
use hues::NUM_HUES;
use loaded_run::{LoadedRun, load};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use trireme_base::{open_regular, replace_file};

const EXAMPLES: &str = "\
The page shows what the runs were and where their configs differ. Its charts show losses, learning
rate, norms of gradients, speed, MFU, time spent waiting for other workers, and memory. Runs that
were trained with `[metrics] trace_interval` also have the drawing of their last traced step, and
where its time went. The page is one file that loads nothing else, so it can be read offline and sent to others.

Examples:
  trireme report html runs/quickstart
      Writes report.html, about a run that is finished or still training.
  trireme report html runs/small runs/large --out comparison.html
      Two runs in the same charts.";

/// Write a page with charts that compare runs.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct HtmlArgs {
    /// The folders of runs.
    #[arg(required = true, value_name = "RUN")]
    run_folders: Vec<PathBuf>,
    /// File to write. An earlier page of this command is replaced.
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Replace FILE even if this command did not write it.
    #[arg(long)]
    force: bool,
}

pub(super) fn run(args: &HtmlArgs) -> Result<()> {
    check_target(&args.out, args.force)?;
    if args.run_folders.len() > NUM_HUES {
        bail!("{} runs are given; a page compares at most {NUM_HUES}", args.run_folders.len());
    }
    let runs = load(&args.run_folders)?;
    let page = page::page(&runs);
    replace_file(&args.out, |file| file.write_all(page.as_bytes()))
        .with_context(|| format!("cannot write {}", args.out.display()))?;
    writeln!(Output, "written: {}", args.out.display())?;
    runs.iter()
        .flat_map(LoadedRun::missing_parts)
        .for_each(|lack| print_diagnostic(&format!("warning: {lack}")));
    Ok(())
}

/// Refuses to replace anything but an earlier page, unless that is forced.
fn check_target(path: &Path, force: bool) -> Result<()> {
    let file = match open_regular(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            bail!("{} is not a file; choose another name with --out", path.display());
        }
        file => file.with_context(|| format!("cannot read {}, which exists", path.display()))?,
    };
    let mut beginning = Vec::new();
    file.take(page::BEGINNING.len() as u64)
        .read_to_end(&mut beginning)
        .with_context(|| format!("cannot read {}, which exists", path.display()))?;
    if !force && beginning != page::BEGINNING.as_bytes() {
        bail!(
            "{} exists and was not written by `trireme report html`; choose another name with --out, or replace it with --force",
            path.display()
        );
    }
    Ok(())
}
