//! The [`Group`]: one rank's handle to a world, with its configuration, buffers and statistics.

mod issuing;
mod splitting;

use crate::buffer::{Memory, Storage};
use crate::element::has_element;
use crate::engine::Engine;
use crate::messages::Messenger;
use crate::queue::Queue;
use crate::recorder::{FlightRecorder, GroupRecorder};
use crate::rendezvous::SplitContext;
use crate::selection::{Choice, Selection, typical_costs};
use crate::transport::GroupConnections;
use crate::transport::device::{DeviceResources, SCRATCH_BYTES};
use crate::transport::shm::{Arena, PeerArena, area_bytes};
use crate::{
    Buffer, CommError, CommStatistics, Element, GroupOptions, PageSize, TransportKind, Untyped, probe,
};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use trireme_base::{DType, DeviceTransport, Heartbeat, Journal, Rank, spawn_thread};
use trireme_schedule::collective::{Algorithm, Collective, CostModel, Hosts};

/// One rank's handle to a world of communicating ranks.
///
/// All ranks issue the same operations in the same order. Several threads may use a group only if they agree on that order. Operations
/// return at once. The group's communication thread, or a thread that waits for a result, executes them in order of issue. The first
/// failure ends the group: all pending and all later operations return it.
///
/// Dropping a group waits for all issued operations and then leaves the world cleanly. If the thread is panicking, the group leaves without
/// a goodbye, so that its peers fail, too.
pub struct Group {
    rank: Rank,
    world_size: usize,
    transport: TransportKind,
    hosts: Hosts,
    /// Shared memory from which buffers are allocated. Without it, buffers are on the heap.
    pub(crate) arena: Option<Arc<Arena>>,
    pub(crate) peer_arenas: Vec<Option<PeerArena>>,
    pub(crate) split_context: SplitContext,
    pub(crate) options: GroupOptions,
    selection: Selection,
    /// Communication costs of this world. Unset until they are measured.
    costs: Arc<OnceLock<CostModel>>,
    devices: DeviceResources,
    recorder: FlightRecorder,
    num_splits: AtomicU64,
    /// `None` in a world of one rank and in a dry group, where an operation is complete when it is issued.
    executor: Option<Executor>,
    /// `None` in a world of one rank and in a dry group.
    messenger: Option<Messenger>,
    message_bytes: AtomicU64,
    /// Set if the group is dry.
    dry: Option<Dry>,
}

#[derive(Clone)]
struct Dry {
    journal: Arc<OnceLock<Journal>>,
    /// The ranks of the group, numbered as in the world.
    members: Arc<[Rank]>,
}

struct Executor {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
    recorder: GroupRecorder,
}

impl Group {
    pub(crate) fn start(
        connections: GroupConnections,
        split_context: SplitContext,
        costs: Arc<OnceLock<CostModel>>,
        devices: DeviceResources,
        options: &GroupOptions,
        recorder: GroupRecorder,
    ) -> Result<Self, CommError> {
        let (rank, hosts) = (connections.rank, connections.hosts.clone());
        let endpoint = connections.assemble(&costs, &devices, options, &recorder)?;
        recorder.set_selection(endpoint.selection.clone());
        let engine = Engine::new(endpoint.control, endpoint.transport, options.timeout, recorder.clone());
        let messenger =
            Messenger::start(rank, endpoint.message_links, devices.clone(), options, recorder.clone())?;
        let queue = Arc::new(Queue::new(engine, Arc::clone(&messenger.message_queue), recorder.clone()));
        let served = Arc::clone(&queue);
        let thread = spawn_thread(&format!("comm-{rank}"), move || served.serve())
            .map_err(|source| CommError::Spawn { source: Arc::new(source) })?;
        Ok(Group {
            rank,
            world_size: hosts.world_size(),
            transport: endpoint.kind,
            hosts,
            peer_arenas: endpoint.peer_arenas,
            selection: endpoint.selection,
            costs,
            devices,
            messenger: Some(messenger),
            executor: Some(Executor { queue, thread: Some(thread), recorder: recorder.clone() }),
            ..Group::single_rank(endpoint.arena, split_context, options, recorder.recorder.clone())
        })
    }

    /// A group of one rank, which allocates its buffers in `arena`.
    pub(crate) fn single_rank(
        arena: Option<Arc<Arena>>,
        split_context: SplitContext,
        options: &GroupOptions,
        recorder: FlightRecorder,
    ) -> Self {
        Group {
            rank: Rank::ROOT,
            world_size: 1,
            transport: TransportKind::Single,
            hosts: Hosts::single(1),
            arena,
            peer_arenas: vec![None],
            split_context,
            options: options.clone(),
            selection: Selection::new(Hosts::single(1), false, Arc::default(), options),
            costs: Arc::default(),
            devices: DeviceResources::default(),
            recorder,
            num_splits: AtomicU64::new(0),
            executor: None,
            messenger: None,
            message_bytes: AtomicU64::new(0),
            dry: None,
        }
    }

    /// Creates a dry group: the handle of `rank` in a simulated world on these `hosts` with this `transport`. Used to predict one rank's
    /// memory and operations without starting the other ranks. Operations complete when they are issued and change nothing. Buffers reserve
    /// addresses but no memory.
    ///
    /// # Errors
    /// [`CommError::Allocate`] if the process has no address space left.
    ///
    /// # Panics
    /// If `hosts` have no such rank.
    pub fn dry(
        rank: Rank,
        hosts: Hosts,
        transport: TransportKind,
        options: &GroupOptions,
    ) -> Result<Group, CommError> {
        assert!(rank.0 < hosts.world_size(), "no {rank} among {} ranks", hosts.world_size());
        let fail = |source| CommError::Allocate { bytes: 0, source: Arc::new(source) };
        let arena = Some(Arena::dry().map_err(fail)?);
        let recorder = FlightRecorder::new(rank, hosts.world_size());
        let alone = Group::single_rank(arena, SplitContext::inproc(), options, recorder);
        let members = (0..hosts.world_size()).map(Rank).collect();
        let dry = Dry { journal: Arc::default(), members };
        Ok(alone.into_dry(rank, hosts, transport, dry))
    }

    /// Records the operations of this dry world, and the waits for them, in `journal`. Only the first journal of a world is used.
    ///
    /// # Panics
    /// If the group is not dry.
    pub fn keep_journal(&self, journal: &Journal) {
        self.dry.as_ref().expect("dry groups keep journals").journal.get_or_init(|| journal.clone());
    }

    /// Turns this group into a dry group with the given rank, hosts and transport. Keeps the memory and the options.
    fn into_dry(self, rank: Rank, hosts: Hosts, transport: TransportKind, dry: Dry) -> Group {
        let world_size = hosts.world_size();
        let transport = if world_size == 1 { TransportKind::Single } else { transport };
        let peer_arenas = vec![None; world_size];
        let selection = Selection::new(hosts.clone(), false, Arc::default(), &self.options);
        let dry = Some(dry);
        Group { rank, world_size, transport, hosts, peer_arenas, selection, dry, ..self }
    }

    /// Whether the group is [dry](Group::dry).
    pub fn is_dry(&self) -> bool {
        self.arena.as_ref().is_some_and(|arena| arena.is_dry())
    }

    /// Creates a group of this rank alone, which shares this group's memory. A local call that allocates no buffers.
    pub fn singleton(&self) -> Group {
        self.singleton_with(&self.options)
    }

    fn singleton_with(&self, options: &GroupOptions) -> Group {
        Group::single_rank(self.arena.clone(), self.split_context.clone(), options, self.recorder.clone())
    }

    /// Starts the group `name` of the given `ranks` of this group.
    pub(crate) fn start_subgroup(
        &self,
        connections: GroupConnections,
        name: String,
        ranks: &[Rank],
        options: &GroupOptions,
    ) -> Result<Group, CommError> {
        match &self.executor {
            Some(executor) if ranks.len() > 1 => {
                let members = ranks.iter().map(|rank| executor.recorder.members()[rank.0]).collect();
                let recorder = self.recorder.group(name, connections.rank, members);
                Group::start(
                    connections,
                    self.split_context.clone(),
                    Arc::clone(&self.costs),
                    self.devices.for_split_group(),
                    options,
                    recorder,
                )
            }
            _ => Ok(self.singleton_with(options)),
        }
    }

    /// The recorder of this rank's recent operations in all groups. The handle outlives the group.
    pub fn flight_recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    /// The heartbeat of this rank. Long local work must beat it every few seconds: waiting peers give up after [`GroupOptions::timeout`]
    /// without a beat.
    pub fn heartbeat(&self) -> &Heartbeat {
        self.recorder.heartbeat()
    }

    /// Sets the program line that reports show for the following operations. Keeps its first 56 bytes, does not allocate, and takes less
    /// than a microsecond.
    pub fn set_program_line(&self, line: fmt::Arguments<'_>) {
        if let Some(executor) = &self.executor {
            executor.recorder.set_program_line(line);
        }
    }

    /// The placement of the ranks on hosts.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// The algorithm that this group uses for `collective` on elements of `element_bytes` bytes.
    pub fn algorithm(&self, collective: Collective, element_bytes: usize) -> Algorithm {
        self.selection.algorithm(collective, element_bytes)
    }

    /// The algorithms chosen so far, sorted by operation name and then by bytes. At most 4096 are kept.
    pub fn choices(&self) -> Vec<Choice> {
        let mut choices = self.selection.choices();
        choices.sort_by_cached_key(|choice| {
            let Choice { collective, element_bytes, .. } = choice;
            (collective.to_string(), choice.bytes(), *element_bytes, collective.root())
        });
        choices
    }

    /// Number of [`choices`](Group::choices). Does not allocate.
    pub fn num_choices(&self) -> usize {
        self.selection.num_choices()
    }

    /// The cost model by which algorithms are chosen: the given or measured costs, else typical ones.
    pub fn costs(&self) -> CostModel {
        self.costs.get().copied().unwrap_or_else(|| self.unmeasured_costs())
    }

    fn unmeasured_costs(&self) -> CostModel {
        self.options.costs.apply_to(typical_costs(self.arena.is_some()))
    }

    /// Measures the communication costs unless the options switch that off. All ranks of a new world call it before any other operation.
    pub(crate) fn measure_costs(&self) -> Result<(), CommError> {
        if self.options.keeps_order && self.world_size > 1 {
            let costs = probe::measure(self, &self.options.costs, self.unmeasured_costs())?;
            self.costs.set(costs).expect("a world's costs are measured once");
        }
        Ok(())
    }

    /// The failure that ended the group, if this rank knows of one. The death of a peer is noticed within half a second.
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.messenger.as_ref()?.message_queue.failure()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The kind of transport that carries the data.
    pub fn transport(&self) -> TransportKind {
        self.transport
    }

    /// Allocates a zeroed, 64-byte-aligned vector of `len` elements in the memory that suits the transport: with `shm`, memory that the
    /// peers map; else the heap. A local call.
    ///
    /// # Errors
    /// [`CommError::Allocate`] if there is not enough memory.
    pub fn buffer<T: Element>(&self, len: usize) -> Result<Buffer<T>, CommError> {
        Ok(Buffer::from_storage(self.storage(T::DTYPE, len, PageSize::Base)?))
    }

    /// Like [`buffer`](Group::buffer), with a `dtype` known at run time and, if the ranks share memory, pages of this size.
    ///
    /// # Errors
    /// As [`buffer`](Group::buffer).
    ///
    /// # Panics
    /// If `dtype` has no [`Element`].
    pub fn buffer_of(
        &self,
        dtype: DType,
        len: usize,
        page_size: PageSize,
    ) -> Result<Buffer<Untyped>, CommError> {
        assert!(has_element(dtype), "groups do not send {dtype}");
        Ok(Buffer::from_storage(self.storage(dtype, len, page_size)?))
    }

    fn storage(&self, dtype: DType, len: usize, page_size: PageSize) -> Result<Storage, CommError> {
        let fail = |source| CommError::Allocate {
            bytes: len.saturating_mul(dtype.size()),
            source: Arc::new(source),
        };
        let num_bytes = len.checked_mul(dtype.size());
        let num_bytes = num_bytes.ok_or_else(|| fail(std::io::ErrorKind::OutOfMemory.into()))?;
        match &self.arena {
            None => Storage::heap(dtype, len),
            Some(arena) => {
                let region = arena.allocate(num_bytes, page_size).map_err(fail)?;
                Ok(Storage::new(Memory::Shared(region), dtype, num_bytes))
            }
        }
    }

    /// Bytes that the group allocates in addition to buffers: the area in which the ranks of a host synchronize, and the rings between
    /// them.
    pub fn fixed_bytes(&self) -> usize {
        let shares_memory = if self.is_dry() {
            matches!(self.transport, TransportKind::Shm | TransportKind::ShmAndTcp)
        } else {
            self.arena.is_some() && self.executor.is_some()
        };
        let num_on_host = self.hosts.ranks(self.hosts.host_of(self.rank)).len();
        if shares_memory { area_bytes(num_on_host) } else { 0 }
    }

    /// Bytes of peers' memory that this process maps when a buffer of `num_bytes` is reduced: with `shm`, its block of each peer's buffer;
    /// else 0.
    pub fn peer_bytes_mapped(&self, num_bytes: usize) -> usize {
        self.peer_bytes_mapped_in(num_bytes, PageSize::Base)
    }

    /// Like [`peer_bytes_mapped`](Group::peer_bytes_mapped), for a buffer in pages of this size. A buffer in huge pages is assumed to be
    /// reduced and gathered, with blocks that may begin and end within a page.
    pub fn peer_bytes_mapped_in(&self, num_bytes: usize, page_size: PageSize) -> usize {
        let part = num_bytes.div_ceil(self.world_size);
        let mapped = match page_size {
            PageSize::Base => part,
            // A reduction reads this rank's block of a peer's buffer, a gather the peer's own block. One buffer serves both.
            PageSize::Huge => num_bytes.min(2 * (part + 2 * PageSize::HUGE_BYTES)),
        };
        if self.transport == TransportKind::Shm { mapped * (self.world_size - 1) } else { 0 }
    }

    /// Sets the transport between the devices of the ranks. From then on, this world and all groups split from it accept vectors in [device
    /// memory](Buffer::on_device). Local; every rank calls it before it issues an operation on such a vector. A dry group only allocates
    /// the memory that the operations need.
    ///
    /// # Panics
    /// If the world has a device transport.
    pub fn set_device_transport(&self, transport: Arc<dyn DeviceTransport>) {
        self.devices.transport.set(transport).expect("a world has one device transport");
    }

    /// Whether the group has several ranks and a [device transport](Group::set_device_transport).
    pub fn has_device_transport(&self) -> bool {
        self.world_size > 1 && self.devices.transport.get().is_some()
    }

    /// Announces exchanges of vectors in device memory, for [`join_devices`](Group::join_devices). A local call.
    pub fn need_devices(&self) {
        self.devices.are_needed.store(true, Ordering::Relaxed);
    }

    /// Allocates the memory for intermediate results on the device, unless that was done before.
    fn reserve_scratch(&self) -> Result<(), CommError> {
        if self.devices.scratch.get().is_some() {
            return Ok(());
        }
        let scratch = self.devices.transport().allocate(SCRATCH_BYTES);
        let scratch = scratch.map_err(|cause| CommError::Allocate {
            bytes: SCRATCH_BYTES,
            source: Arc::new(std::io::Error::other(cause)),
        })?;
        // Another thread may have allocated memory meanwhile.
        let _ = self.devices.scratch.set(scratch);
        Ok(())
    }

    /// The counters of all operations so far.
    pub fn statistics(&self) -> CommStatistics {
        let statistics =
            self.executor.as_ref().map(|executor| executor.queue.statistics()).unwrap_or_default();
        CommStatistics { message_bytes: self.message_bytes.load(Ordering::Relaxed), ..statistics }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The communication thread ends after the operation that it is executing.
            self.queue.abort(CommError::Panicked);
            return;
        }
        self.queue.close();
        let ended = self.thread.take().map(JoinHandle::join);
        self.recorder.drop_group();
        assert!(!matches!(ended, Some(Err(_))), "the communication thread panicked; its message is above");
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group(rank {} of {}, {})", self.rank, self.world_size, self.transport)
    }
}
