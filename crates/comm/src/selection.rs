use crate::GroupOptions;
use trireme_schedule::collective::{Algorithm, Collective, FlatAlgorithm, Hosts, fits, is_canonical};

/// Chooses algorithms, the same ones on all ranks: what is asked for where it fits, else what suits the length.
pub(crate) struct Selection {
    asked: Option<Algorithm>,
    keeps_order: bool,
    short_bytes_max: usize,
}

impl Selection {
    pub(crate) fn new(options: &GroupOptions) -> Self {
        Selection {
            asked: options.algorithm,
            keeps_order: options.keeps_order,
            short_bytes_max: options.short_bytes_max,
        }
    }

    /// The algorithm for an operation on elements of so many bytes.
    pub(crate) fn algorithm(
        &self,
        collective: Collective,
        hosts: &Hosts,
        element_bytes: usize,
        shares_memory: bool,
    ) -> Algorithm {
        let may_take = |algorithm: &Algorithm| {
            let is_direct = *algorithm == Algorithm::Flat(FlatAlgorithm::Direct);
            (shares_memory || !is_direct)
                && fits(collective, *algorithm, hosts)
                && (!self.keeps_order || is_canonical(collective, *algorithm, hosts))
        };
        if let Some(asked) = self.asked.filter(may_take) {
            return asked;
        }
        let is_short = collective.len() * element_bytes <= self.short_bytes_max;
        let preferred: &[FlatAlgorithm] = match (collective, is_short) {
            (Collective::AllReduce { .. }, true) => &[FlatAlgorithm::RecursiveDoubling],
            (Collective::AllReduce { .. }, false) => &[FlatAlgorithm::HalvingDoubling],
            (Collective::Reduce { .. } | Collective::Broadcast { .. }, _) => &[FlatAlgorithm::BinomialTree],
            (Collective::AllGather { .. }, _) => &[FlatAlgorithm::Ring],
            (Collective::ReduceScatter { .. }, _) => &[FlatAlgorithm::RecursiveHalving],
            (Collective::Gather { .. } | Collective::Scatter { .. }, _) => &[FlatAlgorithm::Linear],
            (Collective::AllToAll { .. }, _) => &[FlatAlgorithm::Pairwise],
            (Collective::Barrier, _) => &[FlatAlgorithm::Dissemination],
        };
        let direct = Algorithm::Flat(FlatAlgorithm::Direct);
        let candidates = std::iter::once(direct).chain(preferred.iter().map(|&flat| Algorithm::Flat(flat)));
        candidates.into_iter().find(may_take).expect("each operation has an algorithm for any world")
    }
}
