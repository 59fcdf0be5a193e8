use super::zero_copy::ZeroCopySends;
use super::{Broken, Interest};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub(crate) struct SocketLink {
    socket: OwnedFd,
    /// State of zero-copy sends of long payloads, as long as the kernel really avoids copies.
    zero_copy_sends: Option<ZeroCopySends>,
}

impl SocketLink {
    pub(crate) fn new(socket: OwnedFd, zero_copy: bool) -> Self {
        SocketLink { zero_copy_sends: zero_copy.then(|| ZeroCopySends::new(&socket)).flatten(), socket }
    }

    pub(super) fn send(
        &mut self,
        header: &[u8],
        payload: &[u8],
        may_zero_copy: bool,
    ) -> Result<usize, Broken> {
        self.zero_copy_sends.take_if(|sends| sends.are_disabled());
        if let Some(sends) =
            self.zero_copy_sends.as_mut().filter(|sends| may_zero_copy && sends.must_send(payload))
        {
            return sends.send(&self.socket, header, payload);
        }
        let slices = [IoSlice::new(header), IoSlice::new(payload)];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &slices, &mut SendAncillaryBuffer::default(), flags) {
            Ok(num_sent) => Ok(num_sent),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(_) => Err(Broken),
        }
    }

    /// Whether the kernel may still read the caller's memory.
    pub(super) fn has_pending_zero_copy(&self) -> bool {
        self.zero_copy_sends.as_ref().is_some_and(ZeroCopySends::are_pending)
    }

    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        match recv(&self.socket, bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(Broken),
            Ok((_, num_read)) => Ok(num_read),
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(_) => Err(Broken),
        }
    }

    pub(super) fn poll(&self, interest: Interest) -> (BorrowedFd<'_>, PollFlags) {
        let flags = match interest {
            // Zero-copy notifications wake `poll` without a requested event.
            Interest::Send
                if self.zero_copy_sends.as_ref().is_some_and(ZeroCopySends::waits_for_notification) =>
            {
                PollFlags::empty()
            }
            Interest::Send => PollFlags::OUT,
            Interest::Receive => PollFlags::IN,
        };
        (self.socket.as_fd(), flags)
    }
}
