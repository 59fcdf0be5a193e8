//! Buffers of a group that are used again.

use crate::setup::peer_bytes;
use crate::usage::Usage;
use std::collections::BTreeMap;
use trireme_base::Category;

/// Buffers of one type of element, which stay in use when they are given back.
#[derive(Debug)]
pub(super) struct Pool {
    category: Category,
    element_bytes: usize,
    group_size: usize,
    /// Whether peers map a part of each buffer.
    is_mapped: bool,
    /// How many are free, by their length.
    free: BTreeMap<usize, usize>,
}

impl Pool {
    /// An empty pool of a group of `group_size`, whose buffers are mapped by peers or not.
    pub(super) fn new(category: Category, element_bytes: usize, group_size: usize, is_mapped: bool) -> Self {
        Pool { category, element_bytes, group_size, is_mapped, free: BTreeMap::new() }
    }

    pub(super) fn take(&mut self, len: usize, usage: &mut Usage) {
        if let Some(free) = self.free.get_mut(&len).filter(|free| **free > 0) {
            *free -= 1;
            return;
        }
        let num_bytes = len * self.element_bytes;
        usage.take(self.category, num_bytes);
        if self.is_mapped {
            usage.take_mapped(peer_bytes(self.group_size, num_bytes));
        }
    }

    pub(super) fn give(&mut self, len: usize) {
        *self.free.entry(len).or_default() += 1;
    }
}
