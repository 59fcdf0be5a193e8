//! The one place of this crate that needs `unsafe`: memory that the kernel or a thread reads and writes while
//! its owner is elsewhere.
#![allow(unsafe_code)]

mod file_memory;
mod memory;
mod ring;

pub(crate) use file_memory::map;
pub(crate) use memory::{LentMemory, Memory, Part};
pub(crate) use ring::Ring;
