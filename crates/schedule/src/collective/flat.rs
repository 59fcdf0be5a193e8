use super::blocks::Blocks;
use super::{Collective, FlatAlgorithm, Step};
use super::{all_gather, all_to_all, barrier, broadcast, double_tree, halving, linear, ring, tree};
use trireme_base::Rank;

impl FlatAlgorithm {
    /// Whether this algorithm does `collective` among `world_size` ranks.
    pub(super) fn fits(self, collective: Collective, world_size: usize, blocks: &Blocks) -> bool {
        use Collective as C;
        use FlatAlgorithm as A;
        let is_power = world_size.is_power_of_two();
        let are_contiguous = blocks.are_contiguous();
        match collective {
            _ if self == A::Direct => are_contiguous,
            C::AllReduce { .. } => {
                matches!(
                    self,
                    A::RecursiveDoubling
                        | A::HalvingDoubling
                        | A::Ring
                        | A::BinomialTree
                        | A::DoubleBinaryTree
                )
            }
            C::Reduce { .. } => matches!(self, A::BinomialTree | A::HalvingDoubling | A::Ring),
            C::Broadcast { .. } => matches!(self, A::BinomialTree | A::ScatterAllGather),
            C::AllGather { .. } => match self {
                A::RecursiveDoubling => is_power && are_contiguous,
                _ => matches!(self, A::Ring | A::Bruck | A::Pairwise),
            },
            C::ReduceScatter { .. } => match self {
                A::RecursiveHalving => is_power || are_contiguous,
                _ => self == A::Ring,
            },
            C::Gather { .. } | C::Scatter { .. } => match self {
                A::BinomialTree => are_contiguous,
                _ => self == A::Linear,
            },
            C::AllToAll { .. } => matches!(self, A::Pairwise | A::Bruck),
            C::Barrier => self == A::Dissemination,
        }
    }

    /// Whether the reductions of `collective` are in canonical order.
    pub(super) fn is_canonical(self, collective: Collective) -> bool {
        use FlatAlgorithm as A;
        let keeps_order =
            [A::Direct, A::RecursiveDoubling, A::RecursiveHalving, A::HalvingDoubling, A::BinomialTree];
        !collective.reduces() || keeps_order.contains(&self)
    }

    /// Appends the steps of `rank` to `steps`.
    ///
    /// # Panics
    /// If the algorithm is none of `collective`, or [`Direct`](FlatAlgorithm::Direct), which has no steps.
    pub(super) fn steps(
        self,
        collective: Collective,
        rank: Rank,
        world_size: usize,
        blocks: &Blocks,
        steps: &mut Vec<Step>,
    ) {
        use Collective as C;
        use FlatAlgorithm as A;
        match (collective, self) {
            (C::AllReduce { len }, A::RecursiveDoubling) => {
                halving::all_reduce_recursive_doubling(rank, world_size, len, steps);
            }
            (C::AllReduce { len }, A::HalvingDoubling) => {
                halving::all_reduce_halving_doubling(rank, world_size, len, steps);
            }
            (C::AllReduce { .. }, A::Ring) => {
                ring::reduce_scatter(rank, world_size, blocks, steps);
                ring::all_gather(rank, world_size, blocks, steps);
            }
            (C::AllReduce { len }, A::BinomialTree) => {
                tree::reduce(rank, world_size, Rank::ROOT, len, steps);
                broadcast::broadcast_binomial(rank, world_size, Rank::ROOT, len, steps);
            }
            (C::AllReduce { len }, A::DoubleBinaryTree) => {
                let num_chunks = double_tree::num_chunks(len);
                double_tree::all_reduce(rank, world_size, len, num_chunks, steps);
            }
            (C::Reduce { root, len }, A::BinomialTree) => tree::reduce(rank, world_size, root, len, steps),
            (C::Reduce { root, len }, A::HalvingDoubling) => {
                halving::reduce(rank, world_size, root, len, steps);
            }
            (C::Reduce { root, .. }, A::Ring) => {
                ring::reduce_scatter(rank, world_size, blocks, steps);
                tree::gather(rank, world_size, root, blocks, steps);
            }
            (C::Broadcast { root, len }, A::BinomialTree) => {
                broadcast::broadcast_binomial(rank, world_size, root, len, steps);
            }
            (C::Broadcast { root, len }, A::ScatterAllGather) => {
                broadcast::scatter_all_gather(rank, world_size, root, len, steps);
            }
            (C::AllGather { .. }, A::Ring) => ring::all_gather(rank, world_size, blocks, steps),
            (C::AllGather { .. }, A::RecursiveDoubling) => {
                all_gather::recursive_doubling(rank, world_size, blocks, steps);
            }
            (C::AllGather { .. }, A::Bruck) => all_gather::bruck(rank, world_size, blocks, steps),
            (C::AllGather { .. }, A::Pairwise) => {
                all_gather::pairwise(rank, world_size, |rank| blocks.of(rank), steps);
            }
            (C::ReduceScatter { .. }, A::Ring) => ring::reduce_scatter(rank, world_size, blocks, steps),
            (C::ReduceScatter { .. }, A::RecursiveHalving) => {
                halving::reduce_scatter(rank, world_size, blocks, steps);
            }
            (C::Gather { root, .. }, A::BinomialTree) => tree::gather(rank, world_size, root, blocks, steps),
            (C::Gather { root, .. }, A::Linear) => linear::gather(rank, world_size, root, blocks, steps),
            (C::Scatter { root, .. }, A::BinomialTree) => {
                tree::scatter(rank, world_size, root, blocks, steps);
            }
            (C::Scatter { root, .. }, A::Linear) => linear::scatter(rank, world_size, root, blocks, steps),
            (C::AllToAll { .. }, A::Pairwise) => all_to_all::pairwise(rank, world_size, blocks, steps),
            (C::AllToAll { len }, A::Bruck) => all_to_all::bruck(rank, world_size, len, steps),
            (C::Barrier, A::Dissemination) => barrier::barrier_dissemination(rank, world_size, steps),
            (collective, algorithm) => panic!("{algorithm} has no steps for {collective}"),
        }
    }
}
