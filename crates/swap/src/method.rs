//! Which method of those that were asked for the system allows.

use crate::raw::{Memory, Ring};
use crate::{ALIGNMENT, Method, SwapOptions};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;

/// How a file is served.
pub(crate) struct Choice {
    pub(crate) method: Method,
    /// What [`Method::Ring`] needs.
    pub(crate) ring: Option<Ring>,
    /// Why the faster methods do not work.
    pub(crate) refused: Vec<(Method, String)>,
}

/// The fastest method that works on `file`, which has at least [`ALIGNMENT`] bytes that do not matter.
pub(crate) fn choose(file: &File, options: &SwapOptions) -> io::Result<Choice> {
    let mut choice = Choice { method: options.method, ring: None, refused: Vec::new() };
    if choice.method == Method::BufferedThreads {
        return Ok(choice);
    }
    if let Err(error) = try_direct(file) {
        set_direct(file, false)?;
        choice.refused.push((Method::DirectThreads, error.to_string()));
        choice.method = Method::BufferedThreads;
        return Ok(choice);
    }
    if choice.method == Method::Ring {
        match Ring::new(file.try_clone()?, options.queue_depth) {
            Ok(ring) => choice.ring = Some(ring),
            Err(error) => {
                choice.refused.push((Method::Ring, error.to_string()));
                choice.method = Method::DirectThreads;
            }
        }
    }
    Ok(choice)
}

/// Makes all IO of the file direct, and tries it: some file systems refuse the flag, others the first transfer.
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
