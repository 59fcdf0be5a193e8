//! What is seen of workers from outside.

use crate::death::Death;
use std::collections::BTreeMap;

/// What is seen of a worker's process from outside, by its rank.
pub(crate) type Fates = BTreeMap<usize, Fate>;

/// What is seen of a worker's process from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has ended, and not well.
    Dead(Death),
    /// It does not run, until a signal continues it.
    Stopped,
}
