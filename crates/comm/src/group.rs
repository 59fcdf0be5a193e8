use crate::buffer::{Memory, Storage};
use crate::control::Control;
use crate::engine::{Engine, Payload};
use crate::queue::Queue;
use crate::transport::Fabric;
use crate::transport::shm::Arena;
use crate::transport::sockets::Sockets;
use crate::{
    Buffer, CommError, CommStatistics, Element, GroupOptions, JoinOptions, Operation, TransportKind, Work,
    rendezvous,
};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use trireme_base::{Rank, ReduceOp};

/// Bytes a rank may give to [`Group::all_gather_bytes`].
pub const CONTROL_BYTES_MAX: usize = 1 << 20;

/// One rank's end of a world of ranks that communicate.
///
/// All ranks issue the same operations in the same order; a group may be used from several threads only if
/// they agree on that order. Operations return at once and are executed in order of issue by the
/// group's communication thread, or by a thread that waits for one. The first failure ends the group:
/// whatever is pending or issued later returns it too.
///
/// Dropping a group waits for what was issued, then leaves in good order. Dropping it during a panic
/// leaves without a goodbye, so that the peers fail instead of waiting.
pub struct Group {
    rank: Rank,
    world_size: usize,
    transport: TransportKind,
    allocator: Allocator,
    /// Absent in a world of one, where every operation is complete when it is issued.
    executor: Option<Executor>,
}

/// Where a group's buffers come from.
enum Allocator {
    Heap,
    Shared(Arc<Arena>),
}

struct Executor {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

/// A world of one rank: every operation completes at once, and no thread is started.
pub fn single() -> Group {
    let (rank, world_size) = (Rank::ROOT, 1);
    Group { rank, world_size, transport: TransportKind::Single, allocator: Allocator::Heap, executor: None }
}

/// A world whose ranks are threads of this process, with default options: one group per rank, in rank order.
///
/// # Panics
/// As [`inproc_world_with`].
pub fn inproc_world(world_size: usize) -> Vec<Group> {
    inproc_world_with(world_size, &GroupOptions::default())
}

/// A world whose ranks are threads of this process: one group per rank, in rank order.
///
/// # Panics
/// If `world_size` is 0, the options are out of bounds, or the process has no file descriptors (two per pair
/// of ranks and rank) or threads left.
pub fn inproc_world_with(world_size: usize, options: &GroupOptions) -> Vec<Group> {
    assert!(world_size > 0, "a world has at least one rank");
    rendezvous::check_group_options(options).expect("options within their bounds");
    if world_size == 1 {
        return Vec::from([single()]);
    }
    let data = socket_pairs(world_size);
    let control = socket_pairs(world_size);
    let ranks = data.into_iter().zip(control).enumerate();
    ranks
        .map(|(rank, (data, control))| {
            let rank = Rank(rank);
            let sockets = Sockets::new(rank, data, options).expect("memory for one piece of a message");
            let fabric = Fabric {
                kind: TransportKind::Inproc,
                control: Control::new(control).expect("a file descriptor to watch the peers"),
                transport: Box::new(sockets),
                arena: None,
            };
            Group::start(rank, world_size, fabric, options).expect("a communication thread")
        })
        .collect()
}

/// One connected pair of sockets for each pair of ranks; row `r` holds the ends of rank `r`.
fn socket_pairs(world_size: usize) -> Vec<Vec<Option<OwnedFd>>> {
    let mut ends: Vec<Vec<Option<OwnedFd>>> =
        (0..world_size).map(|_| (0..world_size).map(|_| None).collect()).collect();
    for second in 1..world_size {
        let (lower, upper) = ends.split_at_mut(second);
        for (first, row) in lower.iter_mut().enumerate() {
            let (one, other) = UnixStream::pair().expect("file descriptors for a pair of sockets");
            row[second] = Some(one.into());
            upper[0][first] = Some(other.into());
        }
    }
    ends
}

/// Joins the world that `options` describe: meets the other ranks at rank 0's address, connects to them, and
/// returns when all are connected.
///
/// # Errors
/// Options out of bounds; an address that does not resolve, is not this host's or is taken; a rank 0 that is
/// not reached or refuses this rank; ranks that do not come within the timeout; a transport that cannot be
/// had.
pub fn join(options: &JoinOptions) -> Result<Group, CommError> {
    rendezvous::check_options(options)?;
    if options.world_size == 1 {
        return Ok(single());
    }
    rendezvous::join(options)
}

impl Group {
    /// Starts a rank's communication thread.
    pub(crate) fn start(
        rank: Rank,
        world_size: usize,
        fabric: Fabric,
        options: &GroupOptions,
    ) -> Result<Self, CommError> {
        let engine = Engine::new(fabric.control, fabric.transport, options.timeout);
        let queue = Arc::new(Queue::new(engine));
        let served = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name(format!("comm-{rank}"))
            .spawn(move || served.serve())
            .map_err(|source| CommError::Spawn { source: Arc::new(source) })?;
        Ok(Group {
            rank,
            world_size,
            transport: fabric.kind,
            allocator: fabric.arena.map_or(Allocator::Heap, Allocator::Shared),
            executor: Some(Executor { queue, thread: Some(thread) }),
        })
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// What carries the data.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// A zeroed vector of `len` elements, 64-byte aligned, in the memory that this group's transport handles
    /// best: memory that the peers map for `shm`, else heap. It is a local call: the other ranks need not
    /// make it.
    ///
    /// # Errors
    /// [`CommError::Allocate`] if there is not so much memory.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>, CommError> {
        let fail = |source| CommError::Allocate {
            bytes: len.saturating_mul(size_of::<T>()),
            source: Arc::new(source),
        };
        let num_bytes = len
            .checked_mul(size_of::<T>())
            .ok_or_else(|| fail(std::io::Error::from(std::io::ErrorKind::OutOfMemory)))?;
        let storage = match &self.allocator {
            Allocator::Heap => Storage::heap(num_bytes)?,
            Allocator::Shared(arena) => Storage::shared(arena.allocate(num_bytes).map_err(fail)?, num_bytes),
        };
        Ok(Buffer::from_storage(storage))
    }

    /// Bytes of its peers' memory that this process maps when a buffer of `num_bytes` is reduced: with `shm` the part
    /// that this rank reduces, in every peer's buffer; else none.
    pub fn peer_bytes_mapped(&self, num_bytes: usize) -> usize {
        match self.transport {
            TransportKind::Shm => num_bytes.div_ceil(self.world_size) * (self.world_size - 1),
            _ => 0,
        }
    }

    /// Replaces each element by the reduction of all ranks' elements, in the canonical order of
    /// [`trireme_schedule::collective`], where steps and bytes are listed too.
    pub fn all_reduce<T: Element>(&self, buffer: Buffer<T>, op: ReduceOp) -> Work<Buffer<T>> {
        let operation = Operation::AllReduce { op, dtype: T::DTYPE, len: buffer.len() };
        self.issue(operation, buffer)
    }

    /// Replaces each rank's elements by those of `root`.
    ///
    /// # Errors
    /// From the work: [`CommError::NoSuchRoot`], and whatever ends a group.
    pub fn broadcast<T: Element>(&self, buffer: Buffer<T>, root: Rank) -> Work<Buffer<T>> {
        let operation = Operation::Broadcast { root, dtype: T::DTYPE, len: buffer.len() };
        if root.0 >= self.world_size {
            let world_size = self.world_size;
            return Work::ready(Err(CommError::NoSuchRoot { operation, root, world_size }));
        }
        self.issue(operation, buffer)
    }

    /// Gives every rank a few bytes of every rank, in rank order, once all pending operations are done.
    ///
    /// # Errors
    /// [`CommError::ControlDataTooLong`] above [`CONTROL_BYTES_MAX`], and whatever ends a group.
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if mine.len() > CONTROL_BYTES_MAX {
            return Err(CommError::ControlDataTooLong {
                rank: self.rank,
                bytes: mine.len() as u64,
                bytes_max: CONTROL_BYTES_MAX,
            });
        }
        let mut blocks = vec![Vec::new(); self.world_size];
        blocks[self.rank.0] = mine.to_vec();
        let Some(executor) = &self.executor else { return Ok(blocks) };
        match executor.queue.call(Operation::AllGatherBytes, Payload::Blocks(blocks))? {
            Payload::Blocks(blocks) => Ok(blocks),
            _ => unreachable!("an operation gives back the payload it took"),
        }
    }

    /// Returns when all ranks have called it and all pending operations are done.
    ///
    /// # Errors
    /// Whatever ends a group.
    pub fn barrier(&self) -> Result<(), CommError> {
        match &self.executor {
            Some(executor) => executor.queue.call(Operation::Barrier, Payload::Nothing).map(drop),
            None => Ok(()),
        }
    }

    /// What the group has done so far.
    pub fn statistics(&self) -> CommStatistics {
        self.executor.as_ref().map_or_else(CommStatistics::default, |executor| executor.queue.statistics())
    }

    fn issue<T: Element>(&self, operation: Operation, buffer: Buffer<T>) -> Work<Buffer<T>> {
        let storage = buffer.into_storage();
        if !self.reaches(&storage) {
            return Work::ready(Err(CommError::ForeignBuffer { operation }));
        }
        let Some(executor) = &self.executor else {
            return Work::ready(Ok(Buffer::from_storage(storage)));
        };
        let ticket = executor.queue.submit(operation, Payload::Vector(storage));
        Work::pending(ticket, |payload| match payload {
            Payload::Vector(storage) => Buffer::from_storage(storage),
            _ => unreachable!("an operation gives back the payload it took"),
        })
    }

    /// Whether the peers can reach the memory as this group's transport needs.
    fn reaches(&self, storage: &Storage) -> bool {
        match (&self.allocator, storage.memory()) {
            (Allocator::Heap, _) => true,
            (Allocator::Shared(arena), Memory::Shared(region)) => region.is_in(arena),
            (Allocator::Shared(_), Memory::Heap(_)) => false,
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Its thread ends when the operation it is in does.
            self.queue.abort(CommError::Panicked);
            return;
        }
        self.queue.close();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(!matches!(ended, Some(Err(_))), "the communication thread panicked; its message is above");
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {}, {})", self.rank, self.world_size, self.transport)
    }
}
