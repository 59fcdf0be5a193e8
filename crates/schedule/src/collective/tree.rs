//! Binomial trees in which every subtree is a run of ranks: whatever the root, what a subtree has is contiguous,
//! and of two subtrees one has the lower ranks.

use super::blocks::Blocks;
use super::order::{Folding, Role};
use super::{Incoming, Outgoing, Span, Step, assert_member};
use std::ops::Range;
use trireme_base::Rank;

/// Two neighbouring subtrees of the same number of ranks become one (the last may be shorter), as seen by the rank
/// that represents one of them.
struct Merge {
    /// The rank that represents the other one.
    partner: usize,
    /// Whether this rank represents both afterwards.
    keeps: bool,
    /// The ranks of the subtree whose representative gives up.
    given: Range<usize>,
}

/// The merge of subtrees of `distance` ranks that `rank` takes part in: the root represents every subtree that it is
/// in, and the lowest rank all others.
fn merge(rank: usize, world_size: usize, root: usize, distance: usize) -> Option<Merge> {
    let representative = |tree: usize| if root / distance == tree { root } else { tree * distance };
    let own = rank / distance;
    let sibling = own ^ 1;
    if representative(own) != rank || sibling * distance >= world_size {
        return None;
    }
    let winner =
        if root / distance == sibling || (root / distance != own && sibling < own) { sibling } else { own };
    let loser = winner ^ 1;
    let given = loser * distance..((loser + 1) * distance).min(world_size);
    Some(Merge { partner: representative(sibling), keeps: winner == own, given })
}

/// 1, 2, 4 and so on, below `world_size`.
fn distances(world_size: usize) -> impl DoubleEndedIterator<Item = usize> {
    (0..usize::BITS).map(|bit| 1_usize << bit).take(world_size.next_power_of_two().ilog2() as usize)
}

/// Reduction of `len` elements to `root` along a binomial tree, in canonical order.
pub(super) fn reduce(rank: Rank, world_size: usize, root: Rank, len: usize, steps: &mut Vec<Step>) {
    let folding = RootedFolding::new(world_size, root);
    let whole = || Span::vector(0..len);
    let Some(leaf) = folding.fold(rank.0, whole(), steps) else { return };
    for distance in distances(folding.num_leaves()) {
        let Some(merge) = merge(leaf, folding.num_leaves(), folding.root_leaf, distance) else { return };
        let partner = folding.leader(merge.partner);
        if !merge.keeps {
            steps.push(Step::send(Outgoing::new(partner, whole())));
            return;
        }
        steps.push(Step::receive(Incoming::reduce(rank.0, partner, whole())));
    }
}

/// Gathers all blocks at `root`.
pub(super) fn gather(rank: Rank, world_size: usize, root: Rank, blocks: &Blocks, steps: &mut Vec<Step>) {
    for distance in distances(world_size) {
        let Some(merge) = merge(rank.0, world_size, root.0, distance) else { continue };
        let given = Span::vector(blocks.of_all(merge.given));
        steps.push(if merge.keeps {
            Step::receive(Incoming::copy(merge.partner, given))
        } else {
            Step::send(Outgoing::new(merge.partner, given))
        });
    }
}

/// Gives every rank its block of what `root` has: [`gather`] backwards.
pub(super) fn scatter(rank: Rank, world_size: usize, root: Rank, blocks: &Blocks, steps: &mut Vec<Step>) {
    for distance in distances(world_size).rev() {
        let Some(merge) = merge(rank.0, world_size, root.0, distance) else { continue };
        let given = Span::vector(blocks.of_all(merge.given));
        steps.push(if merge.keeps {
            Step::send(Outgoing::new(merge.partner, given))
        } else {
            Step::receive(Incoming::copy(merge.partner, given))
        });
    }
}

/// A [`Folding`] in which the root stands for its leaf even if it is the second rank of a pair.
pub(super) struct RootedFolding {
    folding: Folding,
    root: usize,
    pub(super) root_leaf: usize,
}

impl RootedFolding {
    pub(super) fn new(world_size: usize, root: Rank) -> Self {
        assert_member(root, world_size);
        let folding = Folding::new(world_size);
        let root_leaf = match folding.role(root.0) {
            Role::Leader { leaf, .. } => leaf,
            Role::Follower { leader } => leader / 2,
        };
        RootedFolding { folding, root: root.0, root_leaf }
    }

    pub(super) fn num_leaves(&self) -> usize {
        self.folding.num_leaves
    }

    /// The rank that stands for a leaf.
    pub(super) fn leader(&self, leaf: usize) -> usize {
        if leaf == self.root_leaf { self.root } else { self.folding.leader(leaf) }
    }

    /// Appends what a rank of a folded pair does first. `None` for the one that hands its vector in and is done, else
    /// the leaf that `rank` stands for.
    pub(super) fn fold(&self, rank: usize, whole: Span, steps: &mut Vec<Step>) -> Option<usize> {
        let (leaf, other) = match self.folding.role(rank) {
            Role::Leader { leaf, follower } => (leaf, follower),
            Role::Follower { leader } => (leader / 2, Some(leader)),
        };
        let leads = self.leader(leaf) == rank;
        match other {
            Some(other) if leads => steps.push(Step::receive(Incoming::reduce(rank, other, whole))),
            Some(other) => steps.push(Step::send(Outgoing::new(other, whole))),
            None => {}
        }
        leads.then_some(leaf)
    }
}
