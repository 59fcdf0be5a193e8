use super::{Incoming, Outgoing, Span, Step, assert_member};
use trireme_base::Rank;

/// Barrier by dissemination (Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", 1988):
/// after `ceil(log2 N)` empty messages each rank has heard, directly or not, from all.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` is not below `world_size`.
pub(super) fn barrier_dissemination(rank: Rank, world_size: usize, steps: &mut Vec<Step>) {
    assert_member(rank, world_size);
    let mut distance = 1;
    while distance < world_size {
        let to = (rank.0 + distance) % world_size;
        let from = (rank.0 + world_size - distance) % world_size;
        steps.push(Step::both(
            Outgoing::new(to, Span::vector(0..0)),
            Incoming::copy(from, Span::vector(0..0)),
        ));
        distance *= 2;
    }
}
