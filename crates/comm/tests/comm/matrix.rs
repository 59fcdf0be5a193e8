//! Every operation on vectors × transport × world size × awkward length × type × kind of memory, against a naive oracle.

use crate::support::operations::{MemoryKind, Pair, bits, check, compare, in_place, kinds, out_of_place};
use crate::support::oracle::Value;
use crate::support::{TRANSPORTS, on_hosts, on_ranks, small_pieces};
use trireme_base::{Bf16, DType, F16, Rank, ReduceOp};
use trireme_comm::{CommError, Group, GroupOptions, PageSize, TransportKind, Work};

/// Lengths around short_bytes_max, chunks, cache lines and blocks of up to five ranks.
const LENGTHS: [usize; 9] = [0, 1, 3, 5, 16, 17, 64, 101, 1000];
/// Longer than the windows in which private memory goes through stages.
const LONG: usize = 700_001;

#[test]
fn every_operation_on_every_transport_and_world() {
    for transport in TRANSPORTS {
        for world_size in 1..=5 {
            on_ranks(transport, world_size, &small_pieces(), |group| {
                for kind in kinds(world_size) {
                    for memory in [MemoryKind::Group, MemoryKind::Private, MemoryKind::Mixed] {
                        check::<f32>(&group, kind, memory, &LENGTHS);
                    }
                }
            });
        }
    }
}

#[test]
fn every_type_of_element() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &small_pieces(), |group| {
            for kind in kinds(3) {
                check::<f64>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<F16>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<Bf16>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<u8>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<u32>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<u64>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<i32>(&group, kind, MemoryKind::Group, &[7, 300]);
                check::<i64>(&group, kind, MemoryKind::Group, &[7, 300]);
            }
        });
    }
}

#[test]
fn vectors_above_the_default_thresholds() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &GroupOptions::default(), |group| {
            for kind in kinds(3) {
                for memory in [MemoryKind::Group, MemoryKind::Private] {
                    check::<f32>(&group, kind, memory, &[LONG]);
                }
            }
        });
    }
}

/// Each rank may choose independently between in-place and out-of-place.
#[test]
fn ranks_may_work_in_place_and_out_of_place_in_one_operation() {
    for transport in TRANSPORTS {
        on_ranks(transport, 4, &small_pieces(), |group| {
            for kind in kinds(4) {
                for len in [4, 400, 4000] {
                    if group.rank().0.is_multiple_of(2) {
                        let buffer = in_place::<f32>(&group, kind, MemoryKind::Group, len).wait();
                        compare(&group, kind, len, 0, &buffer.expect("it goes well"), "in place");
                    } else {
                        let (work, first) = out_of_place::<f32>(&group, kind, MemoryKind::Group, len);
                        let (_, output) = work.wait().expect("it goes well");
                        compare(&group, kind, len, first, &output, "out of place");
                    }
                }
            }
        });
    }
}

#[test]
fn blocks_of_any_lengths_go_from_all_to_all() {
    for transport in TRANSPORTS {
        for world_size in 1..=5 {
            on_ranks(transport, world_size, &small_pieces(), |group| {
                let rank = group.rank().0;
                for scale in [0, 1, 40] {
                    // Some blocks are empty, and block lengths differ between pairs of ranks.
                    let len = |from: usize, to: usize| (from * 7 + to * 3) % 5 * scale;
                    let value = |from: usize, to: usize, index: usize| u64::of(from, to * 1000 + index);
                    let send_lens: Vec<usize> = (0..world_size).map(|to| len(rank, to)).collect();
                    let receive_lens: Vec<usize> = (0..world_size).map(|from| len(from, rank)).collect();
                    let mut input = group.buffer::<u64>(send_lens.iter().sum()).expect("memory");
                    let output = group.buffer::<u64>(receive_lens.iter().sum()).expect("memory");
                    let sent =
                        (0..world_size).flat_map(|to| (0..len(rank, to)).map(move |index| (to, index)));
                    for (place, (to, index)) in input.iter_mut().zip(sent) {
                        *place = value(rank, to, index);
                    }
                    let work = group.all_to_all_variable(input, &send_lens, output, &receive_lens);
                    let (_, output) = work.wait().expect("it goes well");
                    let expected: Vec<u64> = (0..world_size)
                        .flat_map(|from| (0..len(from, rank)).map(move |index| value(from, rank, index)))
                        .collect();
                    assert_eq!(output[..], expected, "{group:?}");
                }
            });
        }
    }
}

/// Placements with two-level routing, and placements without it: hosts with different numbers of ranks, and a single host.
const PLACEMENTS: [&[usize]; 7] =
    [&[0, 0, 1, 1], &[0, 1, 0, 1], &[0, 0, 1, 1, 2, 2], &[0, 1, 1, 0, 1, 0], &[0, 0, 1], &[0, 0, 0], &[0]];

/// Checks a hierarchical all-to-all whose vectors have `rest` more elements than needed: the received elements, the unchanged elements, and
/// the bytes that this rank sends.
fn check_by_hosts<T: Value>(group: &Group, len: impl Fn(usize, usize) -> usize, rest: usize) {
    let (rank, world_size, hosts) = (group.rank().0, group.world_size(), group.hosts());
    let value = |from: usize, to: usize, index: usize| T::of(from, to * 1000 + index);
    let block = |from: usize, to: usize| (0..len(from, to)).map(move |index| value(from, to, index));
    let vector = |values: Vec<T>| {
        let mut buffer = group.buffer::<T>(values.len()).expect("memory");
        buffer.copy_from_slice(&values);
        buffer
    };
    let sent: Vec<T> = (0..world_size).flat_map(|to| block(rank, to)).collect();
    let received: Vec<T> = (0..world_size).flat_map(|from| block(from, rank)).collect();
    let end = || (0..rest).map(|index| T::of(9, index));
    let input: Vec<T> = sent.into_iter().chain(end()).collect();
    let before = received.iter().map(|_| T::zeroed()).chain(end()).collect();
    let expected: Vec<T> = received.into_iter().chain(end()).collect();
    let lens =
        (0..world_size * world_size).map(|index| len(index / world_size, index % world_size)).collect();
    let sent_before = group.statistics().payload_bytes;
    let work = group.all_to_all_variable_by_hosts(vector(input.clone()), vector(before), lens);
    let (kept, output) = work.wait().expect("it goes well");
    assert!(bits(&output) == bits(&expected), "{group:?}, {hosts:?}");
    assert!(bits(&kept) == bits(&input), "{group:?} changed its input");

    let has_levels = hosts.num_hosts() > 1 && hosts.ranks_per_host().is_some_and(|ranks| ranks > 1);
    let has_own_local_rank = |to: usize| hosts.local_rank(Rank(to)) == hosts.local_rank(group.rank());
    let own_host = hosts.host_of(group.rank());
    let others = (0..world_size).filter(|&to| to != rank);
    let sent: usize = if has_levels {
        let sent = others.map(|to| match (has_own_local_rank(to), hosts.ranks(own_host)) {
            (true, own) => own.iter().map(|from| len(from.0, to)).sum(),
            (false, _) => len(rank, to),
        });
        sent.sum()
    } else {
        others.map(|to| len(rank, to)).sum()
    };
    let sent_now = group.statistics().payload_bytes - sent_before;
    assert_eq!(sent_now, (sent * size_of::<T>()) as u64, "{group:?}, {hosts:?}");
}

#[test]
fn blocks_of_any_lengths_go_by_hosts() {
    for transport in TRANSPORTS {
        let is_possible =
            |hosts: &[usize]| transport != TransportKind::Shm || hosts.iter().all(|&host| host == 0);
        for placement in PLACEMENTS.into_iter().filter(|hosts| is_possible(hosts)) {
            on_hosts(transport, placement, &small_pieces(), |group| {
                for scale in [0, 1, 40] {
                    // Some blocks are empty, and block lengths differ between pairs of ranks.
                    let len = |from: usize, to: usize| (from * 7 + to * 3) % 5 * scale;
                    for rest in [0, 33] {
                        check_by_hosts::<f32>(&group, len, rest);
                        check_by_hosts::<f64>(&group, len, rest);
                        check_by_hosts::<F16>(&group, len, rest);
                        check_by_hosts::<Bf16>(&group, len, rest);
                        check_by_hosts::<u8>(&group, len, rest);
                        check_by_hosts::<u32>(&group, len, rest);
                        check_by_hosts::<u64>(&group, len, rest);
                        check_by_hosts::<i32>(&group, len, rest);
                        check_by_hosts::<i64>(&group, len, rest);
                    }
                }
                let last = group.world_size() - 1;
                check_by_hosts::<f32>(&group, |from, to| if (from, to) == (0, last) { LONG } else { 0 }, 5);
            });
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused_and_the_group_goes_on() {
    for transport in [TransportKind::Inproc, TransportKind::Shm] {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let buffer = |len| group.buffer::<f32>(len).expect("memory");
            let refused = |work: Work<Pair<f32>>| match work.wait() {
                Err(CommError::InvalidBuffers { .. }) => {}
                other => panic!("{transport}: {other:?}"),
            };
            refused(group.all_reduce_into(buffer(3), buffer(4), ReduceOp::Sum));
            refused(group.all_gather_into(buffer(4), buffer(5)));
            refused(group.broadcast_into(buffer(4), buffer(4), Rank(1 - group.rank().0)));
            refused(group.reduce_scatter_into(buffer(4), buffer(3), ReduceOp::Sum));
            refused(group.gather_into(buffer(4), buffer(7), Rank(0)));
            refused(group.scatter_into(buffer(7), buffer(4), group.rank()));
            refused(group.all_to_all_into(buffer(3), buffer(3)));
            refused(group.all_to_all_variable(buffer(3), &[1, 1], buffer(2), &[1, 1]));
            refused(group.all_to_all_variable(buffer(3), &[3], buffer(2), &[1, 1]));
            refused(group.all_to_all_variable(buffer(2), &[2, 0], buffer(2), &[0, 2]));
            let by_hosts = |input, output, lens: &[usize]| {
                group.all_to_all_variable_by_hosts(buffer(input), buffer(output), lens.into())
            };
            refused(by_hosts(2, 2, &[1, 1, 1]));
            refused(by_hosts(1, 2, &[1, 1, 1, 1]));
            refused(by_hosts(2, 1, &[1, 1, 1, 1]));
            refused(by_hosts(2, 2, &[1, usize::MAX, 1, 1]));
            refused(by_hosts(2, 2, &[0, usize::MAX / 4, 1, 0]));
            assert!(matches!(group.all_to_all(buffer(3)).wait(), Err(CommError::InvalidBuffers { .. })));
            let of = |dtype| group.buffer_of(dtype, 4, PageSize::Base).expect("memory");
            let narrow = group.all_reduce_into(of(DType::F32), of(DType::U8), ReduceOp::Sum).wait();
            assert!(matches!(narrow, Err(CommError::InvalidBuffers { .. })), "{transport}: {narrow:?}");
            let lens = [2, 2];
            let narrow = group.all_to_all_variable(of(DType::F32), &lens, of(DType::U8), &lens).wait();
            assert!(matches!(narrow, Err(CommError::InvalidBuffers { .. })), "{transport}: {narrow:?}");
            let no_root = group.reduce(buffer(3), ReduceOp::Sum, Rank(2)).wait();
            assert!(matches!(no_root, Err(CommError::NoSuchRoot { root: Rank(2), world_size: 2, .. })));
            group.barrier().wait().expect("the group goes on");
        });
    }
}
