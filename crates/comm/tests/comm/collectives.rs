//! All-reduces, broadcasts, gathers of bytes and barriers on every transport, with awkward lengths, against a naive oracle.

use crate::support::oracle::{Value, expected};
use crate::support::{TRANSPORTS, on_ranks, small_pieces};
use std::sync::atomic::{AtomicUsize, Ordering};
use trireme_base::{Bf16, F16, Rank, ReduceOp};
use trireme_comm::{CONTROL_BYTES_MAX, Element, Group, GroupOptions, TransportKind, Work, single};
use trireme_schedule::collective::FlatAlgorithm;

/// Lengths around short_bytes_max (16 f32, 32 f16), a chunk (twice that), cache lines and the shares of four ranks.
const LENGTHS: [usize; 14] = [0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 100, 1000, 4099];
fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// All-reduces vectors of every length with every reduction, all in flight at once.
fn check_all_reduce<T: Value>(group: &Group) {
    let mut works: Vec<(ReduceOp, Work<_>)> = Vec::new();
    for len in LENGTHS {
        for op in ReduceOp::ALL {
            let mut buffer = group.buffer::<T>(len).expect("memory");
            assert!(bits(&buffer).iter().all(|&byte| byte == 0));
            assert!(buffer.as_ptr().addr().is_multiple_of(64));
            for (index, value) in buffer.iter_mut().enumerate() {
                *value = T::of(group.rank().0, index);
            }
            works.push((op, group.all_reduce(buffer, op)));
        }
    }
    for (op, work) in works {
        let buffer = work.wait().expect("reduced");
        let expected: Vec<T> =
            (0..buffer.len()).map(|index| expected(op, group.world_size(), index)).collect();
        assert!(bits(&buffer) == bits(&expected), "{op} of {} on {group:?}", buffer.len());
    }
}

fn check_broadcast<T: Value>(group: &Group) {
    for root in 0..group.world_size() {
        for len in LENGTHS {
            let mut buffer = group.buffer::<T>(len).expect("memory");
            for (index, value) in buffer.iter_mut().enumerate() {
                *value = T::of(group.rank().0, index);
            }
            let buffer = group.broadcast(buffer, Rank(root)).wait().expect("broadcast");
            let expected: Vec<T> = (0..len).map(|index| T::of(root, index)).collect();
            assert!(bits(&buffer) == bits(&expected), "{len} from {root} on {group:?}");
        }
    }
}

fn check_all_gather_bytes(group: &Group) {
    for lengths in [[0, 0, 0, 0], [1, 0, 3, 2], [5, 5, 5, 5], [0, 70_000, 1, 0], [CONTROL_BYTES_MAX, 1, 2, 3]]
    {
        let block = |rank: usize| vec![rank as u8 + 1; lengths[rank]];
        let gathered = group.all_gather_bytes(&block(group.rank().0)).wait().expect("gathered");
        let expected: Vec<_> = (0..group.world_size()).map(block).collect();
        assert!(gathered == expected, "{lengths:?} on {group:?}");
    }
}

#[test]
fn all_reduce_broadcast_and_all_gather_bytes_on_every_transport() {
    for transport in TRANSPORTS {
        for world_size in 1..=4 {
            on_ranks(transport, world_size, &small_pieces(), |group| {
                assert_eq!(group.world_size(), world_size);
                check_all_reduce::<f32>(&group);
                check_all_reduce::<f64>(&group);
                check_all_reduce::<F16>(&group);
                check_all_reduce::<Bf16>(&group);
                check_all_reduce::<u8>(&group);
                check_all_reduce::<u32>(&group);
                check_all_reduce::<u64>(&group);
                check_all_reduce::<i32>(&group);
                check_all_reduce::<i64>(&group);
                check_broadcast::<f32>(&group);
                check_broadcast::<Bf16>(&group);
                check_broadcast::<u8>(&group);
                check_all_gather_bytes(&group);
            });
        }
    }
}

#[test]
fn short_and_long_vectors_give_the_same_bits() {
    for transport in TRANSPORTS {
        let reduced = [64, GroupOptions::SHORT_BYTES_LIMIT].map(|short_bytes_max| {
            let options = GroupOptions { short_bytes_max, chunk_bytes: 4096, ..small_pieces() };
            on_ranks(transport, 4, &options, |group| {
                // More bytes than a socket buffers: received bytes must not overwrite those that are not sent yet.
                let len = GroupOptions::SHORT_BYTES_LIMIT / size_of::<f32>();
                let mut buffer = group.buffer::<f32>(len).expect("memory");
                for (index, value) in buffer.iter_mut().enumerate() {
                    *value = f32::of(group.rank().0, index);
                }
                bits(&group.all_reduce(buffer, ReduceOp::Sum).wait().expect("reduced")).to_vec()
            })
        });
        assert!(reduced.iter().flatten().all(|bits| *bits == reduced[0][0]), "{transport}");
    }
}

#[test]
fn vectors_above_the_default_thresholds() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &GroupOptions::default(), |group| {
            let len = 300_007;
            let mut buffer = group.buffer::<f32>(len).expect("memory");
            buffer.iter_mut().enumerate().for_each(|(index, value)| *value = f32::of(group.rank().0, index));
            let buffer = group.all_reduce(buffer, ReduceOp::Sum).wait().expect("reduced");
            let expected: Vec<f32> = (0..len).map(|index| expected(ReduceOp::Sum, 3, index)).collect();
            assert!(bits(&buffer) == bits(&expected));
        });
    }
}

#[test]
fn no_rank_passes_a_barrier_before_all_have_arrived() {
    for transport in TRANSPORTS {
        let num_arrivals = AtomicUsize::new(0);
        on_ranks(transport, 3, &small_pieces(), |group| {
            for round in 1..=50 {
                num_arrivals.fetch_add(1, Ordering::SeqCst);
                group.barrier().wait().expect("everybody came");
                assert!(num_arrivals.load(Ordering::SeqCst) >= 3 * round);
            }
        });
    }
}

#[test]
fn a_barrier_is_in_flight_while_its_rank_continues() {
    for transport in TRANSPORTS {
        let rank_0_has_continued = std::sync::Barrier::new(2);
        on_ranks(transport, 2, &small_pieces(), |group| {
            let mut works = Vec::new();
            if group.rank() == Rank(0) {
                works.extend([group.barrier(), group.barrier()]);
                assert!(!works[0].is_done() && !works[1].is_done(), "{transport}");
            }
            rank_0_has_continued.wait();
            if group.rank() == Rank(1) {
                works.extend([group.barrier(), group.barrier()]);
            }
            let gathered = group.all_gather_bytes(&[group.rank().0 as u8]);
            for work in works {
                work.wait().expect("everybody came");
            }
            assert_eq!(gathered.wait().expect("gathered"), [[0], [1]]);
        });
    }
}

#[test]
fn results_can_be_awaited_in_any_order_or_not_at_all() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            for _ in 0..20 {
                let mut works = Vec::new();
                for value in 0..10_u32 {
                    let mut buffer = group.buffer::<u32>(40).expect("memory");
                    buffer.fill(value);
                    works.push((value, group.all_reduce(buffer, ReduceOp::Sum)));
                }
                drop(works.remove(3));
                for (value, work) in works.into_iter().rev() {
                    assert_eq!(work.wait().expect("reduced")[39], 2 * value);
                }
            }
        });
    }
}

#[test]
fn works_outlive_their_group() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let mut buffer = group.buffer::<u8>(500).expect("memory");
            buffer.fill(1);
            let work = group.all_reduce(buffer, ReduceOp::Sum);
            drop(group);
            assert!(work.is_done());
            assert!(work.wait().expect("reduced").iter().all(|&value| value == 2));
        });
    }
}

#[test]
fn a_buffer_is_reused_by_many_operations() {
    for transport in TRANSPORTS {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let mut buffer = group.buffer::<u64>(200).expect("memory");
            let place = buffer.as_ptr();
            buffer.fill(1);
            for round in 1..60 {
                buffer = group.all_reduce(buffer, ReduceOp::Sum).wait().expect("reduced");
                assert!(buffer.iter().all(|&value| value == 1 << round));
                assert_eq!(buffer.as_ptr(), place);
            }
        });
    }
}

#[test]
fn a_quick_rank_does_not_overwrite_what_a_slow_one_still_reads() {
    let options =
        GroupOptions { short_bytes_max: GroupOptions::SHORT_BYTES_LIMIT, ..GroupOptions::default() };
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &options, |group| {
            let mut buffer = group.buffer::<u32>(50_000).expect("memory");
            for round in 0..100 {
                buffer.fill(round + group.rank().0 as u32);
                buffer = group.all_reduce(buffer, ReduceOp::Sum).wait().expect("reduced");
                assert!(buffer.iter().all(|&value| value == 3 * round + 3), "{transport}, {round}");
            }
        });
    }
}

#[test]
fn bytes_moved_follow_the_formulas() {
    let (world_size, len) = (4, 1000);
    for transport in TRANSPORTS {
        let moved = |algorithm: FlatAlgorithm, len| -> Vec<u64> {
            let options = GroupOptions { algorithm: Some(algorithm.into()), ..small_pieces() };
            on_ranks(transport, world_size, &options, |group| {
                let vector = group.buffer::<f32>(len).expect("memory");
                let vector = group.all_reduce(vector, ReduceOp::Sum).wait().expect("reduced");
                assert_eq!(vector.len(), len);
                group.barrier().wait().expect("everybody came");
                let statistics = group.statistics();
                assert_eq!(statistics.num_operations, 2);
                assert!(statistics.waiting <= statistics.busy);
                statistics.payload_bytes
            })
        };
        // 2 D (N - 1) / N per rank, so 2 D (N - 1) in total.
        let long: u64 = moved(FlatAlgorithm::HalvingDoubling, len).iter().sum();
        assert_eq!(long as usize, 2 * 4 * len * (world_size - 1), "{transport}");
        let short = moved(FlatAlgorithm::RecursiveDoubling, 16);
        assert!(short.iter().all(|&bytes| bytes == 64 * 2), "{transport}: {short:?}");
        if transport == TransportKind::Shm {
            let long: u64 = moved(FlatAlgorithm::Direct, len).iter().sum();
            assert_eq!(long as usize, 2 * 4 * len * (world_size - 1));
            let short = moved(FlatAlgorithm::Direct, 16);
            assert!(short.iter().all(|&bytes| bytes == 64 * 3), "{short:?}");
        }
    }
}

#[test]
fn a_world_of_one_needs_no_thread() {
    let group = single();
    assert_eq!((group.rank(), group.world_size()), (Rank(0), 1));
    assert_eq!(group.transport(), TransportKind::Single);
    check_all_reduce::<f32>(&group);
    check_broadcast::<f64>(&group);
    check_all_gather_bytes(&group);
    group.barrier().wait().expect("nobody to wait for");
    let work = group.all_reduce(group.buffer::<f32>(3).expect("memory"), ReduceOp::Sum);
    assert!(work.is_done());
    drop(work);
}
