//! What the steps of one rank depend on.

use super::blocks::Blocks;

/// What the steps of a rank depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Own {
    pub(super) rank: usize,
    /// The rank that gives or gets; 0 where none does.
    pub(super) root: usize,
    /// Where the ranks' blocks lie.
    pub(super) blocks: Blocks,
}

impl Own {
    /// How many ranks there are.
    pub(super) fn world_size(&self) -> usize {
        self.blocks.world_size()
    }

    /// The rank so many places further on, in a ring.
    pub(super) fn after(&self, distance: usize) -> usize {
        (self.rank + distance) % self.world_size()
    }

    /// The rank so many places before, in a ring.
    pub(super) fn before(&self, distance: usize) -> usize {
        self.after(self.world_size() - distance % self.world_size())
    }
}

/// 1, 2, 4 and so on, below `world_size`.
pub(super) fn distances(world_size: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..world_size.next_power_of_two().ilog2()).map(|bit| 1 << bit)
}
