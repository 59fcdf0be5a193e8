//! Connections without the job's secret, and worlds that have no secret.

use crate::common::{Fixture, Running, assert_contains, free_port};
use rustix::process::{Resource, Rlimit, prlimit};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

const SECRET: &str = "4f5c8e6b7d9a0c1e2b3f";

#[test]
fn a_worker_without_the_secret_is_refused_and_changes_nothing() {
    let fixture = Fixture::with_corpus();
    fixture.write("secret", format!("{SECRET}\n"));
    let set_mode = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(fixture.path("secret"), permissions).unwrap();
    };
    set_mode(0o600);
    let port = free_port();
    let train = "train tiny.toml --set comm.secret_file=secret";
    let worker = |rank, secret: &str| {
        let mut command: Command = fixture.worker(rank, port, train);
        command.env("TRIREME_SECRET", secret);
        Running::start(command)
    };
    let host = worker(0, "");
    let error = worker(1, "another secret of another job").end().refused();
    assert_contains(&error, &["rejected rank 1", "TRIREME_SECRET", "secret_file"]);
    let peer = worker(1, SECRET);
    let outcome = host.end();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_contains(
        &outcome.stderr,
        &["warning: refused a connection: 127.0.0.1:", "does not know the secret"],
    );
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    peer.end().succeeded();

    set_mode(0o644);
    assert_contains(
        &worker(0, "").end().refused(),
        &["cannot read the secret from secret", "644", "chmod 600"],
    );
    assert_contains(&worker(0, "too short").end().refused(), &["9", "openssl rand -hex 32"]);
}

#[test]
fn a_world_of_several_hosts_needs_a_secret() {
    let fixture = Fixture::with_corpus();
    let before = fixture.everything();
    // An address reserved for documentation (RFC 5737), which no host has.
    let worker = |arguments: &str| {
        let mut command: Command = fixture.worker(0, free_port(), arguments);
        command.env("MASTER_ADDR", "192.0.2.1");
        Running::start(command).end().refused()
    };
    assert_contains(
        &worker("train tiny.toml"),
        &["192.0.2.1", "TRIREME_SECRET", "secret_file", "require_secret"],
    );
    assert_contains(
        &worker("train tiny.toml --set comm.require_secret=false"),
        &["cannot listen on 192.0.2.1"],
    );
    assert_contains(
        &worker("train tiny.toml --set comm.interface=nowhere0"),
        &["nowhere0", "[comm] interface"],
    );
    assert!(fixture.everything() == before);
}

/// More silent connections than rank 0 may have open files.
#[test]
fn silent_connections_that_use_all_open_files_keep_no_worker_out() {
    let fixture = Fixture::with_corpus();
    let port = free_port();
    let host = Running::start(fixture.worker(0, port, "train tiny.toml"));
    let limit = Rlimit { current: Some(40), maximum: Some(40) };
    prlimit(Some(host.process()), Resource::Nofile, limit).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let connect = || loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
    };
    let silent_connections: Vec<TcpStream> = (0..60).map(|_| connect()).collect();
    let peer = Running::start(fixture.worker(1, port, "train tiny.toml"));
    let outcome = host.end();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    peer.end().succeeded();
    drop(silent_connections);
}
