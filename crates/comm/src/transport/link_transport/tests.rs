//! Tests against a peer that violates the protocol. The test controls the peer's ends of the connections.

use super::*;
use crate::Operation;
use crate::recorder::FlightRecorder;
use crate::transport::link::SocketLink;
use std::io::Write;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use trireme_base::{DType, ReduceOp};

struct Peer {
    data: UnixStream,
    control: UnixStream,
}

fn call(operation: Operation) -> Call {
    Call {
        is_awaited: true,
        operation,
        sequence: 7,
        started: Instant::now(),
        timeout: Duration::from_secs(20),
    }
}

/// Executes `operation` as rank 0 of two, after `act` has acted as the peer.
fn outcome(
    operation: Operation,
    payload: &mut Payload,
    act: impl FnOnce(&mut Peer),
) -> Result<(), CommError> {
    outcome_with(&GroupOptions::default(), operation, payload, act)
}

fn outcome_with(
    options: &GroupOptions,
    operation: Operation,
    payload: &mut Payload,
    act: impl FnOnce(&mut Peer),
) -> Result<(), CommError> {
    let (own_data, data) = UnixStream::pair().expect("sockets");
    let (own_control, control) = UnixStream::pair().expect("sockets");
    let row = |end: UnixStream| Vec::from([None, Some(OwnedFd::from(end))]);
    let links = Vec::from([None, Some(Link::Socket(SocketLink::new(own_data.into(), true)))]);
    let hosts = Hosts::single(2);
    let selection = Selection::new(hosts.clone(), false, Arc::default(), options);
    let mut linked = LinkTransport::new(Rank(0), hosts, links, None, None, selection, options)
        .expect("memory for a piece");
    let recorder = FlightRecorder::new(Rank(0), 2);
    let recorder = recorder.group("world".to_owned(), Rank(0), Vec::from([Rank(0), Rank(1)]));
    let mut control_connections = Control::new(row(own_control), recorder).expect("an epoll instance");
    let mut peer = Peer { data, control };
    act(&mut peer);
    linked.execute(&call(operation), payload, &mut control_connections)
}

const SUM: Operation =
    Operation::reduction_of(CollectiveKind::AllReduce.with_len(4), ReduceOp::Sum, DType::F32);

fn vector() -> Payload {
    Payload::Vector(crate::buffer::Storage::heap(trireme_base::DType::U8, 16).expect("memory"))
}

fn header(call: &Call, payload_bytes: u64) -> [u8; frame::HEADER_BYTES] {
    let (sequence, operation) = (call.sequence, call.operation);
    frame::Header { sequence, operation, payload_bytes, has_checksum: false }.encode()
}

#[test]
fn garbage_is_named_and_ends_the_operation() {
    let failure = outcome(SUM, &mut vector(), |peer| {
        peer.data.write_all(&[0xff; 4096]).expect("sent");
    })
    .expect_err("garbage");
    assert!(matches!(failure, CommError::Protocol { rank: Rank(1), sequence: 7, .. }), "{failure}");
}

/// Receives a broadcast of 16 bytes from rank 1, whose frame has flipped bits in the bytes `flips`.
fn broadcast_with(checksums: bool, flips: &[usize]) -> Result<(), CommError> {
    let operation = Operation::of(CollectiveKind::Broadcast.with_root(Rank(1), 16), DType::U8);
    let options = GroupOptions { checksums, ..GroupOptions::default() };
    let mut payload = vector();
    outcome_with(&options, operation, &mut payload, |peer| {
        let mut checksum = frame::Checksum::default();
        let header = frame::Header { sequence: 7, operation, payload_bytes: 16, has_checksum: true }.encode();
        let mut bytes = [&header[..], &[3; 16]].concat();
        checksum.add(&bytes);
        bytes.extend(checksum.to_bytes());
        flips.iter().for_each(|&flip| bytes[flip] ^= 0x10);
        // The frame of the barrier that follows.
        let header = frame::Header { payload_bytes: 0, ..frame::Header::decode(&header).expect("a header") };
        let (mut checksum, header) = (frame::Checksum::default(), header.encode());
        checksum.add(&header);
        bytes.extend([&header[..], &checksum.to_bytes()].concat());
        peer.data.write_all(&bytes).expect("sent");
    })
}

#[test]
fn a_bit_that_changes_on_the_way_is_found_by_the_checksum() {
    broadcast_with(true, &[]).expect("nothing has changed");
    // In the payload, which only the checksum covers, and in the checksum itself.
    for flip in (40..60).step_by(3) {
        let failure = broadcast_with(true, &[flip]).expect_err("a bit has changed");
        assert!(failure.to_string().contains("bytes changed on the way"), "{failure}");
    }
    let failure = broadcast_with(false, &[]).expect_err("only the peer has checksums");
    assert!(failure.to_string().contains("has a checksum, unlike this rank's"), "{failure}");
}

#[test]
fn a_huge_length_is_not_believed() {
    for bytes in [0, 15, 17, u64::MAX] {
        let failure = outcome(SUM, &mut vector(), |peer| {
            peer.data.write_all(&header(&call(SUM), bytes)).expect("sent");
        })
        .expect_err("another length");
        assert!(matches!(failure, CommError::Protocol { .. }), "{failure}");
    }
}

#[test]
fn a_block_above_its_bound_is_refused_before_it_is_allocated() {
    let mut blocks = Payload::Blocks(Vec::from([Vec::from([1]), Vec::new()]));
    let failure = outcome(Operation::ALL_GATHER_BYTES, &mut blocks, |peer| {
        peer.data.write_all(&header(&call(Operation::ALL_GATHER_BYTES), 8)).expect("sent");
        peer.data.write_all(&u64::MAX.to_le_bytes()).expect("sent");
    })
    .expect_err("too long");
    assert!(
        matches!(failure, CommError::ControlDataTooLong { rank: Rank(1), bytes: u64::MAX, .. }),
        "{failure}"
    );
}

#[test]
fn an_operation_out_of_turn_is_refused() {
    let failure = outcome(SUM, &mut vector(), |peer| {
        let late = Call { sequence: 6, ..call(SUM) };
        peer.data.write_all(&header(&late, 16)).expect("sent");
    })
    .expect_err("the wrong turn");
    assert!(failure.to_string().contains("16 bytes of operation 6"), "{failure}");
}

#[test]
fn a_broken_connection_is_a_loss() {
    let failure = outcome(SUM, &mut vector(), |peer| {
        peer.data.write_all(&header(&call(SUM), 16)[..20]).expect("sent");
        peer.data.shutdown(Shutdown::Both).expect("ended");
        peer.control.shutdown(Shutdown::Both).expect("ended");
    })
    .expect_err("half a header");
    assert!(matches!(failure, CommError::PeerLost { rank: Rank(1), .. }), "{failure}");
}

#[test]
fn garbage_on_the_control_connection_ends_the_operation() {
    let failure = outcome(SUM, &mut vector(), |peer| {
        peer.control.write_all(&[0xff; 4096]).expect("sent");
    })
    .expect_err("garbage");
    assert!(matches!(failure, CommError::Protocol { rank: Rank(1), .. }), "{failure}");
}
