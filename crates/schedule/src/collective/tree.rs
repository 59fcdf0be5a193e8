//! Binomial trees in which every subtree is a run of consecutive ranks, whatever the root, so that the data of a subtree is contiguous.

use super::order::Folding;
use super::rank_context::{RankContext, distances};
use super::{Incoming, Outgoing, Step};
use std::ops::Range;

/// The merge of two neighboring subtrees of equal size (the last may be smaller), as seen by the representative of one of them.
struct Merge {
    /// The representative of the other subtree.
    partner: usize,
    /// Whether this rank represents the merged subtree.
    keeps: bool,
    /// The ranks of the subtree whose representative sends to the other one.
    given: Range<usize>,
}

/// Returns the merge of subtrees of `distance` ranks in which `rank` takes part, if any. The root represents its subtree; the lowest rank
/// represents any other subtree.
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

/// Appends the steps of a reduction to the root along a binomial tree, in canonical order.
pub(super) fn reduce(own: &RankContext, steps: &mut Vec<Step>) {
    let folding = Folding::new(own.world_size(), own.root);
    let whole = || 0..own.blocks.len;
    let Some(leaf) = folding.fold(own.rank, whole, steps) else { return };
    for distance in distances(folding.num_leaves) {
        let Some(merge) = merge(leaf, folding.num_leaves, folding.leaf(own.root), distance) else { return };
        let partner = folding.representative(merge.partner);
        if !merge.keeps {
            steps.push(Step::send(Outgoing::new(partner, whole())));
            return;
        }
        steps.push(Step::receive(Incoming::reduce(own.rank, partner, whole())));
    }
}

/// Appends the steps of a gather of all blocks at the root.
pub(super) fn gather(own: &RankContext, steps: &mut Vec<Step>) {
    for distance in distances(own.world_size()) {
        let Some(merge) = merge(own.rank, own.world_size(), own.root, distance) else { continue };
        let given = own.blocks.of_all(merge.given);
        steps.push(if merge.keeps {
            Step::receive(Incoming::copy(merge.partner, given))
        } else {
            Step::send(Outgoing::new(merge.partner, given))
        });
    }
}

/// Appends the steps of a scatter of the root's blocks: [`gather`] in reverse.
pub(super) fn scatter(own: &RankContext, steps: &mut Vec<Step>) {
    let first = steps.len();
    gather(own, steps);
    steps[first..].reverse();
    steps[first..].iter_mut().for_each(Step::undo);
}
