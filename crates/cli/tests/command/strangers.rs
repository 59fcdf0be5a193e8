//! Workers that do not know the secret, and worlds that have none.

use crate::common::{Running, Scene, free_port, tells};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

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
    // An address of documentation (RFC 5737), which no host has.
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
