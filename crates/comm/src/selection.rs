//! The choice of the algorithm of each operation. It is a pure function of the operation, its length and the costs of links. All ranks use
//! the same costs, so they make the same choice without communication.

use crate::{GroupOptions, Operation};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use trireme_schedule::collective::{
    Algorithm, Collective, CostModel, DirectCost, FlatAlgorithm, Hosts, LinkCost, choose, fits, is_canonical,
};

/// Maximum number of choices that are kept. A step repeats far fewer operations.
const NUM_KEPT_MAX: usize = 4096;

/// Costs of links within a host that are assumed without a measurement: over shared memory, or over loopback.
const TYPICAL_MEMORY: LinkCost = LinkCost { latency_seconds: 3e-6, seconds_per_byte: 1.0 / 4e9 };
const TYPICAL_LOOPBACK: LinkCost = LinkCost { latency_seconds: 20e-6, seconds_per_byte: 1.0 / 2e9 };
/// Cost of a 10 Gbit/s network.
const TYPICAL_NETWORK: LinkCost = LinkCost { latency_seconds: 40e-6, seconds_per_byte: 1.0 / 1.2e9 };
const TYPICAL_DIRECT: DirectCost = DirectCost { synchronization_seconds: 3e-6, seconds_per_byte: 1.0 / 10e9 };
/// Reduction or copy by one core.
const TYPICAL_SECONDS_PER_BYTE: f64 = 1.0 / 10e9;

/// Communication costs that are assumed without a measurement.
pub(crate) fn typical_costs(shares_memory: bool) -> CostModel {
    CostModel {
        within: if shares_memory { TYPICAL_MEMORY } else { TYPICAL_LOOPBACK },
        across: TYPICAL_NETWORK,
        direct: shares_memory.then_some(TYPICAL_DIRECT),
        reduce_seconds_per_byte: TYPICAL_SECONDS_PER_BYTE,
        copy_seconds_per_byte: TYPICAL_SECONDS_PER_BYTE,
    }
}

/// The algorithm that a group chose for an operation on vectors of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The operation. Its length is the length of the full vector, in elements.
    pub collective: Collective,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// The algorithm that was chosen.
    pub algorithm: Algorithm,
}

impl Choice {
    /// Bytes of the full vector.
    pub fn bytes(&self) -> u64 {
        (self.collective.len * self.element_bytes) as u64
    }
}

type Chosen = HashMap<(Collective, usize), Algorithm>;

/// Chooses algorithms, the same on all ranks: the requested one where it fits, else the one predicted to be fastest.
#[derive(Clone)]
pub(crate) struct Selection {
    hosts: Hosts,
    requested: Option<Algorithm>,
    keeps_order: bool,
    /// Given costs, with typical ones for the rest.
    unmeasured: CostModel,
    /// Measured costs. All ranks set them between the same two operations.
    measured: Arc<OnceLock<CostModel>>,
    /// The choices made before and after the measurement. Shared by clones.
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
            requested: options.algorithm,
            keeps_order: options.keeps_order,
            unmeasured: options.costs.apply_to(typical_costs(shares_memory)),
            measured,
            chosen: Arc::default(),
        }
    }

    /// The algorithm for `collective` on elements of `element_bytes` bytes.
    pub(crate) fn algorithm(&self, collective: Collective, element_bytes: usize) -> Algorithm {
        let measured = self.measured.get();
        let (model, which) = (measured.unwrap_or(&self.unmeasured), usize::from(measured.is_some()));
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

    /// The algorithm chosen last for an operation. `None` if there was no choice yet, or the operation has no algorithms.
    pub(crate) fn chosen(&self, operation: Operation) -> Option<Algorithm> {
        let (dtype, _) = operation.elements();
        let key = (operation.collective()?, dtype.size());
        self.lock().iter().rev().find_map(|chosen| chosen.get(&key).copied())
    }

    /// The choices made with the costs that are in effect now, in any order.
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
        // Where all ranks share memory, no message is faster than direct access.
        let direct = Algorithm::Flat(FlatAlgorithm::Direct);
        let choose = || choose(collective, &self.hosts, element_bytes, model, self.keeps_order);
        self.requested.filter(may_take).or(Some(direct).filter(may_take)).unwrap_or_else(choose)
    }
}
