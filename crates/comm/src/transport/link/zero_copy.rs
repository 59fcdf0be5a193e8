//! Zero-copy sends: the kernel reads the sender's memory until the peer has acknowledged the bytes, and then notifies the sender through
//! the socket's error queue (Linux 4.14 and later; de Bruijn, Dumazet, "sendmsg copy avoidance with MSG_ZEROCOPY", netdev 2.1, 2017).

use super::Broken;
use super::notifications::{Notification, enable_zero_copy, next_notification};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Minimum bytes of a zero-copy payload. Shorter ones cost less to copy than to track.
const PAYLOAD_BYTES_MIN: usize = 64 << 10;
/// Bytes at the end of a payload that are copied: a receiver may acknowledge the last bytes only after 40 ms, but earlier ones at once.
const TAIL_BYTES: usize = 32 << 10;
/// Bytes of one zero-copy send, which the kernel releases together.
const ZERO_COPY_SEND_BYTES: usize = 512 << 10;
/// Asks the kernel to send without a copy.
const ZERO_COPY: SendFlags = SendFlags::from_bits_retain(libc::MSG_ZEROCOPY as u32);

/// The bytes that the kernel has accepted from a sender and may still read.
///
/// The memory of such bytes is called lent. The kernel holds references to its pages, so freeing it early is not unsafe, but the peer could
/// receive bytes that are written there before the kernel releases the pages.
pub(super) struct ZeroCopySends {
    /// Sends in order. The memory of the first one is lent.
    sends: VecDeque<AcceptedSend>,
    /// Total bytes of these sends.
    num_accepted: usize,
    /// The kernel's number of the next zero-copy send. It starts at 0 and wraps around.
    next_number: u32,
    /// Whether the last call left bytes for which the socket had no room.
    wants_room: bool,
    /// Whether zero-copy sends are useless because the kernel copies anyway, as it does if both ends are on one host.
    kernel_copies: bool,
}

/// Bytes that the kernel accepted in one send.
struct AcceptedSend {
    num_bytes: usize,
    /// The kernel's number of the send, if its memory is lent.
    zero_copy_number: Option<u32>,
}

impl ZeroCopySends {
    /// Enables zero-copy sends on a TCP socket. `None` if the kernel does not support them.
    pub(super) fn new(socket: &OwnedFd) -> Option<Self> {
        enable_zero_copy(socket).then(|| ZeroCopySends {
            sends: VecDeque::with_capacity(64),
            num_accepted: 0,
            next_number: 0,
            wants_room: false,
            kernel_copies: false,
        })
    }

    /// Whether a payload, or the rest of one, must be sent by [`send`](Self::send).
    pub(super) fn must_send(&self, payload: &[u8]) -> bool {
        !self.sends.is_empty() || !self.kernel_copies && payload.len() >= PAYLOAD_BYTES_MIN
    }

    /// Whether no memory is lent, and zero-copy sends have become useless.
    pub(super) fn are_disabled(&self) -> bool {
        self.kernel_copies && self.sends.is_empty()
    }

    /// Whether the kernel may still read the caller's memory.
    pub(super) fn are_pending(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Whether the next progress is a notification that the kernel has released memory, not room in the socket.
    pub(super) fn waits_for_notification(&self) -> bool {
        !self.sends.is_empty() && !self.wants_room
    }

    /// Sends as many bytes as possible. Returns the number of leading bytes that the kernel has finished with. The next call must start
    /// after them.
    pub(super) fn send(&mut self, socket: &OwnedFd, header: &[u8], payload: &[u8]) -> Result<usize, Broken> {
        let lent_end = header.len() + payload.len().saturating_sub(TAIL_BYTES);
        self.wants_room = false;
        while self.num_accepted < header.len() + payload.len() {
            let at = self.num_accepted;
            let (bytes, lends) = match at.checked_sub(header.len()) {
                None => (&header[at..], false),
                Some(start) if at < lent_end && !self.kernel_copies => {
                    (&payload[start..(start + ZERO_COPY_SEND_BYTES).min(lent_end - header.len())], true)
                }
                Some(start) => (&payload[start..], false),
            };
            match self.send_part(socket.as_fd(), bytes, lends) {
                Ok(()) => {}
                Err(Errno::AGAIN | Errno::INTR) => {
                    self.wants_room = true;
                    break;
                }
                // The limit of lent memory is reached.
                Err(Errno::NOBUFS) if !self.sends.is_empty() => break,
                Err(Errno::NOBUFS | Errno::INVAL | Errno::OPNOTSUPP) if lends => self.kernel_copies = true,
                Err(_) => return Err(Broken),
            }
        }
        self.process_notifications(socket)?;
        Ok(self.pop_done())
    }

    fn send_part(&mut self, socket: BorrowedFd<'_>, bytes: &[u8], lends: bool) -> Result<(), Errno> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let num_bytes = send(socket, bytes, if lends { flags | ZERO_COPY } else { flags })?;
        let zero_copy_number = lends.then_some(self.next_number);
        self.next_number = self.next_number.wrapping_add(u32::from(lends));
        self.num_accepted += num_bytes;
        self.sends.push_back(AcceptedSend { num_bytes, zero_copy_number });
        Ok(())
    }

    /// Processes the kernel's notifications about released memory.
    fn process_notifications(&mut self, socket: &OwnedFd) -> Result<(), Broken> {
        while self.sends.iter().any(|send| send.zero_copy_number.is_some()) {
            let Some(notification) = next_notification(socket)? else { break };
            self.release(notification);
        }
        Ok(())
    }

    fn release(&mut self, Notification { first, last, was_copied }: Notification) {
        self.kernel_copies |= was_copied;
        let num_others = last.wrapping_sub(first);
        for send in &mut self.sends {
            send.zero_copy_number.take_if(|number| number.wrapping_sub(first) <= num_others);
        }
    }

    /// Removes the leading sends whose memory the kernel has released. Returns their total bytes.
    fn pop_done(&mut self) -> usize {
        let num_sends = self.sends.iter().take_while(|send| send.zero_copy_number.is_none()).count();
        let num_done = self.sends.drain(..num_sends).map(|send| send.num_bytes).sum();
        self.num_accepted -= num_done;
        num_done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use trireme_testkit::or_skip;

    fn pair(address: SocketAddr) -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind(address).expect("a port");
        let one = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
        (one.into(), listener.accept().expect("accepted").0)
    }

    fn sends(socket: &OwnedFd) -> Option<ZeroCopySends> {
        or_skip(
            "kernel that reads lent memory",
            ZeroCopySends::new(socket).ok_or("it does not know MSG_ZEROCOPY"),
        )
    }

    #[test]
    fn zero_copy_bytes_arrive_and_may_be_overwritten_once_released() {
        for address in [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()] {
            let (socket, mut other) = pair(address);
            let Some(mut sends) = sends(&socket) else { return };
            let header = [7; 40];
            let mut payload: Vec<u8> = (0..3_000_001_u32).map(|index| (index % 251) as u8).collect();
            let expected = [&header[..], &payload].concat();
            let reader = std::thread::spawn(move || {
                let mut received = vec![0; 40 + 3_000_001];
                other.read_exact(&mut received).expect("all bytes");
                received
            });
            let mut num_done = 0;
            while num_done < expected.len() {
                let start = num_done.saturating_sub(header.len());
                let newly = sends
                    .send(&socket, &header[num_done.min(40)..], &payload[start..])
                    .expect("a connection");
                num_done += newly;
                payload[..num_done.saturating_sub(header.len())].fill(0);
                std::thread::yield_now();
            }
            assert!(sends.sends.is_empty() && sends.num_accepted == 0);
            // Loopback copies, and its notifications say so.
            assert!(sends.are_disabled() && sends.next_number > 0);
            assert!(reader.join().expect("no panic") == expected);
        }
    }

    #[test]
    fn memory_is_done_in_order_whatever_the_order_of_notifications() {
        let (socket, _other) = pair((Ipv4Addr::LOCALHOST, 0).into());
        let Some(mut sends) = sends(&socket) else { return };
        // The kernel's counter wraps around.
        sends.next_number = u32::MAX;
        for (num_bytes, lends) in [(1000, true), (2000, true), (10, false), (3000, true)] {
            sends.send_part(socket.as_fd(), &vec![1; num_bytes], lends).expect("room");
        }
        let told = |first, last| Notification { first, last, was_copied: false };
        sends.release(told(1, 1));
        assert_eq!(sends.pop_done(), 0);
        assert!(sends.waits_for_notification());
        sends.release(told(u32::MAX, 0));
        assert_eq!(sends.pop_done(), 6010);
        assert!(!sends.waits_for_notification() && !sends.are_disabled());
    }

    #[test]
    fn unix_sockets_have_no_zero_copy() {
        let (one, _other) = UnixStream::pair().expect("sockets");
        assert!(ZeroCopySends::new(&one.into()).is_none());
    }
}
