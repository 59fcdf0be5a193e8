//! Worlds whose data is encrypted.
#![cfg(feature = "tls")]

#[allow(dead_code, reason = "the other test binaries use the rest")]
#[path = "comm/support/mod.rs"]
mod support;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;
use support::operations::check_algorithm;
use support::{join_all, join_options, ranks, small_pieces};
use tempfile::TempDir;
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{CommError, JoinOptions, TlsOptions, TransportChoice, join};
use trireme_schedule::collective::{Algorithm, FlatAlgorithm};

/// Options of a TCP world whose workers use one of the test certificates, and the folder of its key.
fn options(world_size: usize, holder: &str) -> (JoinOptions, TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
    let key = folder.path().join("key");
    std::fs::copy(given.join(format!("{holder}.key")), &key).expect("a copy");
    set_mode(&key, 0o600);
    let certificate = given.join(format!("{holder}.pem"));
    let authority = given.join("authority.pem");
    let tls = TlsOptions { certificate, key, authority, name: "trireme".to_owned() };
    let options = join_options(world_size, TransportChoice::Tcp, &small_pieces());
    (JoinOptions { tls: Some(tls), ..options }, folder)
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("an own file");
}

#[test]
fn an_encrypted_world_computes_the_same() {
    let (options, _folder) = options(3, "worker");
    let groups = join_all(&ranks(&options, &[0, 1, 2]));
    std::thread::scope(|scope| {
        for group in groups {
            let group = group.expect("joined");
            scope.spawn(move || {
                for len in [0, 1, 100, 100_000] {
                    let mut buffer = group.buffer::<f32>(len).expect("memory");
                    buffer.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 7 + group.rank().0) as f32);
                    let sum = group.all_reduce(buffer, ReduceOp::Sum).wait().expect("everybody is here");
                    assert!(sum.iter().enumerate().all(|(i, x)| *x == (3 * (i % 7) + 3) as f32), "{len}");
                }
                group.barrier().wait().expect("everybody is here");
            });
        }
    });
}

#[test]
fn every_algorithm_works_over_encrypted_connections() {
    for algorithm in FlatAlgorithm::ALL.map(Algorithm::from) {
        let (mut options, _folder) = options(3, "worker");
        options.group.algorithm = Some(algorithm);
        options.group.keeps_order = false;
        let groups = join_all(&ranks(&options, &[0, 1, 2]));
        std::thread::scope(|scope| {
            for group in groups {
                let group = group.expect("joined");
                scope.spawn(move || {
                    if !algorithm.needs_shared_memory() {
                        check_algorithm(&group, algorithm);
                    }
                });
            }
        });
    }
}

#[test]
fn all_workers_encrypt_or_none_does() {
    let (encrypted, _folder) = options(2, "worker");
    std::thread::scope(|scope| {
        let host = scope.spawn(|| join(&JoinOptions { rank: Rank(0), ..encrypted.clone() }));
        let plain = JoinOptions { rank: Rank(1), tls: None, ..encrypted.clone() };
        let refused = join(&plain).expect_err("refused").to_string();
        assert!(refused.contains("tls (rank 0 has true)"), "{refused}");
        join(&JoinOptions { rank: Rank(1), ..encrypted.clone() }).expect("joined");
        host.join().expect("no panic").expect("joined");
    });
}

#[test]
fn a_certificate_of_another_authority_is_refused() {
    let (good, _folder) = options(2, "worker");
    let (stranger, _other_folder) = options(2, "stranger");
    let join_timeout = Duration::from_secs(20);
    let worker = JoinOptions { rank: Rank(0), join_timeout, ..good.clone() };
    let stranger = JoinOptions { rank: Rank(1), tls: stranger.tls, ..worker.clone() };
    for outcome in join_all(&[worker, stranger]) {
        let failure = outcome.expect_err("no certificate");
        assert!(matches!(failure, CommError::Rendezvous { .. }), "{failure}");
    }
}

#[test]
fn an_error_names_the_invalid_tls_file() {
    let (good, folder) = options(2, "worker");
    let Some(files) = &good.tls else { panic!("files") };
    let refuses = |tls: TlsOptions, path: &Path| match join(&JoinOptions { tls: Some(tls), ..good.clone() }) {
        Err(CommError::TlsFile { path: named, .. }) => assert_eq!(named, path),
        outcome => panic!("{outcome:?}"),
    };
    let missing = folder.path().join("missing");
    refuses(TlsOptions { certificate: missing.clone(), ..files.clone() }, &missing);
    refuses(TlsOptions { certificate: files.key.clone(), ..files.clone() }, &files.key);
    refuses(TlsOptions { authority: files.key.clone(), ..files.clone() }, &files.key);
    // The key of another certificate.
    let (other, _other_folder) = options(2, "stranger");
    let other = other.tls.expect("files");
    refuses(TlsOptions { key: other.key, ..files.clone() }, &files.certificate);
    set_mode(&files.key, 0o644);
    refuses(files.clone(), &files.key);
    set_mode(&files.key, 0o600);
    let name =
        JoinOptions { tls: Some(TlsOptions { name: "no name".to_owned(), ..files.clone() }), ..good.clone() };
    assert!(matches!(join(&name), Err(CommError::Options { .. })));
}
