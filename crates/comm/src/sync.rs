//! The locks and the clock of the queue. The models compile it against others instead.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::time::Instant;
