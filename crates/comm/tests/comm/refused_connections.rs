//! Connections of strangers, which must not join a world.

use crate::support::{check_world, join_all, join_options, ranks, small_pieces};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use trireme_base::Rank;
use trireme_comm::{
    CommError, GroupOptions, JoinOptions, OnRefusal, Refusal, Secret, TransportChoice, TransportKind, join,
};
use trireme_testkit::or_skip;

fn options(world_size: usize) -> JoinOptions {
    join_options(world_size, TransportChoice::Auto, &small_pieces())
}

fn secret() -> Option<Secret> {
    Some(Secret::random().expect("random numbers"))
}

/// The options with a listener that records refusals, and the record.
fn recording_refusals(options: JoinOptions) -> (JoinOptions, Arc<Mutex<Vec<Refusal>>>) {
    let refusals = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&refusals);
    let on_refusal = OnRefusal::new(move |refusal| told.lock().expect("no panic").push(refusal.clone()));
    (JoinOptions { on_refusal: Some(on_refusal), ..options }, refusals)
}

/// Connects to rank 0 as soon as it listens.
fn connect_to_root(options: &JoinOptions) -> TcpStream {
    loop {
        if let Ok(stream) = TcpStream::connect((options.master_addr.as_str(), options.master_port)) {
            return stream;
        }
        std::thread::yield_now();
    }
}

#[test]
fn strangers_are_refused_and_the_others_join() {
    let options = options(3);
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| join_all(&ranks(&options, &[0, 2])));
        let mut silent = connect_to_root(&options);
        let mut garbage = connect_to_root(&options);
        garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
        let mut answer = Vec::new();
        // A reset instead of a clean end is fine, too.
        let _ = garbage.read_to_end(&mut answer);
        assert!(String::from_utf8_lossy(&answer).contains("does not speak"), "{answer:?}");
        silent.write_all(b"TRIR").expect("sent");

        let other_world = JoinOptions { rank: Rank(1), world_size: 4, ..options.clone() };
        let other_job = JoinOptions { rank: Rank(1), job: "another".to_owned(), ..options.clone() };
        let other_options = GroupOptions { chunk_bytes: 4096, ..options.group.clone() };
        let other_group = JoinOptions { rank: Rank(1), group: other_options, ..options.clone() };
        for (stranger, why) in [
            (other_world, "world_size 4"),
            (other_job, "a different job"),
            (other_group, "chunk_bytes (rank 0 has "),
        ] {
            let refused = join(&stranger).expect_err("refused");
            let CommError::Refused { rank: Rank(1), reason, .. } = &refused else { panic!("{refused}") };
            assert!(reason.contains(why), "{reason}");
        }
        let mut world = join_all(&ranks(&options, &[1]));
        world.extend(joined.join().expect("no panic"));
        check_world(world, TransportKind::Shm);
    });
}

#[test]
fn a_process_without_the_secret_is_refused() {
    for (choice, kind) in
        [(TransportChoice::Shm, TransportKind::Shm), (TransportChoice::Tcp, TransportKind::Tcp)]
    {
        let without = join_options(3, choice, &small_pieces());
        let (good, refusals) = recording_refusals(JoinOptions { secret: secret(), ..without.clone() });
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| join_all(&ranks(&good, &[0, 2])));
            for wrong in [secret(), None] {
                let stranger = JoinOptions { rank: Rank(1), secret: wrong, ..without.clone() };
                let refused = join(&stranger).expect_err("refused");
                let CommError::Refused { rank: Rank(1), reason, .. } = &refused else { panic!("{refused}") };
                assert!(reason.contains("the secret of this job"), "{reason}");
            }
            let mut world = join_all(&ranks(&good, &[1]));
            world.extend(joined.join().expect("no panic"));
            check_world(world, kind);
        });
        let refusals = refusals.lock().expect("no panic");
        assert_eq!(refusals.len(), 2, "{refusals:?}");
        for refusal in refusals.iter() {
            assert!(refusal.address.is_some_and(|address| address.ip().is_loopback()), "{refusal}");
            assert!(refusal.reason.contains("does not know the secret"), "{refusal}");
        }
    }
}

#[test]
fn public_addresses_need_a_secret() {
    let options = options(2);
    for address in ["192.0.2.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:192.0.2.1"] {
        let open = JoinOptions { master_addr: address.to_owned(), ..options.clone() };
        for rank in ranks(&open, &[0, 1]) {
            let failure = join(&rank).expect_err("no secret");
            assert!(matches!(failure, CommError::SecretMissing { .. }), "{failure}");
            assert!(failure.to_string().contains("have no secret"), "{failure}");
        }
    }
    let allowed = JoinOptions { master_addr: "192.0.2.1".to_owned(), requires_secret: false, ..options };
    assert!(matches!(join(&allowed), Err(CommError::Listen { .. })));
}

/// Poses as rank 0 to record a worker's introduction and its proof for a challenge of zeros.
fn record_introduction(options: &JoinOptions) -> Vec<u8> {
    let listener = TcpListener::bind((options.master_addr.as_str(), 0)).expect("a free port");
    let master_port = listener.local_addr().expect("an address").port();
    let victim = JoinOptions { rank: Rank(1), master_port, ..options.clone() };
    std::thread::scope(|scope| {
        scope.spawn(|| join(&victim).expect_err("nobody who knows the secret answered"));
        let (mut stream, _) = listener.accept().expect("a worker");
        let mut said = vec![0; 216];
        stream.read_exact(&mut said).expect("a hello");
        let challenge =
            [b"TRIRMSG2".as_slice(), &5_u64.to_le_bytes(), &32_u64.to_le_bytes(), &[0; 32]].concat();
        stream.write_all(&challenge).expect("sent");
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).expect("a proof");
        // A welcome with the worker's own proof, which the worker must not accept.
        let welcome = [b"TRIRMSG2".as_slice(), &6_u64.to_le_bytes(), &32_u64.to_le_bytes(), &proof].concat();
        stream.write_all(&welcome).expect("sent");
        said.extend(proof);
        said
    })
}

#[test]
fn hostile_clients_change_nothing() {
    let good = JoinOptions { secret: secret(), ..options(3) };
    let overheard = record_introduction(&good);
    let (good, refusals) = recording_refusals(good);
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| join_all(&ranks(&good, &[0, 2])));
        let say = |bytes: &[u8]| {
            let mut stream = connect_to_root(&good);
            // Rank 0 may close the connection before it has received everything.
            let _ = stream.write_all(bytes);
            stream
        };
        let answer = |mut stream: TcpStream| {
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        };
        let half = say(&overheard[..60]);
        drop(say(&overheard[..60]));
        assert!(answer(say(&overheard)).contains("does not know the secret"));
        let huge = [b"TRIRMSG2".as_slice(), &2_u64.to_le_bytes(), &u64::MAX.to_le_bytes()].concat();
        assert!(answer(say(&huge)).contains("does not speak"));
        let endless = [b"TRIRJOI5".as_slice(), &[0xff; 1 << 16]].concat();
        let _endless = say(&endless);
        let other_job = JoinOptions { rank: Rank(1), job: "another".to_owned(), ..good.clone() };
        let other_secret = JoinOptions { rank: Rank(1), secret: secret(), ..good.clone() };
        for (stranger, why) in [(other_job, "a different job"), (other_secret, "does not know the secret")] {
            let refused = join(&stranger).expect_err("refused");
            assert!(refused.to_string().contains(why), "{refused}");
        }
        let mut world = join_all(&ranks(&good, &[1]));
        world.extend(joined.join().expect("no panic"));
        check_world(world, TransportKind::Shm);
        drop(half);
    });
    let refusals = refusals.lock().expect("no panic");
    for (why, num_times) in
        [("hung up", 1), ("does not speak", 2), ("a different job", 1), ("does not know the secret", 2)]
    {
        let found = refusals.iter().filter(|refusal| refusal.reason.contains(why)).count();
        assert_eq!(found, num_times, "{why}: {refusals:?}");
    }
}

#[test]
fn silent_connections_do_not_block_members() {
    let (good, refusals) = recording_refusals(JoinOptions { secret: secret(), ..options(2) });
    std::thread::scope(|scope| {
        let host = scope.spawn(|| join(&JoinOptions { rank: Rank(0), ..good.clone() }));
        let mut crowd: Vec<TcpStream> = (0..300).map(|_| connect_to_root(&good)).collect();
        let worker = join(&JoinOptions { rank: Rank(1), ..good.clone() });
        check_world(Vec::from([host.join().expect("no panic"), worker]), TransportKind::Shm);
        // A connection that is closed for lack of room gets no refusal, so its peer may retry.
        let mut said = Vec::new();
        crowd[0].read_to_end(&mut said).expect("an end");
        assert!(said.is_empty(), "{}", String::from_utf8_lossy(&said));
    });
    let refusals = refusals.lock().expect("no panic");
    assert!(!refusals.is_empty() && refusals.len() < 20, "{}", refusals.len());
    assert!(refusals[0].reason.contains("when others connected"), "{refusals:?}");
    assert!(refusals.last().is_some_and(|last| last.reason.contains("not reported")), "{refusals:?}");
}

#[test]
fn ipv6_strangers_are_refused_too() {
    let Some(probe) = or_skip("IPv6 on loopback", TcpListener::bind("[::1]:0")) else { return };
    let master_port = probe.local_addr().expect("an address").port();
    drop(probe);
    let tcp = join_options(2, TransportChoice::Tcp, &small_pieces());
    let good = JoinOptions { master_addr: "::1".to_owned(), master_port, secret: secret(), ..tcp };
    std::thread::scope(|scope| {
        let host = scope.spawn(|| join(&JoinOptions { rank: Rank(0), ..good.clone() }));
        let stranger = JoinOptions { rank: Rank(1), secret: None, ..good.clone() };
        assert!(matches!(join(&stranger), Err(CommError::Refused { .. })));
        let worker = join(&JoinOptions { rank: Rank(1), ..good.clone() });
        check_world(Vec::from([host.join().expect("no panic"), worker]), TransportKind::Tcp);
    });
}

/// Addresses on which this process listens at `port`, from the kernel's table for IPv4.
fn listening_addresses(port: u16) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let rows = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let listening = rows.filter(|row| row.get(3) == Some(&"0A")).filter_map(|row| {
        let (address, found) = row[1].split_once(':')?;
        (u16::from_str_radix(found, 16) == Ok(port)).then(|| address.to_owned())
    });
    listening.collect()
}

#[test]
fn only_the_address_of_the_rendezvous_is_listened_on() {
    let options = options(2);
    let probe = TcpListener::bind((options.master_addr.as_str(), 0)).expect("a free port");
    let master_port = probe.local_addr().expect("an address").port();
    drop(probe);
    let options = JoinOptions { master_port, ..options };
    std::thread::scope(|scope| {
        let host = scope.spawn(|| join(&JoinOptions { rank: Rank(0), ..options.clone() }));
        drop(connect_to_root(&options));
        let address: Ipv4Addr = options.master_addr.parse().expect("an address");
        let expected = format!("{:08X}", u32::from_ne_bytes(address.octets()));
        assert_eq!(listening_addresses(master_port), [expected]);
        let worker = join(&JoinOptions { rank: Rank(1), ..options.clone() });
        check_world(Vec::from([host.join().expect("no panic"), worker]), TransportKind::Shm);
    });
}
