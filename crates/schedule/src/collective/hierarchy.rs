//! Two-level algorithms as lists of phases, each a flat algorithm among some of the ranks.

use super::blocks::Blocks;
use super::{Collective, CollectiveKind, FlatAlgorithm, Hierarchy, Hosts, Leaders, Step, block};
use std::ops::Range;
use trireme_base::Rank;

/// A phase of a hierarchical collective: a flat collective among some of the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// The ranks that take part.
    pub members: Members,
    /// The collective among the members. Its root is an index among the members, and its length is the length of `range`.
    pub collective: Collective,
    /// The algorithm of the phase. [`FlatAlgorithm::Direct`] occurs only among the ranks of a host.
    pub algorithm: FlatAlgorithm,
    /// The range of the full vector that the phase works on.
    pub range: Range<usize>,
    /// The members' blocks within `range`.
    pub(super) blocks: Blocks,
}

/// Some ranks of a world of several hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Members {
    /// All ranks of a host.
    Host(usize),
    /// One rank of each host: the rank with `local_rank`. On the host of `root`, the member is `root` instead.
    Across {
        /// Local rank of the members.
        local_rank: usize,
        /// A rank that must be a member.
        root: Option<Rank>,
    },
}

impl Members {
    /// Returns the number of members.
    pub fn len(self, hosts: &Hosts) -> usize {
        match self {
            Members::Host(host) => hosts.ranks(host).len(),
            Members::Across { .. } => hosts.num_hosts(),
        }
    }

    /// Returns the member with an index: a local rank within a host, or a host across hosts.
    ///
    /// # Panics
    /// If there is no such member.
    pub fn rank(self, hosts: &Hosts, index: usize) -> Rank {
        match self {
            Members::Host(host) => hosts.ranks(host)[index],
            Members::Across { local_rank, root } => {
                let root = root.filter(|&root| hosts.host_of(root) == index);
                root.unwrap_or_else(|| hosts.ranks(index)[local_rank])
            }
        }
    }

    fn index_of(self, hosts: &Hosts, rank: Rank) -> usize {
        match self {
            Members::Host(_) => hosts.local_rank(rank),
            Members::Across { .. } => hosts.host_of(rank),
        }
    }
}

impl Phase {
    /// Appends the steps of `rank` to `steps`.
    ///
    /// # Panics
    /// If `rank` is not a member, or the algorithm has no steps ([`FlatAlgorithm::Direct`]).
    pub fn steps(&self, hosts: &Hosts, rank: Rank, steps: &mut Vec<Step>) {
        let index = self.members.index_of(hosts, rank);
        assert_eq!(self.members.rank(hosts, index), rank, "only members have steps");
        let first_step = steps.len();
        self.algorithm.steps(self.collective, index, self.blocks, steps);
        for step in &mut steps[first_step..] {
            step.relabel(|member| self.members.rank(hosts, member.0), self.range.start);
        }
    }

    fn fits(&self) -> bool {
        self.algorithm.fits(self.collective, &self.blocks)
    }

    fn is_canonical(&self) -> bool {
        self.algorithm.is_canonical(self.collective)
    }
}

/// Appends the phases of `rank` in a hierarchical algorithm to `phases`, in order. An executor may execute a phase in its own way, or by
/// [`Phase::steps`]. Phases with a single member are left out.
///
/// # Panics
/// If `rank` or the root is outside the world, or the hierarchy does not fit ([`fits`](super::fits)).
pub fn phases(
    collective: Collective,
    hierarchy: Hierarchy,
    hosts: &Hosts,
    rank: Rank,
    phases: &mut Vec<Phase>,
) {
    assert!(fits(collective, hierarchy, hosts), "the hierarchy does not fit {collective} on these hosts");
    for_each_phase(collective, hierarchy, hosts, rank, &mut |phase| phases.push(phase));
}

/// Visits the phases of `rank` in order. Phases with a single member are left out.
pub(super) fn for_each_phase(
    collective: Collective,
    hierarchy: Hierarchy,
    hosts: &Hosts,
    rank: Rank,
    visit: &mut dyn FnMut(Phase),
) {
    let phases = Phases { collective, hierarchy, hosts, rank };
    let mut visit = |phase: Phase| {
        if phase.members.len(hosts) > 1 {
            visit(phase);
        }
    };
    match hierarchy.leaders {
        Leaders::One => phases.visit_by_one(&mut visit),
        Leaders::All => phases.visit_by_all(&mut visit),
    }
}

/// Returns whether there are several hosts, at least one of which has several ranks, the ranks are placed as the collective requires, and
/// an algorithm exists for each phase.
pub(super) fn fits(collective: Collective, hierarchy: Hierarchy, hosts: &Hosts) -> bool {
    use CollectiveKind as C;
    let has_levels = 1 < hosts.num_hosts() && hosts.num_hosts() < hosts.world_size();
    let are_equal = hosts.ranks_per_host().is_some();
    // The blocks of a host are one range only if its ranks are consecutive.
    let suit_hosts = match (collective.kind, hierarchy.leaders) {
        (C::AllGather | C::ReduceScatter, _) | (C::Gather | C::Scatter, Leaders::One) => {
            are_equal && hosts.are_consecutive()
        }
        (C::AllReduce | C::Reduce | C::Broadcast | C::Barrier, Leaders::All) => are_equal,
        (C::AllReduce | C::Reduce | C::Broadcast | C::Barrier, Leaders::One) => true,
        _ => false,
    };
    let level_fits = has_levels && suit_hosts && hierarchy.across != FlatAlgorithm::Direct;
    level_fits && all_phases(collective, hierarchy, hosts, Phase::fits)
}

/// Returns whether partial sums of hosts are subtrees of the canonical tree, and the algorithms of both levels keep its order.
pub(super) fn is_canonical(collective: Collective, hierarchy: Hierarchy, hosts: &Hosts) -> bool {
    let are_subtrees = hosts.are_consecutive() && hosts.ranks_per_host().is_some_and(usize::is_power_of_two);
    let keeps_order = || all_phases(collective, hierarchy, hosts, Phase::is_canonical);
    !collective.reduces() || (are_subtrees && keeps_order())
}

/// Returns whether `passes` holds for all phases of all ranks. Checking a host's leader is enough, because it has every phase of its host's
/// ranks.
fn all_phases(
    collective: Collective,
    hierarchy: Hierarchy,
    hosts: &Hosts,
    passes: impl Fn(&Phase) -> bool,
) -> bool {
    let mut all_pass = true;
    for host in 0..hosts.num_hosts() {
        let rank = leaders_of(collective).rank(hosts, host);
        for_each_phase(collective, hierarchy, hosts, rank, &mut |phase| all_pass &= passes(&phase));
    }
    all_pass
}

/// Returns one leader of each host: the root on its host, the lowest rank on the others.
pub(super) fn leaders_of(collective: Collective) -> Members {
    Members::Across { local_rank: 0, root: collective.root() }
}

struct Phases<'a> {
    collective: Collective,
    hierarchy: Hierarchy,
    hosts: &'a Hosts,
    rank: Rank,
}

impl Phases<'_> {
    /// Visits the phases with one leader per host. The leader holds all data of its host and communicates with the other leaders.
    fn visit_by_one(&self, visit: &mut dyn FnMut(Phase)) {
        use CollectiveKind as C;
        let (hosts, len) = (self.hosts, self.collective.len);
        let leaders = leaders_of(self.collective);
        let leader = leaders.rank(hosts, self.host());
        let root = Rank(hosts.local_rank(leader));
        let on_whole = |collective| Some(self.within(collective, 0..len));
        let host_range = || self.range_of_host(self.host());
        let host_len = || host_range().len();
        let (reduce, broadcast) =
            (|| on_whole(C::Reduce.with_root(root, len)), || on_whole(C::Broadcast.with_root(root, len)));
        let gather = || Some(self.within(C::Gather.with_root(root, host_len()), host_range()));
        let scatter = || Some(self.within(C::Scatter.with_root(root, host_len()), host_range()));
        let (before, after) = match self.collective.kind {
            C::AllReduce => (reduce(), broadcast()),
            C::Reduce => (reduce(), None),
            C::Broadcast => (None, broadcast()),
            C::AllGather => (gather(), broadcast()),
            C::ReduceScatter => (reduce(), scatter()),
            C::Gather => (gather(), None),
            C::Scatter => (None, scatter()),
            C::Barrier => (on_whole(C::Barrier.with_len(0)), on_whole(C::Barrier.with_len(0))),
            _ => unreachable!("no hierarchy fits"),
        };
        before.into_iter().for_each(&mut *visit);
        if leader == self.rank {
            let blocks = match self.collective.kind {
                C::AllReduce | C::Reduce | C::Broadcast | C::Barrier => Blocks::even(hosts.num_hosts(), len),
                // Each leader owns the blocks of its host.
                _ => Blocks::of_hosts(hosts.world_size(), self.ranks_per_host(), len),
            };
            let collective = self.collective.map_root(|root| Rank(hosts.host_of(root)));
            visit(self.across(leaders, collective, 0..len, blocks));
        }
        after.into_iter().for_each(visit);
    }

    /// Visits the phases in which all ranks are leaders. Each rank of a host holds one block of the host's data, and communicates with the
    /// ranks of other hosts that hold the same block.
    fn visit_by_all(&self, visit: &mut dyn FnMut(Phase)) {
        use CollectiveKind as C;
        let hosts = self.hosts;
        let len = self.collective.len;
        let local_rank = hosts.local_rank(self.rank);
        let column = Members::Across { local_rank, root: None };
        let own = block(Rank(local_rank), self.ranks_per_host(), len);
        let own_len = own.len();
        let on_own = |collective| {
            self.across(column, collective, own.clone(), Blocks::even(hosts.num_hosts(), own_len))
        };
        // Each rank owns its own block of the full vector.
        let by_rank = |collective| {
            let blocks = Blocks::of_column(hosts.world_size(), self.ranks_per_host(), local_rank, len);
            self.across(column, collective, 0..len, blocks)
        };
        let root = self.collective.root().unwrap_or(Rank::ROOT);
        let each_host = (0..hosts.num_hosts()).map(|host| self.range_of_host(host));
        match self.collective.kind {
            C::AllReduce => {
                visit(self.within(C::ReduceScatter.with_len(len), 0..len));
                visit(on_own(C::AllReduce.with_len(own_len)));
                visit(self.within(C::AllGather.with_len(len), 0..len));
            }
            C::Reduce => {
                visit(self.within(C::ReduceScatter.with_len(len), 0..len));
                let target = hosts.host_of(root);
                visit(on_own(C::Reduce.with_root(Rank(target), own_len)));
                let root = Rank(hosts.local_rank(root));
                (self.host() == target).then(|| visit(self.within(C::Gather.with_root(root, len), 0..len)));
            }
            C::Broadcast => {
                let source = hosts.host_of(root);
                let root = Rank(hosts.local_rank(root));
                (self.host() == source).then(|| visit(self.within(C::Scatter.with_root(root, len), 0..len)));
                visit(on_own(C::Broadcast.with_root(Rank(source), own_len)));
                visit(self.within(C::AllGather.with_len(len), 0..len));
            }
            C::AllGather => {
                visit(by_rank(C::AllGather.with_len(len)));
                each_host.for_each(|range| visit(self.within(C::AllGather.with_len(range.len()), range)));
            }
            C::ReduceScatter => {
                each_host.for_each(|range| visit(self.within(C::ReduceScatter.with_len(range.len()), range)));
                visit(by_rank(C::ReduceScatter.with_len(len)));
            }
            C::Barrier => {
                visit(self.within(C::Barrier.with_len(0), 0..0));
                visit(on_own(C::Barrier.with_len(0)));
            }
            _ => unreachable!("no hierarchy fits"),
        }
    }

    fn host(&self) -> usize {
        self.hosts.host_of(self.rank)
    }

    fn ranks_per_host(&self) -> usize {
        self.hosts.ranks_per_host().expect("the hierarchy fits hosts of as many ranks each")
    }

    /// Returns the range of the blocks of a host's ranks.
    fn range_of_host(&self, host: usize) -> Range<usize> {
        Blocks::of_hosts(self.hosts.world_size(), self.ranks_per_host(), self.collective.len).of(host)
    }

    fn within(&self, collective: Collective, range: Range<usize>) -> Phase {
        let members = Members::Host(self.host());
        let blocks = Blocks::even(members.len(self.hosts), range.len());
        let algorithm = self.hierarchy.within.phase_algorithm(self.collective, collective);
        Phase { members, collective, algorithm, range, blocks }
    }

    fn across(&self, members: Members, collective: Collective, range: Range<usize>, blocks: Blocks) -> Phase {
        let algorithm = self.hierarchy.across.phase_algorithm(self.collective, collective);
        Phase { members, collective, algorithm, range, blocks }
    }
}

impl FlatAlgorithm {
    /// Returns the algorithm of the phase `part` if this algorithm was chosen for one level of `whole`. In an all-reduce by halving and
    /// doubling, the reduce-scatter is by recursive halving and the all-gather by recursive doubling. Intermediate gathers and scatters use
    /// binomial trees, unless the algorithm is direct.
    fn phase_algorithm(self, whole: Collective, part: Collective) -> FlatAlgorithm {
        use CollectiveKind as C;
        use FlatAlgorithm as A;
        match (whole.kind, self, part.kind) {
            _ if whole.kind == part.kind || self == A::Direct => self,
            (C::AllReduce, A::HalvingDoubling, C::ReduceScatter) => A::RecursiveHalving,
            (C::AllReduce, A::HalvingDoubling, C::AllGather) => A::RecursiveDoubling,
            (_, _, C::Gather | C::Scatter) => A::BinomialTree,
            _ => self,
        }
    }
}
