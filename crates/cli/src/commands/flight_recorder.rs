//! `trireme flight-recorder`.

use crate::console::Output;
use crate::hang;
use crate::process_state::ProcessStates;
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use trireme_comm::{Diagnosis, OperationState, RankReport, read_reports};
use trireme_train::FLIGHT_RECORDER_FOLDER;

const HELP: &str = "\
How to read it:
  Each worker records the last operations of each of its groups. It writes them
  to disk when it joins, when an operation takes long, and when one fails on it
  or on another worker. The table shows where each worker was at that time, which
  workers it waited for and how long, and the first operation that differed
  between ranks.

Examples:
  trireme flight-recorder runs/quickstart
      Where the workers were.
  trireme flight-recorder runs/quickstart --rank 1
      The last operations of rank 1 with their algorithms, newest last.
  trireme flight-recorder runs/quickstart --json | jq '.diagnosis.disagreement'
      Output for scripts.";

/// Show what the workers of a run last did, after a hang or failure.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct FlightRecorderArgs {
    /// The folder of a run.
    run_folder: PathBuf,
    /// Show the last operations of one rank.
    #[arg(long, value_name = "RANK")]
    rank: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &FlightRecorderArgs) -> Result<()> {
    let folder = args.run_folder.join(FLIGHT_RECORDER_FOLDER);
    let mut reports = read_reports(&folder)
        .with_context(|| format!("{} has no reports from several workers", args.run_folder.display()))?;
    if let Some(rank) = args.rank {
        reports.retain(|report| report.rank == rank);
    }
    match (&reports[..], args.rank, args.json) {
        ([], Some(rank), _) => bail!("{} has no report from rank {rank}", folder.display()),
        ([], None, _) => bail!("{} has no reports", folder.display()),
        (_, _, true) => {
            let document = json!({ "diagnosis": Diagnosis::of(&reports), "reports": reports });
            writeln!(Output, "{document:#}")?;
        }
        ([report, ..], Some(_), false) => print_operations(report)?,
        (_, None, false) => {
            for line in hang::lines(&Diagnosis::of(&reports), &ProcessStates::new()) {
                writeln!(Output, "{line}")?;
            }
            writeln!(Output, "reports: {}", folder.display())?;
        }
    }
    Ok(())
}

fn print_operations(report: &RankReport) -> Result<()> {
    for group in &report.groups {
        let failure = group.failure.as_ref().map(|failure| format!(": {}", failure.text)).unwrap_or_default();
        writeln!(
            Output,
            "{}, ranks {:?}{}",
            hang::escape_controls(&group.name),
            group.members,
            hang::escape_controls(&failure)
        )?;
        for operation in group.operations.iter().chain(&group.messages) {
            let ago = report.written - operation.started.unwrap_or(operation.queued);
            let took = match (operation.started, operation.ended) {
                (Some(started), Some(ended)) => format!("{:.3} s", ended - started),
                _ => String::new(),
            };
            let state = match operation.state {
                OperationState::Queued => "queued",
                OperationState::Running => "running",
                OperationState::Done => "done",
                OperationState::Failed => "failed",
            };
            let described = hang::describe_operation(&group.name, operation);
            let algorithm = operation.algorithm.iter().map(|name| format!(", by {name}")).collect::<String>();
            let described = hang::escape_controls(&format!("{described}{algorithm}"));
            writeln!(Output, "  {ago:9.3} s ago  {state:7}  {took:>10}  {described}")?;
        }
    }
    Ok(())
}
