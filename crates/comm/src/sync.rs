//! The locks and the clock of the queue. Loom models compile the queue against replacements of them.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::time::Instant;
