//! Workers that join late, or not at all.

use crate::common::{Fixture, Outcome, Running, assert_contains, free_port};
use serde_json::Value;

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Runs two workers of another launcher, each with its own command.
fn world(fixture: &Fixture, commands: [&str; 2], secret: Option<&str>) -> [Outcome; 2] {
    let port = free_port();
    let start = |rank: usize| {
        let mut worker = fixture.worker(rank, port, commands[rank]);
        worker.envs(secret.map(|secret| ("TRIREME_SECRET", secret)));
        Running::start(worker)
    };
    [0, 1].map(start).map(Running::end)
}

#[test]
fn a_worker_that_fails_before_it_joins_ends_the_others_with_its_reason() {
    let fixture = Fixture::with_corpus();
    let good = "train tiny.toml";
    // If the config cannot be read, the job has no name, and the secret identifies it.
    for (bad, secret, reason) in [
        ("train nowhere.toml", Some(SECRET), "the config nowhere.toml does not exist"),
        ("train tiny.toml --set comm.interface=nowhere", None, "no interface 'nowhere'"),
    ] {
        let [first, second] = world(&fixture, [good, bad], secret);
        assert_contains(&second.refused(), &["error: rank 1 on ", reason]);
        assert_contains(&first.refused(), &["rank 1 failed before all ranks had joined", reason]);
        let [first, second] = world(&fixture, [bad, good], secret);
        assert_contains(&first.refused(), &[reason]);
        assert_contains(&second.refused(), &["rank 0 at 127.0.0.1", reason]);
        // If all of them fail, no worker waits for the others.
        let [first, second] = world(&fixture, [bad, bad], secret);
        assert_contains(&first.refused(), &[reason]);
        assert_contains(&second.refused(), &[reason]);
    }
}

#[test]
fn rank_0_alone_is_on_the_console_and_all_have_logs_with_times() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml";
    let [first, second] = world(&fixture, [train, train], None);
    assert_contains(&first.succeeded(), &["step: 4 "]);
    assert_eq!(second.succeeded(), "");
    for (run, workers) in [("tiny", 0), ("own", 2)] {
        if workers > 0 {
            fixture.run(&format!("{train} --workers {workers} --set run.name={run}")).succeeded();
        }
        for rank in [0, 1] {
            let log = fixture.read(&format!("runs/{run}/logs/rank-{rank}.log"));
            let line = log.lines().find(|line| line.contains("step: 4 ")).unwrap_or_else(|| panic!("{log}"));
            let (time, rest) = line.split_once(' ').unwrap();
            assert!(time.len() == 20 && time.ends_with('Z') && rest.starts_with("step: 4 "), "{line}");
        }
    }
}

fn objects(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
}

#[test]
fn errors_of_all_ranks_are_on_the_error_output_and_in_their_logs() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --set checkpoint.resume=runs/nowhere";
    // Rank 0 has the console.
    let ranks =
        [("error: ", "runs/nowhere does not exist"), ("error: rank 1 on ", "could not choose a checkpoint")];
    for (run, format) in [("text", ""), ("objects", "--set metrics.log_format=json")] {
        let command = &format!("{train} --set run.name={run} {format}");
        for (rank, outcome) in world(&fixture, [command, command], None).into_iter().enumerate() {
            let (start, reason) = ranks[rank];
            let log = fixture.read(&format!("runs/{run}/logs/rank-{rank}.log"));
            if format.is_empty() {
                assert_contains(&outcome.stderr, &[start, reason]);
                assert_contains(&log, &["Z error: ", reason]);
                continue;
            }
            for text in [outcome.stderr, log] {
                let lines = objects(&text);
                assert!(lines.iter().all(|line| line["rank"] == rank && line["host"].is_string()), "{text}");
                assert!(
                    lines.iter().any(|line| line["message"].as_str().unwrap().contains(reason)),
                    "{text}"
                );
            }
        }
    }
    // Trireme's launcher shows a worker's log line in a JSON object of its own.
    let shown = fixture.run(&format!("{train} --workers 2 --set metrics.log_format=json")).stderr;
    let [shown] = &objects(&shown)[..] else { panic!("{shown}") };
    assert_contains(
        shown["message"].as_str().unwrap(),
        &["error: rank ", "Its log is", "\n    error: runs/nowhere does not exist"],
    );
}

#[test]
fn lines_may_be_objects() {
    let fixture = Fixture::with_corpus();
    let printed = fixture.run("train tiny.toml --workers 2 --set metrics.log_format=json").succeeded();
    let lines = objects(&printed);
    assert!(
        lines.iter().all(|line| line["time"].is_string() && line["host"].is_string() && line["rank"] == 0)
    );
    let steps = lines.iter().filter_map(|line| line["record"]["step"].as_u64());
    assert_eq!(steps.collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(
        lines
            .iter()
            .any(|line| line["message"].as_str().is_some_and(|text| text.starts_with("run folder: ")))
    );
    // The log has the peak of the worker as well.
    let mut logged = objects(&fixture.read("runs/tiny/logs/rank-0.log"));
    let is_peak =
        |line: &Value| line["message"].as_str().is_some_and(|text| text.contains("peak of this worker"));
    assert_eq!(logged.iter().filter(|line| is_peak(line)).count(), 1, "{logged:?}");
    logged.retain(|line| !is_peak(line));
    assert_eq!(logged, lines);
    assert!(
        objects(&fixture.read("runs/tiny/logs/rank-1.log")).iter().any(|line| line["record"]["step"] == 4)
    );
}
