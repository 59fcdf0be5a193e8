//! Worker processes that ended or stopped.

use crate::death::Death;
use std::collections::BTreeMap;

/// The processes of workers that ended or stopped, by rank.
pub(crate) type Fates = BTreeMap<usize, Fate>;

/// What is seen of a worker's process from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has ended, and not well.
    Dead(Death),
    /// It does not run, until a signal continues it.
    Stopped,
}
