//! The one place of this crate that needs `unsafe`: memory that the kernel or a thread reads and writes while
//! its owner is elsewhere.
#![allow(unsafe_code)]

mod memory;
mod ring;

pub(crate) use memory::{HUGE_PAGE, LentMemory, Memory, Part};
pub(crate) use ring::Ring;
