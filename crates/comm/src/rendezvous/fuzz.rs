//! Tests with hostile introductions, messages and entire handshakes.

use super::handshake::{HandshakeAcceptor, HandshakeStep, Introduction, proof};
use super::hello::Hello;
use super::key::{Key, NONCE_BYTES, Nonce};
use super::message::{HEADER_BYTES, Message, TEXT_BYTES_MAX, Table, body_bytes};
use super::rank_address::RankAddress;
use super::session::PeerHello;
use crate::fuzz::Fuzzer;
use crate::{JoinOptions, Secret};
use trireme_base::Rank;

const WORLD_SIZE: usize = 4;

fn rank_address() -> RankAddress {
    RankAddress {
        host: 1 << 100 | 7,
        socket_id: 8,
        address: "[2001:db8::1]:4000".parse().expect("an address"),
    }
}

fn hello() -> Hello {
    Hello::of(&JoinOptions::new(Rank(1), WORLD_SIZE), rank_address())
}

fn key() -> Key {
    Key::of(Some(&Secret::new("0123456789abcdef").expect("long enough")))
}

#[test]
fn hostile_hellos_are_read_or_refused() {
    let options = JoinOptions::new(Rank(0), WORLD_SIZE);
    let mut fuzzer = Fuzzer::new("hellos", vec![hello().encode().to_vec()]);
    let mut num_welcome = 0;
    for _ in 0..150_000 {
        if let Some(hello) = Hello::decode(fuzzer.next()) {
            assert_eq!(Hello::decode(&hello.encode()), Some(hello));
            if hello.objection(&options).is_none() {
                assert!(
                    (1..WORLD_SIZE as u64).contains(&hello.rank) && hello.world_size == WORLD_SIZE as u64
                );
                num_welcome += 1;
            }
        }
    }
    assert!(num_welcome > 1000, "{num_welcome}");
}

#[test]
fn hostile_introductions_of_members_are_read_or_refused() {
    let valid = [0, 1].map(|purpose| PeerHello { from: 3, to: 1, purpose }.encode().to_vec());
    let mut fuzzer = Fuzzer::new("members", valid.to_vec());
    for _ in 0..50_000 {
        let bytes = fuzzer.next();
        if let Some(hello) = PeerHello::decode(bytes) {
            assert_eq!(hello.encode(), bytes);
        }
    }
}

#[test]
fn hostile_messages_are_read_or_refused_within_their_bounds() {
    let table = Table {
        session: [77; NONCE_BYTES],
        tries_shm: true,
        rank_addresses: vec![rank_address(); WORLD_SIZE],
    };
    let messages = [
        Message::Refused("because".to_owned()),
        Message::Table(table),
        Message::Report(Ok(())),
        Message::Report(Err("no".to_owned())),
        Message::Challenge([1; NONCE_BYTES]),
        Message::Welcome([2; NONCE_BYTES]),
    ];
    let valid: Vec<_> = messages.iter().map(Message::encode).collect();
    let body_bytes_max = TEXT_BYTES_MAX.max(NONCE_BYTES + 8 + 48 * WORLD_SIZE);
    let mut fuzzer = Fuzzer::new("messages", valid);
    let mut num_read = 0;
    for _ in 0..200_000 {
        let bytes = fuzzer.next();
        if let Some(header) = bytes.first_chunk::<HEADER_BYTES>()
            && let Ok(num_bytes) = body_bytes(header, WORLD_SIZE)
        {
            assert!(num_bytes <= body_bytes_max, "{num_bytes}");
        }
        match Message::decode(bytes, WORLD_SIZE) {
            Ok(Message::Table(table)) => assert_eq!(table.rank_addresses.len(), WORLD_SIZE),
            // An invalid UTF-8 byte becomes a character of three bytes.
            Ok(Message::Refused(text) | Message::Report(Err(text))) => {
                assert!(text.len() <= 3 * TEXT_BYTES_MAX && !text.contains(char::is_control));
            }
            Ok(Message::Report(Ok(())) | Message::Challenge(_) | Message::Welcome(_)) => {}
            Err(_) => continue,
        }
        num_read += 1;
    }
    assert!((10_000..190_000).contains(&num_read), "{num_read}");
}

/// Runs the accepting side of a handshake with these two messages. Returns whether it accepts the peer as a member.
fn is_accepted(messages: [&[u8]; 2], challenge: Nonce) -> bool {
    let mut handshake = HandshakeAcceptor::<Hello>::new(key(), challenge);
    for turn in messages {
        if handshake.check_prefix(turn).is_err() {
            return false;
        }
        match handshake.handle(turn) {
            HandshakeStep::Answer(answer) => assert_eq!(answer, Message::Challenge(challenge)),
            HandshakeStep::Authenticated(_) => return true,
            HandshakeStep::Refused(_) => return false,
        }
        assert!(handshake.message_bytes() < 256);
    }
    false
}

#[test]
fn no_handshake_succeeds_without_the_secret() {
    let (challenge, earlier) = ([3; NONCE_BYTES], [4; NONCE_BYTES]);
    let opening = [hello().encode().as_slice(), &[5; NONCE_BYTES]].concat();
    let right = proof(&key(), &opening, &challenge);
    assert!(is_accepted([&opening, &right], challenge), "an honest worker is let in");
    let replayed = proof(&key(), &opening, &earlier);
    let without = proof(&Key::of(None), &opening, &challenge);

    let mut openings = Fuzzer::new("openings", vec![opening.clone()]);
    let mut proofs =
        Fuzzer::new("proofs", vec![right.to_vec(), replayed.to_vec(), without.to_vec(), challenge.to_vec()]);
    for _ in 0..70_000 {
        let (first, second) = (openings.next().to_vec(), proofs.next().to_vec());
        let is_honest = |first: &[u8], second: &[u8]| first == opening && second == right;
        for turns in [[&first, right.as_slice()], [&opening, &second], [&first, &second]] {
            assert_eq!(is_accepted(turns, challenge), is_honest(turns[0], turns[1]), "{turns:?}");
        }
    }
    for stale in [replayed, without, challenge] {
        assert!(!is_accepted([&opening, &stale], challenge));
    }
}
