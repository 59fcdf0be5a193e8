use super::blocks::Blocks;
use super::{Incoming, Outgoing, Span, Step};
use trireme_base::Rank;

/// Every rank sends its block to `root`, which takes one after the other.
pub(super) fn gather(rank: Rank, world_size: usize, root: Rank, blocks: &Blocks, steps: &mut Vec<Step>) {
    if rank != root {
        steps.push(Step::send(Outgoing::new(root.0, Span::vector(blocks.of(rank.0)))));
        return;
    }
    let others = (0..world_size).filter(|&other| other != root.0);
    steps.extend(others.map(|from| Step::receive(Incoming::copy(from, Span::vector(blocks.of(from))))));
}

/// `root` sends every rank its block, one after the other.
pub(super) fn scatter(rank: Rank, world_size: usize, root: Rank, blocks: &Blocks, steps: &mut Vec<Step>) {
    if rank != root {
        steps.push(Step::receive(Incoming::copy(root.0, Span::vector(blocks.of(rank.0)))));
        return;
    }
    let others = (0..world_size).filter(|&other| other != root.0);
    steps.extend(others.map(|to| Step::send(Outgoing::new(to, Span::vector(blocks.of(to))))));
}
