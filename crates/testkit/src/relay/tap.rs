#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

/// The file through which TAP devices are created.
pub(super) const TUN_DEVICE_FILE: &str = "/dev/net/tun";

/// The kernel's `struct ifreq`, used for a device's name and flags.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; size_of::<libc::ifreq>() - libc::IFNAMSIZ - size_of::<libc::c_short>()],
}

/// Creates an Ethernet device in the network namespace of the calling thread. Each read from the file returns a frame that the kernel sends
/// over the device, and each write is a frame that the device receives. Neither blocks. The device ends when the file is closed.
pub(crate) fn open(name: &str) -> io::Result<File> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(TUN_DEVICE_FILE)?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI;
    let mut request = Request { name: [0; _], flags: flags as libc::c_short, rest: [0; _] };
    assert!(name.len() < request.name.len(), "the kernel bounds the names of devices");
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the request has the size and layout that the kernel reads and writes, and outlives the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}
