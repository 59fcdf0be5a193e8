use super::blocks::Blocks;
use super::rank_context::RankContext;
use super::{Collective, CollectiveKind, FlatAlgorithm, Step};
use super::{all_gather, all_to_all, barrier, broadcast, double_tree, halving, linear, ring, tree};

impl FlatAlgorithm {
    /// Returns whether this algorithm implements `collective` among the ranks of these blocks.
    pub(super) fn fits(self, collective: Collective, blocks: &Blocks) -> bool {
        match self {
            FlatAlgorithm::Direct => blocks.are_contiguous(),
            _ => self.step_generator(collective, blocks).is_some(),
        }
    }

    /// Returns whether the reductions of `collective` are in canonical order.
    pub(super) fn is_canonical(self, collective: Collective) -> bool {
        use FlatAlgorithm as A;
        let keeps_order =
            [A::Direct, A::RecursiveDoubling, A::RecursiveHalving, A::HalvingDoubling, A::BinomialTree];
        !collective.reduces() || keeps_order.contains(&self)
    }

    /// Appends the steps of `rank` to `steps`.
    ///
    /// # Panics
    /// If the algorithm does not implement `collective`, or is [`Direct`](FlatAlgorithm::Direct), which has no steps.
    pub(super) fn steps(self, collective: Collective, rank: usize, blocks: Blocks, steps: &mut Vec<Step>) {
        let make = self.step_generator(collective, &blocks);
        let make = make.unwrap_or_else(|| panic!("{self} has no steps for {collective}"));
        make(&RankContext { rank, root: collective.root().map_or(0, |root| root.0), blocks }, steps);
    }

    /// Returns the function that generates the steps of a rank, if this algorithm implements `collective` by steps.
    fn step_generator(
        self,
        collective: Collective,
        blocks: &Blocks,
    ) -> Option<fn(&RankContext, &mut Vec<Step>)> {
        use CollectiveKind as C;
        use FlatAlgorithm as A;
        let is_power = blocks.world_size().is_power_of_two();
        let are_contiguous = blocks.are_contiguous();
        Some(match (collective.kind, self) {
            (C::AllReduce, A::RecursiveDoubling) => halving::all_reduce_recursive_doubling,
            (C::AllReduce, A::HalvingDoubling) => halving::all_reduce_halving_doubling,
            (C::AllReduce, A::Ring) => |own, steps| {
                ring::reduce_scatter(own, steps);
                ring::all_gather(own, steps);
            },
            (C::AllReduce, A::BinomialTree) => |own, steps| {
                tree::reduce(own, steps);
                broadcast::binomial(own, steps);
            },
            (C::AllReduce, A::DoubleBinaryTree) => double_tree::all_reduce,
            (C::Reduce, A::BinomialTree) => tree::reduce,
            (C::Reduce, A::HalvingDoubling) => halving::reduce,
            (C::Reduce, A::Ring) => |own, steps| {
                ring::reduce_scatter(own, steps);
                tree::gather(own, steps);
            },
            (C::Broadcast, A::BinomialTree) => broadcast::binomial,
            (C::Broadcast, A::ScatterAllGather) => broadcast::scatter_all_gather,
            (C::AllGather, A::RecursiveDoubling) if is_power && are_contiguous => {
                all_gather::recursive_doubling
            }
            (C::AllGather, A::Ring) => ring::all_gather,
            (C::AllGather, A::Bruck) => all_gather::bruck,
            (C::AllGather, A::Pairwise) => all_gather::pairwise,
            (C::ReduceScatter, A::RecursiveHalving) if is_power || are_contiguous => halving::reduce_scatter,
            (C::ReduceScatter, A::Ring) => ring::reduce_scatter,
            (C::Gather, A::BinomialTree) if are_contiguous => tree::gather,
            (C::Gather, A::Linear) => linear::gather,
            (C::Scatter, A::BinomialTree) if are_contiguous => tree::scatter,
            (C::Scatter, A::Linear) => linear::scatter,
            (C::AllToAll, A::Pairwise) => all_to_all::pairwise,
            (C::AllToAll, A::Bruck) => all_to_all::bruck,
            (C::Barrier, A::Dissemination) => barrier::dissemination,
            _ => return None,
        })
    }
}

/// Returns the number of synchronizations of a direct algorithm, and the bytes that the busiest rank reads and writes in other ranks'
/// memory, for vectors of `whole` bytes and blocks of `own` bytes.
pub(super) fn direct_work(kind: CollectiveKind, whole: f64, own: f64) -> (f64, f64) {
    use CollectiveKind as C;
    match kind {
        C::AllReduce | C::AllToAll => (2.0, 2.0 * (whole - own)),
        C::Reduce | C::Broadcast => (2.0, whole),
        C::AllGather | C::ReduceScatter | C::Gather => (2.0, whole - own),
        C::Scatter => (2.0, own),
        C::Barrier => (1.0, 0.0),
    }
}
