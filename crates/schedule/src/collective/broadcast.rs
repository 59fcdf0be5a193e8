use super::blocks::Blocks;
use super::{Incoming, Outgoing, Span, Step, assert_member, ring, tree};
use trireme_base::Rank;

/// Broadcast of `len` elements from `root` along a binomial tree.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` or `root` is not below `world_size`.
pub(super) fn broadcast_binomial(
    rank: Rank,
    world_size: usize,
    root: Rank,
    len: usize,
    steps: &mut Vec<Step>,
) {
    assert_member(rank, world_size);
    assert_member(root, world_size);
    let absolute = |relative: usize| (relative + root.0) % world_size;
    let relative = (rank.0 + world_size - root.0) % world_size;

    let mut distance = 1;
    while distance < world_size && relative & distance == 0 {
        distance *= 2;
    }
    if relative != 0 {
        steps.push(Step::receive(Incoming::copy(absolute(relative - distance), Span::vector(0..len))));
    }
    while distance > 1 {
        distance /= 2;
        if relative + distance < world_size {
            steps.push(Step::send(Outgoing::new(absolute(relative + distance), Span::vector(0..len))));
        }
    }
}

/// Broadcast of long vectors: the root scatters blocks along a binomial tree, and a ring gathers them (Barnett et al.:
/// "Interprocessor collective communication library (InterCom)", 1994).
pub(super) fn scatter_all_gather(
    rank: Rank,
    world_size: usize,
    root: Rank,
    len: usize,
    steps: &mut Vec<Step>,
) {
    let blocks = Blocks::even(world_size, len);
    tree::scatter(rank, world_size, root, &blocks, steps);
    ring::all_gather(rank, world_size, &blocks, steps);
}
