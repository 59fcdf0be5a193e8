//! Connections between processes of one host, over abstract sockets, and the exchange of their arenas.

use super::socket_io::{invalid, wait_for};
use super::wait_limit::WaitLimit;
use crate::transport::shm::Arena;
use rustix::event::PollFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};
use rustix::process::geteuid;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::time::{Duration, Instant};

/// Time within which processes of one host connect, once all of them have joined.
pub(super) const LOCAL_CONNECT_MAX: Duration = Duration::from_secs(5);

/// Listens on the socket at which processes of this host reach a rank. It has no file, and vanishes with the process.
pub(super) fn listen_local(socket_id: u64) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&local_address(socket_id)?)
}

fn local_address(socket_id: u64) -> io::Result<UnixAddr> {
    UnixAddr::from_abstract_name(local_name(socket_id))
}

fn local_name(socket_id: u64) -> String {
    format!("trireme-{socket_id:016x}")
}

/// Connects to a rank of this host. Waits for a stopped process until the deadline; a process that has ended refuses at once.
pub(super) fn connect_local(socket_id: u64, deadline: Instant) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new_abstract_name(local_name(socket_id).as_bytes())?;
    // This timeout also limits the wait for room in the listener's queue (unix(7), connect).
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    set_socket_timeout(&socket, Timeout::Send, Some(left))?;
    match retry_on_intr(|| net::connect(&socket, &address)) {
        Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        connected => connected?,
    }
    set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(socket)
}

/// Fails if the peer's process belongs to another user, with which memory must not be shared.
pub(super) fn check_user(socket: impl AsFd) -> io::Result<()> {
    if socket_peercred(socket)?.uid == geteuid() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "the other process belongs to another user"))
}

pub(super) fn send_arena(socket: impl AsFd, arena: &Arena) -> io::Result<()> {
    let memory = [arena.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&memory)), "the space is for one descriptor");
    let slices = [IoSlice::new(&[0])];
    let num_sent = retry_on_intr(|| sendmsg(&socket, &slices, &mut ancillary, SendFlags::NOSIGNAL))?;
    if num_sent == 1 { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

pub(super) fn receive_arena(socket: impl AsFd, limit: WaitLimit<'_>) -> io::Result<OwnedFd> {
    wait_for(&socket, PollFlags::IN, limit)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    recvmsg(&socket, &mut [IoSliceMut::new(&mut [0])], &mut ancillary, flags)?;
    let memory = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    memory.ok_or_else(|| invalid("a message without shared memory"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::random_bytes;
    use rustix::net::{bind, listen, socket};

    /// Simulates a stopped process, which accepts no connections: its queue of connections is full.
    #[test]
    fn a_local_socket_that_does_not_accept_times_out() {
        let socket_id = u64::from_ne_bytes(random_bytes().unwrap());
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(local_name(socket_id).as_bytes()).unwrap();
        bind(&listener, &address).unwrap();
        listen(&listener, 0).unwrap();
        let soon = || Instant::now() + Duration::from_millis(50);
        let _first = connect_local(socket_id, soon()).unwrap();
        assert_eq!(connect_local(socket_id, soon()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(listener);
        assert_eq!(connect_local(socket_id, soon()).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
