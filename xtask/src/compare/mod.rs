//! `cargo xtask compare`: measures the table of README.md on this machine.

mod environment;
mod programs;
mod progress;
mod results;
mod rows;
mod table;

use anyhow::{Result, bail};
use environment::{Bound, Environment};
use programs::Programs;
use progress::Progress;
use results::Round;
use rows::{BenchCommand, BenchSettings, Peer, Row, Step};
use std::path::{Path, PathBuf};

const HELP: &str = "\
The first call builds Trireme and installs PyTorch (peers/requirements.txt,
about 5 GB) into target/peers-venv, which needs python3 with venv. Open MPI is
compared if mpicc and mpirun are installed. The table goes to the standard
output, everything else to the error output. Run nothing else on the machine
meanwhile.

Examples:
  cargo xtask compare --rounds 5 > table.md
      The whole table. A round takes about five minutes on two cores.
  cargo xtask compare --only all_reduce
      The rows with all_reduce in their names.
  cargo xtask compare --quick
      A smoke test: do all commands work? Its figures mean nothing.";

/// Compare Trireme with PyTorch and Open MPI, and print the table of README.md.
///
/// Both sides run in turns, every other round in the opposite order. Figures are medians of the rounds, and a ratio is the
/// median of the rounds' ratios.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct CompareArgs {
    /// Number of rounds. Each round runs every command once.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Run only rows with this in their names.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    only: String,
    /// Python with the packages of peers/requirements.txt, instead of the one in target/peers-venv.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// One round of a few steps.
    #[arg(long, conflicts_with = "rounds")]
    quick: bool,
}

impl CompareArgs {
    fn num_rounds(&self) -> usize {
        if self.quick { 1 } else { self.rounds as usize }
    }

    fn bench_settings(&self) -> BenchSettings {
        if self.quick {
            BenchSettings { num_steps: 2, num_warmup_steps: 1, seconds: 0.05 }
        } else {
            BenchSettings { num_steps: 16, num_warmup_steps: 3, seconds: 1.0 }
        }
    }
}

/// Runs `cargo xtask compare`. Returns whether every command succeeded.
pub(crate) fn run(args: &CompareArgs, root: &Path) -> Result<bool> {
    let rows = chosen_rows(rows::rows(args.bench_settings()), &args.only)?;
    let programs = Programs::prepare(root, args.python.clone())?;
    let is_installed = |peer: &Peer| peer.variants.iter().all(|(_, run)| programs.has(run.program));
    let runs: Vec<BenchCommand> = runs(&rows).into_iter().filter(|run| programs.has(run.program)).collect();
    let steps: Vec<Step> = rows.iter().filter_map(|row| row.bound).collect();

    let mut progress = Progress::new(1 + steps.len() + args.num_rounds() * runs.len());
    progress.begin("the machine");
    let environment = Environment::find(root, &programs)?;
    let measure = |step: &Step| {
        progress.begin(&format!("the bound of {}, {}", step.model, step.dtype));
        Bound::measure(*step, &programs)
    };
    let bounds: Vec<Bound> = steps.iter().map(measure).collect::<Result<_>>()?;
    let (rounds, num_failed) = run_rounds(args.num_rounds(), &runs, &programs, &mut progress);
    drop(progress);

    print!("{environment}");
    println!("- Method: {}.", method(args));
    println!("{}", environment::show_bounds(&bounds, &rows, &rounds));
    print!("{}", table::table(&rows, &rounds, is_installed));
    Ok(num_failed == 0)
}

/// Runs every command once per round. Returns the rounds, and the number of commands that failed.
fn run_rounds(
    num_rounds: usize,
    runs: &[BenchCommand],
    programs: &Programs,
    progress: &mut Progress,
) -> (Vec<Round>, usize) {
    let mut num_failed = 0;
    let mut run_round = |number: usize| {
        let mut round = Round::new();
        // Every other round runs in reverse order, so that a drift of the machine favors neither side.
        let mut order: Vec<&BenchCommand> = runs.iter().collect();
        if number.is_multiple_of(2) {
            order.reverse();
        }
        for run in order {
            progress.begin(&format!("round {number}: {run}"));
            match programs.run(run) {
                Ok(objects) => round.push((run.clone(), objects)),
                Err(error) => {
                    num_failed += 1;
                    progress.line(&format!("error: {error:#}"));
                }
            }
        }
        round
    };
    let rounds = (1..=num_rounds).map(&mut run_round).collect();
    (rounds, num_failed)
}

fn chosen_rows(rows: Vec<Row>, only: &str) -> Result<Vec<Row>> {
    let names: Vec<&str> = rows.iter().map(|row| row.name).collect();
    let names = names.join("\n  ");
    let chosen: Vec<Row> = rows.into_iter().filter(|row| row.name.contains(only)).collect();
    if chosen.is_empty() {
        bail!("no row has '{only}' in its name; the rows are\n  {names}");
    }
    Ok(chosen)
}

/// Returns the commands of some rows, each once, because several rows may read one command's output.
fn runs(rows: &[Row]) -> Vec<BenchCommand> {
    let mut runs = Vec::new();
    for row in rows {
        let peers = row.peers.iter().flat_map(|peer| &peer.variants).map(|(_, run)| run);
        for run in [&row.ours].into_iter().chain(peers) {
            if !runs.contains(run) {
                runs.push(run.clone());
            }
        }
    }
    runs
}

fn method(args: &CompareArgs) -> String {
    if args.quick {
        return "a smoke test; its figures mean nothing".to_owned();
    }
    let BenchSettings { num_steps, num_warmup_steps, .. } = args.bench_settings();
    format!(
        "{} rounds, both sides in turns; a figure is the median of the rounds, a ratio the median of the rounds' ratios \
         (lowest–highest); training runs have {num_steps} timed steps after {num_warmup_steps} others",
        args.num_rounds()
    )
}

#[cfg(test)]
mod tests {
    use super::rows::Program;
    use super::*;

    fn all() -> Vec<Row> {
        rows::rows(BenchSettings { num_steps: 2, num_warmup_steps: 1, seconds: 0.5 })
    }

    #[test]
    fn a_command_runs_once_for_all_rows_that_read_it() {
        let runs = runs(&all());
        assert!(runs.iter().enumerate().all(|(index, run)| !runs[..index].contains(run)));
        let num_mentioned: usize =
            all().iter().map(|row| 1 + row.peers.iter().map(|peer| peer.variants.len()).sum::<usize>()).sum();
        assert!(runs.len() < num_mentioned, "{} of {num_mentioned}", runs.len());
        assert!(runs.iter().any(|run| run.program == Program::OpenMpi));
    }

    #[test]
    fn rows_are_chosen_by_their_names() {
        assert_eq!(chosen_rows(all(), "").unwrap().len(), all().len());
        let chosen = chosen_rows(all(), "all_reduce").unwrap();
        assert!(chosen.len() == 3 && chosen.iter().all(|row| row.name.contains("all_reduce")));
        let error = chosen_rows(all(), "gpt-5").unwrap_err().to_string();
        assert!(error.contains("\n  llama-12m, bf16"), "{error}");
    }
}
