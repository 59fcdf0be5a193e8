//! Traces of runs, and the reports on them.

use crate::common::{Fixture, Outcome, Running, assert_contains};
use serde_json::Value;

const PIPELINE: &str = "--set model.architecture=llama --set model.tie_word_embeddings=false --set model.num_layers=4 \
                        --set parallelism.pipeline_parallel_degree=2";

/// Creates a fixture in which a pipeline of two workers has left a trace of steps 2 and 4.
fn traced() -> Fixture {
    let fixture = Fixture::with_corpus();
    fixture.run(&format!("train tiny.toml {PIPELINE} --set metrics.trace_interval=2")).succeeded();
    fixture
}

#[test]
fn a_step_is_drawn_as_measured_and_as_simulated() {
    let fixture = traced();
    let text = fixture.run("report trace runs/tiny --svg step.svg").succeeded();
    assert_contains(
        &text,
        &[
            "runs/tiny: step 4\n",
            "measured, ",
            "simulated with the mean of each pass, ",
            "U update",
            "; 1 column: ",
        ],
    );
    assert_contains(
        &text,
        &["rank    passes   waiting", "ratio  bubble measured  simulated\n       2 ", "\n       4 "],
    );
    assert_eq!(text.matches("\nrank 0 |").count(), 2, "{text}");
    let svg = fixture.read("step.svg");
    assert!(svg.starts_with("<svg ") && svg.contains("<title>B 1 3, ns "), "{svg}");
    // Every microbatch runs forward and backward on both workers, in both pictures.
    for (pass, number) in [("F 0", 4), ("F 1", 4), ("B 0", 4), ("B 1", 4), ("U 0", 1), ("U 1", 1)] {
        assert_eq!(svg.matches(&format!("<title>{pass} ")).count(), 2 * number, "{pass}");
    }
    assert_contains(&fixture.run("report trace runs/tiny --step 2").succeeded(), &["runs/tiny: step 2\n"]);
    let error = fixture.run("report trace runs/tiny --step 3").refused();
    assert_contains(&error, &["runs/tiny/trace.json does not contain this step; it has 2, 4"]);
}

#[test]
fn traces_of_other_layouts_and_runs_without_a_trace() {
    let fixture = Fixture::with_corpus();
    fixture.run(&format!("train tiny.toml {PIPELINE} --set run.name=plain")).succeeded();
    let error = fixture.run("report trace runs/plain").refused();
    assert_contains(&error, &["runs/plain has no trace.json", "[metrics] trace_interval"]);
    let trace = "--set metrics.trace_interval=4";
    fixture.run(&format!("train tiny.toml {PIPELINE} {trace} --set run.name=traced")).succeeded();
    assert_eq!(fixture.losses("traced"), fixture.losses("plain"));
    fixture.run(&format!("train tiny.toml {PIPELINE} {trace} --workers 4 --set run.name=grid")).succeeded();
    let text = fixture.run("report trace runs/grid").succeeded();
    assert_contains(&text, &["step 4, the first of 2 data-parallel pipelines", "\nrank 1 |"]);
    let sharded =
        "--set parallelism.zero_stage=3 --set activation_checkpoint.mode=block --set offload.optimizer=host";
    fixture.run(&format!("train tiny.toml {sharded} {trace} --set run.name=sharded")).succeeded();
    let text = fixture.run("report trace runs/sharded").succeeded();
    assert_contains(&text, &["the first of 2"]);
    // Passes begin once parameters are gathered.
    assert!(text.lines().any(|line| line.starts_with("rank 0 |") && line.contains('F')), "{text}");
    fixture.run(&format!("train tiny.toml --workers 1 {trace} --set run.name=one")).succeeded();
    assert_contains(
        &fixture.run("report trace runs/one").succeeded(),
        &["runs/one: step 4\n", "\nrank 0 |F"],
    );
}

/// Figures of the last step in `trace.json`.
struct StepTotals {
    /// Floating-point operations that the model needs.
    model_flops: f64,
    /// Floating-point operations of the matrix products that were executed.
    hardware_flops: f64,
    /// Peak FLOP/s of all workers.
    peak: f64,
    /// Seconds of the step on the first worker.
    seconds: f64,
}

fn step_totals(fixture: &Fixture, run: &str) -> StepTotals {
    let trace: Value = serde_json::from_str(&fixture.read(&format!("runs/{run}/trace.json"))).unwrap();
    let array = |value: &Value| value.as_array().unwrap().clone();
    let peaks = array(&trace["otherData"]["ranks"]);
    let step = array(&trace["otherData"]["steps"]).pop().unwrap();
    let events = array(&trace["traceEvents"]);
    let executed = events.iter().filter(|event| event["args"]["step"] == step["step"]);
    StepTotals {
        model_flops: step["model_flops"].as_f64().unwrap(),
        hardware_flops: executed.filter_map(|event| event["args"]["product_flops"].as_f64()).sum(),
        peak: peaks.iter().map(|rank| rank["peak_flops"].as_f64().unwrap()).sum(),
        seconds: step["durations"][0].as_f64().unwrap() / 1e9,
    }
}

/// Returns the percentages of a list of parts.
fn parts(text: &str) -> Vec<f64> {
    let (_, list) = text.split_once("time of step 4, all workers; MFU ").unwrap();
    let lines = list.lines().skip(1).map_while(|line| line.split_once(" %  "));
    lines.map(|(part, _)| part.trim().parse().unwrap()).collect()
}

#[test]
fn the_parts_of_a_step_add_up_and_layouts_count_the_model_once() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --set model.num_layers=2 --set metrics.trace_interval=4";
    let mut model = None;
    for (name, settings) in [
        ("one", "--workers 1"),
        ("recomputed", "--workers 1 --set activation_checkpoint.mode=block"),
        ("sharded", "--set parallelism.zero_stage=3"),
        ("deep", "--set parallelism.pipeline_parallel_degree=2"),
        ("wide", "--set parallelism.tensor_parallel_degree=2"),
        ("long", "--set parallelism.context_parallel_degree=2"),
    ] {
        fixture.run(&format!("{train} {settings} --set run.name={name}")).succeeded();
        let found = step_totals(&fixture, name);
        assert_eq!(*model.get_or_insert(found.model_flops), found.model_flops, "{name}");
        assert!(
            found.hardware_flops > found.model_flops,
            "{name}: {} of {}",
            found.hardware_flops,
            found.model_flops
        );
        let mfu = fixture.records(name).pop().unwrap()["mfu"].as_f64().unwrap();
        let expected = found.model_flops / (found.peak * found.seconds);
        assert!((mfu / expected - 1.0).abs() < 1e-6, "{name}: {mfu} is not {expected}");
        for command in ["run", "trace"] {
            let text = fixture.run(&format!("report {command} runs/{name}")).succeeded();
            let parts = parts(&text);
            let sum: f64 = parts.iter().sum();
            assert!(parts.len() == 5 && (sum - 100.0).abs() < 2.0, "{name}: {text}");
        }
    }
    assert!(
        step_totals(&fixture, "recomputed").hardware_flops
            > 1.2 * step_totals(&fixture, "one").hardware_flops
    );
}

#[test]
fn a_configured_peak_applies_to_each_worker() {
    let fixture = Fixture::with_corpus();
    let text = fixture
        .run("train tiny.toml --set metrics.trace_interval=4 --set metrics.peak_flops=4e12")
        .succeeded();
    assert_contains(&text, &["  mfu: "]);
    assert_eq!(step_totals(&fixture, "tiny").peak, 8e12);
    assert_contains(&fixture.run("report run runs/tiny").succeeded(), &["median MFU: "]);
    assert!(!fixture.read("runs/tiny/logs/rank-0.log").contains("the peak of this worker"));
}

#[test]
fn a_peak_is_measured_once_per_number_of_threads() {
    let fixture = Fixture::with_own_cache();
    let line = |run: &str| {
        fixture.run(&format!("train tiny.toml --workers 1 --set run.name={run}")).succeeded();
        let log = fixture.read(&format!("runs/{run}/logs/rank-0.log"));
        let line = log.lines().find_map(|line| line.split_once("the peak of this worker, for MFU, is "));
        line.unwrap_or_else(|| panic!("{log}")).1.to_owned()
    };
    let (first, second) = (line("first"), line("second"));
    let is_kept = first.contains("measured now");
    assert!(is_kept || first.contains("measured while other programs may have computed"), "{first}");
    assert_eq!(second.contains("measured by an earlier command"), is_kept, "{first}; {second}");
    if is_kept {
        assert_eq!(first.split_once(':').unwrap().0, second.split_once(':').unwrap().0);
    }
}

#[test]
fn a_new_run_moves_the_trace_of_an_earlier_run() {
    let fixture = traced();
    fixture.run(&format!("train tiny.toml {PIPELINE} --set checkpoint.resume=never")).succeeded();
    assert!(!fixture.path("runs/tiny/trace.json").exists());
    assert!(fixture.path("runs/tiny/previous-1/trace.json").exists());
}

#[test]
fn damaged_traces_are_refused_in_words() {
    let fixture = traced();
    let whole = fixture.read("runs/tiny/trace.json").into_bytes();
    let report =
        || -> Outcome { Running::start(fixture.command("report trace runs/tiny --svg step.svg")).end() };
    let mut num_refused = 0;
    for (index, at) in (0..whole.len()).step_by(whole.len() / 150).enumerate() {
        let mut damaged = whole.clone();
        damaged[at] = b"90F\"- ,{"[index % 8];
        fixture.write("runs/tiny/trace.json", damaged);
        // Another digit may be another valid time, which need not be refused.
        let outcome = report();
        if outcome.code != Some(0) {
            outcome.refused();
            num_refused += 1;
        }
    }
    assert!(num_refused > 50, "{num_refused}");
    let text = String::from_utf8(whole).unwrap();
    for (from, to, why) in [
        ("\"F 2 1\"", "\"F 2 0\"", "does not describe an executable program"),
        ("\"SEND_B 3 0\"", "\"SEND_B 0 0\"", "does not describe an executable program"),
        ("@1\"", "@9\"", "does not describe an executable program"),
        ("\"traceEvents\"", "\"events\"", "is not a valid trace"),
    ] {
        assert!(text.contains(from), "{from}");
        fixture.write("runs/tiny/trace.json", text.replace(from, to));
        assert_contains(&report().refused(), &[why]);
    }
}

#[test]
fn a_peak_that_is_too_low_gives_no_utilization() {
    let fixture = Fixture::with_corpus();
    let printed =
        fixture.run("train tiny.toml --set metrics.peak_flops=1e8 --set model.hidden_size=128").succeeded();
    assert_contains(&printed, &["faster than the peak", "peak_flops"]);
    assert!(fixture.records("tiny").iter().any(|record| record["mfu"].is_null()));
}
