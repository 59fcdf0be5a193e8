use super::rank_context::{RankContext, distances};
use super::{Incoming, Outgoing, Step, ring, tree};

/// Appends the steps of a broadcast from the root along a binomial tree.
pub(super) fn binomial(own: &RankContext, steps: &mut Vec<Step>) {
    let (world_size, whole) = (own.world_size(), || 0..own.blocks.len);
    // The rank's number, counted from the root.
    let relative_rank = (own.rank + world_size - own.root) % world_size;
    if relative_rank != 0 {
        let distance = 1 << relative_rank.trailing_zeros();
        steps.push(Step::receive(Incoming::copy(own.before(distance), whole())));
    }
    for distance in distances(world_size).rev() {
        if relative_rank.is_multiple_of(2 * distance) && relative_rank + distance < world_size {
            steps.push(Step::send(Outgoing::new(own.after(distance), whole())));
        }
    }
}

/// Appends the steps of a broadcast of long vectors: the root scatters blocks along a binomial tree, and a ring gathers them (Barnett et
/// al.: "Interprocessor collective communication library (InterCom)", 1994).
pub(super) fn scatter_all_gather(own: &RankContext, steps: &mut Vec<Step>) {
    tree::scatter(own, steps);
    ring::all_gather(own, steps);
}
