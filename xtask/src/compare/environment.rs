//! The text above the table: the machine, the versions, and the upper bounds on this processor.

use super::programs::Programs;
use super::results::{Round, ours};
use super::rows::{BenchCommand, Program, Row, Step, installation};
use super::table::with_separators;
use crate::commands::output;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fmt;
use std::path::Path;
use std::process::Command;

#[derive(Debug)]
pub(super) struct Environment {
    machine: String,
    software: String,
}

impl Environment {
    pub(super) fn find(root: &Path, programs: &Programs) -> Result<Self> {
        let doctor =
            BenchCommand { program: Program::Trireme, arguments: "doctor --seconds 0.01 --json".to_owned() };
        let report = first(programs.run(&doctor)?);
        let installation = first(programs.run(&installation())?);
        let commit = output(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(root));
        let rustc = output(Command::new("rustc").arg("--version").current_dir(root));
        let open_mpi = programs.open_mpi_version().unwrap_or("without Open MPI");
        let software = format!(
            "Trireme {} ({}) by {}; PyTorch {} on Python {}; {open_mpi}",
            text(&report["version"]),
            commit.as_deref().map_or("unknown commit", str::trim),
            rustc.as_deref().map_or("an unknown compiler", str::trim),
            text(&installation["torch"]),
            text(&installation["python"]),
        );
        Ok(Environment { machine: machine(&report["machine"]), software })
    }
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "- Machine: {}.", self.machine)?;
        writeln!(f, "- Software: {}.", self.software)
    }
}

/// Describes the machine as `trireme doctor` reports it.
fn machine(machine: &Value) -> String {
    let virtual_machine = machine["hypervisor"].as_str().map(|name| format!(", virtual: {name}"));
    let kernel =
        std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or("unknown version".to_owned());
    format!(
        "{} ({}{}), {} cores, {} of them for this process, {:.1} GiB of memory, Linux {}",
        text(&machine["processor"]),
        text(&machine["architecture"]),
        virtual_machine.unwrap_or_default(),
        machine["num_cores"],
        machine["num_cores_available"],
        machine["memory_bytes"].as_f64().unwrap_or_default() / f64::from(1 << 30),
        kernel.trim(),
    )
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("unknown")
}

fn first(objects: Vec<Value>) -> Value {
    objects.into_iter().next().unwrap_or_default()
}

/// Upper bounds on the speed of a step on this processor.
#[derive(Debug)]
pub(super) struct Bound {
    step: Step,
    /// Name of the processor's unit that multiplies matrices.
    unit: String,
    peak_gflops: f64,
    /// Lowest and highest fraction of the peak that a matrix product of the step reaches when it is timed alone.
    product_fractions: [f64; 2],
    tokens_per_second: f64,
    copy_gb_per_second: f64,
}

impl Bound {
    pub(super) fn measure(step: Step, programs: &Programs) -> Result<Self> {
        Bound::read(step, &first(programs.run(&step.kernels())?))
    }

    /// Reads the bound from the output of `trireme bench kernels`.
    fn read(step: Step, report: &Value) -> Result<Self> {
        let number = |value: &Value| value.as_f64().context("trireme bench kernels printed no bound");
        let kernels = &report["steps"][0];
        let peak_gflops = number(&kernels["product_peak_gflops"])?;
        let is_product = |kernel: &&Value| kernel["name"] == "matmul";
        let mut product_fractions = [f64::INFINITY, 0.0];
        for kernel in kernels["kernels"].as_array().into_iter().flatten().filter(is_product) {
            let flops = number(&kernel["operations"])? / number(&kernel["median_us"])? * 1e6;
            let fraction = flops / 1e9 / peak_gflops;
            let [lowest, highest] = product_fractions;
            product_fractions = [lowest.min(fraction), highest.max(fraction)];
        }
        Ok(Bound {
            step,
            unit: text(&kernels["product_unit"]).to_owned(),
            peak_gflops,
            product_fractions,
            tokens_per_second: step.num_tokens() as f64 * 1e3 / number(&kernels["bound_ms"])?,
            copy_gb_per_second: number(&report["copy_bytes_per_second"])? / 1e9,
        })
    }
}

/// Returns the bounds as Markdown, with the fraction of each that Trireme reaches in the row of the same step. Empty without bounds.
pub(super) fn show_bounds(bounds: &[Bound], rows: &[Row], rounds: &[Round]) -> String {
    let Some(fastest) = bounds.iter().map(|bound| bound.copy_gb_per_second).reduce(f64::max) else {
        return String::new();
    };
    let mut shown = format!(
        "- Measured bounds: a copy that no cache holds moves {fastest:.1} GB/s. The kernels of a step cannot be faster than:\n\n\
         | step | peak of products | products timed alone, of the peak | bound, tokens/s | Trireme, of the bound |\n|---|---|---|---|---|\n"
    );
    for bound in bounds {
        let Bound {
            step, unit, peak_gflops, product_fractions: [lowest, highest], tokens_per_second, ..
        } = bound;
        let row = rows.iter().find(|row| row.bound == Some(*step));
        let reached = row.and_then(|row| ours(rounds, row));
        let reached = reached.map_or("failed".to_owned(), |ours| format!("{:.2}", ours / tokens_per_second));
        let (Step { model, dtype, .. }, bound) = (step, with_separators(*tokens_per_second, 0));
        shown += &format!(
            "| {model}, {dtype} | {unit} {peak_gflops:.0} GFLOP/s | {lowest:.2}–{highest:.2} | {bound} | {reached} |\n"
        );
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::{SPEED, rounds, row};
    use super::super::rows::{BenchSettings, rows};
    use super::*;
    use serde_json::json;

    fn step() -> Step {
        rows(BenchSettings { num_steps: 1, num_warmup_steps: 1, seconds: 1.0 })[0].bound.unwrap()
    }

    #[test]
    fn the_table_compares_bounds_with_measured_speeds() {
        let report = json!({
            "copy_bytes_per_second": 57.84e9,
            "steps": [{"product_unit": "fma 512", "product_peak_gflops": 512.7, "bound_ms": 200.0, "kernels": [
                {"name": "matmul", "operations": 2e9, "median_us": 5e3}, {"name": "norm", "operations": 9e9, "median_us": 1.0},
                {"name": "matmul", "operations": 1e9, "median_us": 4e3}
            ]}]
        });
        let bound = Bound::read(step(), &report).unwrap();
        let row = Row { bound: Some(step()), ..row(SPEED) };
        let shown = show_bounds(&[bound], &[row], &rounds(&[&[("ours", 5120.0)]]));
        assert!(shown.contains(" 57.8 GB/s"), "{shown}");
        assert!(
            shown.ends_with("| gpt2-11m, bf16 | fma 512 513 GFLOP/s | 0.49–0.78 | 10,240 | 0.50 |\n"),
            "{shown}"
        );
        assert_eq!(show_bounds(&[], &[], &[]), "");
        assert!(Bound::read(step(), &json!({"steps": []})).is_err());
    }

    #[test]
    fn the_machine_is_described_with_its_known_properties() {
        let known = machine(&json!({
            "processor": "Fast 9", "architecture": "x86_64", "hypervisor": "KVM", "num_cores": 4,
            "num_cores_available": 2, "memory_bytes": 1u64 << 31
        }));
        let expected =
            "Fast 9 (x86_64, virtual: KVM), 4 cores, 2 of them for this process, 2.0 GiB of memory, Linux ";
        assert!(known.starts_with(expected), "{known}");
        assert!(machine(&json!({})).starts_with("unknown (unknown), "));
    }
}
