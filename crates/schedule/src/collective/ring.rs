use super::rank_context::RankContext;
use super::{Incoming, Outgoing, ReceiveAction, Side, Step};
use trireme_base::Rank;

/// Appends the steps of a ring reduce-scatter (Patarasuk, Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations",
/// 2009). Each block starts at the rank after its owner and travels around the ring to the owner. Each rank on the way adds its elements as
/// the right operand.
pub(super) fn reduce_scatter(own: &RankContext, steps: &mut Vec<Step>) {
    let block = |distance| own.blocks.of(own.before(distance)).into();
    for step in 1..own.world_size() {
        let action = ReceiveAction::Reduce { own_side: Side::Right };
        let receive = Incoming { from: Rank(own.before(1)), span: block(step + 1), action };
        steps.push(Step::both(Outgoing::new(own.after(1), block(step)), receive));
    }
}

/// Appends the steps of a ring all-gather: each rank sends on the block that it received last.
pub(super) fn all_gather(own: &RankContext, steps: &mut Vec<Step>) {
    let block = |distance| own.blocks.of(own.before(distance));
    for step in 1..own.world_size() {
        let send = Outgoing::new(own.after(1), block(step - 1));
        steps.push(Step::both(send, Incoming::copy(own.before(1), block(step))));
    }
}
