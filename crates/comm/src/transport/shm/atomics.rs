//! The atomics in shared memory. Loom models compile boards and rings against loom's atomics instead.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
