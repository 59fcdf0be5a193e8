//! Folders that cannot be written, ports and folders in use, and contradictory environments.

use crate::common::{Running, Scene, tells};
use std::net::TcpListener;
use std::process::Command;

#[test]
fn folders_that_cannot_be_written() {
    // Root may write into any folder, but no user can create a folder below a file.
    let scene = Scene::with_corpus();
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
        let error = scene.refused_without_trace(&arguments);
        tells(&error, facts);
        tells(&error, &["Not a directory"]);
    }
    scene.run("train tiny.toml --workers 1").succeeded();
    let error = scene.refused_without_trace("checkpoint export runs/tiny text.txt/below");
    tells(&error, &["text.txt/below", "Not a directory"]);
    let error = scene.refused_without_trace("checkpoint export runs/tiny corpus");
    tells(&error, &["corpus is not empty"]);
}

#[test]
fn a_file_where_checkpoints_belong() {
    let scene = Scene::with_corpus();
    std::fs::create_dir_all(scene.path("runs/tiny")).unwrap();
    scene.write("runs/tiny/checkpoints", "mine");
    tells(&scene.run("train tiny.toml").refused(), &["runs/tiny/checkpoints", "Not a directory"]);
    assert_eq!(scene.read("runs/tiny/checkpoints"), "mine");
}

/// Opening a pipe would wait for its other end.
#[test]
fn pipes_where_files_of_a_run_belong() {
    let scene = Scene::with_corpus();
    let mkfifo = |name: &str| {
        let made = Command::new("mkfifo").arg(scene.path(name)).status().unwrap();
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
        std::fs::create_dir_all(scene.path("runs/tiny/logs")).unwrap();
        mkfifo(&format!("runs/tiny/{name}"));
        let error = scene.run(&format!("train tiny.toml {arguments}")).refused();
        tells(&error, &[&format!("runs/tiny/{name}"), "it is not a regular file"]);
        std::fs::remove_dir_all(scene.path("runs")).unwrap();
    }
    // A run starts even if it cannot record that it uses the corpus.
    std::fs::remove_file(scene.path("corpus/used-by.txt")).unwrap();
    mkfifo("corpus/used-by.txt");
    scene.run("train tiny.toml").succeeded();
    std::fs::remove_file(scene.path("corpus/used-by.txt")).unwrap();
    std::fs::rename(scene.path("corpus/prepare.json"), scene.path("report")).unwrap();
    mkfifo("corpus/prepare.json");
    tells(&scene.run("train tiny.toml").refused(), &["corpus/prepare.json", "it is not a regular file"]);
    tells(&scene.run("data show corpus").refused(), &["corpus contains no prepared corpus"]);
    std::fs::rename(scene.path("report"), scene.path("corpus/prepare.json")).unwrap();
    scene.run("train tiny.toml --set metrics.trace_interval=1").succeeded();
    for name in ["trace.json", "config.toml", "metrics.jsonl", "checkpoints/latest", "checkpoints/best"] {
        let path = scene.path(&format!("runs/tiny/{name}"));
        let _ = std::fs::remove_file(&path);
        mkfifo(&format!("runs/tiny/{name}"));
        for (command, reads) in [
            ("report trace runs/tiny", name == "trace.json"),
            ("report run runs/tiny", name == "metrics.jsonl"),
            ("report html runs/tiny", name == "metrics.jsonl"),
        ] {
            let outcome = scene.run(command);
            if reads {
                tells(&outcome.refused(), &[&format!("runs/tiny/{name}"), "it is not a regular file"]);
            } else {
                assert_ne!(outcome.code, None, "{outcome:?}");
            }
        }
        if name.starts_with("checkpoints") {
            scene.run("checkpoint list runs/tiny").succeeded();
        }
    }
}

/// A shell must read names as they are, and names must not control the terminal.
#[test]
fn names_are_quoted_in_commands_and_harmless_on_a_terminal() {
    let scene = Scene::with_corpus();
    let mut train = scene.command("train tiny.toml --set");
    train.args(["run.folder=my runs", "--set", "generate.prompt=it's"]);
    let printed = Running::start(train).end().succeeded();
    tells(
        &printed,
        &[
            r"trireme generate 'my runs/tiny' --prompt 'it'\''s'",
            "trireme eval 'my runs/tiny' DATA",
            "trireme checkpoint export 'my runs/tiny' exported",
            "tensorboard --logdir 'my runs'",
        ],
    );
    std::fs::create_dir(scene.path("not prepared")).unwrap();
    let mut train = scene.command("train tiny.toml --set");
    train.arg("data.folder=not prepared");
    tells(&Running::start(train).end().refused(), &["trireme prepare INPUT… --out 'not prepared'"]);
    let mut unknown = scene.command("train");
    unknown.arg("\u{1b}[31m.toml");
    let error = Running::start(unknown).end().refused();
    assert!(error.contains(r"\u{1b}[31m.toml") && !error.contains('\u{1b}'), "{error:?}");
}

#[test]
fn a_port_that_is_taken() {
    let scene = Scene::with_corpus();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = scene.run(&format!("train tiny.toml --set launch.master_port={port}")).refused();
    tells(&error, &[&format!("TCP port {port}"), "[launch] master_port", "Address already in use"]);
    let error = Running::start(scene.worker(0, port, "train tiny.toml")).end().refused();
    tells(&error, &[&format!("127.0.0.1:{port}"), "MASTER_PORT", "Address already in use"]);
    assert!(!scene.path("runs/tiny/metrics.jsonl").exists());
}

#[test]
fn a_run_that_another_process_trains() {
    let scene = Scene::with_corpus();
    let mut first = Running::start(scene.command("train tiny.toml --set training.steps=1000000000"));
    first.until("step: 2 ");
    for workers in [1, 2] {
        let error = scene.run(&format!("train tiny.toml --workers {workers}")).refused();
        tells(&error, &["another process is using the run runs/tiny"]);
    }
    first.until("step: 3 ");
}

#[test]
fn environments_that_describe_no_worker() {
    let scene = Scene::with_corpus();
    let before = scene.everything();
    for (variables, facts) in [
        ("RANK=0", ["RANK is set", "WORLD_SIZE is not"]),
        ("RANK=x WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["RANK is 'x'", "expected"]),
        ("RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", ["RANK = 2", "WORLD_SIZE = 2"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a..b MASTER_PORT=1", ["'a..b'", "MASTER_ADDR"]),
    ] {
        let mut command = scene.command("train tiny.toml");
        command.envs(variables.split(' ').filter_map(|variable| variable.split_once('=')));
        tells(&Running::start(command).end().refused(), &facts);
        assert!(scene.everything() == before);
    }
    let worker = scene.worker(0, 1, "train tiny.toml --workers 2");
    tells(&Running::start(worker).end().refused(), &["--workers", "another launcher", "one of 2"]);
}
