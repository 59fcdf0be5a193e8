//! The atomics that ranks share. The models compile boards and rings against loom's instead.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
