//! Rendezvous: the ranks of a world find each other and connect.
//!
//! 1. Rank 0 listens on the rendezvous address. The others connect to it, with retries, because it may start last, and introduce
//!    themselves: protocol version, rank, world size, job. Both sides prove that they know the job's secret (`handshake`). A connection
//!    that does not belong to the job is refused with a reason, and has no effect.
//! 2. When all ranks have joined, rank 0 sends each of them a table with the addresses of all ranks. The table also says whether to try
//!    shared memory: if it was requested, or if no transport was requested and some ranks share a host. From then on, messages to and from
//!    rank 0 carry tags that only holders of the secret can make (`channel`). If requested, and if the ranks of a host are not adjacent,
//!    all ranks are renumbered by the table.
//! 3. Shared memory: processes of one host connect over abstract Unix sockets, and pass each other the descriptors of their arenas. If any
//!    rank fails, all ranks continue with TCP under [`TransportChoice::Auto`], and fail otherwise.
//! 4. TCP between all other pairs of ranks. Each pair has one connection for collectives, one for messages and one for control. There may
//!    be more connections for data ([`GroupOptions::sockets_per_peer`]).
//! 5. Each rank reports to rank 0 that it is connected, and starts when all ranks are. A rank that cannot connect reports that at once, and
//!    the others stop waiting for it. Under [`TransportChoice::Mpi`], the connected ranks then exchange their addresses in MPI
//!    (`mpi_exchange`), and report once more before they start.
//!
//! On each connection of steps 3 and 4, both sides prove that they belong to the session, whose key is derived from the secret and the
//! table (`session`). With TLS, the data connections of step 4 are then encrypted (`encryption`). `docs/security.md` describes what this
//! protects.

mod acceptor;
mod channel;
mod encryption;
#[cfg(test)]
mod fuzz;
mod handshake;
mod hello;
mod interface;
mod join_context;
mod join_progress;
mod key;
mod local;
mod mesh;
mod message;
mod mpi_exchange;
mod ports;
mod rank_address;
mod refusals;
mod root_exchange;
mod root_rendezvous;
mod session;
mod socket_io;
mod split;
mod split_context;
mod wait_limit;

use crate::recorder::{FlightRecorder, Occasion};
use crate::secret::random_bytes;
use crate::transport::device::DeviceResources;
use crate::transport::link::Tls;
use crate::transport::mpi::MpiProcess;
use crate::transport::shm::{Arena, area_bytes};
use crate::transport::{GroupConnections, OwnMemory};
use crate::{CommError, Group, GroupOptions, JoinOptions, TransportChoice};
use join_context::{JoinContext, check_secret, look_up};
use join_progress::JoinProgress;
use key::Key;
use local::LOCAL_CONNECT_MAX;
use mesh::{Listeners, Mesh, MeshConfig, SocketKind, socket_kinds};
use message::Table;
use rank_address::RankAddress;
use refusals::Refusals;
use root_exchange::{Joined, RootExchange};
use session::Session;
use socket_io::sleep_if_time;
pub(crate) use split::split;
pub(crate) use split_context::SplitContext;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;
use trireme_schedule::collective::Hosts;
use wait_limit::{AnotherFailed, WaitLimit};

/// Maximum number of ranks in a world. It bounds the tables that ranks exchange.
const WORLD_SIZE_MAX: usize = 1 << 16;
/// Upper bound of timeouts: practically unlimited, and far from where times overflow.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Pause between two attempts to resolve the name of rank 0's host.
const LOOK_UP_PAUSE: Duration = Duration::from_millis(500);
/// How long a failed rank tries to reach rank 0 to report its failure.
const FAILURE_REPORT_MAX: Duration = Duration::from_secs(10);

pub(crate) fn check_options(options: &JoinOptions) -> Result<(), CommError> {
    let JoinOptions { rank, world_size, master_port, join_timeout, .. } = options;
    if !(1..=WORLD_SIZE_MAX).contains(world_size) {
        return refuse(format!("world_size is {world_size}; it must be from 1 to {WORLD_SIZE_MAX}"));
    }
    if rank.0 >= *world_size {
        return refuse(format!("rank {rank} is outside a world of {world_size} ranks; ranks count from 0"));
    }
    if *master_port == 0 {
        return refuse("master_port is 0; the ranks must agree on a port from 1 to 65535".to_owned());
    }
    if options.transport == TransportChoice::Mpi && options.tls.is_some() {
        let what = "TLS encrypts TCP connections, but with transport mpi, MPI carries the data: remove one of the two";
        return refuse(what.to_owned());
    }
    check_timeout("join_timeout", *join_timeout)?;
    check_group_options(&options.group)
}

pub(crate) fn check_group_options(options: &GroupOptions) -> Result<(), CommError> {
    check_timeout("timeout", options.timeout)?;
    let (pause, limit) = (options.network_pause, GroupOptions::NETWORK_PAUSE_MAX);
    if !(Duration::from_secs(1)..=limit).contains(&pause) {
        return refuse(format!("network_pause is {pause:?}; it must be from 1s to {limit:?}"));
    }
    let (bytes, limit) = (options.short_bytes_max, GroupOptions::SHORT_BYTES_LIMIT);
    if bytes > limit {
        return refuse(format!("short_bytes_max is {bytes}; it may be at most {limit}"));
    }
    let (bytes, bounds) = (options.chunk_bytes, GroupOptions::CHUNK_BYTES_BOUNDS);
    if !bounds.contains(&bytes) {
        let (start, end) = (bounds.start(), bounds.end());
        return refuse(format!("chunk_bytes is {bytes}; it must be from {start} to {end}"));
    }
    if !options.costs.are_positive() {
        return refuse(format!("costs are {:?}; they must be positive", options.costs));
    }
    let (sockets, limit) = (options.sockets_per_peer, GroupOptions::SOCKETS_PER_PEER_MAX);
    if !(1..=limit).contains(&sockets) {
        return refuse(format!("sockets_per_peer is {sockets}; it must be from 1 to {limit}"));
    }
    Ok(())
}

fn check_timeout(name: &str, timeout: Duration) -> Result<(), CommError> {
    if timeout.is_zero() || timeout > TIMEOUT_MAX {
        return refuse(format!("{name} is {timeout:?}; it must be more than 0 and at most {TIMEOUT_MAX:?}"));
    }
    Ok(())
}

fn refuse(what: String) -> Result<(), CommError> {
    Err(CommError::Options { what })
}

pub(crate) fn join(options: &JoinOptions) -> Result<Group, CommError> {
    if options.transport == TransportChoice::Mpi {
        MpiProcess::start(options.rank, options.world_size)?;
    }
    let deadline = Instant::now() + options.join_timeout;
    let waiting = JoinProgress::new(options.on_note.as_ref(), Instant::now());
    let addresses = resolve(options, deadline, &waiting)?;
    let (key, refusals) = (Key::of(options.secret.as_ref()), Refusals::new(options));
    let tls = options.tls.as_ref().map(Tls::read).transpose()?;
    let interface = interface::address(options, &addresses)?;
    check_secret(options, addresses.iter().map(SocketAddr::ip).chain(interface).chain(options.listen))?;
    let setting_up = |source| CommError::rendezvous("setting up a socket for the ranks of this host", source);
    let socket_id = u64::from_ne_bytes(random_bytes().map_err(setting_up)?);
    let local = local::listen_local(socket_id).map_err(setting_up)?;
    let joining = JoinContext {
        options,
        addresses: &addresses,
        interface,
        key: &key,
        refusals: &refusals,
        progress: &waiting,
        deadline,
    };
    let host = this_host(options);
    let place_at = |address| RankAddress { host, socket_id, address };
    let Joined { mut root_exchange, mut table, listener, own, root } = if options.rank == Rank::ROOT {
        joining.join_as_root(place_at)?
    } else {
        joining.join_as_peer(place_at)?
    };
    let order = if options.orders_by_host { order_by_host(&table.rank_addresses) } else { Vec::new() };
    let rank = match order.iter().position(|&old_rank| old_rank == options.rank.0) {
        Some(rank) => Rank(rank),
        None => options.rank,
    };
    // From here on, ranks are the renumbered ones.
    let options = &JoinOptions { rank, ..options.clone() };
    if !order.is_sorted() {
        root_exchange.reorder(rank, &order);
        table.rank_addresses = order.iter().map(|&old_rank| table.rank_addresses[old_rank]).collect();
        if rank == Rank::ROOT {
            options.on_note.iter().for_each(|listener| listener.notify(&order_note(&order)));
        }
    }
    let session = Session::new(&key, &table.session, options.rank, options.world_size, &refusals);
    let listeners = Listeners { tcp: Some(listener), local };

    // All ranks have joined, so the remaining time does not depend on when they start.
    let deadline = deadline.max(Instant::now() + 2 * LOCAL_CONNECT_MAX);
    let mut connecting = Connecting {
        options,
        session: &session,
        table: &table,
        listeners: &listeners,
        tls: tls.as_ref(),
        root_exchange: &mut root_exchange,
    };
    let parts = match table.tries_shm.then(|| connecting.share_memory(deadline)).transpose()? {
        _ if options.transport == TransportChoice::Mpi => connecting.by_mpi(deadline)?,
        Some(Ok(parts)) => parts,
        Some(Err(reason)) if options.transport == TransportChoice::Shm => {
            return Err(CommError::ShmUnavailable { reason });
        }
        _ => connecting.by_tcp(deadline)?,
    };
    let key = key.derive("trireme: key of split groups", &[&table.session]);
    let split_context = SplitContext { key, addresses: Some([own, root]), ports: options.ports.clone(), tls };
    let recorder = FlightRecorder::start(options.rank, options.world_size, &options.flight_recorder)?;
    let members = (0..options.world_size).map(Rank).collect();
    let world = recorder.group("world".to_owned(), options.rank, members);
    let group = Group::start(
        parts,
        split_context,
        Arc::default(),
        DeviceResources::default(),
        &options.group,
        world,
    )?;
    // Shows a launcher that this rank writes reports.
    recorder.write(Occasion::Joined);
    recorder.flush();
    Ok(group)
}

/// Implements [`crate::report_failure`].
pub(crate) fn report_failure(options: &JoinOptions, reason: &str, informed: &[Rank]) {
    let now = Instant::now();
    let waiting = JoinProgress::new(None, now);
    let deadline = now + FAILURE_REPORT_MAX;
    let Ok(addresses) = resolve(options, deadline, &waiting) else { return };
    let (key, refusals) = (Key::of(options.secret.as_ref()), Refusals::silent());
    let joining = JoinContext {
        options,
        addresses: &addresses,
        interface: None,
        key: &key,
        refusals: &refusals,
        progress: &waiting,
        deadline,
    };
    if check_secret(options, addresses.iter().map(SocketAddr::ip).chain(options.listen)).is_ok() {
        joining.report_failure(reason, informed);
    }
}

/// The state of a rank that has the table and connects to all others.
struct Connecting<'a> {
    options: &'a JoinOptions,
    session: &'a Session<'a>,
    table: &'a Table,
    listeners: &'a Listeners,
    tls: Option<&'a Tls>,
    root_exchange: &'a mut RootExchange,
}

impl Connecting<'_> {
    /// Shares memory with the ranks of this host, and connects to the others by TCP. The inner error holds the known reasons if any rank
    /// failed.
    fn share_memory(&mut self, deadline: Instant) -> Result<Result<GroupConnections, String>, CommError> {
        let hosts = match self.options.transport {
            TransportChoice::Shm => Hosts::single(self.options.world_size),
            _ => hosts_of(&self.table.rank_addresses),
        };
        // Ranks of one host connect within this time. Connecting over a network between hosts may take longer.
        let is_local = hosts.num_hosts() == 1;
        let until = if is_local { deadline.min(Instant::now() + LOCAL_CONNECT_MAX) } else { deadline };
        let own =
            OwnMemory::new(self.options.world_size, &hosts, self.options.rank).map_err(|e| e.to_string());
        let routes = socket_kinds(&hosts, self.options.rank, SocketKind::Local);
        let connected = own.and_then(|memory| {
            let mesh = self.mesh(&routes, Some(&memory.arena), until).map_err(|e| reason_of(&e))?;
            // Every rank's area is the first region of its arena.
            let offsets = vec![0; mesh.arenas.len()];
            let memory = memory.with_areas(mesh.arenas, &offsets, &hosts, self.options.rank);
            Ok((memory.map_err(|e| e.to_string())?, mesh.connections_by_purpose))
        });
        let report = connected.as_ref().map(drop).map_err(String::clone);
        let outcome = self.root_exchange.agree("sharing memory with the other ranks", report, deadline)?;
        Ok(outcome.and(connected).map(|(memory, connections_by_purpose)| {
            let rank = self.options.rank;
            GroupConnections {
                rank,
                hosts,
                connections_by_purpose,
                memory: Some(memory),
                mpi_addresses: None,
                is_inproc: false,
            }
        }))
    }

    fn by_tcp(&mut self, deadline: Instant) -> Result<GroupConnections, CommError> {
        let doing = "connecting to the other ranks";
        let wrap = |source| CommError::rendezvous(doing, source);
        let rank = self.options.rank;
        let routes = vec![SocketKind::Tcp; self.options.world_size];
        let mesh = self.mesh(&routes, None, deadline);
        let report = mesh.as_ref().map(drop).map_err(reason_of);
        let outcome = self.root_exchange.agree(doing, report, deadline)?;
        outcome.map_err(|reason| wrap(io::Error::other(reason)))?;
        let mesh = mesh.map_err(wrap)?;
        let hosts = hosts_of(&self.table.rank_addresses);
        Ok(GroupConnections {
            rank,
            hosts,
            connections_by_purpose: mesh.connections_by_purpose,
            memory: None,
            mpi_addresses: None,
            is_inproc: false,
        })
    }

    /// Connects by TCP for control, with MPI as the transport of data.
    fn by_mpi(&mut self, deadline: Instant) -> Result<GroupConnections, CommError> {
        let parts = self.by_tcp(deadline)?;
        let failure = || self.root_exchange.knows_of_failure().then(|| io::Error::other(AnotherFailed));
        let mpi_addresses =
            mpi_exchange::exchange(&parts.connections_by_purpose, WaitLimit::unless(deadline, &failure));
        let report = mpi_addresses.as_ref().map(drop).map_err(ToString::to_string);
        let outcome = self.root_exchange.agree("registering with MPI", report, deadline)?;
        outcome.map_err(|reason| CommError::MpiUnavailable { reason })?;
        Ok(GroupConnections { mpi_addresses: Some(mpi_addresses?), ..parts })
    }

    fn mesh(&self, routes: &[SocketKind], arena: Option<&Arena>, deadline: Instant) -> io::Result<Mesh> {
        let members = MeshConfig {
            own: self.options.rank,
            addresses: &self.table.rank_addresses,
            socket_kinds: routes,
            arena,
            arena_bytes_min: area_bytes(self.options.world_size),
            tls: self.tls,
            network_pause: self.options.group.network_pause,
            // With MPI, TCP connections carry no data.
            sockets_per_peer: match self.options.transport {
                TransportChoice::Mpi => 1,
                _ => self.options.group.sockets_per_peer,
            },
        };
        let failure = || self.root_exchange.knows_of_failure().then(|| io::Error::other(AnotherFailed));
        mesh::connect(self.session, &members, self.listeners, WaitLimit::unless(deadline, &failure))
    }
}

/// The report of a rank that could not connect. Empty if it stopped only because another rank failed.
fn reason_of(error: &io::Error) -> String {
    let is_followup = error.get_ref().is_some_and(|inner| inner.is::<AnotherFailed>());
    if is_followup { String::new() } else { error.to_string() }
}

/// The placement of the ranks on hosts. A rank with an unknown host is alone on its host.
fn hosts_of(places: &[RankAddress]) -> Hosts {
    let ids = places.iter().enumerate().map(|(rank, place)| match place.host {
        0 => (0, rank),
        host => (host, 0),
    });
    Hosts::new(&ids.collect::<Vec<_>>())
}

/// Orders the ranks so that the ranks of a host are adjacent. Hosts are in the order of their first ranks.
fn order_by_host(places: &[RankAddress]) -> Vec<usize> {
    let hosts = hosts_of(places);
    let mut order: Vec<usize> = (0..places.len()).collect();
    order.sort_by_key(|&rank| hosts.host_of(Rank(rank)));
    order
}

fn order_note(order: &[usize]) -> String {
    let renamed = order.iter().enumerate().filter(|(rank, old_rank)| rank != *old_rank);
    let texts: Vec<String> =
        renamed.clone().take(4).map(|(rank, old_rank)| format!("{old_rank} is now rank {rank}")).collect();
    let more = if renamed.count() > texts.len() { ", and so on" } else { "" };
    format!(
        "the launcher placed neighboring ranks on different hosts, so ranks are renumbered by host: rank {}{more}",
        texts.join(", ")
    )
}

/// Resolves rank 0's addresses. Retries until the deadline while the name is unknown, perhaps because its container is still starting.
fn resolve(
    options: &JoinOptions,
    deadline: Instant,
    waiting: &JoinProgress<'_>,
) -> Result<Vec<SocketAddr>, CommError> {
    loop {
        let failure = match look_up(options) {
            Ok(addresses) => return Ok(addresses),
            Err(failure) => failure,
        };
        // An invalid name will never become valid.
        if failure.kind() == io::ErrorKind::InvalidInput || !sleep_if_time(LOOK_UP_PAUSE, deadline) {
            let (address, source) = (options.master_addr.clone(), Arc::new(failure));
            return Err(CommError::Resolve { address, source });
        }
        waiting.report(Instant::now(), || {
            format!("waiting for the name of rank 0's host, {} ({failure})", options.master_addr)
        });
    }
}

/// An identifier of this host, or 0 if it is unknown. Two processes have the same identifier if and only if they can reach each other
/// within the host: it identifies the running system and the network namespace, in which abstract sockets are visible.
fn this_host(options: &JoinOptions) -> u128 {
    if let Some(name) = &options.host {
        return u128::from(hello::fingerprint("host", name)) << 64 | 1;
    }
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let system = u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0);
    match std::fs::metadata("/proc/thread-self/ns/net") {
        // Namespace numbers are unique within a system.
        Ok(namespace) if system != 0 => system ^ u128::from(namespace.ino()) << 32,
        _ => system,
    }
}
