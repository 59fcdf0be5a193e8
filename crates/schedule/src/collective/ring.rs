use super::blocks::Blocks;
use super::{Action, Incoming, Outgoing, Side, Span, Step};
use trireme_base::Rank;

/// Reduce-scatter around a ring (Patarasuk, Yuan: "Bandwidth optimal all-reduce algorithms for clusters of
/// workstations", 2009): each block starts behind its owner and goes around to it, and each rank on the way adds its
/// elements as the right operand.
pub(super) fn reduce_scatter(rank: Rank, world_size: usize, blocks: &Blocks, steps: &mut Vec<Step>) {
    let before = |distance: usize| (rank.0 + 2 * world_size - distance) % world_size;
    for step in 1..world_size {
        steps.push(Step::both(
            Outgoing::new((rank.0 + 1) % world_size, Span::vector(blocks.of(before(step)))),
            Incoming {
                from: Rank(before(1)),
                span: Span::vector(blocks.of(before(step + 1))),
                action: Action::Reduce { own: Side::Right },
            },
        ));
    }
}

/// All-gather around a ring: each rank passes on the block that it got last.
pub(super) fn all_gather(rank: Rank, world_size: usize, blocks: &Blocks, steps: &mut Vec<Step>) {
    let before = |distance: usize| (rank.0 + world_size - distance) % world_size;
    for step in 1..world_size {
        steps.push(Step::both(
            Outgoing::new((rank.0 + 1) % world_size, Span::vector(blocks.of(before(step - 1)))),
            Incoming::copy(before(1), Span::vector(blocks.of(before(step)))),
        ));
    }
}
