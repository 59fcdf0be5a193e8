//! `trireme report`.
//!
//! `record_lines.rs` reads files of records line by line: `records.rs` the steps of `metrics.jsonl` for all reports, `diff.rs` the hashes
//! of `hashes.jsonl`. `breakdown.rs` divides the time of a traced step into named parts.

mod breakdown;
mod comparison;
mod diff;
mod html;
mod picture;
mod record_lines;
mod records;
mod run;
mod trace;

use anyhow::Result;
pub(crate) use diff::RunsDiffer;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ReportCommand {
    Run(run::RunArgs),
    Html(html::HtmlArgs),
    Diff(diff::DiffArgs),
    Trace(trace::TraceArgs),
}

pub(crate) fn run(command: &ReportCommand) -> Result<()> {
    match command {
        ReportCommand::Run(args) => run::run(args),
        ReportCommand::Html(args) => html::run(args),
        ReportCommand::Diff(args) => diff::run(args),
        ReportCommand::Trace(args) => trace::run(args),
    }
}
