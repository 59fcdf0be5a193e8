//! Establishes the connections of a group that is split from another.

use super::key::{NONCE_BYTES, Nonce, nonce};
use super::local::{self, LOCAL_CONNECT_MAX};
use super::mesh::{self, Listeners, Mesh, MeshConfig, SocketKind};
use super::mpi_exchange;
use super::ports::listen_at;
use super::rank_address::{RANK_ADDRESS_WORDS, RankAddress};
use super::refusals::Refusals;
use super::session::Session;
use super::wait_limit::WaitLimit;
use crate::secret::random_bytes;
use crate::transport::shm::area_bytes;
use crate::transport::{GroupConnections, OwnMemory};
use crate::{CommError, Group, GroupOptions, TransportKind, words};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Instant;
use trireme_base::Rank;
use trireme_schedule::collective::Hosts;

/// The members of a new group, by their ranks in the parent.
struct Membership {
    own: Rank,
    ranks: Vec<Rank>,
}

/// A member's addresses in the new group, and a nonce. The session key of the group is derived from the nonce of its first member.
struct MemberInfo {
    address: RankAddress,
    nonce: Nonce,
    area_offset: usize,
}

const MEMBER_INFO_BYTES: usize = 8 * (RANK_ADDRESS_WORDS + 1) + NONCE_BYTES;

impl MemberInfo {
    fn encode(&self) -> Vec<u8> {
        let [a, b, c, d, e, f] = self.address.to_words();
        let words: [u8; 8 * (RANK_ADDRESS_WORDS + 1)] =
            words::to_bytes([a, b, c, d, e, f, self.area_offset as u64]);
        [&words[..], &self.nonce].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MEMBER_INFO_BYTES] = bytes.try_into().ok()?;
        let (words, nonce) = bytes.split_at(8 * (RANK_ADDRESS_WORDS + 1));
        let words: [u64; RANK_ADDRESS_WORDS + 1] = words::from_bytes::<
            { RANK_ADDRESS_WORDS + 1 },
            { 8 * (RANK_ADDRESS_WORDS + 1) },
        >(words.try_into().ok()?);
        let [place @ .., area_offset] = words;
        Some(MemberInfo {
            address: RankAddress::from_words(place)?,
            nonce: nonce.try_into().ok()?,
            area_offset: usize::try_from(area_offset).ok()?,
        })
    }
}

/// Splits `parent` into groups called `name`. All ranks of `parent` call it, including those without a color.
pub(crate) fn split(
    parent: &Group,
    name: String,
    color: Option<u64>,
    key: u64,
    options: &GroupOptions,
) -> Result<Option<Group>, CommError> {
    let membership = membership(parent, color, key)?;
    let prepared = membership.as_ref().map(|membership| Preparation::new(parent, membership)).transpose();
    let offer = prepared
        .as_ref()
        .map(|prepared| prepared.as_ref().map_or_else(Vec::new, |prepared| prepared.info.encode()));
    let infos = agree(parent, "preparing to connect", offer.map_err(ToString::to_string))?;

    let connected = match (&membership, prepared) {
        (Some(membership), Ok(Some(prepared))) => Some(prepared.connect(parent, membership, &infos)),
        _ => None,
    };
    let report = match &connected {
        Some(Err(error)) => Err(error.to_string()),
        _ => Ok(Vec::new()),
    };
    agree(parent, "connecting", report)?;
    let (Some(Ok(parts)), Some(Membership { ranks, .. })) = (connected, membership) else { return Ok(None) };
    parent.start_subgroup(parts, name, &ranks, options).map(Some)
}

/// Ends a phase on all ranks. Each rank passes some bytes for the others, or the reason of its failure. Returns the bytes of all ranks, or
/// an error if any rank failed.
fn agree(parent: &Group, doing: &str, own: Result<Vec<u8>, String>) -> Result<Vec<Vec<u8>>, CommError> {
    let message = match own {
        Ok(bytes) => [&[1], &bytes[..]].concat(),
        Err(reason) => [&[0], reason.as_bytes()].concat(),
    };
    let mut all = parent.all_gather_bytes(&message).wait()?;
    for (rank, message) in all.iter_mut().enumerate() {
        if message.first() != Some(&1) {
            let reason = String::from_utf8_lossy(message.get(1..).unwrap_or_default()).into_owned();
            return Err(CommError::Split { rank: Rank(rank), doing: doing.to_owned(), reason });
        }
        message.remove(0);
    }
    Ok(all)
}

/// The ranks of this rank's color, ordered by key and then by rank in the parent.
fn membership(parent: &Group, color: Option<u64>, key: u64) -> Result<Option<Membership>, CommError> {
    let own: [u8; 24] = words::to_bytes([u64::from(color.is_some()), color.unwrap_or(0), key]);
    let all = parent.all_gather_bytes(&own).wait()?;
    let Some(color) = color else { return Ok(None) };
    let mut ranks = Vec::new();
    for (rank, message) in all.iter().enumerate() {
        let message: &[u8; 24] = message.as_slice().try_into().map_err(|_| CommError::Split {
            rank: Rank(rank),
            doing: "announcing its color".to_owned(),
            reason: format!("it sent {} bytes", message.len()),
        })?;
        let [has_color, their_color, their_key] = words::from_bytes(message);
        if has_color == 1 && their_color == color {
            ranks.push((their_key, Rank(rank)));
        }
    }
    ranks.sort();
    let ranks: Vec<Rank> = ranks.into_iter().map(|(_, rank)| rank).collect();
    let own = ranks.iter().position(|&rank| rank == parent.rank()).expect("a rank has its own color");
    Ok(Some(Membership { own: Rank(own), ranks }))
}

/// The listeners and memory of a member before it is connected.
struct Preparation {
    info: MemberInfo,
    listeners: Listeners,
    hosts: Hosts,
    memory: Option<OwnMemory>,
}

impl Preparation {
    fn new(parent: &Group, membership: &Membership) -> io::Result<Self> {
        let ids: Vec<usize> = membership.ranks.iter().map(|&rank| parent.hosts().host_of(rank)).collect();
        let hosts = Hosts::new(&ids);
        let memory = match &parent.arena {
            None => None,
            Some(arena) => {
                let num_members = hosts.ranks(hosts.host_of(membership.own)).len();
                let area = arena.allocate_permanent(area_bytes(num_members))?;
                Some(OwnMemory { arena: Arc::clone(arena), area: Arc::new(area) })
            }
        };
        let socket_id = u64::from_ne_bytes(random_bytes()?);
        let tcp = match parent.split_context.addresses {
            Some([own, _]) if parent.transport() != TransportKind::Shm => {
                Some(listen_at(own, parent.split_context.ports.as_ref())?)
            }
            _ => None,
        };
        let nowhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let address = tcp.as_ref().map_or(Ok(nowhere), TcpListener::local_addr)?;
        let area_offset = memory.as_ref().map_or(0, |memory| memory.area.offset());
        let info =
            MemberInfo { address: RankAddress { host: 0, socket_id, address }, nonce: nonce()?, area_offset };
        Ok(Preparation {
            info,
            listeners: Listeners { tcp, local: local::listen_local(socket_id)? },
            hosts,
            memory,
        })
    }

    fn connect(
        self,
        parent: &Group,
        membership: &Membership,
        infos: &[Vec<u8>],
    ) -> io::Result<GroupConnections> {
        let infos: Option<Vec<MemberInfo>> =
            membership.ranks.iter().map(|rank| MemberInfo::decode(&infos[rank.0])).collect();
        let infos = infos.ok_or_else(|| super::socket_io::invalid("a member's offer is none"))?;
        let is_inproc = parent.transport() == TransportKind::Inproc;
        let within = if self.memory.is_some() { SocketKind::Local } else { SocketKind::Tcp };
        // Threads of one process use local sockets, whatever hosts they are assigned to.
        let routes = if is_inproc {
            vec![SocketKind::Local; membership.ranks.len()]
        } else {
            mesh::socket_kinds(&self.hosts, membership.own, within)
        };
        let seen = |place: RankAddress| match parent.split_context.addresses {
            Some([_, root]) => place.with_scope_of(root),
            None => place,
        };
        let places: Vec<RankAddress> = infos.iter().map(|offer| seen(offer.address)).collect();
        let members = MeshConfig {
            own: membership.own,
            addresses: &places,
            socket_kinds: &routes,
            arena: None,
            arena_bytes_min: 0,
            tls: parent.split_context.tls.as_ref(),
            network_pause: parent.options.network_pause,
            sockets_per_peer: match parent.transport() {
                TransportKind::Mpi => 1,
                _ => parent.options.sockets_per_peer,
            },
        };
        // The options of the world are not kept, so strangers are refused without a report.
        let refusals = Refusals::silent();
        let session = Session::new(
            &parent.split_context.key,
            &infos[0].nonce,
            membership.own,
            membership.ranks.len(),
            &refusals,
        );
        let deadline = Instant::now() + parent.options.timeout.max(2 * LOCAL_CONNECT_MAX);
        let failure = || parent.failure().map(io::Error::other);
        let limit = WaitLimit::unless(deadline, &failure);
        let Mesh { connections_by_purpose, .. } = mesh::connect(&session, &members, &self.listeners, limit)?;
        let memory = self.memory.map(|memory| -> io::Result<_> {
            let is_on_same_host = |rank: Rank| self.hosts.host_of(rank) == self.hosts.host_of(membership.own);
            let peers = membership.ranks.iter().enumerate();
            let peers = peers.map(|(index, rank)| {
                parent.peer_arenas[rank.0].clone().filter(|_| is_on_same_host(Rank(index)))
            });
            let offsets: Vec<usize> = infos.iter().map(|offer| offer.area_offset).collect();
            memory.with_areas(peers.collect(), &offsets, &self.hosts, membership.own)
        });
        let memory = memory.transpose()?;
        let mpi_addresses = match parent.transport() {
            TransportKind::Mpi => {
                Some(mpi_exchange::exchange(&connections_by_purpose, limit).map_err(io::Error::other)?)
            }
            _ => None,
        };
        Ok(GroupConnections {
            rank: membership.own,
            hosts: self.hosts,
            connections_by_purpose,
            memory,
            mpi_addresses,
            is_inproc,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupOptions, inproc_world_with};
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::time::Duration;

    /// Rank 2 dies after it has established one of its connections to each of the others, which wait for the next one.
    #[test]
    fn a_rank_that_dies_during_a_split_is_noticed_long_before_the_deadline() {
        let options = GroupOptions { timeout: Duration::from_secs(3600), ..GroupOptions::default() };
        let mut groups = inproc_world_with(3, &options);
        let victim = groups.pop().unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let failure = group.split(Some(0), 0).err().unwrap();
                    assert!(matches!(failure, CommError::PeerLost { rank: Rank(2), .. }), "{failure}");
                });
            }
            let membership = membership(&victim, Some(0), 0).unwrap().unwrap();
            let prepared = Preparation::new(&victim, &membership).unwrap();
            let infos = agree(&victim, "preparing to connect", Ok(prepared.info.encode())).unwrap();
            let infos: Vec<MemberInfo> =
                infos.iter().map(|offer| MemberInfo::decode(offer).unwrap()).collect();
            let refusals = Refusals::silent();
            let session = Session::new(&victim.split_context.key, &infos[0].nonce, Rank(2), 3, &refusals);
            let soon = Instant::now() + Duration::from_secs(20);
            let made = [0, 1].map(|lower| {
                let socket = local::connect_local(infos[lower].address.socket_id, soon).unwrap();
                session.introduce(&socket, Rank(lower), 0, soon).unwrap();
                socket
            });
            let died = catch_unwind(AssertUnwindSafe(|| {
                let _victim = victim;
                resume_unwind(Box::new("not printed"));
            }));
            assert!(died.is_err());
            drop(made);
        });
    }
}
