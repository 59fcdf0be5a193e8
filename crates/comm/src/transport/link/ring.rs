use super::{Broken, Interest};
use crate::transport::shm::{Corrupt, Region, RingReceiver, RingSender};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A link of two byte rings in memory that both ranks map, and a socket that wakes a sleeping peer. The kernel closes the socket with the
/// process, so a sleeper notices its peer's death.
pub(crate) struct RingLink {
    wakeup: OwnedFd,
    outgoing: RingSender,
    incoming: RingReceiver,
    /// Whether the peer has closed the socket. The peer has ended, but the bytes it wrote before are valid.
    has_ended: bool,
    /// Keeps the outgoing ring's memory allocated.
    _area: Arc<Region>,
}

impl From<Corrupt> for Broken {
    fn from(_: Corrupt) -> Self {
        Broken
    }
}

impl RingLink {
    /// Creates the link. `wakeup` is a connected stream socket that wakes the peer.
    pub(crate) fn new(
        wakeup: OwnedFd,
        outgoing: RingSender,
        incoming: RingReceiver,
        area: Arc<Region>,
    ) -> Self {
        RingLink { wakeup, outgoing, incoming, has_ended: false, _area: area }
    }

    pub(super) fn send(&mut self, header: &[u8], payload: &[u8]) -> Result<usize, Broken> {
        if self.has_ended {
            return Err(Broken);
        }
        let mut num_sent = self.outgoing.write(header)?;
        if num_sent == header.len() {
            num_sent += self.outgoing.write(payload)?;
        }
        if num_sent > 0 && self.outgoing.take_sleep_flag() {
            self.wake_peer();
        }
        Ok(num_sent)
    }

    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        let num_read = self.incoming.read(bytes)?;
        if num_read == 0 && self.has_ended {
            return Err(Broken);
        }
        if num_read > 0 && self.incoming.take_sleep_flag() {
            self.wake_peer();
        }
        Ok(num_read)
    }

    /// Whether the ring has room or unread bytes. True for a corrupt ring: the next use reports the error.
    pub(super) fn is_ready(&self, interest: Interest) -> bool {
        match interest {
            Interest::Send => self.outgoing.has_room().unwrap_or(true),
            Interest::Receive => self.incoming.has_unread().unwrap_or(true),
        }
    }

    pub(super) fn prepare_sleep(&mut self, interest: Interest) -> Result<bool, Broken> {
        Ok(match interest {
            Interest::Send => self.outgoing.prepare_sleep()?,
            Interest::Receive => self.incoming.prepare_sleep()?,
        })
    }

    pub(super) fn end_sleep(&mut self, interest: Interest) {
        match interest {
            Interest::Send => self.outgoing.end_sleep(),
            Interest::Receive => self.incoming.end_sleep(),
        }
        // Wake-ups that were received must not wake the next sleeper.
        match recv(&self.wakeup, &mut [0; 64][..], RecvFlags::DONTWAIT) {
            Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((_, 0)) | Err(_) => self.has_ended = true,
        }
    }

    pub(super) fn poll(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.wakeup.as_fd(), PollFlags::IN)
    }

    /// Wakes the peer, best effort: a full socket wakes it anyway, and a closed one has no reader.
    fn wake_peer(&self) {
        let _ = send(&self.wakeup, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
