//! TCP connections with several sockets per peer, and frames with checksums.

use crate::support::{on_ranks, small_pieces};
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{Group, GroupOptions, TransportKind};

/// Shorter than a stripe, a few stripes, and many stripes with an incomplete last one.
const LENGTHS: [usize; 4] = [3, 40_000, 150_000, 500_003];

fn check_all_reduce(group: &Group, len: usize) {
    let rank = group.rank().0 as u64;
    let mut buffer = group.buffer::<u64>(len).expect("memory");
    buffer.iter_mut().enumerate().for_each(|(index, element)| *element = index as u64 * (rank + 1));
    let sum = group.all_reduce(buffer, ReduceOp::Sum).wait().expect("reduced");
    let factor = (1..=group.world_size() as u64).sum::<u64>();
    assert!(sum.iter().enumerate().all(|(index, &element)| element == index as u64 * factor), "{len}");
}

/// Every rank sends a message to the next rank while all reduce a vector.
fn check_messages(group: &Group, len: usize) {
    let (rank, world_size) = (group.rank().0, group.world_size());
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let value = |from: usize, index: usize| (from * 1_000_003 + index) as u32;
    let mut message = group.buffer::<u32>(len).expect("memory");
    message.iter_mut().enumerate().for_each(|(index, element)| *element = value(rank, index));
    let sent = group.send(message, Rank(next));
    let received = group.receive(group.buffer::<u32>(len).expect("memory"), Rank(previous));
    check_all_reduce(group, len);
    let received = received.wait().expect("received");
    assert!(received.iter().enumerate().all(|(index, &element)| element == value(previous, index)), "{len}");
    sent.wait().expect("sent");
}

fn check(transport: TransportKind, options: &GroupOptions) {
    for world_size in [2, 3] {
        on_ranks(transport, world_size, options, |group| {
            for len in LENGTHS {
                check_all_reduce(&group, len);
                check_messages(&group, len);
            }
            let halves = group.split(Some(group.rank().0 as u64 % 2), 0).expect("split");
            check_all_reduce(&halves.expect("every rank has a color"), 70_001);
        });
    }
}

#[test]
fn several_sockets_carry_one_stream() {
    for sockets_per_peer in [2, 5] {
        for algorithm in ["ring", "halving_doubling"] {
            let algorithm = Some(algorithm.parse().expect("an algorithm"));
            let options = GroupOptions {
                sockets_per_peer,
                algorithm,
                keeps_order: false,
                chunk_bytes: 60_000,
                ..small_pieces()
            };
            check(TransportKind::Tcp, &options);
        }
    }
    // Only links between hosts have several sockets.
    check(TransportKind::ShmAndTcp, &GroupOptions { sockets_per_peer: 3, ..small_pieces() });
}

#[test]
fn frames_with_checksums_arrive_over_every_link() {
    let options = GroupOptions { checksums: true, ..small_pieces() };
    for transport in crate::support::TRANSPORTS {
        check(transport, &options);
    }
    check(TransportKind::Tcp, &GroupOptions { sockets_per_peer: 3, ..options });
}
