//! Assembles the links, shared memory and control connections of a rank.

use super::device::{DeviceCollectives, DeviceResources};
use super::link::{Connection, Link, RingLink};
use super::link_transport::LinkTransport;
use super::mpi::{MpiAddresses, MpiLink};
use super::shm::{Area, Arena, PeerArena, Region, SharedMemory, area_bytes};
use super::{Purpose, Transport};
use crate::buffer::CacheLine;
use crate::control::Control;
use crate::recorder::GroupRecorder;
use crate::selection::Selection;
use crate::{CommError, GroupOptions, TransportKind};
use std::io;
use std::sync::{Arc, OnceLock};
use trireme_base::Rank;
use trireme_schedule::collective::{CostModel, Hosts};

/// The connections and memory of a group, from which [`assemble`](Self::assemble) builds the transport and links of this rank.
pub(crate) struct GroupConnections {
    pub(crate) rank: Rank,
    pub(crate) hosts: Hosts,
    /// Connections to the peers: one row per [`Purpose`], in rank order, with `None` for this rank.
    pub(crate) connections_by_purpose: [Vec<Option<Connection>>; 3],
    /// Memory shared with the ranks on this host.
    pub(crate) memory: Option<GroupMemory>,
    /// The ranks' addresses in MPI, if MPI carries the data.
    pub(crate) mpi_addresses: Option<MpiAddresses>,
    /// Whether all ranks are threads of this process.
    pub(crate) is_inproc: bool,
}

/// This rank's memory for a group, before the peers' memory is known.
pub(crate) struct OwnMemory {
    pub(crate) arena: Arc<Arena>,
    pub(crate) area: Arc<Region>,
}

/// The memory of those ranks of a group that are on this host.
pub(crate) struct GroupMemory {
    own: OwnMemory,
    peers: Vec<Option<PeerArena>>,
    /// The areas of the ranks on this host, `None` for other ranks.
    areas: Vec<Option<Area>>,
}

/// The connections, transport and memory of one rank in a group.
pub(crate) struct GroupEndpoint {
    pub(crate) kind: TransportKind,
    pub(crate) control: Control,
    pub(crate) transport: Box<dyn Transport>,
    pub(crate) selection: Selection,
    /// Links for messages to and from each rank, `None` for this rank.
    pub(crate) message_links: Vec<Option<Link>>,
    /// Shared memory from which the group's buffers are allocated.
    pub(crate) arena: Option<Arc<Arena>>,
    pub(crate) peer_arenas: Vec<Option<PeerArena>>,
}

impl OwnMemory {
    /// Creates an arena for this process, and in it the area for the group of all ranks.
    pub(crate) fn new(world_size: usize, hosts: &Hosts, rank: Rank) -> io::Result<Self> {
        let arena = Arena::new(world_size)?;
        let num_members = hosts.ranks(hosts.host_of(rank)).len();
        // The first region of an arena, so that the peers know its offset.
        let area = arena.allocate_permanent(area_bytes(num_members))?;
        assert_eq!(area.offset(), 0, "an arena begins with its first region");
        Ok(OwnMemory { arena, area: Arc::new(area) })
    }

    /// Adds the peers' arenas, in rank order, with the offsets of their areas.
    pub(crate) fn with_areas(
        self,
        peers: Vec<Option<PeerArena>>,
        offsets: &[usize],
        hosts: &Hosts,
        rank: Rank,
    ) -> io::Result<GroupMemory> {
        let num_members = hosts.ranks(hosts.host_of(rank)).len();
        let own_place = (Arc::clone(self.arena.mapping()), self.area.offset());
        let place = |other: usize| match &peers[other] {
            _ if other == rank.0 => Some(own_place.clone()),
            Some(peer) => Some((Arc::clone(&peer.0), offsets[other])),
            None => None,
        };
        let area = |other: usize| {
            let area = place(other).map(|(memory, offset)| Area::new(memory, offset, num_members));
            let refuse =
                || io::Error::new(io::ErrorKind::InvalidData, format!("rank {other} has its area nowhere"));
            area.map(|area| area.ok_or_else(refuse)).transpose()
        };
        let areas = (0..peers.len()).map(area).collect::<io::Result<_>>()?;
        Ok(GroupMemory { own: self, peers, areas })
    }
}

impl GroupConnections {
    pub(crate) fn assemble(
        self,
        measured: &Arc<OnceLock<CostModel>>,
        devices: &DeviceResources,
        options: &GroupOptions,
        recorder: &GroupRecorder,
    ) -> Result<GroupEndpoint, CommError> {
        let GroupConnections { rank, hosts, connections_by_purpose, memory, mpi_addresses, is_inproc } = self;
        let [collectives, messages, control] = connections_by_purpose;
        let control = control.into_iter().map(|connection| connection.map(Connection::into_socket)).collect();
        let control = Control::new(control, recorder.clone())
            .map_err(|source| CommError::Watch { source: Arc::new(source) })?;
        let piece_bytes = options.chunk_bytes.next_multiple_of(size_of::<CacheLine>());
        let links = |connections: Vec<Option<Connection>>, purpose| {
            let connections = connections.into_iter().enumerate();
            let link = |(peer, connection): (usize, Option<Connection>)| {
                Some(match &mpi_addresses {
                    Some(mpi_addresses) => {
                        let socket = connection?.into_socket();
                        Link::Mpi(MpiLink::new(socket, mpi_addresses, Rank(peer), purpose, piece_bytes))
                    }
                    None => link(
                        connection?,
                        purpose,
                        rank,
                        Rank(peer),
                        &hosts,
                        memory.as_ref(),
                        options.zero_copy,
                    ),
                })
            };
            connections.map(link).collect::<Vec<_>>()
        };
        let collective_links = links(collectives, Purpose::Collectives);
        let message_links = links(messages, Purpose::Messages);
        let (shares_all, world_size) = (hosts.num_hosts() == 1, hosts.world_size());
        let kind = match (&memory, is_inproc) {
            (_, true) => TransportKind::Inproc,
            _ if mpi_addresses.is_some() => TransportKind::Mpi,
            (None, false) => TransportKind::Tcp,
            (Some(_), false) if shares_all => TransportKind::Shm,
            (Some(_), false) => TransportKind::ShmAndTcp,
        };
        let (arena, peer_arenas) = match &memory {
            Some(memory) => (Some(Arc::clone(&memory.own.arena)), memory.peers.clone()),
            None => (None, collective_links.iter().map(|_| None).collect()),
        };
        let shared = memory
            .filter(|_| hosts.ranks(hosts.host_of(rank)).len() > 1)
            .map(|memory| {
                let areas: Vec<Area> = memory.areas.into_iter().flatten().collect();
                let members = hosts.ranks(hosts.host_of(rank)).to_vec();
                let OwnMemory { arena, area } = memory.own;
                SharedMemory::new(hosts.local_rank(rank), members, areas, arena, area, options)
            })
            .transpose()?;
        let selection = Selection::new(hosts.clone(), arena.is_some(), Arc::clone(measured), options);
        let transport = LinkTransport::new(
            rank,
            hosts,
            collective_links,
            shared,
            arena.clone(),
            selection.clone(),
            options,
        )?;
        let transport =
            DeviceCollectives::new((rank, world_size), options.keeps_order, transport, devices.clone());
        let transport = Box::new(transport);
        Ok(GroupEndpoint { kind, control, transport, selection, message_links, arena, peer_arenas })
    }
}

/// Creates the link to a peer. It is a ring in shared memory if both ranks map each other's memory.
fn link(
    connection: Connection,
    purpose: Purpose,
    own: Rank,
    peer: Rank,
    hosts: &Hosts,
    memory: Option<&GroupMemory>,
    zero_copy: bool,
) -> Link {
    let shared = memory.and_then(|memory| {
        Some((&memory.own.area, memory.areas[own.0].as_ref()?, memory.areas[peer.0].as_ref()?))
    });
    let Some((region, own_area, peer_area)) = shared else { return connection.into_link(zero_copy) };
    let outgoing = own_area.sender(purpose, hosts.local_rank(peer));
    let incoming = peer_area.receiver(purpose, hosts.local_rank(own));
    Link::Ring(RingLink::new(connection.into_socket(), outgoing, incoming, Arc::clone(region)))
}
