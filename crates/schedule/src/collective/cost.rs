use super::blocks::Blocks;
use super::flat::direct_work;
use super::hierarchy::{Members, Phase, for_each_phase, leaders_of};
use super::{
    Algorithm, Collective, FlatAlgorithm, Hierarchy, Hosts, Leaders, Step, algorithms_for, is_canonical,
    simulate,
};

/// What a message costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkCost {
    /// Seconds of a message without payload.
    pub latency_seconds: f64,
    /// Seconds more for each byte of payload.
    pub seconds_per_byte: f64,
}

impl LinkCost {
    /// From the units in which people measure links.
    pub fn of(latency_microseconds: f64, gigabytes_per_second: f64) -> Self {
        LinkCost {
            latency_seconds: latency_microseconds * 1e-6,
            seconds_per_byte: 1e-9 / gigabytes_per_second,
        }
    }
}

/// What the algorithms without steps cost, those by memory that the ranks of a host share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DirectCost {
    /// Seconds until all ranks of a host know that all have come.
    pub synchronisation_seconds: f64,
    /// Seconds for each byte that a rank reads or writes in the memory of others, while all do.
    pub seconds_per_byte: f64,
}

impl DirectCost {
    /// From the units in which people measure memory.
    pub fn of(synchronisation_microseconds: f64, gigabytes_per_second: f64) -> Self {
        DirectCost {
            synchronisation_seconds: synchronisation_microseconds * 1e-6,
            seconds_per_byte: 1e-9 / gigabytes_per_second,
        }
    }
}

/// What the machines cost; all ranks of a group must have the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostModel {
    /// Between two ranks of a host.
    pub within: LinkCost,
    /// Between ranks of different hosts; the bandwidth is shared by the ranks of a host.
    pub across: LinkCost,
    /// Memory that all ranks of a host share, if there is.
    pub direct: Option<DirectCost>,
    /// Seconds for each byte of a received message that is reduced.
    pub reduce_seconds_per_byte: f64,
    /// Seconds for each byte copied within a rank.
    pub copy_seconds_per_byte: f64,
}

/// The algorithm with the least predicted time, the first of equals; with `canonical_only` among the [canonical](is_canonical)
/// ones. Flat algorithms are [simulated](simulate()), of hierarchical ones each phase. Deterministic, so all ranks with the same
/// arguments choose the same.
///
/// Takes milliseconds with dozens of ranks: an executor keeps the choice.
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
    /// Phases that were timed already, by all that their time depends on.
    timed: Vec<(PhaseKey, f64)>,
}

/// What is done, how, by how many, and how many such phases share a host's link.
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

    /// Panics if the algorithm does not [fit](super::fits).
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

    /// The phases of that host's leader which take the longest, one after the other.
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
        let (num_synchronisations, bytes) = direct_work(collective.kind, whole, own);
        num_synchronisations * cost.synchronisation_seconds + bytes * cost.seconds_per_byte
    }
}
