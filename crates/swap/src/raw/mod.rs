//! The only module of this crate with unsafe code: memory that the kernel or a thread reads and writes while its owner has no access,
//! io_uring, and mapped files.
#![allow(unsafe_code)]

mod file_memory;
mod memory;
mod ring;

pub(crate) use file_memory::map;
pub(crate) use memory::{LentMemory, Memory, MemoryPart};
pub(crate) use ring::Ring;
