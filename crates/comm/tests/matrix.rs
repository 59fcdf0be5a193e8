//! Every operation on vectors × transport × world size × awkward length × kind of memory × algorithm, against a naive
//! oracle.

#[path = "support/oracle.rs"]
mod oracle;
mod support;

use oracle::{Value, expected};
use support::{TRANSPORTS, on_ranks, small_pieces};
use trireme_base::{Bf16, F16, Rank, ReduceOp};
use trireme_comm::{Buffer, CommError, Element, Group, GroupOptions, TransportKind, Work};
use trireme_schedule::collective::{Algorithm, FlatAlgorithm, Hierarchy, Leaders, block};

/// Around the borders of short_bytes_max, pieces, cache lines and blocks of up to five ranks.
const LENGTHS: [usize; 9] = [0, 1, 3, 5, 16, 17, 64, 101, 1000];
/// Longer than the windows by which private memory goes through stages.
const LONG: usize = 700_001;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, Rank),
    Broadcast(Rank),
    AllGather,
    ReduceScatter(ReduceOp),
    Gather(Rank),
    Scatter(Rank),
    AllToAll,
}

/// Where buffers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Where the group would have them.
    Group,
    /// In the process's own memory.
    Private,
    /// The input here, the output there, and the other way round on every second rank.
    Mixed,
}

fn kinds(world_size: usize) -> Vec<Kind> {
    let mut kinds = vec![
        Kind::AllReduce(ReduceOp::Sum),
        Kind::AllReduce(ReduceOp::Mean),
        Kind::ReduceScatter(ReduceOp::Sum),
        Kind::ReduceScatter(ReduceOp::Max),
        Kind::AllGather,
        Kind::AllToAll,
    ];
    for root in [0, world_size - 1].map(Rank) {
        kinds.extend([
            Kind::Reduce(ReduceOp::Prod, root),
            Kind::Reduce(ReduceOp::Mean, root),
            Kind::Broadcast(root),
            Kind::Gather(root),
            Kind::Scatter(root),
        ]);
    }
    kinds
}

/// The element at `index` of what `rank` has in the end, where that is specified.
fn result<T: Value>(kind: Kind, rank: usize, world_size: usize, len: usize, index: usize) -> Option<T> {
    let owner = (0..world_size).find(|&rank| block(Rank(rank), world_size, len).contains(&index));
    let owner = owner.expect("every element is in a block");
    match kind {
        Kind::AllReduce(op) => Some(expected(op, world_size, index)),
        Kind::Reduce(op, root) => (root.0 == rank).then(|| expected(op, world_size, index)),
        Kind::Broadcast(root) => Some(T::of(root.0, index)),
        Kind::AllGather => Some(T::of(owner, index)),
        Kind::ReduceScatter(op) => (owner == rank).then(|| expected(op, world_size, index)),
        Kind::Gather(root) => (root.0 == rank).then(|| T::of(owner, index)),
        Kind::Scatter(root) => (owner == rank).then(|| T::of(root.0, index)),
        Kind::AllToAll => {
            let within = index - block(Rank(owner), world_size, len).start;
            Some(T::of(owner, block(Rank(rank), world_size, len).start + within))
        }
    }
}

fn buffer<T: Value>(group: &Group, place: Place, is_input: bool, range: std::ops::Range<usize>) -> Buffer<T> {
    let rank = group.rank().0;
    let is_private = match place {
        Place::Group => false,
        Place::Private => true,
        Place::Mixed => is_input == rank.is_multiple_of(2),
    };
    let len = range.len();
    let made = if is_private { Buffer::private(len) } else { group.buffer(len) };
    let mut buffer = made.expect("memory");
    if is_input {
        for (value, index) in buffer.iter_mut().zip(range) {
            *value = T::of(rank, index);
        }
    }
    buffer
}

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Compares the elements of a buffer that begins at `first` of the whole vector.
fn compare<T: Value>(group: &Group, kind: Kind, len: usize, first: usize, buffer: &[T], what: &str) {
    let (rank, world_size) = (group.rank().0, group.world_size());
    for (offset, value) in buffer.iter().enumerate() {
        let Some(expected) = result::<T>(kind, rank, world_size, len, first + offset) else { continue };
        assert!(
            bits(&[*value]) == bits(&[expected]),
            "{kind:?} of {len} {what} on {group:?}, element {}",
            first + offset
        );
    }
}

fn in_place<T: Value>(group: &Group, kind: Kind, place: Place, len: usize) -> Work<Buffer<T>> {
    let buffer = buffer::<T>(group, place, true, 0..len);
    match kind {
        Kind::AllReduce(op) => group.all_reduce(buffer, op),
        Kind::Reduce(op, root) => group.reduce(buffer, op, root),
        Kind::Broadcast(root) => group.broadcast(buffer, root),
        Kind::AllGather => group.all_gather(buffer),
        Kind::ReduceScatter(op) => group.reduce_scatter(buffer, op),
        Kind::Gather(root) => group.gather(buffer, root),
        Kind::Scatter(root) => group.scatter(buffer, root),
        Kind::AllToAll => group.all_to_all(buffer),
    }
}

type Pair<T> = (Buffer<T>, Buffer<T>);

/// The work, and where its output begins in the whole vector.
fn out_of_place<T: Value>(group: &Group, kind: Kind, place: Place, len: usize) -> (Work<Pair<T>>, usize) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let own = block(rank, world_size, len);
    let input = |range| buffer::<T>(group, place, true, range);
    let output = |len| buffer::<T>(group, place, false, 0..len);
    let at_root = |root, len| if root == rank { len } else { 0 };
    match kind {
        Kind::AllReduce(op) => (group.all_reduce_into(input(0..len), output(len), op), 0),
        Kind::Reduce(op, root) => (group.reduce_into(input(0..len), output(at_root(root, len)), op, root), 0),
        Kind::AllGather => (group.all_gather_into(input(own), output(len)), 0),
        Kind::ReduceScatter(op) => {
            (group.reduce_scatter_into(input(0..len), output(own.len()), op), own.start)
        }
        Kind::Gather(root) => (group.gather_into(input(own), output(at_root(root, len)), root), 0),
        Kind::Scatter(root) => {
            (group.scatter_into(input(0..at_root(root, len)), output(own.len()), root), own.start)
        }
        Kind::AllToAll => (group.all_to_all_into(input(0..len), output(len)), 0),
        Kind::Broadcast(root) => (group.broadcast_into(input(0..at_root(root, len)), output(len), root), 0),
    }
}

/// All lengths of an operation, in place and out of place, all in flight at once.
fn check<T: Value>(group: &Group, kind: Kind, place: Place, lengths: &[usize]) {
    let world_size = group.world_size();
    let needs_equal = |kind| matches!(kind, Kind::AllToAll | Kind::Gather(_) | Kind::Scatter(_));
    let mut in_flight = Vec::new();
    let mut pairs = Vec::new();
    for &len in lengths {
        let equal = len / world_size * world_size;
        let len_in_place = if kind == Kind::AllToAll { equal } else { len };
        in_flight.push((len_in_place, in_place::<T>(group, kind, place, len_in_place)));
        let len = if needs_equal(kind) { equal } else { len };
        let (work, first) = out_of_place::<T>(group, kind, place, len);
        pairs.push((len, first, work));
    }
    for (len, work) in in_flight {
        let buffer = work.wait().expect("it goes well");
        compare(group, kind, len, 0, &buffer, &format!("in place, {place:?}"));
    }
    for (len, first, work) in pairs {
        let (input, output) = work.wait().expect("it goes well");
        compare(group, kind, len, first, &output, &format!("out of place, {place:?}"));
        let own_start = match kind {
            Kind::AllGather | Kind::Gather(_) => block(group.rank(), world_size, len).start,
            _ => 0,
        };
        let is_kept = input
            .iter()
            .enumerate()
            .all(|(index, value)| bits(&[*value]) == bits(&[T::of(group.rank().0, own_start + index)]));
        assert!(is_kept, "{kind:?} of {len} changed its input on {group:?}");
    }
}

#[test]
fn every_operation_on_every_transport_and_world() {
    for transport in TRANSPORTS {
        for world_size in 1..=5 {
            on_ranks(transport, world_size, &small_pieces(), |group| {
                for kind in kinds(world_size) {
                    for place in [Place::Group, Place::Private, Place::Mixed] {
                        check::<f32>(&group, kind, place, &LENGTHS);
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
                check::<f64>(&group, kind, Place::Group, &[7, 300]);
                check::<F16>(&group, kind, Place::Group, &[7, 300]);
                check::<Bf16>(&group, kind, Place::Group, &[7, 300]);
                check::<u8>(&group, kind, Place::Group, &[7, 300]);
                check::<u32>(&group, kind, Place::Group, &[7, 300]);
                check::<u64>(&group, kind, Place::Group, &[7, 300]);
                check::<i32>(&group, kind, Place::Group, &[7, 300]);
                check::<i64>(&group, kind, Place::Group, &[7, 300]);
            }
        });
    }
}

#[test]
fn every_algorithm_that_can_be_asked_for() {
    for transport in TRANSPORTS {
        for algorithm in FlatAlgorithm::ALL {
            let options =
                GroupOptions { keeps_order: false, algorithm: Some(algorithm.into()), ..small_pieces() };
            on_ranks(transport, 4, &options, |group| {
                for kind in kinds(4) {
                    // Integers have one sum in any order.
                    check::<i32>(&group, kind, Place::Group, &[0, 1, 5, 101, 1000]);
                }
            });
        }
    }
}

/// Two hosts of two ranks: shared memory, rings or sockets within, and across hosts what there is.
#[test]
fn hierarchical_algorithms_on_two_hosts() {
    use FlatAlgorithm as A;
    for transport in [TransportKind::ShmAndTcp, TransportKind::Tcp] {
        for leaders in [Leaders::One, Leaders::All] {
            for (within, across) in [
                (A::Direct, A::Ring),
                (A::Direct, A::HalvingDoubling),
                (A::BinomialTree, A::BinomialTree),
                (A::HalvingDoubling, A::RecursiveDoubling),
                (A::Ring, A::Direct),
            ] {
                let algorithm = Some(Algorithm::Hierarchical(Hierarchy { leaders, within, across }));
                let options = GroupOptions { algorithm, keeps_order: false, ..small_pieces() };
                on_ranks(transport, 4, &options, |group| {
                    for kind in kinds(4) {
                        for place in [Place::Group, Place::Private] {
                            check::<i32>(&group, kind, place, &[0, 1, 5, 101, 1000]);
                        }
                    }
                });
                // Two ranks a host: sums of neighbours are subtrees of the canonical tree.
                let options = GroupOptions { algorithm, ..small_pieces() };
                on_ranks(transport, 4, &options, |group| {
                    check::<f32>(&group, Kind::AllReduce(ReduceOp::Sum), Place::Group, &[101, 1000]);
                });
            }
        }
    }
}

#[test]
fn vectors_above_the_default_thresholds() {
    for transport in TRANSPORTS {
        on_ranks(transport, 3, &GroupOptions::default(), |group| {
            for kind in kinds(3) {
                for place in [Place::Group, Place::Private] {
                    check::<f32>(&group, kind, place, &[LONG]);
                }
            }
        });
    }
}

/// The form of an operation is each rank's own affair.
#[test]
fn ranks_may_work_in_place_and_out_of_place_in_one_operation() {
    for transport in TRANSPORTS {
        on_ranks(transport, 4, &small_pieces(), |group| {
            for kind in kinds(4) {
                for len in [4, 400, 4000] {
                    if group.rank().0.is_multiple_of(2) {
                        let buffer = in_place::<f32>(&group, kind, Place::Group, len).wait();
                        compare(&group, kind, len, 0, &buffer.expect("it goes well"), "in place");
                    } else {
                        let (work, first) = out_of_place::<f32>(&group, kind, Place::Group, len);
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
                    // Some blocks are empty, and no two pairs alike.
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

#[test]
fn lengths_that_do_not_fit_are_refused_and_the_group_goes_on() {
    for transport in [TransportKind::Inproc, TransportKind::Shm] {
        on_ranks(transport, 2, &small_pieces(), |group| {
            let buffer = |len| group.buffer::<f32>(len).expect("memory");
            let refused = |work: Work<Pair<f32>>| match work.wait() {
                Err(CommError::Lengths { .. }) => {}
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
            assert!(matches!(group.all_to_all(buffer(3)).wait(), Err(CommError::Lengths { .. })));
            let no_root = group.reduce(buffer(3), ReduceOp::Sum, Rank(2)).wait();
            assert!(matches!(no_root, Err(CommError::NoSuchRoot { root: Rank(2), world_size: 2, .. })));
            group.barrier().wait().expect("the group goes on");
        });
    }
}
