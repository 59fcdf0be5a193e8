//! Parts that check results.

use super::programs::{Programs, SUITES};
use super::row::Row;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Relative difference from the losses of the CPU that the rounding of bf16 explains, and that other orders of f32 sums explain.
const TOLERANCES: [(&str, f64); 2] = [("f32", 1e-4), ("bf16", 2e-2)];

/// Layouts of two workers.
const LAYOUTS: [&str; 5] = [
    "zero_stage=1",
    "zero_stage=3",
    "pipeline_parallel_degree=2",
    "tensor_parallel_degree=2",
    "context_parallel_degree=2",
];

/// Runs the suites of kernels and operations.
pub(super) fn conformance(programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    for suite in SUITES {
        rows.push(result_row(suite, programs.outcome(&mut programs.suite(suite))?));
    }
    Ok(())
}

/// Runs the suites under compute-sanitizer, if it is installed.
pub(super) fn sanitizer(programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    if programs.in_path("compute-sanitizer").is_none() {
        rows.push(Row::new("compute-sanitizer", "not installed", ""));
        return Ok(());
    }
    for suite in SUITES {
        let outcome = programs.outcome(&mut programs.sanitized_suite(suite))?;
        rows.push(result_row(&format!("{suite}, compute-sanitizer"), outcome));
    }
    Ok(())
}

/// Returns the row of a suite: the numbers of tests, or the names of those that failed. Prints the output of a suite that failed.
fn result_row(name: &str, (is_success, [stdout, stderr]): (bool, [String; 2])) -> Row {
    let summary = stdout.lines().find_map(|line| line.strip_prefix("test result: "));
    let summary = summary.and_then(|line| line.split("; ").next()).unwrap_or("ended without a result");
    let summary = summary.trim_start_matches("ok. ").trim_start_matches("FAILED. ");
    if is_success {
        return Row::new(name, summary, "");
    }
    eprintln!("{stdout}{stderr}");
    let test = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?.to_owned());
    let failed: Vec<String> = stdout.lines().filter_map(test).collect();
    let which = if failed.is_empty() { "see the error output".to_owned() } else { failed.join(", ") };
    Row::failed(name, &format!("{summary}; {which}"))
}

/// Compares the losses of a training on a GPU with those on the CPU.
pub(super) fn losses(programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    for (dtype, tolerance) in TOLERANCES {
        let name = format!("losses of {} steps, {dtype}", num_steps(programs));
        let losses = |device: &str| {
            train(programs, folder.path(), &format!("--workers 1 --set training.device={device}"), dtype)
        };
        rows.push(compared(&name, &losses("cpu")?, &losses("cuda")?, tolerance));
    }
    Ok(())
}

/// Compares the losses of layouts of two workers with the losses of one GPU. Without a second GPU, both workers use the first one.
pub(super) fn layouts(programs: &Programs, rows: &mut Vec<Row>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let batch =
        "--set training.device=cuda --set training.global_batch_size=4 --set training.local_batch_size";
    let one = train(programs, folder.path(), &format!("--workers 1 {batch}=4"), "f32")?;
    for layout in LAYOUTS {
        let local = if layout.contains("zero") { 2 } else { 4 };
        let arguments = format!("--workers 2 {batch}={local} --set parallelism.{layout}");
        let found = train(programs, folder.path(), &arguments, "f32")?;
        rows.push(compared(&format!("losses with {layout}"), &one, &found, TOLERANCES[0].1));
    }
    Ok(())
}

fn num_steps(programs: &Programs) -> usize {
    if programs.is_quick() { 2 } else { 50 }
}

/// Trains a small model on the text of the repository. Returns the loss of each step.
fn train(programs: &Programs, folder: &Path, arguments: &str, dtype: &str) -> Result<Vec<f64>> {
    let small = "--set model.hidden_size=32 --set model.num_layers=2 --set training.seq_len=16";
    let small = if programs.is_quick() { small } else { "" };
    let settings = format!(
        "train configs/quickstart.toml --resume never --set training.steps={} --set training.dtype={dtype} \
         --set checkpoint.enable=false --set training.validation_interval=0 {small} {arguments}",
        num_steps(programs)
    );
    let mut command = programs.trireme();
    command.args(settings.split_whitespace()).arg("--set").arg(format!("run.folder={}", folder.display()));
    programs.run(&mut command)?;
    let path = folder.join("quickstart/metrics.jsonl");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let loss = |line: &str| serde_json::from_str::<Value>(line).ok()?["loss"].as_f64();
    Ok(text.lines().filter_map(loss).collect())
}

/// Returns the row of a comparison of losses.
fn compared(name: &str, expected: &[f64], found: &[f64], tolerance: f64) -> Row {
    let differences = || expected.iter().zip(found).map(|(expected, found)| (found / expected - 1.0).abs());
    let largest = differences().fold(0.0, f64::max);
    let (found_last, expected_last) = (found.last(), expected.last());
    let row = Row::new(
        name,
        format!(
            "{:.6}, differences up to {largest:.1e} (at most {tolerance:.0e})",
            found_last.copied().unwrap_or(f64::NAN)
        ),
        format!("{:.6}", expected_last.copied().unwrap_or(f64::NAN)),
    );
    let is_complete = found.len() == expected.len() && !found.is_empty();
    let is_close = is_complete && differences().all(|difference| difference <= tolerance);
    Row { has_failed: !is_close, ..row }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_named() {
        let row =
            |is_success, stdout: &str| result_row("suite", (is_success, [stdout.to_owned(), String::new()]));
        let passed = "running 2 tests\ntest a ... ok\n\ntest result: ok. 2 passed; 0 failed; 0 ignored\n";
        assert_eq!(row(true, passed), Row::new("suite", "2 passed", ""));
        assert_eq!(row(false, passed), Row::failed("suite", "2 passed; see the error output"));
        let failed = "test a::b ... FAILED\ntest c ... ok\n\ntest result: FAILED. 1 passed; 1 failed\n";
        assert_eq!(row(false, failed), Row::failed("suite", "1 passed; a::b"));
        assert!(row(false, "").found.contains("ended without a result"));
    }

    #[test]
    fn losses_that_differ_or_lack_steps_fail() {
        assert!(!compared("", &[4.0, 3.0], &[4.0, 3.0003], 1.1e-4).has_failed);
        for found in [&[4.0, 3.001][..], &[4.0], &[]] {
            assert!(compared("", &[4.0, 3.0], found, 1.1e-4).has_failed);
        }
        assert!(compared("", &[4.0], &[f64::NAN], 1.0).has_failed);
    }
}
