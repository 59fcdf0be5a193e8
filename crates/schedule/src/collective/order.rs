use super::{Incoming, Outgoing, Step};
use std::ops::Range;
use trireme_base::Rank;

/// An instruction of a stack program that reduces in the canonical order. The stack holds partial results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StackInstruction {
    /// Pushes the rank's elements.
    Load(Rank),
    /// Reduces the top with the rank's elements as the right operand.
    Reduce(Rank),
    /// Pops the right operand and reduces the new top with it.
    Combine,
}

/// Returns the canonical order over `world_size` ranks as a stack program. The program needs a stack of [`num_partials`] partial results,
/// and leaves one partial result, which is the result of the reduction.
///
/// # Panics
/// If `world_size` is 0.
pub fn canonical_order(world_size: usize) -> Vec<StackInstruction> {
    let folding = Folding::new(world_size, 0);
    let mut terms = Vec::new();
    push_subtree(&folding, 0, folding.num_leaves, &mut terms);
    terms
}

/// Returns the number of partial results that [`canonical_order`] needs at the same time.
///
/// # Panics
/// If `world_size` is 0.
pub fn num_partials(world_size: usize) -> usize {
    let depth = |depth: &mut usize, term| {
        match term {
            StackInstruction::Load(_) => *depth += 1,
            StackInstruction::Reduce(_) => {}
            StackInstruction::Combine => *depth -= 1,
        }
        Some(*depth)
    };
    canonical_order(world_size).into_iter().scan(0, depth).max().unwrap_or(0)
}

fn push_subtree(folding: &Folding, first: usize, end: usize, terms: &mut Vec<StackInstruction>) {
    if end - first == 1 {
        let rank = folding.representative(first);
        terms.push(StackInstruction::Load(Rank(rank)));
        if first < folding.extra {
            terms.push(StackInstruction::Reduce(Rank(rank + 1)));
        }
        return;
    }
    let middle = first.midpoint(end);
    push_subtree(folding, first, middle, terms);
    if end - middle == 1 && middle >= folding.extra {
        terms.push(StackInstruction::Reduce(Rank(folding.representative(middle))));
    } else {
        push_subtree(folding, middle, end, terms);
        terms.push(StackInstruction::Combine);
    }
}

/// The ranks as leaves of a balanced tree. The first `extra` leaves are pairs of neighbors. A pair is represented by the root if it
/// contains the root, else by its first rank.
pub(super) struct Folding {
    pub(super) num_leaves: usize,
    pub(super) extra: usize,
    root: usize,
}

impl Folding {
    pub(super) fn new(world_size: usize, root: usize) -> Self {
        assert!(world_size > 0, "a world has at least one rank");
        let num_leaves = 1 << world_size.ilog2();
        Folding { num_leaves, extra: world_size - num_leaves, root }
    }

    /// Returns the leaf of a rank.
    pub(super) fn leaf(&self, rank: usize) -> usize {
        if rank < 2 * self.extra { rank / 2 } else { rank - self.extra }
    }

    /// Returns the rank that represents a leaf.
    pub(super) fn representative(&self, leaf: usize) -> usize {
        if leaf == self.leaf(self.root) {
            self.root
        } else if leaf < self.extra {
            2 * leaf
        } else {
            leaf + self.extra
        }
    }

    /// Returns the other rank of the same leaf, if the leaf is a pair.
    pub(super) fn other(&self, rank: usize) -> Option<usize> {
        (rank < 2 * self.extra).then_some(rank ^ 1)
    }

    /// Appends the first step of a rank if it belongs to a folded pair. Returns the leaf that the rank represents, or `None` if the rank
    /// sends the range `whole` to the other rank of its pair.
    pub(super) fn fold(
        &self,
        rank: usize,
        whole: impl FnOnce() -> Range<usize>,
        steps: &mut Vec<Step>,
    ) -> Option<usize> {
        let leaf = self.leaf(rank);
        let leads = self.representative(leaf) == rank;
        steps.extend(self.other(rank).map(|other| {
            if leads {
                Step::receive(Incoming::reduce(rank, other, whole()))
            } else {
                Step::send(Outgoing::new(other, whole()))
            }
        }));
        leads.then_some(leaf)
    }
}
