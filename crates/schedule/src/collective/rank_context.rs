//! A collective, from the point of view of one rank.

use super::blocks::Blocks;

/// A rank, the root, and the blocks of all ranks, from which an algorithm derives the steps of the rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankContext {
    pub(super) rank: usize,
    /// The root; 0 in operations without one.
    pub(super) root: usize,
    /// Offsets and lengths of the ranks' blocks.
    pub(super) blocks: Blocks,
}

impl RankContext {
    pub(super) fn world_size(&self) -> usize {
        self.blocks.world_size()
    }

    /// Returns the rank `distance` places after this one in the ring.
    pub(super) fn after(&self, distance: usize) -> usize {
        (self.rank + distance) % self.world_size()
    }

    /// Returns the rank `distance` places before this one in the ring.
    pub(super) fn before(&self, distance: usize) -> usize {
        self.after(self.world_size() - distance % self.world_size())
    }
}

/// Returns the powers of two below `world_size`, in rising order.
pub(super) fn distances(world_size: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..world_size.next_power_of_two().ilog2()).map(|bit| 1 << bit)
}
