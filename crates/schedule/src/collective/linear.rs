use super::rank_context::RankContext;
use super::{Incoming, Outgoing, Step};

/// Appends the steps of a gather: every rank sends its block to the root, which receives one after the other.
pub(super) fn gather(own: &RankContext, steps: &mut Vec<Step>) {
    let RankContext { rank, root, blocks } = *own;
    if rank != root {
        steps.push(Step::send(Outgoing::new(root, blocks.of(rank))));
        return;
    }
    let others = (0..own.world_size()).filter(|&other| other != root);
    steps.extend(others.map(|from| Step::receive(Incoming::copy(from, blocks.of(from)))));
}

/// Appends the steps of a scatter: the root sends every rank its block, one after the other.
pub(super) fn scatter(own: &RankContext, steps: &mut Vec<Step>) {
    let first = steps.len();
    gather(own, steps);
    steps[first..].iter_mut().for_each(Step::undo);
}
