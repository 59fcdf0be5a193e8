//! Stand-ins for the libraries of CUDA: the driver, NVRTC, cuBLASLt and NCCL. They run kernels on the host, so that the backend
//! for GPUs is tested on machines without one.
//!
//! The crate is one shared library, which serves under all these names ([`install`]); a program loads it like the real libraries. It has
//! only the functions that Trireme calls.
//!
//! - NVRTC compiles the sources of kernels as C++ for the host (`device.h`). Its "machine code" is a shared library. If `FAKE_CUDA_PTX`
//!   names the folder of the real NVRTC, this compiles them to PTX instead, which is interpreted ([`ptx`]).
//! - The threads of a block are coroutines ([`block`]) that run one at a time, in an order that a seed chooses, until they meet at a
//!   barrier or in an operation of their warp.
//! - Device memory is not accessible to the host ([`memory`]), except while the driver runs jobs. New memory holds NaN.
//! - NCCL's communicators are sockets between processes ([`nccl`]).
//! - Streams run late, in any order that events allow ([`stream`]). The seed chooses this order as well. Copies read pinned host memory
//!   when they run, and a program that unpins it before that ends.
//!
//! The variable `FAKE_CUDA_SEED` sets the seed, `FAKE_CUDA_SANITIZE` names sanitizers for kernels ([`nvrtc`]), `FAKE_NCCL_KILLED` and
//! `FAKE_NCCL_STOPPED` kill or stop a process in an operation of NCCL ([`nccl`]), and the other variables that start with `FAKE_CUDA_`
//! describe the GPUs ([`gpu`]).
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the functions have the names of the libraries that they stand for")]

pub mod block;
pub mod gpu;
pub mod launch;
pub mod memory;
pub mod module;
pub mod nccl;
pub mod nvrtc;
pub mod ptx;
pub mod stream;

mod cublaslt;
mod driver;
mod floats;
mod random;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};

/// A place for a result, which callers may pass without a value.
type Out<'a, T> = &'a mut std::mem::MaybeUninit<T>;

/// File names of the libraries that this one stands for.
pub const LIBRARY_NAMES: [&str; 4] = ["libcuda.so.1", "libnvrtc.so.12", "libcublasLt.so.12", "libnccl.so.2"];

/// Creates links to the shared library, with the names of those that it stands for, in `folder`. Existing links are kept.
///
/// # Errors
/// If the shared library is not there, or if the links cannot be created.
pub fn install(folder: &Path) -> io::Result<()> {
    let library = library()?;
    std::fs::create_dir_all(folder)?;
    for name in LIBRARY_NAMES {
        let link = folder.join(name);
        if std::fs::read_link(&link).is_ok_and(|target| target == library) {
            continue;
        }
        // Tests that run at the same time may create the same link.
        let new = folder.join(format!("{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
        std::os::unix::fs::symlink(&library, &new)?;
        std::fs::rename(&new, &link)?;
    }
    Ok(())
}

/// Returns the path of the shared library: where cargo puts it, next to the program.
///
/// # Errors
/// If it is not there.
pub fn library() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let name = "libtrireme_fake_cuda.so";
    let folders = program.ancestors().skip(1).take(2);
    let mut candidates = folders.flat_map(|folder| [folder.join(name), folder.join("deps").join(name)]);
    let found = candidates.find(|path| path.is_file());
    found.ok_or_else(|| io::Error::other(format!("no {name} next to {}", program.display())))
}
