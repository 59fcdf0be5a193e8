//! Which method of those that were asked for the system allows.

use crate::raw::{Memory, Ring};
use crate::{ALIGNMENT, Method, SwapOptions};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::fs::File;
use std::io;

/// How a file is served.
pub(crate) enum Engine {
    Ring(Ring),
    Threads { num_threads: usize },
}

/// The fastest method that works on `file`, which has at least [`ALIGNMENT`] bytes that do not matter; and why
/// the faster ones do not.
pub(crate) fn choose(
    file: &File,
    options: &SwapOptions,
) -> io::Result<(Method, Engine, Vec<(Method, String)>)> {
    let mut refused = Vec::new();
    let threads = Engine::Threads { num_threads: options.num_threads };
    if options.method == Method::BufferedThreads {
        return Ok((Method::BufferedThreads, threads, refused));
    }
    if let Err(error) = try_direct(file) {
        set_direct(file, false)?;
        refused.push((Method::DirectThreads, error.to_string()));
        return Ok((Method::BufferedThreads, threads, refused));
    }
    if options.method == Method::Ring {
        match Ring::new(file.try_clone()?, options.queue_depth) {
            Ok(ring) => return Ok((Method::Ring, Engine::Ring(ring), refused)),
            Err(error) => refused.push((Method::Ring, error.to_string())),
        }
    }
    Ok((Method::DirectThreads, threads, refused))
}

/// Makes all IO of the file direct, and tries it: some file systems refuse the flag, others the first transfer.
fn try_direct(file: &File) -> io::Result<()> {
    set_direct(file, true)?;
    let mut memory = Memory::new(ALIGNMENT)?;
    let written = rustix::io::pwrite(file, &memory, 0)?;
    let read = rustix::io::pread(file, &mut memory[..], 0)?;
    if (written, read) != (ALIGNMENT, ALIGNMENT) {
        return Err(io::Error::other(format!("of {ALIGNMENT} bytes {written} were written and {read} read")));
    }
    Ok(())
}

fn set_direct(file: &File, is_direct: bool) -> io::Result<()> {
    let mut flags = fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, is_direct);
    Ok(fcntl_setfl(file, flags)?)
}
