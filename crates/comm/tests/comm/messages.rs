//! Messages between two ranks, concurrent with a group's operations, and split groups.

use crate::support::{TRANSPORTS, on_ranks, small_pieces};
use std::time::Duration;
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{Buffer, CommError, Group, GroupOptions, TransportKind, Work};

const LENGTHS: [usize; 6] = [0, 1, 17, 1000, 70_000, 300_001];

fn value(from: usize, to: usize, len: usize, index: usize) -> u64 {
    ((from * 31 + to * 7 + len) * 1_000_003 + index) as u64
}

fn filled(group: &Group, to: usize, len: usize) -> Buffer<u64> {
    let mut buffer = group.buffer::<u64>(len).expect("memory");
    let from = group.rank().0;
    buffer.iter_mut().enumerate().for_each(|(index, element)| *element = value(from, to, len, index));
    buffer
}

fn check(group: &Group, from: usize, len: usize, work: Work<Buffer<u64>>) {
    let buffer = work.wait().expect("received");
    let to = group.rank().0;
    let is_right = |(index, &element): (usize, &u64)| element == value(from, to, len, index);
    assert!(buffer.iter().enumerate().all(is_right), "{len} from {from} on {group:?}");
}

/// All ranks send first and receive later, with more bytes in flight in both directions than a connection buffers.
#[test]
fn all_ranks_send_to_all_in_any_order() {
    for transport in TRANSPORTS {
        for world_size in 2..=4 {
            on_ranks(transport, world_size, &small_pieces(), |group| {
                let peers: Vec<usize> = (0..world_size).filter(|&peer| peer != group.rank().0).collect();
                let mut sent = Vec::new();
                for &peer in &peers {
                    for len in LENGTHS {
                        sent.push(group.send(filled(&group, peer, len), Rank(peer)));
                    }
                }
                for &peer in peers.iter().rev() {
                    let receive = |len| (len, group.receive(group.buffer(len).expect("memory"), Rank(peer)));
                    let works = LENGTHS.map(receive);
                    for (len, work) in works.into_iter().rev() {
                        check(&group, peer, len, work);
                    }
                }
                sent.into_iter().for_each(|work| drop(work.wait().expect("sent")));
            });
        }
    }
}

#[test]
fn messages_and_operations_do_not_wait_for_each_other() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &small_pieces(), |group| {
            let sum = || group.all_reduce(filled(&group, 0, 500), ReduceOp::Sum);
            // Rank 0 receives before it reduces; rank 1 sends after it has reduced.
            match group.rank().0 {
                0 => {
                    let message = group.receive(group.buffer(9000).expect("memory"), Rank(1));
                    let sum = sum();
                    check(&group, 1, 9000, message);
                    drop(sum.wait().expect("reduced"));
                }
                1 => {
                    drop(sum().wait().expect("reduced"));
                    drop(group.send(filled(&group, 0, 9000), Rank(0)).wait().expect("sent"));
                }
                _ => drop(sum().wait().expect("reduced")),
            }
        });
    }
}

#[test]
fn a_chain_of_ranks_passes_many_small_messages() {
    for transport in TRANSPORTS {
        on_ranks(transport, 4, &small_pieces(), |group| {
            let rank = group.rank().0;
            let mut buffer = group.buffer::<u64>(4).expect("memory");
            for round in 0..200 {
                if rank > 0 {
                    buffer = group.receive(buffer, Rank(rank - 1)).wait().expect("received");
                } else {
                    buffer.fill(round);
                }
                assert!(buffer.iter().all(|&element| element == round + rank as u64));
                buffer.iter_mut().for_each(|element| *element += 1);
                if rank < 3 {
                    buffer = group.send(buffer, Rank(rank + 1)).wait().expect("sent");
                }
            }
        });
    }
}

#[test]
fn threads_may_wait_for_messages_at_the_same_time() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let peer = 1 - group.rank().0;
            let works: Vec<_> = (0..8)
                .map(|_| {
                    let sent = group.send(filled(&group, peer, 5000), Rank(peer));
                    (sent, group.receive(group.buffer(5000).expect("memory"), Rank(peer)))
                })
                .collect();
            std::thread::scope(|scope| {
                for (sent, received) in works {
                    let group = &group;
                    scope.spawn(move || {
                        check(group, peer, 5000, received);
                        drop(sent.wait().expect("sent"));
                    });
                }
            });
        });
    }
}

#[test]
fn another_message_than_expected_is_named() {
    for transport in TRANSPORTS {
        let failures = on_ranks(transport, 2, &small_pieces(), |group| {
            let buffer = group.buffer::<f32>(10 + group.rank().0).expect("memory");
            let work = match group.rank() {
                Rank(0) => group.send(buffer, Rank(1)),
                _ => group.receive(buffer, Rank(0)),
            };
            work.wait().err().map(|failure| failure.to_string())
        });
        let failure = failures[1].as_ref().expect("a mismatch");
        assert!(failure.contains("f32 x 10") && failure.contains("f32 x 11"), "{transport}: {failure}");
    }
}

#[test]
fn a_lost_or_silent_peer_is_named() {
    for transport in TRANSPORTS {
        let options = GroupOptions { timeout: Duration::from_secs(1), ..small_pieces() };
        let done = std::sync::Barrier::new(3);
        on_ranks(transport, 3, &options, |group| {
            let receive = |from| group.receive(group.buffer::<u8>(5).expect("memory"), Rank(from)).wait();
            match group.rank().0 {
                0 => match receive(1).expect_err("nobody sends") {
                    CommError::TimedOut { missing, .. } => assert_eq!(missing, [Rank(1)]),
                    other => panic!("{transport}: {other}"),
                },
                1 => {}
                _ => {
                    drop(group);
                    done.wait();
                    return;
                }
            }
            done.wait();
        });
        on_ranks(transport, 2, &small_pieces(), |group| {
            if group.rank() == Rank(1) {
                return drop(group);
            }
            let work = group.receive(group.buffer::<u8>(5).expect("memory"), Rank(1));
            assert!(matches!(work.wait(), Err(CommError::PeerLost { rank: Rank(1), .. })), "{transport}");
        });
    }
}

#[test]
fn a_failed_operation_ends_the_messages_of_its_group() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &small_pieces(), |group| {
            // No rank sends this message.
            let from = Rank((group.rank().0 + 1) % 3);
            let message = group.receive(group.buffer::<u8>(5).expect("memory"), from);
            let len = 100 + group.rank().0 / 2;
            let buffer = group.buffer::<f32>(len).expect("memory");
            let sum = group.all_reduce(buffer, ReduceOp::Sum).wait();
            assert!(matches!(sum, Err(CommError::Mismatch { .. })), "{transport}");
            assert!(message.wait().is_err(), "{transport}");
        });
    }
}

#[test]
fn messages_to_missing_ranks_are_refused() {
    on_ranks(TransportKind::Inproc, 2, &small_pieces(), |group| {
        for peer in [group.rank(), Rank(2)] {
            let buffer = || group.buffer::<u8>(1).expect("memory");
            assert!(matches!(group.send(buffer(), peer).wait(), Err(CommError::NoSuchPeer { .. })));
            assert!(matches!(group.receive(buffer(), peer).wait(), Err(CommError::NoSuchPeer { .. })));
        }
        group.barrier().wait().expect("the group goes on");
    });
}

/// Rows and columns of a 2 × 2 mesh that operate concurrently, and a split of a row.
#[test]
fn groups_of_some_ranks_work_at_the_same_time() {
    for transport in TRANSPORTS {
        on_ranks(transport, 4, &small_pieces(), |world| {
            let rank = world.rank().0;
            let (row_color, column_color) = (rank as u64 / 2, rank as u64 % 2);
            let row = world.split(Some(row_color), 0).expect("split").expect("a member");
            // The keys reverse the order.
            let column = world.split(Some(column_color), 10 - rank as u64).expect("split").expect("a member");
            assert_eq!((row.world_size(), row.rank().0), (2, rank % 2));
            assert_eq!((column.world_size(), column.rank().0), (2, 1 - rank / 2));
            let sum = |group: &Group| {
                let mut buffer = world.buffer::<u64>(3000).expect("memory");
                buffer.fill(rank as u64);
                group.all_reduce(buffer, ReduceOp::Sum)
            };
            for _ in 0..10 {
                let works = [sum(&row), sum(&column), sum(&world)];
                let sums = works.map(|work| work.wait().expect("reduced")[2999]);
                assert_eq!(sums, [4 * row_color + 1, 2 * column_color + 2, 6], "{transport}");
            }
            let alone = row.split(Some(rank as u64), 0).expect("split").expect("a member");
            assert_eq!(alone.world_size(), 1);
            let peer = Rank(1 - row.rank().0);
            let sent = row.send(filled(&row, peer.0, 40), peer);
            check(&row, peer.0, 40, row.receive(row.buffer(40).expect("memory"), peer));
            drop(sent.wait().expect("sent"));
            drop(row);
            let some = world.split((rank != 2).then_some(7), 0).expect("split");
            assert_eq!(some.as_ref().map(Group::world_size), (rank != 2).then_some(3));
            if let Some(some) = some {
                some.barrier().wait().expect("all came");
            }
            world.barrier().wait().expect("all came");
        });
    }
}
