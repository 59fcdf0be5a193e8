//! Socket I/O with deadlines.

use super::wait_limit::WaitLimit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Maximum time of one attempt to connect to another rank by TCP.
pub(super) const ATTEMPT_MAX: Duration = Duration::from_secs(5);

/// Pause between two attempts to connect to another rank.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

pub(super) fn wait_for<'a>(
    socket: impl AsFd,
    flags: PollFlags,
    limit: impl Into<WaitLimit<'a>>,
) -> io::Result<()> {
    wait_for_any(&mut [PollFd::new(&socket, flags)], limit)
}

/// Waits until any of the sockets is ready for its polled events.
pub(super) fn wait_for_any<'a>(polled: &mut [PollFd<'_>], limit: impl Into<WaitLimit<'a>>) -> io::Result<()> {
    let limit = limit.into();
    loop {
        let left = limit.next_check().saturating_duration_since(Instant::now());
        // Rounded up, so that the last wait does not repeatedly end just before the deadline.
        let timeout = Timespec::try_from(left + Duration::from_millis(1)).map_err(io::Error::other)?;
        match poll(polled, Some(&timeout)) {
            Ok(0) => limit.check()?,
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

pub(super) fn receive_exact<'a>(
    socket: impl AsFd,
    mut bytes: &mut [u8],
    limit: impl Into<WaitLimit<'a>>,
) -> io::Result<()> {
    let limit = limit.into();
    while !bytes.is_empty() {
        match recv(&socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side hung up")),
            Ok((_, num_read)) => bytes = &mut bytes[num_read..],
            Err(Errno::AGAIN) => wait_for(&socket, PollFlags::IN, limit)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

pub(super) fn send_all<'a>(
    socket: impl AsFd,
    mut bytes: &[u8],
    limit: impl Into<WaitLimit<'a>>,
) -> io::Result<()> {
    let limit = limit.into();
    while !bytes.is_empty() {
        match send(&socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(num_sent) => bytes = &bytes[num_sent..],
            Err(Errno::AGAIN) => wait_for(&socket, PollFlags::OUT, limit)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether the error shows that the peer has closed the connection. Another attempt to connect may then succeed.
pub(super) fn has_hung_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe
    )
}

/// Sleeps before the next attempt. Returns false, at once, if there is no time for one.
pub(super) fn sleep_before_retry(deadline: Instant) -> bool {
    sleep_if_time(RETRY_PAUSE, deadline)
}

pub(super) fn sleep_if_time(pause: Duration, deadline: Instant) -> bool {
    let has_time = Instant::now() + pause <= deadline;
    if has_time {
        std::thread::sleep(pause);
    }
    has_time
}

/// The error for bytes that violate the protocol.
pub(super) fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Encodes an address without its port in two words. IPv4 addresses are mapped to IPv6.
pub(super) fn ip_to_words(ip: IpAddr) -> [u64; 2] {
    let bits = match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    };
    [(bits >> 64) as u64, bits as u64]
}

pub(super) fn words_to_ip([high, low]: [u64; 2]) -> IpAddr {
    Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low)).to_canonical()
}
