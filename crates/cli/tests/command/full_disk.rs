//! Disks that fill up, and readers that close their end.

use crate::common::{Fixture, Running, assert_contains};
use std::fs::File;
use std::process::Stdio;

#[test]
fn prepare_leaves_nothing() {
    let fixture = Fixture::new();
    let before = fixture.everything();
    let error =
        Running::start(fixture.command_on_full_disk(8, "prepare text.txt --out corpus")).end().refused();
    assert_contains(&error, &["cannot write corpus/", "free space", "File too large"]);
    assert!(fixture.everything() == before);
    fixture.run("prepare text.txt --out corpus").succeeded();
}

#[test]
fn a_checkpoint_leaves_the_earlier_one() {
    for workers in [1, 2] {
        let fixture = Fixture::with_corpus();
        let train = format!("train tiny.toml --workers {workers} --set comm.transport=tcp");
        fixture.run(&format!("{train} --set training.steps=2")).succeeded();
        let error = Running::start(fixture.command_on_full_disk(100, &train)).end().refused();
        assert_contains(
            &error,
            &["checkpoint of step 4 was not saved", "step-4", "free space", "File too large"],
        );
        assert_eq!(fixture.names("runs/tiny/checkpoints"), ["latest", "step-2"]);
        assert_eq!(fixture.complete_checkpoints("tiny"), 1);
        assert_contains(&fixture.run(&train).succeeded(), &["resuming after step 2 of 4"]);
        assert_eq!(fixture.losses("tiny").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }
}

#[test]
fn a_run_continues_without_a_checkpoint_that_is_not_its_last() {
    for workers in [1, 2] {
        let fixture = Fixture::with_corpus();
        let train =
            format!("train tiny.toml --workers {workers} --set comm.transport=tcp --set training.steps=5");
        let run = Running::start(fixture.command_on_full_disk(100, &train)).end();
        let tries = run.stdout.lines().filter(|line| line.starts_with("note: the checkpoint of step "));
        let tries: Vec<_> = tries.collect();
        assert_contains(
            tries[0],
            &[
                "step 2 was not saved",
                "File too large",
                "training continues, and the next checkpoint is in 2 steps",
            ],
        );
        assert_eq!(tries.len(), 2, "{tries:?}");
        assert_contains(&run.refused(), &["the checkpoint of step 5 was not saved"]);
        assert_eq!(fixture.losses("tiny").len(), 5);
        assert!(fixture.names("runs/tiny/checkpoints").is_empty());
    }
}

#[test]
fn metrics_and_exports_name_their_file() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --workers 1 --set training.steps=100 --set checkpoint.enable=false";
    let run = Running::start(fixture.command_on_full_disk(16, train)).end();
    assert_eq!(
        run.stdout.matches("step records are kept in memory").count(),
        2,
        "once a file: {}",
        run.stdout
    );
    assert_contains(&run.stdout, &["step: 100 "]);
    let error = run.refused();
    assert_contains(&error, &["cannot write to the metrics file runs/tiny/", "File too large"]);
    fixture.run("train tiny.toml --workers 1 --resume never").succeeded();
    assert_eq!(fixture.losses("tiny").len(), 4);
    let before = fixture.everything();
    let error =
        Running::start(fixture.command_on_full_disk(16, "checkpoint export runs/tiny out")).end().refused();
    assert_contains(&error, &["out.partial-", "model.safetensors", "File too large"]);
    assert!(fixture.everything() == before);
}

#[test]
fn unavailable_shared_memory() {
    let fixture = Fixture::with_corpus();
    let train = "train tiny.toml --set comm.transport=shm";
    let error = Running::start(fixture.command_on_full_disk(16, train)).end().refused();
    assert_contains(&error, &["shm transport cannot be used", "choose transport auto or tcp"]);
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    let fixture = Fixture::with_corpus();
    fixture.run("train tiny.toml --workers 1").succeeded();
    fixture.run("checkpoint export runs/tiny model").succeeded();
    for arguments in [
        "checkpoint list runs/tiny",
        "checkpoint inspect runs/tiny",
        "config tiny.toml",
        "generate runs/tiny --num-tokens 4",
        "prepare text.txt --out corpus",
        "bench step --model model --batch 1 --seq 8 --steps 1 --warmup 0 --threads 1",
    ] {
        let mut command = fixture.command(arguments);
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = command.stdout(full).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        let expected = "error: cannot write to standard output: No space left on device (os error 28)\n";
        assert_eq!((output.status.code(), error.as_str()), (Some(1), expected), "{arguments}");
    }
}

#[test]
fn a_closed_output_is_no_error() {
    let fixture = Fixture::with_corpus();
    for arguments in [
        "train tiny.toml --workers 1",
        "train tiny.toml --workers 2 --set run.name=two",
        "checkpoint inspect runs/tiny",
        "config --explain",
        "generate runs/tiny --num-tokens 4",
    ] {
        let mut child =
            fixture.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments}: {output:?}");
    }
    // The output of the runs was never read, and still they completed.
    for run in ["tiny", "two"] {
        assert_eq!(fixture.complete_checkpoints(run), 2);
        assert_contains(&fixture.read(&format!("runs/{run}/logs/rank-0.log")), &["step: 4 ", "run folder: "]);
    }
}
