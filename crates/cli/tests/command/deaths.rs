//! Workers and launchers that die in any phase.

use crate::common::{Fixture, Outcome, Running, assert_contains, free_port, kill, poll};
use rustix::process::{Signal, kill_process};
use std::process::Command;

const ENDLESS: &str = "--set training.steps=1000000000";

/// Asserts that the death is reported once, with all facts that help.
fn assert_death_of(rank: usize, fixture: &Fixture, outcome: Outcome) {
    let error = outcome.refused();
    let suggests_resume = error.contains("try: run the same command again; it resumes after step ");
    let can_resume =
        fixture.path("runs/tiny/checkpoints").exists() && fixture.complete_checkpoints("tiny") > 0;
    assert_eq!(suggests_resume, can_resume, "{error}");
    let log = format!("runs/tiny/logs/rank-{rank}.log");
    assert_contains(
        &error,
        &[&format!("rank {rank} was killed by SIGKILL"), "the other workers have been stopped", &log],
    );
    assert!(fixture.path(&log).exists());
}

#[test]
fn before_the_workers_have_met() {
    let fixture = Fixture::with_corpus();
    // Opening a pipe waits for its other end: the launcher gets the config, and the workers do not.
    let pipe = fixture.path("pipe.toml");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut run = Running::start(fixture.command("train pipe.toml --set run.name=tiny"));
    std::fs::write(&pipe, fixture.read("tiny.toml")).unwrap();
    kill(run.worker(0));
    assert_death_of(0, &fixture, run.end_after_death());
    assert!(!fixture.path("runs/tiny/checkpoints").exists());
    fixture.run("train tiny.toml").succeeded();
}

#[test]
fn during_the_steps() {
    for (transport, victim) in [("shm", 0), ("shm", 1), ("tcp", 0), ("tcp", 1)] {
        let fixture = Fixture::with_corpus();
        let train = format!("train tiny.toml --set comm.transport={transport} --set checkpoint.interval=5");
        let mut run = Running::start(fixture.command(&format!("{train} {ENDLESS}")));
        run.until("checkpoint of step 5:");
        let workers = [run.worker(0), run.worker(1)];
        kill(workers[victim]);
        assert_death_of(victim, &fixture, run.end_after_death());
        let num_steps = fixture.losses("tiny").len();
        assert!(fixture.complete_checkpoints("tiny") > 0);
        let printed = fixture.run(&format!("{train} --set training.steps={}", num_steps + 5)).succeeded();
        assert_contains(&printed, &["resuming after step "]);
        let steps: Vec<u64> = fixture.losses("tiny").iter().map(|(step, _)| *step).collect();
        assert_eq!(steps, (1..=num_steps as u64 + 5).collect::<Vec<_>>());
    }
}

#[test]
fn during_a_checkpoint() {
    for victim in [0, 1] {
        let fixture = Fixture::with_corpus();
        let train = "train tiny.toml --set checkpoint.interval=1";
        let mut run = Running::start(fixture.command(&format!("{train} {ENDLESS}")));
        run.until("checkpoint of step 1:");
        let workers = [run.worker(0), run.worker(1)];
        let is_being_written =
            || fixture.names("runs/tiny/checkpoints").iter().any(|name| name.contains(".partial-"));
        poll(|| {
            kill_process(workers[victim], Signal::STOP).unwrap();
            if is_being_written() {
                return Some(());
            }
            kill_process(workers[victim], Signal::CONT).unwrap();
            None
        });
        kill(workers[victim]);
        assert_death_of(victim, &fixture, run.end_after_death());
        assert!(fixture.complete_checkpoints("tiny") > 0);
        let num_steps = fixture.losses("tiny").len();
        let printed = fixture.run(&format!("{train} --set training.steps={}", num_steps + 2)).succeeded();
        assert_contains(&printed, &["resuming after step "]);
        assert!(!is_being_written(), "what was half-written is gone");
    }
}

#[test]
fn under_another_launcher() {
    for (transport, victim) in [("shm", 0), ("tcp", 1)] {
        let fixture = Fixture::with_corpus();
        let port = free_port();
        let train = format!("train tiny.toml --set comm.transport={transport} {ENDLESS}");
        let [mut first, second] = [0, 1].map(|rank| Running::start(fixture.worker(rank, port, &train)));
        first.until("step: 5 ");
        let (dead, survivor) = if victim == 0 { (first, second) } else { (second, first) };
        kill(dead.process());
        let outcome = survivor.end_after_death();
        assert_eq!(outcome.code, Some(74), "{outcome:?}");
        assert_contains(&outcome.one_error(), &[&format!("rank {victim} was lost"), "its log may say why"]);
        assert!(fixture.complete_checkpoints("tiny") > 0);
    }
}

#[test]
fn a_launcher_that_is_killed_ends_its_workers() {
    let fixture = Fixture::with_corpus();
    let mut run = Running::start(fixture.command(&format!("train tiny.toml {ENDLESS}")));
    run.until("checkpoint of step 2:");
    run.watch_workers();
    kill(run.process());
    let outcome = run.end_after_death();
    assert_eq!(outcome.code, None, "{outcome:?}");
    assert!(fixture.complete_checkpoints("tiny") > 0);
}

#[test]
fn a_preparation_that_was_killed_starts_again() {
    let fixture = Fixture::new();
    fixture.write("long.txt", fixture.read("text.txt").repeat(300));
    let prepare = "prepare long.txt --out corpus --train-bpe 300";
    let run = Running::start(fixture.command(prepare));
    poll(|| fixture.names("corpus").iter().any(|name| name.starts_with('.')).then_some(()));
    kill(run.process());
    assert_eq!(run.end().code, None);
    let train = "train tiny.toml --set data.inputs=[] --set data.folder=corpus";
    assert_contains(&fixture.run(train).refused(), &["corpus contains no prepared corpus"]);
    // On a slow machine the command may print its progress.
    assert_eq!(fixture.run(prepare).code, Some(0));
    assert_eq!(
        fixture.names("corpus"),
        ["prepare.json", "tokenizer.json", "train.tokens", "validation.tokens"]
    );
}
