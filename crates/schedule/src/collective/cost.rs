use super::blocks::Blocks;
use super::flat::direct_work;
use super::hierarchy::{Members, Phase, for_each_phase, leaders_of};
use super::{
    Algorithm, Collective, FlatAlgorithm, Hierarchy, Hosts, Leaders, Step, algorithms_for, is_canonical,
    simulate,
};

/// Cost of a message over a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkCost {
    /// Seconds for a message without payload.
    pub latency_seconds: f64,
    /// Additional seconds per byte of payload.
    pub seconds_per_byte: f64,
}

impl LinkCost {
    /// Creates the cost from a latency in microseconds and a bandwidth in GB/s (10^9 bytes per second).
    pub fn of(latency_microseconds: f64, gigabytes_per_second: f64) -> Self {
        LinkCost {
            latency_seconds: latency_microseconds * 1e-6,
            seconds_per_byte: 1e-9 / gigabytes_per_second,
        }
    }
}

/// Cost of direct algorithms, which have no steps and use memory that the ranks of a host share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DirectCost {
    /// Seconds until all ranks of a host know that all ranks have arrived.
    pub synchronization_seconds: f64,
    /// Seconds per byte that a rank reads or writes in the memory of other ranks, while all ranks do so.
    pub seconds_per_byte: f64,
}

impl DirectCost {
    /// Creates the cost from a synchronization time in microseconds and a bandwidth in GB/s (10^9 bytes per second).
    pub fn of(synchronization_microseconds: f64, gigabytes_per_second: f64) -> Self {
        DirectCost {
            synchronization_seconds: synchronization_microseconds * 1e-6,
            seconds_per_byte: 1e-9 / gigabytes_per_second,
        }
    }
}

/// Cost model of the machines. All ranks of a group must use the same model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Links between two ranks of a host.
    pub within: LinkCost,
    /// Links between ranks of different hosts. The ranks of a host share the bandwidth.
    pub across: LinkCost,
    /// Memory that all ranks of a host share, if available.
    pub direct: Option<DirectCost>,
    /// Seconds per byte of a received message that is reduced.
    pub reduce_seconds_per_byte: f64,
    /// Seconds per byte copied within a rank.
    pub copy_seconds_per_byte: f64,
}

/// Returns the algorithm with the least predicted time; of equal times, the first. With `canonical_only`, only [canonical](is_canonical)
/// algorithms are candidates. Flat algorithms are [simulated](simulate()); for hierarchical ones, each phase is simulated. The choice is
/// deterministic, so all ranks with the same arguments choose the same algorithm.
///
/// Takes milliseconds with dozens of ranks, so an executor should cache the choice.
#[expect(clippy::missing_panics_doc, reason = "each collective has a canonical algorithm")]
pub fn choose(
    collective: Collective,
    hosts: &Hosts,
    element_bytes: usize,
    model: &CostModel,
    canonical_only: bool,
) -> Algorithm {
    let mut predictor = Predictor::new(collective, hosts, element_bytes, model);
    let candidates = algorithms_for(collective, hosts).into_iter().filter(|&algorithm| {
        (model.direct.is_some() || !algorithm.needs_shared_memory())
            && (!canonical_only || is_canonical(collective, algorithm, hosts))
    });
    let timed = candidates.map(|algorithm| (predictor.predict(algorithm), algorithm));
    let (_, fastest) = timed
        .reduce(|best, other| if other.0 < best.0 { other } else { best })
        .expect("every collective has a canonical algorithm with steps");
    fastest
}

/// Predicts the seconds of algorithms for one collective.
pub(super) struct Predictor<'a> {
    collective: Collective,
    hosts: &'a Hosts,
    element_bytes: usize,
    model: &'a CostModel,
    /// Seconds of phases that were predicted already, with all inputs that they depend on.
    timed: Vec<(PhaseKey, f64)>,
}

/// The collective, the algorithm, the number of members, and how many phases share the link of a host at the same time (`None` within a
/// host).
type PhaseKey = (Collective, FlatAlgorithm, usize, Option<usize>);

impl<'a> Predictor<'a> {
    pub(super) fn new(
        collective: Collective,
        hosts: &'a Hosts,
        element_bytes: usize,
        model: &'a CostModel,
    ) -> Self {
        Predictor { collective, hosts, element_bytes, model, timed: Vec::new() }
    }

    /// Returns the predicted seconds of an algorithm. Panics if the algorithm does not [fit](super::fits).
    pub(super) fn predict(&mut self, algorithm: Algorithm) -> f64 {
        match algorithm {
            Algorithm::Flat(FlatAlgorithm::Direct) => self.direct(self.collective, self.hosts.world_size()),
            Algorithm::Flat(flat) => {
                let blocks = Blocks::even(self.hosts.world_size(), self.collective.len);
                self.simulated(flat, self.collective, blocks, self.hosts, self.model)
            }
            Algorithm::Hierarchical(levels) => self.hierarchical(levels),
        }
    }

    /// Returns the total seconds of the phases of a host's leader, for the host where they take longest.
    fn hierarchical(&mut self, levels: Hierarchy) -> f64 {
        let (collective, hosts) = (self.collective, self.hosts);
        let leaders = leaders_of(collective);
        let of_host = |host| {
            let mut seconds = 0.0;
            for_each_phase(collective, levels, hosts, leaders.rank(hosts, host), &mut |phase| {
                seconds += self.phase(&phase, levels.leaders);
            });
            seconds
        };
        (0..hosts.num_hosts()).map(of_host).fold(0.0, f64::max)
    }

    fn phase(&mut self, phase: &Phase, leaders: Leaders) -> f64 {
        let count = phase.members.len(self.hosts);
        let num_sharing = match (phase.members, leaders) {
            (Members::Host(_), _) => None,
            (Members::Across { .. }, Leaders::One) => Some(1),
            (Members::Across { .. }, Leaders::All) => self.hosts.ranks_per_host(),
        };
        let key = (phase.collective, phase.algorithm, count, num_sharing);
        if let Some((_, seconds)) = self.timed.iter().find(|(timed, _)| *timed == key) {
            return *seconds;
        }
        let simulated = |hosts: Hosts, model: &CostModel| {
            self.simulated(phase.algorithm, phase.collective, phase.blocks, &hosts, model)
        };
        let seconds = match num_sharing {
            None if phase.algorithm == FlatAlgorithm::Direct => self.direct(phase.collective, count),
            None => simulated(Hosts::single(count), self.model),
            Some(num_sharing) => {
                let mut model = *self.model;
                model.across.seconds_per_byte *= num_sharing as f64;
                simulated(Hosts::separate(count), &model)
            }
        };
        self.timed.push((key, seconds));
        seconds
    }

    fn simulated(
        &self,
        algorithm: FlatAlgorithm,
        collective: Collective,
        blocks: Blocks,
        hosts: &Hosts,
        model: &CostModel,
    ) -> f64 {
        let world_size = hosts.world_size();
        let program = |rank| {
            let mut steps: Vec<Step> = Vec::new();
            algorithm.steps(collective, rank, blocks, &mut steps);
            steps
        };
        let programs: Vec<_> = (0..world_size).map(program).collect();
        simulate(&programs, hosts, self.element_bytes, model)
    }

    fn direct(&self, collective: Collective, world_size: usize) -> f64 {
        let Some(cost) = self.model.direct else { return f64::INFINITY };
        if world_size == 1 {
            return 0.0;
        }
        let whole = (collective.len * self.element_bytes) as f64;
        let own = whole / world_size as f64;
        let (num_synchronizations, bytes) = direct_work(collective.kind, whole, own);
        num_synchronizations * cost.synchronization_seconds + bytes * cost.seconds_per_byte
    }
}
