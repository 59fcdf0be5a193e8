//! How the ranks of a world find each other and connect.
//!
//! 1. Rank 0 listens on the rendezvous address, the others connect to it (with retries, for it may start
//!    last) and say hello: protocol version, rank, world size, job. Who does not belong is told why and
//!    changes nothing.
//! 2. When all are there, rank 0 sends everyone the table of places and whether to try shared memory: it does
//!    if that was asked for, or nothing was and all ranks run on one booted system.
//! 3. Shared memory: processes of one host meet at abstract unix sockets and pass each other the descriptors
//!    of their arenas. If any rank fails (say, it is in another network namespace), all of them go on with
//!    TCP under [`TransportChoice::Auto`], and fail otherwise.
//! 4. TCP: each pair of ranks has one connection for data and one for control.
//! 5. All ranks tell rank 0 that they are connected, and start when everyone is.

mod hello;
mod lobby;
mod mesh;
mod message;
mod star;
mod wire;

use crate::control::Control;
use crate::transport::Fabric;
use crate::transport::shm::SharedMemory;
use crate::transport::sockets::Sockets;
use crate::{CommError, Group, GroupOptions, JoinOptions, TransportChoice, TransportKind};
use hello::Place;
use message::Table;
use rustix::rand::{GetRandomFlags, getrandom};
use star::{Meeting, Star};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Ranks in a world: what the tables that are sent around are bounded by.
const WORLD_SIZE_MAX: usize = 1 << 16;
/// As good as forever, and far from where times overflow.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Processes of one host need no longer to connect, once all of them are there.
const SHM_CONNECT_MAX: Duration = Duration::from_secs(5);

/// Refuses options that cannot be.
pub(crate) fn check_options(options: &JoinOptions) -> Result<(), CommError> {
    let JoinOptions { rank, world_size, master_port, join_timeout, .. } = options;
    if !(1..=WORLD_SIZE_MAX).contains(world_size) {
        return refuse(format!("world_size is {world_size}; a world has 1 to {WORLD_SIZE_MAX} ranks"));
    }
    if rank.0 >= *world_size {
        return refuse(format!("rank {rank} is outside of a world of {world_size}; ranks count from 0"));
    }
    if *master_port == 0 {
        return refuse("master_port is 0; the ranks must agree on a port from 1 to 65535".to_owned());
    }
    check_timeout("join_timeout", *join_timeout)?;
    check_group_options(&options.group)
}

/// Refuses options out of their bounds.
pub(crate) fn check_group_options(options: &GroupOptions) -> Result<(), CommError> {
    check_timeout("timeout", options.timeout)?;
    let (bytes, limit) = (options.short_bytes_max, GroupOptions::SHORT_BYTES_LIMIT);
    if bytes > limit {
        return refuse(format!("short_bytes_max is {bytes}; it may be at most {limit}"));
    }
    let (bytes, bounds) = (options.chunk_bytes, GroupOptions::CHUNK_BYTES_BOUNDS);
    if !bounds.contains(&bytes) {
        let (start, end) = (bounds.start(), bounds.end());
        return refuse(format!("chunk_bytes is {bytes}; it must be from {start} to {end}"));
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

/// Joins a world of at least two ranks.
pub(crate) fn join(options: &JoinOptions) -> Result<Group, CommError> {
    let deadline = Instant::now() + options.join_timeout;
    let addresses = resolve(options)?;
    let setting_up = |source| CommError::Rendezvous {
        doing: "setting up a socket for the ranks of this host".to_owned(),
        source: Arc::new(source),
    };
    let (meeting, session) = (random().map_err(setting_up)?, random().map_err(setting_up)?);
    let local = mesh::listen_local(meeting).map_err(setting_up)?;
    let host = this_host();
    let place_at = |address| Place { host, meeting, address };
    let Meeting { mut star, table, listener } = if options.rank == Rank::ROOT {
        star::host(options, &addresses, place_at, session, deadline)?
    } else {
        star::visit(options, &addresses, place_at, deadline)?
    };

    // All ranks are here now: what is left does not depend on when they come.
    let deadline = deadline.max(Instant::now() + 2 * SHM_CONNECT_MAX);
    let shared =
        table.tries_shm.then(|| share_memory(options, &mut star, &table, &local, deadline)).transpose()?;
    let fabric = match shared {
        Some(Ok(fabric)) => fabric,
        Some(Err(reason)) if options.transport == TransportChoice::Shm => {
            return Err(CommError::ShmUnavailable { reason });
        }
        _ => connect_by_tcp(options, &mut star, &table, &listener, deadline)?,
    };
    Group::start(options.rank, options.world_size, fabric, &options.group)
}

/// Connects by shared memory, if all ranks can; else the reasons why not.
fn share_memory(
    options: &JoinOptions,
    star: &mut Star,
    table: &Table,
    local: &UnixListener,
    deadline: Instant,
) -> Result<Result<Fabric, String>, CommError> {
    let doing = "sharing memory with the other ranks";
    let patience = deadline.min(Instant::now() + SHM_CONNECT_MAX);
    let own = mesh::connect_shm(options.rank, table, local, patience)
        .and_then(|mesh| Ok((Control::new(mesh.control)?, mesh.arena, mesh.arenas)))
        .map_err(|error| error.to_string());
    let report = own.as_ref().map(drop).map_err(String::clone);
    let outcome = star.agree(doing, report, deadline)?;
    let (Ok(()), Ok((control, arena, arenas))) = (&outcome, own) else {
        return Ok(Err(outcome.err().unwrap_or_else(|| doing.to_owned())));
    };
    let transport = SharedMemory::new(options.rank, Arc::clone(&arena), arenas, &options.group)?;
    let kind = TransportKind::Shm;
    Ok(Ok(Fabric { kind, control, transport: Box::new(transport), arena: Some(arena) }))
}

fn connect_by_tcp(
    options: &JoinOptions,
    star: &mut Star,
    table: &Table,
    listener: &TcpListener,
    deadline: Instant,
) -> Result<Fabric, CommError> {
    let doing = "connecting to the other ranks";
    let wrap = |source| CommError::Rendezvous { doing: doing.to_owned(), source: Arc::new(source) };
    let own = mesh::connect_tcp(options.rank, table, listener, deadline)
        .and_then(|mesh| Ok((Control::new(mesh.control)?, mesh.data)));
    let report = own.as_ref().map(drop).map_err(ToString::to_string);
    let outcome = star.agree(doing, report, deadline)?;
    let (control, data) = own.map_err(wrap)?;
    outcome.map_err(|reason| wrap(io::Error::other(reason)))?;
    let transport = Sockets::new(options.rank, data, &options.group)?;
    Ok(Fabric { kind: TransportKind::Tcp, control, transport: Box::new(transport), arena: None })
}

fn resolve(options: &JoinOptions) -> Result<Vec<SocketAddr>, CommError> {
    let fail = |source| CommError::Resolve { address: options.master_addr.clone(), source: Arc::new(source) };
    let addresses: Vec<_> =
        (options.master_addr.as_str(), options.master_port).to_socket_addrs().map_err(fail)?.collect();
    if addresses.is_empty() {
        return Err(fail(io::ErrorKind::NotFound.into()));
    }
    Ok(addresses)
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(bytes))
}

/// A number that all processes of the running system share, and no others; 0 if it cannot be read.
fn this_host() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0)
}
