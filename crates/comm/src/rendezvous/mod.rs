//! How the ranks of a world find each other and connect.
//!
//! 1. Rank 0 listens on the rendezvous address, the others connect to it (with retries, for it may start last)
//!    and say hello: protocol version, rank, world size, job. Who does not belong is told why and changes nothing.
//! 2. When all are there, rank 0 sends everyone the table of places and whether to try shared memory: it does if
//!    that was asked for, or nothing was and all ranks run on one booted system.
//! 3. Shared memory: processes of one host meet at abstract unix sockets and pass each other the descriptors of
//!    their arenas. If any rank fails (say, it is in another network namespace), all of them go on with TCP
//!    under [`TransportChoice::Auto`], and fail otherwise.
//! 4. TCP: each pair of ranks has one connection for data and one for control.
//! 5. All ranks tell rank 0 that they are connected, and start when everyone is.

mod hello;
mod lobby;
mod mesh;
mod message;
mod star;
mod wire;

use crate::control::Control;
use crate::transport::shm::SharedMemory;
use crate::transport::sockets::Sockets;
use crate::{CommError, Group, GroupOptions, JoinOptions, TransportChoice, TransportKind};
use hello::Place;
use rustix::rand::{GetRandomFlags, getrandom};
use star::Meeting;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Ranks in a world: what the tables that are sent around are bounded by.
const WORLD_SIZE_MAX: usize = 1 << 16;
/// Processes of one host need no longer to connect, once all of them are there.
const SHM_CONNECT_MAX: Duration = Duration::from_secs(10);

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
    if join_timeout.is_zero() {
        return refuse("join_timeout is 0; the ranks need some time to find each other".to_owned());
    }
    check_group_options(&options.group)
}

/// Refuses options out of their bounds.
pub(crate) fn check_group_options(options: &GroupOptions) -> Result<(), CommError> {
    if options.timeout.is_zero() {
        return refuse("timeout is 0; an operation needs some time".to_owned());
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

    let (rank, world_size, group) = (options.rank, options.world_size, &options.group);
    // All ranks are here now: what is left does not depend on when they come.
    let deadline = deadline.max(Instant::now() + SHM_CONNECT_MAX);
    if table.tries_shm {
        let patience = deadline.min(Instant::now() + SHM_CONNECT_MAX);
        let mesh = mesh::connect_shm(rank, &table, &local, patience);
        let own = mesh.as_ref().map(drop).map_err(ToString::to_string);
        let outcome = star.agree("sharing memory with the other ranks", own, deadline)?;
        match (outcome, mesh) {
            (Ok(()), Ok(mesh)) => {
                let control = Control::new(mesh.control).map_err(setting_up)?;
                let shared = SharedMemory::new(rank, Arc::clone(&mesh.arena), mesh.arenas, group)?;
                let kind = TransportKind::Shm;
                return Group::start(
                    rank,
                    world_size,
                    kind,
                    Some(mesh.arena),
                    control,
                    Box::new(shared),
                    group,
                );
            }
            (Err(reason), _) if options.transport == TransportChoice::Shm => {
                return Err(CommError::ShmUnavailable { reason });
            }
            _ => {}
        }
    }
    let connecting = |source| CommError::Rendezvous {
        doing: "connecting to the other ranks".to_owned(),
        source: Arc::new(source),
    };
    let mesh = mesh::connect_tcp(rank, &table, &listener, deadline);
    let own = mesh.as_ref().map(drop).map_err(ToString::to_string);
    let outcome = star.agree("connecting to the other ranks", own, deadline)?;
    let mesh = mesh.map_err(connecting)?;
    outcome.map_err(|reason| connecting(io::Error::other(reason)))?;
    let control = Control::new(mesh.control).map_err(connecting)?;
    let sockets = Sockets::new(rank, mesh.data, group)?;
    Group::start(rank, world_size, TransportKind::Tcp, None, control, Box::new(sockets), group)
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
