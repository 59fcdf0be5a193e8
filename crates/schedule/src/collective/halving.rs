use super::order::Folding;
use super::rank_context::{RankContext, distances};
use super::{Incoming, Outgoing, Step};
use std::ops::Range;

/// Appends the steps of an all-reduce for long vectors: reduce-scatter by vector halving and distance doubling, then the same exchanges in
/// reverse (Thakur, Rabenseifner, Gropp: "Optimization of collective communication operations in MPICH", 2005, sections on reduce and
/// allreduce). Neighbors pair first, so the order is canonical. The two ranks of a folded pair also send each other `len` elements.
pub(super) fn all_reduce_halving_doubling(own: &RankContext, steps: &mut Vec<Step>) {
    let first = steps.len();
    halve(own, &Folding::new(own.world_size(), 0), steps);
    mirror(first..steps.len(), steps);
}

/// Appends the steps of an all-reduce for short vectors (same paper). Compared with [`all_reduce_halving_doubling`], there are half as many
/// steps, each on the full vector, and the results have the same bits.
pub(super) fn all_reduce_recursive_doubling(own: &RankContext, steps: &mut Vec<Step>) {
    let (folding, first, whole) = (Folding::new(own.world_size(), 0), steps.len(), || 0..own.blocks.len);
    let leaf = folding.fold(own.rank, whole, steps);
    let folds = first..steps.len();
    for distance in distances(folding.num_leaves).filter(|_| leaf.is_some()) {
        let partner = folding.representative(folding.leaf(own.rank) ^ distance);
        steps.push(Step::both(Outgoing::new(partner, whole()), Incoming::reduce(own.rank, partner, whole())));
    }
    mirror(folds, steps);
}

/// Appends the steps of a reduction to the root for long vectors (same paper): the first half of [`all_reduce_halving_doubling`]. After
/// that, in each pair of partners, the partner on the root's side receives the elements of the other partner.
pub(super) fn reduce(own: &RankContext, steps: &mut Vec<Step>) {
    let folding = Folding::new(own.world_size(), own.root);
    let Some(first_step) = halve(own, &folding, steps) else { return };
    let away = folding.leaf(own.rank) ^ folding.leaf(own.root);
    for index in (first_step..steps.len()).rev() {
        let is_given = away & (1 << (index - first_step)) != 0;
        let mut step = steps[index].clone();
        step.undo();
        if let Step::Exchange { send, receive } = &mut step {
            if is_given { *receive = None } else { *send = None }
        }
        steps.push(step);
        if is_given {
            return;
        }
    }
}

/// Appends the steps of a reduce-scatter in canonical order (recursive halving, neighbors first). At each of the doubling distances, a
/// rank sends its partner the blocks that the partner continues to reduce, in one message for each leaf. The second rank of a folded pair
/// first sends its vector to the first rank, and receives its block at the end.
///
/// Blocks must be contiguous if the number of ranks is not a power of two.
pub(super) fn reduce_scatter(own: &RankContext, steps: &mut Vec<Step>) {
    let RankContext { rank, blocks, .. } = *own;
    let folding = Folding::new(own.world_size(), 0);
    let leaf = folding.fold(rank, || blocks.of_all(0..own.world_size()), steps);
    let blocks_of = |leaf: usize| {
        let first = folding.representative(leaf);
        if leaf < folding.extra { blocks.of_all(first..first + 2) } else { blocks.of(first) }
    };
    for distance in distances(folding.num_leaves) {
        let Some(leaf) = leaf else { break };
        let (stride, partner_leaf) = (2 * distance, leaf ^ distance);
        let partner = folding.representative(partner_leaf);
        for others in (0..folding.num_leaves).step_by(stride) {
            steps.push(Step::both(
                Outgoing::new(partner, blocks_of(partner_leaf % stride + others)),
                Incoming::reduce(rank, partner, blocks_of(leaf % stride + others)),
            ));
        }
    }
    steps.extend(folding.other(rank).map(|other| match leaf {
        Some(_) => Step::send(Outgoing::new(other, blocks.of(other))),
        None => Step::receive(Incoming::copy(other, blocks.of(rank))),
    }));
}

/// Appends the steps of a reduce-scatter among a power of two of leaves, after folding: partners at doubling distances exchange halves of
/// the range that both still work on. Returns the index of the first step after folding, or `None` if the rank does not represent a leaf.
fn halve(own: &RankContext, folding: &Folding, steps: &mut Vec<Step>) -> Option<usize> {
    let mut range = 0..own.blocks.len;
    let leaf = folding.fold(own.rank, || 0..own.blocks.len, steps)?;
    let first = steps.len();
    for distance in distances(folding.num_leaves) {
        let partner = folding.representative(leaf ^ distance);
        let middle = range.start.midpoint(range.end);
        let (lower, upper) = (range.start..middle, middle..range.end);
        let (kept, given) = if leaf & distance == 0 { (lower, upper) } else { (upper, lower) };
        let receive = Incoming::reduce(own.rank, partner, kept.clone());
        steps.push(Step::both(Outgoing::new(partner, given), receive));
        range = kept;
    }
    Some(first)
}

/// Appends the steps that undo the steps `done`, from the last to the first.
fn mirror(done: Range<usize>, steps: &mut Vec<Step>) {
    for index in done.rev() {
        let mut step = steps[index].clone();
        step.undo();
        steps.push(step);
    }
}
