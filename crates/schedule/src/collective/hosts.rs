use trireme_base::Rank;

/// Which host each rank of a group is on.
///
/// Hosts are numbered from 0 by their lowest ranks; a rank's local rank counts the lower ranks on its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    host_of: Vec<usize>,
    local_rank: Vec<usize>,
    /// Of each host.
    ranks: Vec<Vec<Rank>>,
}

impl Hosts {
    /// From anything that tells hosts apart, one for each rank.
    ///
    /// # Panics
    /// If `ids` is empty.
    pub fn new<T: PartialEq>(ids: &[T]) -> Self {
        assert!(!ids.is_empty(), "a world has at least one rank");
        let mut hosts = Hosts { host_of: vec![], local_rank: vec![], ranks: vec![] };
        for (rank, id) in ids.iter().enumerate() {
            let known = hosts.ranks.iter().position(|ranks| ids[ranks[0].0] == *id);
            let host = known.unwrap_or(hosts.ranks.len());
            if known.is_none() {
                hosts.ranks.push(vec![]);
            }
            hosts.host_of.push(host);
            hosts.local_rank.push(hosts.ranks[host].len());
            hosts.ranks[host].push(Rank(rank));
        }
        hosts
    }

    /// All ranks on one host.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn single(world_size: usize) -> Self {
        Hosts::new(&vec![(); world_size])
    }

    /// Each rank on a host of its own.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn separate(world_size: usize) -> Self {
        Hosts::new(&Vec::from_iter(0..world_size))
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.host_of.len()
    }

    /// Number of hosts.
    pub fn num_hosts(&self) -> usize {
        self.ranks.len()
    }

    /// The host of a rank.
    ///
    /// # Panics
    /// If `rank` is outside of the world.
    pub fn host_of(&self, rank: Rank) -> usize {
        assert_member(rank, self.world_size());
        self.host_of[rank.0]
    }

    /// The number of a rank on its host.
    ///
    /// # Panics
    /// If `rank` is outside of the world.
    pub fn local_rank(&self, rank: Rank) -> usize {
        assert_member(rank, self.world_size());
        self.local_rank[rank.0]
    }

    /// The ranks of a host, ascending.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn ranks(&self, host: usize) -> &[Rank] {
        &self.ranks[host]
    }

    /// Ranks of each host, if they are equally many.
    pub fn ranks_per_host(&self) -> Option<usize> {
        let first = self.ranks[0].len();
        self.ranks.iter().all(|ranks| ranks.len() == first).then_some(first)
    }

    /// Whether the ranks of each host follow each other without a gap.
    pub fn are_runs(&self) -> bool {
        self.host_of.is_sorted()
    }
}

/// Panics unless `rank` is one of `world_size` ranks: no algorithm has steps for another.
pub(super) fn assert_member(rank: Rank, world_size: usize) {
    assert!(rank.0 < world_size, "rank {rank} is outside of a world of {world_size}");
}
