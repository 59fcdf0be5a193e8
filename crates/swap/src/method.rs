//! Selects the fastest IO method that the system allows.

use crate::raw::{Memory, Ring};
use crate::{ALIGNMENT, IoMethod, SwapOptions};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;

/// The selected method of a file.
pub(crate) struct SelectedMethod {
    pub(crate) method: IoMethod,
    /// Present for [`IoMethod::Ring`].
    pub(crate) ring: Option<Ring>,
    /// The faster methods that are not available, with the reasons.
    pub(crate) unavailable: Vec<(IoMethod, String)>,
}

/// Selects the fastest method that works on `file`, starting with the one in `options`. Overwrites the first [`ALIGNMENT`] bytes of the
/// file, which must exist.
pub(crate) fn choose(file: &File, options: &SwapOptions) -> io::Result<SelectedMethod> {
    let mut choice = SelectedMethod { method: options.method, ring: None, unavailable: Vec::new() };
    if choice.method == IoMethod::BufferedThreads {
        return Ok(choice);
    }
    if let Err(error) = try_direct(file) {
        set_direct(file, false)?;
        choice.unavailable.push((IoMethod::DirectThreads, error.to_string()));
        choice.method = IoMethod::BufferedThreads;
        return Ok(choice);
    }
    if choice.method == IoMethod::Ring {
        match Ring::new(file.try_clone()?, options.queue_depth) {
            Ok(ring) => choice.ring = Some(ring),
            Err(error) => {
                choice.unavailable.push((IoMethod::Ring, error.to_string()));
                choice.method = IoMethod::DirectThreads;
            }
        }
    }
    Ok(choice)
}

/// Enables direct IO for the file and tries it. Some file systems reject the flag, others only the first transfer.
fn try_direct(file: &File) -> io::Result<()> {
    set_direct(file, true)?;
    let mut memory = Memory::new(ALIGNMENT)?;
    let written = rustix::io::pwrite(file, &memory, 0)?;
    let read = rustix::io::pread(file, &mut memory[..], 0)?;
    if (written, read) != (ALIGNMENT, ALIGNMENT) {
        return Err(io::Error::other(format!("wrote {written} of {ALIGNMENT} bytes and read {read}")));
    }
    Ok(())
}

fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    Ok(fcntl_setfl(file, flags)?)
}
