//! The table that is printed when workers die, stop, or issue different operations.

use crate::common::{Fixture, Running, assert_contains, free_port, kill};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// Endless steps without checkpoints. The operations of a checkpoint belong to no line of the program, so they would change the table.
const ENDLESS: &str = "--set training.steps=1000000000 --set checkpoint.interval=1000000000";
const THREE_WORKERS: &str = "--workers 3 --set training.global_batch_size=12";

/// Returns the row of a rank in the table.
#[track_caller]
fn row(text: &str, rank: usize) -> String {
    let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with("rank  state"));
    let row = lines.find(|line| line.split_whitespace().next() == Some(&rank.to_string()));
    row.unwrap_or_else(|| panic!("no row of rank {rank}: {text}")).to_owned()
}

#[test]
fn a_killed_worker_is_reported_with_the_state_of_the_others() {
    for transport in ["shm", "tcp"] {
        let fixture = Fixture::with_corpus();
        let train = format!("train tiny.toml --set comm.transport={transport} {ENDLESS} {THREE_WORKERS}");
        let mut run = Running::start(fixture.command(&train));
        run.until("step: 5 ");
        kill(run.worker(1));
        let error = run.end_after_death().refused();
        assert_contains(
            &error,
            &["rank 1 was killed by SIGKILL", "try: check whether rank 1 was killed because memory ran out"],
        );
        assert_contains(&row(&error, 1), &["killed by SIGKILL", "no report"]);
        for survivor in [0, 2] {
            assert_contains(&row(&error, survivor), &["failed", "rank 1", ", world ", ", step ", "line "]);
        }
        // The reports can be read later.
        let shown = fixture.run("flight-recorder runs/tiny").succeeded();
        assert_contains(&row(&shown, 0), &["failed", "rank 1"]);
        assert_contains(&row(&shown, 1), &["silent"]);
        let operations = fixture.run("flight-recorder runs/tiny --rank 2").succeeded();
        assert_contains(
            &operations,
            &["world, ranks [0, 1, 2]: rank 1 was lost", "REDUCE_GRAD 0", "done", "failed"],
        );
        let reduction = operations.lines().find(|line| line.contains("REDUCE_GRAD 0")).unwrap();
        assert_eq!(reduction.ends_with("REDUCE_GRAD 0, by direct"), transport == "shm", "{reduction}");
        assert_contains(reduction, &["REDUCE_GRAD 0, by "]);
        let document = fixture.run("flight-recorder runs/tiny --json").succeeded();
        let document: Value = serde_json::from_str(&document).unwrap();
        assert_eq!(document["diagnosis"]["findings"][0]["waits_for"], serde_json::json!([1]));
        assert_eq!(document["reports"][2]["groups"][0]["name"], "world");
    }
}

/// Opening a FIFO waits until its other end is opened.
#[test]
fn a_pipe_where_a_report_belongs_does_not_stop_the_end() {
    let fixture = Fixture::with_corpus();
    std::fs::create_dir_all(fixture.path("runs/tiny/flight-recorder")).unwrap();
    let pipe = fixture.path("runs/tiny/flight-recorder/.rank-0.json.partial");
    assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
    let mut run = Running::start(fixture.command(&format!("train tiny.toml {ENDLESS} {THREE_WORKERS}")));
    run.until("step: 2 ");
    kill(run.worker(1));
    let error = run.end_after_death().refused();
    assert_contains(&row(&error, 1), &["killed by SIGKILL", "no report"]);
    assert_contains(&row(&error, 2), &["failed", "rank 1"]);
}

#[test]
fn a_stopped_worker_is_reported_after_the_deadline() {
    let fixture = Fixture::with_corpus();
    let train = format!("train tiny.toml --set comm.timeout_seconds=1 {ENDLESS} {THREE_WORKERS}");
    let mut run = Running::start(fixture.command(&train));
    run.until("step: 5 ");
    let stopped = run.worker(2);
    kill_process(stopped, Signal::STOP).unwrap();
    let outcome = run.end();
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    let text = &outcome.stderr;
    // The operation depends on where in a step the worker was stopped.
    assert_contains(
        text,
        &["warning: rank 0 has been waiting for rank 2 in ", "it will give up after 1.0 s"],
    );
    assert_contains(text, &["error: rank ", "made no progress for 1s; ranks that have not reached it: 2"]);
    assert_contains(text, &["try: find out what stopped rank 2"]);
    assert_contains(&row(text, 2), &["stopped"]);
    for survivor in [0, 1] {
        assert_contains(&row(text, survivor), &["failed", "rank 2", ", step ", "line "]);
    }
}

#[test]
fn a_bench_whose_worker_is_lost_or_stopped_ends_with_the_table() {
    let sizes = "--min-bytes 64K --max-bytes 64K --seconds 3600 --iters 10000000";
    for (signal, cause, state) in [
        (Signal::KILL, "rank 1 was killed by SIGKILL", "killed by SIGKILL"),
        (Signal::STOP, "ranks that have not reached it: 1", "stopped"),
    ] {
        let fixture = Fixture::new();
        let mut bench = fixture.command(&format!("bench collectives --workers 3 --timeout 1 {sizes}"));
        // The logs and reports of a failed bench stay in this folder.
        bench.env("TMPDIR", fixture.path(""));
        let mut run = Running::start(bench);
        run.until("3 workers over shm");
        kill_process(run.worker(1), signal).unwrap();
        let process_id = run.process();
        let error = run.end().stderr;
        assert_contains(&error, &[cause, "try: "]);
        assert_contains(&row(&error, 1), &[state]);
        // Another user can neither guess the folder's name nor write into it.
        let kept = fixture.names("").into_iter().find(|name| name.starts_with("trireme-workers-")).unwrap();
        assert_ne!(kept, format!("trireme-workers-{}", process_id.as_raw_nonzero()));
        assert_eq!(fixture.path(&kept).metadata().unwrap().permissions().mode() & 0o777, 0o700);
        for survivor in [0, 2] {
            assert_contains(
                &row(&error, survivor),
                &["failed", "rank 1", ", world ", "bench all_reduce of 64.00KiB"],
            );
        }
    }
}

/// Starts two workers by hand, with other arguments for the second.
fn by_hand(fixture: &Fixture, common: &str, second: &str) -> [Running; 2] {
    let port = free_port();
    let worker = |rank, more: &str| -> Command {
        fixture.worker(rank, port, &format!("train tiny.toml {common} {more}"))
    };
    [Running::start(worker(0, "")), Running::start(worker(1, second))]
}

#[test]
fn an_operation_that_differs_is_reported_without_a_launcher() {
    let fixture = Fixture::new();
    let port = free_port();
    let bench = |rank, bytes: &str| {
        let command =
            format!("bench collectives --ops all_reduce --min-bytes {bytes} --max-bytes {bytes} --seconds 1");
        Running::start(fixture.worker(rank, port, &command))
    };
    let (first, second) = (bench(0, "64K"), bench(1, "128K"));
    let (first, second) = (first.end(), second.end());
    assert!(first.code.is_some_and(|code| code != 0) && second.code.is_some_and(|code| code != 0));
    let (error, other) = (first.one_error(), second.one_error());
    assert_contains(
        &error,
        &[
            "differs between ranks",
            "first mismatch: operation of world ",
            "rank 1 issued all_reduce(sum, ",
            "try: ",
        ],
    );
    assert_contains(&row(&error, 1), &["failed", "bench all_reduce of 128.00KiB"]);
    // Only the first rank reports on all ranks.
    assert_contains(&other, &["differs between ranks"]);
    assert!(!other.contains("first mismatch"), "{other}");
}

#[test]
fn without_a_launcher_the_first_survivor_reports_a_rank_that_is_lost_or_stopped() {
    for (victim, signal) in [(0, Signal::KILL), (0, Signal::STOP), (1, Signal::STOP)] {
        let fixture = Fixture::with_corpus();
        let common = format!("--set comm.timeout_seconds=2 {ENDLESS}");
        let [mut first, second] = by_hand(&fixture, &common, "");
        first.until("step: 5 ");
        let (dead, survivor) = if victim == 0 { (first, second) } else { (second, first) };
        kill_process(dead.process(), signal).unwrap();
        let text = survivor.end().stderr;
        kill(dead.process());
        assert_contains(&row(&text, victim), &["silent", "no report"]);
        assert_contains(&row(&text, 1 - victim), &["failed", &format!("rank {victim}"), "line "]);
        assert_contains(&text, &[&format!("try: look for the process of rank {victim}")]);
        drop(dead.end());
    }
}

#[test]
fn a_run_without_reports_is_refused() {
    let fixture = Fixture::with_corpus();
    assert_contains(
        &fixture.run("flight-recorder nowhere").refused(),
        &["nowhere has no reports from several workers"],
    );
    fixture.run("train tiny.toml").succeeded();
    let shown = fixture.run("flight-recorder runs/tiny").succeeded();
    assert_contains(&row(&shown, 1), &["no operation", "none yet"]);
    assert_contains(&fixture.run("flight-recorder runs/tiny --rank 2").refused(), &["no report from rank 2"]);
    fixture.write("runs/tiny/flight-recorder/rank-1.json", "{}");
    assert_contains(
        &fixture.run("flight-recorder runs/tiny").refused(),
        &["rank-1.json is not a flight recorder report"],
    );
}
