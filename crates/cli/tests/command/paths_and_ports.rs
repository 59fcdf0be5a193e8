//! Folders that cannot be written, ports and folders in use, and contradictory environments.

use crate::common::{Fixture, Running, assert_contains};
use std::net::TcpListener;
use std::process::Command;

#[test]
fn folders_that_cannot_be_written() {
    // Root may write into any folder, but no user can create a folder below a file.
    let fixture = Fixture::with_corpus();
    let under_a_file = "text.txt/below";
    for (arguments, facts) in [
        (
            format!("prepare text.txt --out {under_a_file}"),
            &["cannot write text.txt/below", "permissions"] as &[&str],
        ),
        (
            format!("train tiny.toml --set run.folder={under_a_file}"),
            &["cannot write text.txt/below/tiny/.lock"],
        ),
        (
            format!("train tiny.toml --workers 1 --set run.folder={under_a_file}"),
            &["cannot write text.txt/below/tiny/.lock"],
        ),
    ] {
        let error = fixture.refused_without_changes(&arguments);
        assert_contains(&error, facts);
        assert_contains(&error, &["Not a directory"]);
    }
    fixture.run("train tiny.toml --workers 1").succeeded();
    let error = fixture.refused_without_changes("checkpoint export runs/tiny text.txt/below");
    assert_contains(&error, &["text.txt/below", "Not a directory"]);
    let error = fixture.refused_without_changes("checkpoint export runs/tiny corpus");
    assert_contains(&error, &["corpus is not empty"]);
}

#[test]
fn a_file_where_checkpoints_belong() {
    let fixture = Fixture::with_corpus();
    std::fs::create_dir_all(fixture.path("runs/tiny")).unwrap();
    fixture.write("runs/tiny/checkpoints", "mine");
    assert_contains(&fixture.run("train tiny.toml").refused(), &["runs/tiny/checkpoints", "Not a directory"]);
    assert_eq!(fixture.read("runs/tiny/checkpoints"), "mine");
}

/// Opening a pipe would wait for its other end.
#[test]
fn pipes_where_files_of_a_run_belong() {
    let fixture = Fixture::with_corpus();
    let mkfifo = |name: &str| {
        let made = Command::new("mkfifo").arg(fixture.path(name)).status().unwrap();
        assert!(made.success());
    };
    for (name, arguments) in [
        ("metrics.jsonl", ""),
        ("config.toml", ""),
        ("program.txt", ""),
        (".lock", ""),
        ("logs/rank-0.log", ""),
        ("logs/rank-0.log", "--workers 1"),
        ("logs/rank-1.log", ""),
        ("hashes.jsonl", "--set metrics.hash_interval=1"),
    ] {
        std::fs::create_dir_all(fixture.path("runs/tiny/logs")).unwrap();
        mkfifo(&format!("runs/tiny/{name}"));
        let error = fixture.run(&format!("train tiny.toml {arguments}")).refused();
        assert_contains(&error, &[&format!("runs/tiny/{name}"), "it is not a regular file"]);
        std::fs::remove_dir_all(fixture.path("runs")).unwrap();
    }
    // However often the run begins, the corpus lists it once.
    assert_eq!(fixture.read("corpus/used-by.txt").lines().count(), 1);
    // A run starts even if it cannot record that it uses the corpus.
    std::fs::remove_file(fixture.path("corpus/used-by.txt")).unwrap();
    mkfifo("corpus/used-by.txt");
    fixture.run("train tiny.toml").succeeded();
    std::fs::remove_file(fixture.path("corpus/used-by.txt")).unwrap();
    std::fs::rename(fixture.path("corpus/prepare.json"), fixture.path("report")).unwrap();
    mkfifo("corpus/prepare.json");
    assert_contains(
        &fixture.run("train tiny.toml").refused(),
        &["corpus/prepare.json", "it is not a regular file"],
    );
    assert_contains(&fixture.run("data show corpus").refused(), &["corpus contains no prepared corpus"]);
    std::fs::rename(fixture.path("report"), fixture.path("corpus/prepare.json")).unwrap();
    fixture.run("train tiny.toml --set metrics.trace_interval=1").succeeded();
    for name in ["trace.json", "config.toml", "metrics.jsonl", "checkpoints/latest", "checkpoints/best"] {
        let path = fixture.path(&format!("runs/tiny/{name}"));
        let _ = std::fs::remove_file(&path);
        mkfifo(&format!("runs/tiny/{name}"));
        for (command, reads) in [
            ("report trace runs/tiny", name == "trace.json"),
            ("report run runs/tiny", name == "metrics.jsonl"),
            ("report html runs/tiny", name == "metrics.jsonl"),
        ] {
            let outcome = fixture.run(command);
            if reads {
                assert_contains(
                    &outcome.refused(),
                    &[&format!("runs/tiny/{name}"), "it is not a regular file"],
                );
            } else {
                assert_ne!(outcome.code, None, "{outcome:?}");
            }
        }
        if name.starts_with("checkpoints") {
            fixture.run("checkpoint list runs/tiny").succeeded();
        }
    }
}

/// A shell must read names as they are, and names must not control the terminal.
#[test]
fn names_are_quoted_in_commands_and_harmless_on_a_terminal() {
    let fixture = Fixture::with_corpus();
    let mut train = fixture.command("train tiny.toml --set");
    train.args(["run.folder=my runs", "--set", "generate.prompt=it's"]);
    let printed = Running::start(train).end().succeeded();
    assert_contains(
        &printed,
        &[
            r"trireme generate 'my runs/tiny' --prompt 'it'\''s'",
            "trireme eval 'my runs/tiny' DATA",
            "trireme checkpoint export 'my runs/tiny' exported",
            "tensorboard --logdir 'my runs'",
        ],
    );
    std::fs::create_dir(fixture.path("not prepared")).unwrap();
    let mut train = fixture.command("train tiny.toml --set");
    train.arg("data.folder=not prepared");
    assert_contains(&Running::start(train).end().refused(), &["trireme prepare INPUT… --out 'not prepared'"]);
    let mut unknown = fixture.command("train");
    unknown.arg("\u{1b}[31m.toml");
    let error = Running::start(unknown).end().refused();
    assert!(error.contains(r"\u{1b}[31m.toml") && !error.contains('\u{1b}'), "{error:?}");
}

#[test]
fn a_port_that_is_taken() {
    let fixture = Fixture::with_corpus();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = fixture.run(&format!("train tiny.toml --set launch.master_port={port}")).refused();
    assert_contains(&error, &[&format!("TCP port {port}"), "[launch] master_port", "Address already in use"]);
    let error = Running::start(fixture.worker(0, port, "train tiny.toml")).end().refused();
    assert_contains(&error, &[&format!("127.0.0.1:{port}"), "MASTER_PORT", "Address already in use"]);
    assert!(!fixture.path("runs/tiny/metrics.jsonl").exists());
}

#[test]
fn a_run_that_another_process_trains() {
    let fixture = Fixture::with_corpus();
    let mut first = Running::start(fixture.command("train tiny.toml --set training.steps=1000000000"));
    first.until("step: 2 ");
    for workers in [1, 2] {
        let error = fixture.run(&format!("train tiny.toml --workers {workers}")).refused();
        assert_contains(&error, &["another process is using the run runs/tiny"]);
    }
    first.until("step: 3 ");
}

#[test]
fn environments_that_describe_no_worker() {
    let fixture = Fixture::with_corpus();
    let before = fixture.everything();
    for (variables, facts) in [
        ("RANK=0", ["RANK is set", "WORLD_SIZE is not"]),
        ("RANK=x WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["RANK is 'x'", "expected"]),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["RANK = 2", "WORLD_SIZE = 2"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a..b MASTER_PORT=1", ["'a..b'", "MASTER_ADDR"]),
    ] {
        let mut command = fixture.command("train tiny.toml");
        command.envs(variables.split(' ').filter_map(|variable| variable.split_once('=')));
        assert_contains(&Running::start(command).end().refused(), &facts);
        assert!(fixture.everything() == before);
    }
    let worker = fixture.worker(0, 1, "train tiny.toml --workers 2");
    assert_contains(&Running::start(worker).end().refused(), &["--workers", "another launcher", "one of 2"]);
}
