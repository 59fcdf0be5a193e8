//! Connections without the job's secret, and worlds that have no secret.

use crate::common::{Running, Scene, free_port, tells};
use rustix::process::{Resource, Rlimit, prlimit};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

const SECRET: &str = "4f5c8e6b7d9a0c1e2b3f";

#[test]
fn who_does_not_know_the_secret_changes_nothing() {
    let scene = Scene::with_corpus();
    scene.write("secret", format!("{SECRET}\n"));
    let set_mode = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(scene.path("secret"), permissions).unwrap();
    };
    set_mode(0o600);
    let port = free_port();
    let train = "train tiny.toml --set comm.secret_file=secret";
    let worker = |rank, secret: &str| {
        let mut command: Command = scene.worker(rank, port, train);
        command.env("TRIREME_SECRET", secret);
        Running::start(command)
    };
    let host = worker(0, "");
    let error = worker(1, "another secret of another job").end().refused();
    tells(&error, &["rejected rank 1", "TRIREME_SECRET", "secret_file"]);
    let guest = worker(1, SECRET);
    let outcome = host.end();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    tells(&outcome.stderr, &["warning: refused a connection: 127.0.0.1:", "does not know the secret"]);
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    guest.end().succeeded();

    set_mode(0o644);
    tells(&worker(0, "").end().refused(), &["cannot read the secret from secret", "644", "chmod 600"]);
    tells(&worker(0, "too short").end().refused(), &["9", "openssl rand -hex 32"]);
}

#[test]
fn a_world_of_several_hosts_needs_a_secret() {
    let scene = Scene::with_corpus();
    let before = scene.everything();
    // An address reserved for documentation (RFC 5737), which no host has.
    let worker = |arguments: &str| {
        let mut command: Command = scene.worker(0, free_port(), arguments);
        command.env("MASTER_ADDR", "192.0.2.1");
        Running::start(command).end().refused()
    };
    tells(&worker("train tiny.toml"), &["192.0.2.1", "TRIREME_SECRET", "secret_file", "require_secret"]);
    tells(&worker("train tiny.toml --set comm.require_secret=false"), &["cannot listen on 192.0.2.1"]);
    tells(&worker("train tiny.toml --set comm.interface=nowhere0"), &["nowhere0", "[comm] interface"]);
    assert!(scene.everything() == before);
}

/// More silent connections than rank 0 may have open files.
#[test]
fn strangers_who_hold_all_open_files_keep_nobody_out() {
    let scene = Scene::with_corpus();
    let port = free_port();
    let host = Running::start(scene.worker(0, port, "train tiny.toml"));
    let limit = Rlimit { current: Some(40), maximum: Some(40) };
    prlimit(Some(host.process()), Resource::Nofile, limit).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let knock = || loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    let strangers: Vec<TcpStream> = (0..60).map(|_| knock()).collect();
    let guest = Running::start(scene.worker(1, port, "train tiny.toml"));
    let outcome = host.end();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    guest.end().succeeded();
    drop(strangers);
}
