//! The connections between all pairs of ranks. Of each pair the higher rank connects and introduces itself.

use super::hello::Place;
use super::message::Table;
use super::wire::{invalid, receive_exact, send_all, wait_for};
use crate::transport::shm::{Arena, PeerArena};
use crate::words;
use rustix::event::PollFlags;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay,
    set_tcp_user_timeout, socket_peercred,
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::geteuid;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// A stranger at the door may take this long to say that it is none.
const INTRODUCTION_MAX: Duration = Duration::from_secs(2);
const MAGIC: u64 = u64::from_le_bytes(*b"TRIRMSH1");
const INTRODUCTION_BYTES: usize = 32;

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Data = 0,
    Control = 1,
}

/// How a rank introduces itself on a connection of the mesh.
fn introduction(session: u64, rank: usize, purpose: Purpose) -> [u8; INTRODUCTION_BYTES] {
    words::to_bytes([MAGIC, session, rank as u64, purpose as u64])
}

/// Who introduced itself, if it is a member of the session.
fn introduced(bytes: &[u8; INTRODUCTION_BYTES], session: u64, world_size: usize) -> Option<(usize, Purpose)> {
    let [magic, their_session, rank, purpose] = words::from_bytes(bytes);
    let purpose = [Purpose::Data, Purpose::Control].into_iter().find(|&known| known as u64 == purpose)?;
    let rank = usize::try_from(rank).ok().filter(|&rank| rank < world_size)?;
    (magic == MAGIC && their_session == session).then_some((rank, purpose))
}

/// One row of connections per purpose, in rank order, `None` for the own rank.
pub(super) struct TcpMesh {
    pub(super) data: Vec<Option<OwnedFd>>,
    pub(super) control: Vec<Option<OwnedFd>>,
}

/// Connects to all other ranks by TCP, with one connection for data and one for control each.
pub(super) fn connect_tcp(
    rank: Rank,
    table: &Table,
    listener: &TcpListener,
    deadline: Instant,
) -> io::Result<TcpMesh> {
    let world_size = table.places.len();
    let mut rows: [Vec<Option<OwnedFd>>; 2] = [0, 1].map(|_| (0..world_size).map(|_| None).collect());
    for (lower, place) in table.places[..rank.0].iter().enumerate() {
        for purpose in [Purpose::Data, Purpose::Control] {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let stream = TcpStream::connect_timeout(&place.address, left).map_err(|error| {
                in_context(error, format!("connecting to rank {lower} at {}", place.address))
            })?;
            send_all(&stream, &introduction(table.session, rank.0, purpose), deadline)?;
            rows[purpose as usize][lower] = Some(tuned(stream, purpose)?);
        }
    }
    while let Some(absent) =
        (rank.0 + 1..world_size).find(|&higher| rows.iter().any(|row| row[higher].is_none()))
    {
        wait_for(listener, PollFlags::IN, deadline)
            .map_err(|error| in_context(error, format!("waiting for rank {absent} to connect")))?;
        let (stream, _) = listener.accept()?;
        let mut bytes = [0; INTRODUCTION_BYTES];
        let patience = deadline.min(Instant::now() + INTRODUCTION_MAX);
        if receive_exact(&stream, &mut bytes, patience).is_err() {
            continue;
        }
        // A stranger is not answered; it learns from the closed connection.
        let Some((from, purpose)) = introduced(&bytes, table.session, world_size) else { continue };
        let place = &mut rows[purpose as usize][from];
        if from > rank.0 && place.is_none() {
            *place = Some(tuned(stream, purpose)?);
        }
    }
    let [data, control] = rows;
    Ok(TcpMesh { data, control })
}

/// Sets what makes small messages quick, and what notices a dead host within 5 s.
fn tuned(stream: TcpStream, purpose: Purpose) -> io::Result<OwnedFd> {
    set_tcp_nodelay(&stream, true)?;
    // Only where it is always quiet: a full data connection may well wait for longer than this.
    if purpose == Purpose::Control {
        set_socket_keepalive(&stream, true)?;
        set_tcp_keepidle(&stream, Duration::from_secs(1))?;
        set_tcp_keepintvl(&stream, Duration::from_secs(1))?;
        set_tcp_keepcnt(&stream, 3)?;
        set_tcp_user_timeout(&stream, 4000)?;
    }
    Ok(stream.into())
}

/// The control connections to all other ranks of this host, and their arenas.
pub(super) struct ShmMesh {
    pub(super) arena: std::sync::Arc<Arena>,
    pub(super) arenas: Vec<Option<PeerArena>>,
    pub(super) control: Vec<Option<OwnedFd>>,
}

/// The socket at which a rank is met by processes of its host. It has no file, and ends with the process.
pub(super) fn listen_local(meeting: u64) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&local_address(meeting)?)
}

fn local_address(meeting: u64) -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name(format!("trireme-{meeting:016x}"))
}

/// Connects to all other ranks over sockets of this host, and maps each other's arenas.
pub(super) fn connect_shm(
    rank: Rank,
    table: &Table,
    listener: &UnixListener,
    deadline: Instant,
) -> io::Result<ShmMesh> {
    let world_size = table.places.len();
    let arena =
        Arena::new(world_size).map_err(|error| in_context(error, "creating the shared memory".to_owned()))?;
    let mut arenas: Vec<Option<PeerArena>> = (0..world_size).map(|_| None).collect();
    let mut control: Vec<Option<OwnedFd>> = (0..world_size).map(|_| None).collect();
    let own = introduction(table.session, rank.0, Purpose::Control);

    for (lower, Place { meeting, .. }) in table.places[..rank.0].iter().enumerate() {
        let meet = || -> io::Result<(OwnedFd, PeerArena)> {
            let stream = UnixStream::connect_addr(&local_address(*meeting)?)?;
            send_with_arena(&stream, &own, &arena)?;
            let (bytes, memory) = receive_with_arena(&stream, deadline)?;
            if introduced(&bytes, table.session, world_size) != Some((lower, Purpose::Control)) {
                return Err(invalid("somebody else answered"));
            }
            Ok((stream.into(), PeerArena::map(&memory)?))
        };
        let (stream, peer) =
            meet().map_err(|error| in_context(error, format!("sharing memory with rank {lower}")))?;
        control[lower] = Some(stream);
        arenas[lower] = Some(peer);
    }
    while let Some(absent) = (rank.0 + 1..world_size).find(|&higher| control[higher].is_none()) {
        wait_for(listener, PollFlags::IN, deadline)
            .map_err(|error| in_context(error, format!("waiting for rank {absent} to share memory")))?;
        let (stream, _) = listener.accept()?;
        let patience = deadline.min(Instant::now() + INTRODUCTION_MAX);
        let Ok((bytes, memory)) = receive_with_arena(&stream, patience) else { continue };
        let Some((from, Purpose::Control)) = introduced(&bytes, table.session, world_size) else { continue };
        if from > rank.0 && control[from].is_none() {
            send_with_arena(&stream, &own, &arena)?;
            control[from] = Some(stream.into());
            arenas[from] = Some(PeerArena::map(&memory)?);
        }
    }
    Ok(ShmMesh { arena, arenas, control })
}

fn send_with_arena(
    stream: &UnixStream,
    introduction: &[u8; INTRODUCTION_BYTES],
    arena: &Arena,
) -> io::Result<()> {
    let memory = [arena.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&memory)), "the space is for one descriptor");
    let slices = [IoSlice::new(introduction)];
    let num_sent = retry_on_intr(|| sendmsg(stream, &slices, &mut ancillary, SendFlags::NOSIGNAL))?;
    if num_sent == INTRODUCTION_BYTES { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// An introduction and the memory that came with it, from a process of the same user.
fn receive_with_arena(
    stream: &UnixStream,
    deadline: Instant,
) -> io::Result<([u8; INTRODUCTION_BYTES], OwnedFd)> {
    if socket_peercred(stream)?.uid != geteuid() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other process is another user's"));
    }
    wait_for(stream, PollFlags::IN, deadline)?;
    let mut bytes = [0; INTRODUCTION_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    let memory = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    match memory {
        Some(memory) if received.bytes == INTRODUCTION_BYTES => Ok((bytes, memory)),
        _ => Err(invalid("an introduction without memory")),
    }
}

fn in_context(error: io::Error, doing: String) -> io::Error {
    io::Error::new(error.kind(), format!("{doing}: {error}"))
}
