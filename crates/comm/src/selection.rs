use crate::{GroupOptions, Operation};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use trireme_schedule::collective::{
    Algorithm, Collective, CostModel, DirectCost, FlatAlgorithm, Hosts, LinkCost, choose, fits, is_canonical,
};

/// Choices that are kept; a step repeats far fewer operations.
const NUM_KEPT_MAX: usize = 4096;

/// Costs of links within a host when nothing was measured: memory that processes share, or loopback.
const TYPICAL_MEMORY: LinkCost = LinkCost { latency_seconds: 3e-6, seconds_per_byte: 1.0 / 4e9 };
const TYPICAL_LOOPBACK: LinkCost = LinkCost { latency_seconds: 20e-6, seconds_per_byte: 1.0 / 2e9 };
/// That of a network of 10 Gbit/s.
const TYPICAL_NETWORK: LinkCost = LinkCost { latency_seconds: 40e-6, seconds_per_byte: 1.0 / 1.2e9 };
const TYPICAL_DIRECT: DirectCost = DirectCost { synchronisation_seconds: 3e-6, seconds_per_byte: 1.0 / 10e9 };
/// Of one core.
const TYPICAL_SECONDS_PER_BYTE: f64 = 1.0 / 10e9;

/// What communication costs where nothing was measured.
pub(crate) fn typical_costs(shares_memory: bool) -> CostModel {
    CostModel {
        within: if shares_memory { TYPICAL_MEMORY } else { TYPICAL_LOOPBACK },
        across: TYPICAL_NETWORK,
        direct: shares_memory.then_some(TYPICAL_DIRECT),
        reduce_seconds_per_byte: TYPICAL_SECONDS_PER_BYTE,
        copy_seconds_per_byte: TYPICAL_SECONDS_PER_BYTE,
    }
}

/// How a group does an operation on vectors of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The operation; its length is that of the whole vector, in elements.
    pub collective: Collective,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// The algorithm that was chosen.
    pub algorithm: Algorithm,
}

impl Choice {
    /// Bytes of the whole vector.
    pub fn bytes(&self) -> u64 {
        (self.collective.len * self.element_bytes) as u64
    }
}

type Chosen = HashMap<(Collective, usize), Algorithm>;

/// Chooses algorithms, the same ones on all ranks: what is asked for where it fits, else what is predicted to be the fastest.
#[derive(Clone)]
pub(crate) struct Selection {
    hosts: Hosts,
    asked: Option<Algorithm>,
    keeps_order: bool,
    /// Given costs, typical ones where none are given.
    typical: CostModel,
    /// What was measured, once it was: on all ranks between the same two operations.
    measured: Arc<OnceLock<CostModel>>,
    /// What was chosen, before anything was measured and since. Clones share it.
    chosen: Arc<Mutex<[Chosen; 2]>>,
}

impl Selection {
    pub(crate) fn new(
        hosts: Hosts,
        shares_memory: bool,
        measured: Arc<OnceLock<CostModel>>,
        options: &GroupOptions,
    ) -> Self {
        Selection {
            hosts,
            asked: options.algorithm,
            keeps_order: options.keeps_order,
            typical: options.costs.over(typical_costs(shares_memory)),
            measured,
            chosen: Arc::default(),
        }
    }

    /// The algorithm for an operation on elements of so many bytes.
    pub(crate) fn algorithm(&self, collective: Collective, element_bytes: usize) -> Algorithm {
        let measured = self.measured.get();
        let (model, which) = (measured.unwrap_or(&self.typical), usize::from(measured.is_some()));
        if let Some(&algorithm) = self.lock()[which].get(&(collective, element_bytes)) {
            return algorithm;
        }
        let algorithm = self.choose(collective, element_bytes, model);
        let chosen = &mut self.lock()[which];
        if chosen.len() == NUM_KEPT_MAX {
            chosen.clear();
        }
        chosen.insert((collective, element_bytes), algorithm);
        algorithm
    }

    /// The algorithm that was chosen last for an operation; none where there was no choice, or none yet.
    pub(crate) fn chosen(&self, operation: Operation) -> Option<Algorithm> {
        let (dtype, _) = operation.elements();
        let key = (operation.collective()?, dtype.size());
        self.lock().iter().rev().find_map(|chosen| chosen.get(&key).copied())
    }

    /// What was chosen by the costs that count now, in no order.
    pub(crate) fn choices(&self) -> Vec<Choice> {
        let choice = |(&(collective, element_bytes), &algorithm): (&(Collective, usize), &Algorithm)| {
            Choice { collective, element_bytes, algorithm }
        };
        self.lock()[usize::from(self.measured.get().is_some())].iter().map(choice).collect()
    }

    pub(crate) fn num_choices(&self) -> usize {
        self.lock()[usize::from(self.measured.get().is_some())].len()
    }

    fn lock(&self) -> MutexGuard<'_, [Chosen; 2]> {
        self.chosen.lock().expect("no thread panics while it looks at the choices")
    }

    fn choose(&self, collective: Collective, element_bytes: usize, model: &CostModel) -> Algorithm {
        let shares_memory = model.direct.is_some();
        let may_take = |algorithm: &Algorithm| {
            (shares_memory || !algorithm.needs_shared_memory())
                && fits(collective, *algorithm, &self.hosts)
                && (!self.keeps_order || is_canonical(collective, *algorithm, &self.hosts))
        };
        // Where all ranks share memory, no message is quicker than a look at it.
        let direct = Algorithm::Flat(FlatAlgorithm::Direct);
        let choose = || choose(collective, &self.hosts, element_bytes, model, self.keeps_order);
        self.asked.filter(may_take).or(Some(direct).filter(may_take)).unwrap_or_else(choose)
    }
}
