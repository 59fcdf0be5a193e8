//! Joining a world, and failures while joining.

use crate::support::{check_world, join_all, join_options, ranks, small_pieces};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;
use trireme_base::{Rank, with_sources};
#[cfg(not(feature = "tls"))]
use trireme_comm::TlsOptions;
use trireme_comm::{
    CommError, GivenCosts, Group, GroupOptions, JoinOptions, Secret, TransportChoice, TransportKind, join,
};
use trireme_schedule::collective::LinkCost;
use trireme_testkit::or_skip;

fn options(world_size: usize) -> JoinOptions {
    join_options(world_size, TransportChoice::Auto, &small_pieces())
}

#[test]
fn ranks_of_one_host_share_memory_unless_told_otherwise() {
    let auto = options(3);
    check_world(join_all(&ranks(&auto, &[2, 0, 1])), TransportKind::Shm);
    let tcp = join_options(3, TransportChoice::Tcp, &small_pieces());
    check_world(join_all(&ranks(&tcp, &[1, 2, 0])), TransportKind::Tcp);
}

#[test]
fn ipv6_works_where_the_host_has_it() {
    // Without and with the brackets of a URL.
    for address in ["::1", "[::1]"] {
        let Some(probe) = or_skip("IPv6 on loopback", TcpListener::bind("[::1]:0")) else { return };
        let master_port = probe.local_addr().expect("an address").port();
        drop(probe);
        let tcp = join_options(2, TransportChoice::Tcp, &small_pieces());
        let options = JoinOptions { master_addr: address.to_owned(), master_port, ..tcp };
        check_world(join_all(&ranks(&options, &[0, 1])), TransportKind::Tcp);
    }
}

#[test]
fn ranks_meet_on_the_interface_that_is_asked_for() {
    let tcp = join_options(2, TransportChoice::Tcp, &small_pieces());
    for interface in ["lo", "127.0.0.1"] {
        let options = JoinOptions { interface: Some(interface.to_owned()), ..tcp.clone() };
        check_world(join_all(&ranks(&options, &[0, 1])), TransportKind::Tcp);
    }
    let options = JoinOptions { interface: Some("no interface".to_owned()), ..tcp };
    let failure = join(&options).expect_err("there is none");
    assert!(matches!(failure, CommError::Interface { .. }), "{failure}");
}

/// Splits a world of three ranks. The last rank gets a group of its own.
fn check_splits(world: Vec<Result<Group, CommError>>) {
    std::thread::scope(|scope| {
        for group in world {
            let group = group.expect("joined");
            scope.spawn(move || {
                let part = group.split(Some(group.rank().0 as u64 / 2), 0).expect("split").expect("a color");
                assert_eq!(part.world_size(), if group.rank() == Rank(2) { 1 } else { 2 });
                part.barrier().wait().expect("all are there");
            });
        }
    });
}

#[test]
fn rank_0_may_listen_on_all_addresses_of_its_host() {
    let tcp = join_options(3, TransportChoice::Tcp, &small_pieces());
    // A port that no other test uses on any address.
    let options = JoinOptions { secret: Secret::random().ok(), master_port: 29_499, ..tcp };
    // Rank 0 uses its own name, and the others use the name of a service, as in a Kubernetes cluster.
    let mut own = ranks(&options, &[0, 1, 2]);
    own[0].listen = Some("0.0.0.0".parse().expect("an address"));
    own[0].master_addr = "localhost".to_owned();
    check_splits(join_all(&own));
    own[0].secret = None;
    let failure = join(&own[0]).expect_err("anybody could come");
    assert!(matches!(failure, CommError::SecretMissing { .. }), "{failure}");
}

#[test]
fn ranks_listen_at_the_ports_that_they_are_given() {
    // Below the system's ephemeral ports. Ranks 1 and 2 listen on 127.0.0.1, from which they reach rank 0.
    let options = |ports| JoinOptions {
        ports: Some(ports),
        join_timeout: Duration::from_secs(1),
        ..join_options(3, TransportChoice::Tcp, &small_pieces())
    };
    check_splits(join_all(&ranks(&options(23_400..=23_405), &[0, 1, 2])));
    let [host, peer, other] =
        <[_; 3]>::try_from(join_all(&ranks(&options(23_410..=23_410), &[0, 1, 2]))).expect("three outcomes");
    let failures = [host, peer, other].map(|outcome| outcome.expect_err("a port is missing"));
    let sources = failures.each_ref().map(|failure| with_sources(failure));
    let is_told = |text: &&String| text.contains("none of the ports 23410-23410 is free");
    assert_eq!(sources.iter().filter(is_told).count(), 1, "{sources:?}");
}

#[test]
fn a_second_rank_of_the_same_number_is_refused() {
    let options = options(3);
    let rank = |rank| JoinOptions { rank: Rank(rank), ..options.clone() };
    let (sender, outcomes) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for options in [rank(0), rank(1), rank(1)] {
            let sender = sender.clone();
            scope.spawn(move || sender.send(join(&options)).expect("somebody listens"));
        }
        // The other two ranks wait for rank 2.
        let refused = outcomes.recv().expect("an outcome").expect_err("a twin");
        assert!(refused.to_string().contains("rank 1 has already joined"), "{refused}");
        let mut world = Vec::from([join(&rank(2))]);
        world.extend(outcomes.iter().take(2));
        check_world(world, TransportKind::Shm);
    });
}

#[test]
fn missing_ranks_are_named_on_both_sides() {
    let options = JoinOptions { join_timeout: Duration::from_secs(1), ..options(4) };
    let intruder = JoinOptions { rank: Rank(3), world_size: 9, ..options.clone() };
    let [host, peer, refused] = <[_; 3]>::try_from(join_all(&[
        JoinOptions { rank: Rank(0), ..options.clone() },
        JoinOptions { rank: Rank(2), ..options },
        intruder,
    ]))
    .expect("three outcomes");
    let host = host.expect_err("ranks are missing");
    let CommError::RanksMissing { missing, refused: turned_away, .. } = &host else { panic!("{host}") };
    assert_eq!(*missing, [Rank(1), Rank(3)]);
    assert_eq!(turned_away.len(), 1, "{turned_away:?}");
    assert!(host.to_string().contains("world_size 9"), "{host}");
    let peer = peer.expect_err("ranks are missing");
    assert!(matches!(peer, CommError::Refused { .. }) && peer.to_string().contains("1, 3"), "{peer}");
    assert!(matches!(refused, Err(CommError::Refused { .. })));
}

#[test]
fn without_rank_0_the_address_is_named() {
    let options = JoinOptions { rank: Rank(1), join_timeout: Duration::from_millis(100), ..options(2) };
    let failure = join(&options).expect_err("nobody listens");
    assert!(matches!(failure, CommError::Unreachable { rank: Rank(1), .. }), "{failure}");
    assert!(failure.to_string().contains(&options.master_addr), "{failure}");
}

#[test]
fn a_busy_port_is_named() {
    let options = options(2);
    let taken = TcpListener::bind((options.master_addr.as_str(), options.master_port)).expect("a free port");
    let failure = join(&options).expect_err("the port is taken");
    assert!(matches!(failure, CommError::Listen { .. }), "{failure}");
    assert!(failure.to_string().contains(&taken.local_addr().expect("an address").to_string()), "{failure}");
}

#[test]
fn an_address_that_names_no_host_is_refused() {
    let options = JoinOptions { master_addr: "no\0host".to_owned(), ..options(2) };
    assert!(matches!(join(&options), Err(CommError::Resolve { .. })));
    // A documentation address (RFC 5737), which no host has.
    let options = JoinOptions {
        master_addr: "192.0.2.1".to_owned(),
        secret: Some(Secret::random().expect("random numbers")),
        ..options
    };
    assert!(matches!(join(&options), Err(CommError::Listen { .. })));
}

#[test]
fn another_program_at_the_address_is_recognised() {
    let options = JoinOptions { rank: Rank(1), ..options(2) };
    let other = TcpListener::bind((options.master_addr.as_str(), options.master_port)).expect("a free port");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = other.accept().expect("a visitor");
            stream.write_all(b"220 mail.example.org ESMTP ready, go ahead\r\n").expect("sent");
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let failure = join(&options).expect_err("that is not rank 0");
        let source = std::error::Error::source(&failure).map(ToString::to_string).unwrap_or_default();
        assert!(source.contains("does not speak this program's"), "{failure}: {source}");
    });
}

#[test]
fn invalid_options_are_refused_before_any_socket_is_opened() {
    let good = options(2);
    let group = |group: GroupOptions| JoinOptions { group, ..good.clone() };
    let defaults = GroupOptions::default();
    let costs = |latency, bandwidth| {
        let across = Some(LinkCost::of(latency, bandwidth));
        GivenCosts { across, ..GivenCosts::default() }
    };
    let wrong = [
        JoinOptions { world_size: 0, ..good.clone() },
        JoinOptions { world_size: 1 << 20, ..good.clone() },
        JoinOptions { rank: Rank(2), ..good.clone() },
        JoinOptions { master_port: 0, ..good.clone() },
        JoinOptions { join_timeout: Duration::ZERO, ..good.clone() },
        JoinOptions { join_timeout: Duration::MAX, ..good.clone() },
        group(GroupOptions { timeout: Duration::ZERO, ..defaults.clone() }),
        group(GroupOptions { chunk_bytes: 0, ..defaults.clone() }),
        group(GroupOptions { chunk_bytes: usize::MAX, ..defaults.clone() }),
        group(GroupOptions { short_bytes_max: usize::MAX, ..defaults.clone() }),
        group(GroupOptions { costs: costs(0.0, 1.0), ..defaults.clone() }),
        group(GroupOptions { costs: costs(1.0, 0.0), ..defaults.clone() }),
        group(GroupOptions { costs: costs(f64::NAN, 1.0), ..defaults }),
    ];
    for options in wrong {
        assert!(matches!(join(&options), Err(CommError::Options { .. })), "{options:?}");
    }
}

#[test]
fn a_world_of_one_joins_without_a_network() {
    let options = JoinOptions { master_addr: "no\0host".to_owned(), ..options(1) };
    assert_eq!(join(&options).expect("alone").transport(), TransportKind::Single);
}

#[cfg(not(feature = "tls"))]
#[test]
fn a_program_without_tls_says_so() {
    let [certificate, key, authority] = ["certificate.pem", "key", "authority.pem"].map(Into::into);
    let tls = TlsOptions { certificate, key, authority, name: "trireme".to_owned() };
    let options = join_options(2, TransportChoice::Tcp, &small_pieces());
    for outcome in join_all(&ranks(&JoinOptions { tls: Some(tls), ..options }, &[0, 1])) {
        assert!(matches!(outcome, Err(CommError::TlsUnavailable)), "{outcome:?}");
    }
}
