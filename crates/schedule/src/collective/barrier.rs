use super::own::{Own, distances};
use super::{Incoming, Outgoing, Step};

/// Barrier by dissemination (Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", 1988):
/// after `ceil(log2 N)` empty messages each rank has heard, directly or not, from all.
pub(super) fn dissemination(own: &Own, steps: &mut Vec<Step>) {
    for distance in distances(own.world_size()) {
        let (to, from) = (own.after(distance), own.before(distance));
        steps.push(Step::both(Outgoing::new(to, 0..0), Incoming::copy(from, 0..0)));
    }
}
