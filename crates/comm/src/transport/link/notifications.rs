//! What a TCP socket's error queue tells of memory that was lent to the kernel (Linux, networking/msg_zerocopy).
#![allow(unsafe_code)]

use super::Broken;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

/// Of the kernel's `linux/errqueue.h`: a notification is of lent memory, and whether the kernel copied after all.
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_COPIED: u8 = 1;
/// Of `asm-generic/socket.h`.
const SO_ZEROCOPY: libc::c_int = 60;

/// The kernel reads the memory of some sends no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Notification {
    /// The first and the last of the sends, as the kernel counts those that lend.
    pub(super) first: u32,
    pub(super) last: u32,
    /// It has copied, instead of reading the memory later.
    pub(super) was_copied: bool,
}

/// Has the kernel accept lent memory; whether it does. Kernels that only look like Linux may take the option and
/// forget it, so it is read back: they would never give memory back.
pub(super) fn notify_of_lent_memory(socket: &OwnedFd) -> bool {
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

/// The next notification, if one has come.
pub(super) fn next_notification(socket: &OwnedFd) -> Result<Option<Notification>, Broken> {
    // Room for one notification with the sender's address, aligned as its header needs.
    let mut control = [0_u64; 16];
    // SAFETY: all zeros are a message header without an address, data or control.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the header names memory of this function and its size, which the call fills and which outlives it.
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
        // SAFETY: the header lies within the control memory, as these functions see to.
        let (header, data) = unsafe { (ptr::read_unaligned(part), libc::CMSG_DATA(part)) };
        let is_error = matches!(
            (header.cmsg_level, header.cmsg_type),
            (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
        );
        if is_error {
            // SAFETY: the kernel puts this structure there, of plain numbers.
            let error = unsafe { ptr::read_unaligned(data.cast::<libc::sock_extended_err>()) };
            if error.ee_origin == ORIGIN_ZEROCOPY && error.ee_errno == 0 {
                let (first, last) = (error.ee_info, error.ee_data);
                return Ok(Some(Notification { first, last, was_copied: error.ee_code == CODE_COPIED }));
            }
        }
        // SAFETY: as above.
        part = unsafe { libc::CMSG_NXTHDR(&message, part) };
    }
    // Something else went wrong with the connection.
    Err(Broken)
}
