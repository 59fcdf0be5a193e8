//! The vector operations: how to issue them, and their expected results.
use super::oracle::{Value, expected};
use std::ops::Range;
use trireme_base::{Rank, ReduceOp};
use trireme_comm::{Buffer, Element, Group, TransportKind, Work};
use trireme_schedule::collective::{
    Algorithm, Collective, CollectiveKind, Step, block, fits, is_canonical, steps,
};

/// Lengths around blocks of up to five ranks, short vectors (16) and chunks (32). No length but 0 is a multiple of 16.
const LENGTHS: [usize; 6] = [0, 1, 3, 17, 101, 1001];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, Rank),
    Broadcast(Rank),
    AllGather,
    ReduceScatter(ReduceOp),
    Gather(Rank),
    Scatter(Rank),
    AllToAll,
}

/// The memory of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Memory of [`Group::buffer`].
    Group,
    /// The process's own memory.
    Private,
    /// Input and output in different memories, swapped on every second rank.
    Mixed,
}

impl Kind {
    /// The collective of the operation on a vector of `len` elements.
    pub(crate) fn collective(self, len: usize) -> Collective {
        match self {
            Kind::AllReduce(_) => CollectiveKind::AllReduce.with_len(len),
            Kind::Reduce(_, root) => CollectiveKind::Reduce.with_root(root, len),
            Kind::Broadcast(root) => CollectiveKind::Broadcast.with_root(root, len),
            Kind::AllGather => CollectiveKind::AllGather.with_len(len),
            Kind::ReduceScatter(_) => CollectiveKind::ReduceScatter.with_len(len),
            Kind::Gather(root) => CollectiveKind::Gather.with_root(root, len),
            Kind::Scatter(root) => CollectiveKind::Scatter.with_root(root, len),
            Kind::AllToAll => CollectiveKind::AllToAll.with_len(len),
        }
    }

    /// The longest vector of up to `len` elements that the operation supports, in place and out of place.
    pub(crate) fn lens(self, world_size: usize, len: usize) -> [usize; 2] {
        let equal = len / world_size * world_size;
        match self {
            Kind::AllToAll => [equal; 2],
            Kind::Gather(_) | Kind::Scatter(_) => [len, equal],
            _ => [len; 2],
        }
    }
}

/// Every operation, with the first and the last rank as root.
pub(crate) fn kinds(world_size: usize) -> Vec<Kind> {
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

/// The expected element at `index` of the full vector on `rank`, if it is specified.
pub(crate) fn result<T: Value>(
    kind: Kind,
    rank: usize,
    world_size: usize,
    len: usize,
    index: usize,
) -> Option<T> {
    let owner = || {
        let mut ranks = 0..world_size;
        let found = ranks.find(|&rank| block(Rank(rank), world_size, len).contains(&index));
        found.expect("every element is in a block")
    };
    match kind {
        Kind::AllReduce(op) => Some(expected(op, world_size, index)),
        Kind::Reduce(op, root) => (root.0 == rank).then(|| expected(op, world_size, index)),
        Kind::Broadcast(root) => Some(T::of(root.0, index)),
        Kind::AllGather => Some(T::of(owner(), index)),
        Kind::ReduceScatter(op) => (owner() == rank).then(|| expected(op, world_size, index)),
        Kind::Gather(root) => (root.0 == rank).then(|| T::of(owner(), index)),
        Kind::Scatter(root) => (owner() == rank).then(|| T::of(root.0, index)),
        Kind::AllToAll => {
            let owner = owner();
            let within = index - block(Rank(owner), world_size, len).start;
            Some(T::of(owner, block(Rank(rank), world_size, len).start + within))
        }
    }
}

pub(crate) fn buffer<T: Value>(
    group: &Group,
    memory: MemoryKind,
    is_input: bool,
    range: Range<usize>,
) -> Buffer<T> {
    let rank = group.rank().0;
    let is_private = match memory {
        MemoryKind::Group => false,
        MemoryKind::Private => true,
        MemoryKind::Mixed => is_input == rank.is_multiple_of(2),
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

pub(crate) fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Compares the elements of a buffer that holds the full vector from `first` on.
pub(crate) fn compare<T: Value>(
    group: &Group,
    kind: Kind,
    len: usize,
    first: usize,
    buffer: &[T],
    what: &str,
) {
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

pub(crate) fn in_place<T: Value>(
    group: &Group,
    kind: Kind,
    memory: MemoryKind,
    len: usize,
) -> Work<Buffer<T>> {
    let buffer = buffer::<T>(group, memory, true, 0..len);
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

pub(crate) type Pair<T> = (Buffer<T>, Buffer<T>);

/// Issues the operation out of place. Returns the work, and the offset of its output in the full vector.
pub(crate) fn out_of_place<T: Value>(
    group: &Group,
    kind: Kind,
    memory: MemoryKind,
    len: usize,
) -> (Work<Pair<T>>, usize) {
    let (rank, world_size) = (group.rank(), group.world_size());
    let own = block(rank, world_size, len);
    let input = |range| buffer::<T>(group, memory, true, range);
    let output = |len| buffer::<T>(group, memory, false, 0..len);
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

/// Checks all lengths of an operation, in place and out of place, all in flight at once.
pub(crate) fn check<T: Value>(group: &Group, kind: Kind, memory: MemoryKind, lengths: &[usize]) {
    let world_size = group.world_size();
    let mut in_flight = Vec::new();
    let mut pairs = Vec::new();
    for &len in lengths {
        let [len_in_place, len] = kind.lens(world_size, len);
        in_flight.push((len_in_place, in_place::<T>(group, kind, memory, len_in_place)));
        let (work, first) = out_of_place::<T>(group, kind, memory, len);
        pairs.push((len, first, work));
    }
    for (len, work) in in_flight {
        let buffer = work.wait().expect("it goes well");
        compare(group, kind, len, 0, &buffer, &format!("in place, {memory:?}"));
    }
    for (len, first, work) in pairs {
        let (input, output) = work.wait().expect("it goes well");
        compare(group, kind, len, first, &output, &format!("out of place, {memory:?}"));
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

/// Checks the algorithm's operations in every kind of memory that the group has.
pub(crate) fn check_algorithm(group: &Group, algorithm: Algorithm) {
    let hosts = group.hosts();
    for kind in kinds(group.world_size()) {
        if !fits(kind.collective(1000), algorithm, hosts) {
            continue;
        }
        assert_eq!(group.algorithm(kind.collective(1000), 4), algorithm, "{kind:?} on {group:?}");
        let has_memory = matches!(group.transport(), TransportKind::Shm | TransportKind::ShmAndTcp);
        let memories =
            if has_memory { &[MemoryKind::Group, MemoryKind::Private][..] } else { &[MemoryKind::Private] };
        for &memory in memories {
            let before = group.statistics().payload_bytes;
            if is_canonical(kind.collective(1000), algorithm, hosts) {
                check::<f32>(group, kind, memory, &LENGTHS)
            } else {
                // Sums of integers do not depend on the order.
                check::<i32>(group, kind, memory, &LENGTHS)
            }
            if !algorithm.needs_shared_memory() {
                let sent = group.statistics().payload_bytes - before;
                assert_eq!(
                    sent,
                    bytes_of_steps(group, kind, algorithm),
                    "{kind:?} by {algorithm} on {group:?}"
                );
            }
        }
    }
}

/// Bytes that the steps of an algorithm send for all lengths, in place and out of place.
fn bytes_of_steps(group: &Group, kind: Kind, algorithm: Algorithm) -> u64 {
    let lens = LENGTHS.iter().flat_map(|&len| kind.lens(group.world_size(), len));
    let mut all = Vec::new();
    lens.for_each(|len| steps(kind.collective(len), algorithm, group.hosts(), group.rank(), &mut all));
    let sent = all.iter().map(|step| match step {
        Step::Exchange { send: Some(send), .. } => 4 * send.span.range.len() as u64,
        _ => 0,
    });
    sent.sum()
}
