//! Notifications in a TCP socket's error queue about memory of zero-copy sends (Linux, networking/msg_zerocopy).
#![allow(unsafe_code)]

use super::Broken;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

/// Constants of `linux/errqueue.h`: the origin of a zero-copy notification, and the code for sends that were copied after all.
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_COPIED: u8 = 1;
/// Constant of `asm-generic/socket.h`.
const SO_ZEROCOPY: libc::c_int = 60;

/// A notification that the kernel has released the memory of consecutive zero-copy sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Notification {
    /// The kernel's numbers of the first and the last of these sends.
    pub(super) first: u32,
    pub(super) last: u32,
    /// Whether the kernel copied the bytes instead of reading the memory later.
    pub(super) was_copied: bool,
}

/// Enables zero-copy sends on a socket. Returns whether the kernel supports them. The option is read back, because kernels that only
/// resemble Linux may accept and ignore it; they would never release the memory.
pub(super) fn enable_zero_copy(socket: &OwnedFd) -> bool {
    let (wanted, mut found): (libc::c_int, libc::c_int) = (1, 0);
    let mut num_bytes = size_of::<libc::c_int>() as libc::socklen_t;
    let (socket, level) = (socket.as_raw_fd(), libc::SOL_SOCKET);
    // SAFETY: the option's value is an integer of that size, which outlives the calls.
    let outcomes = unsafe {
        [
            libc::setsockopt(socket, level, SO_ZEROCOPY, ptr::from_ref(&wanted).cast(), num_bytes),
            libc::getsockopt(socket, level, SO_ZEROCOPY, ptr::from_mut(&mut found).cast(), &mut num_bytes),
        ]
    };
    outcomes == [0, 0] && found == wanted
}

/// Returns the next notification, if one has arrived.
pub(super) fn next_notification(socket: &OwnedFd) -> Result<Option<Notification>, Broken> {
    // Room for one notification with the sender's address, aligned for its header.
    let mut control = [0_u64; 16];
    // SAFETY: all zeros are a message header without an address, data or control.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the header points to memory of this function with its size. The call fills that memory, which outlives the call.
    let outcome =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT) };
    if outcome < 0 {
        return match io::Error::last_os_error().kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
            _ => Err(Broken),
        };
    }
    // SAFETY: the kernel has filled the control memory, and set its length.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(&message) };
    while !part.is_null() {
        // SAFETY: the header is within the control memory, as `CMSG_FIRSTHDR` and `CMSG_NXTHDR` guarantee.
        let (header, data) = unsafe { (ptr::read_unaligned(part), libc::CMSG_DATA(part)) };
        let is_error = matches!(
            (header.cmsg_level, header.cmsg_type),
            (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
        );
        if is_error {
            // SAFETY: the kernel writes this structure there, which consists of plain integers.
            let error = unsafe { ptr::read_unaligned(data.cast::<libc::sock_extended_err>()) };
            if error.ee_origin == ORIGIN_ZEROCOPY && error.ee_errno == 0 {
                let (first, last) = (error.ee_info, error.ee_data);
                return Ok(Some(Notification { first, last, was_copied: error.ee_code == CODE_COPIED }));
            }
        }
        // SAFETY: as above.
        part = unsafe { libc::CMSG_NXTHDR(&message, part) };
    }
    // The queue holds another error of the connection.
    Err(Broken)
}
