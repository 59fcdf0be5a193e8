use super::rank_context::{RankContext, distances};
use super::{Incoming, Outgoing, Step};

/// Appends the steps of a dissemination barrier (Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", 1988). After
/// `ceil(log2 N)` empty messages, each rank has heard from all ranks, directly or through others.
pub(super) fn dissemination(own: &RankContext, steps: &mut Vec<Step>) {
    for distance in distances(own.world_size()) {
        let (to, from) = (own.after(distance), own.before(distance));
        steps.push(Step::both(Outgoing::new(to, 0..0), Incoming::copy(from, 0..0)));
    }
}
