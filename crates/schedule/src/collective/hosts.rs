use trireme_base::Rank;

/// The host of each rank of a group.
///
/// Hosts are numbered from 0 by their lowest ranks. A rank's local rank is the number of lower ranks on its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    host_of: Vec<usize>,
    local_rank: Vec<usize>,
    /// Ranks of each host.
    ranks: Vec<Vec<Rank>>,
}

impl Hosts {
    /// Creates the hosts from one identifier per rank. Ranks with equal identifiers are on the same host.
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

    /// Places all ranks on one host.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn single(world_size: usize) -> Self {
        Hosts::new(&vec![(); world_size])
    }

    /// Places each rank on a host of its own.
    ///
    /// # Panics
    /// If `world_size` is 0.
    pub fn separate(world_size: usize) -> Self {
        Hosts::new(&Vec::from_iter(0..world_size))
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.host_of.len()
    }

    /// Returns the number of hosts.
    pub fn num_hosts(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the host of a rank.
    ///
    /// # Panics
    /// If `rank` is outside the world.
    pub fn host_of(&self, rank: Rank) -> usize {
        assert_member(rank, self.world_size());
        self.host_of[rank.0]
    }

    /// Returns the local rank of a rank: its index among the ranks of its host.
    ///
    /// # Panics
    /// If `rank` is outside the world.
    pub fn local_rank(&self, rank: Rank) -> usize {
        assert_member(rank, self.world_size());
        self.local_rank[rank.0]
    }

    /// Returns the ranks of a host, ascending.
    ///
    /// # Panics
    /// If there is no such host.
    pub fn ranks(&self, host: usize) -> &[Rank] {
        &self.ranks[host]
    }

    /// Returns the number of ranks per host, if all hosts have equally many.
    pub fn ranks_per_host(&self) -> Option<usize> {
        let first = self.ranks[0].len();
        self.ranks.iter().all(|ranks| ranks.len() == first).then_some(first)
    }

    /// Returns whether the ranks of each host are consecutive.
    pub fn are_consecutive(&self) -> bool {
        self.host_of.is_sorted()
    }
}

/// Panics unless `rank` is below `world_size`: no algorithm has steps for other ranks.
pub(super) fn assert_member(rank: Rank, world_size: usize) {
    assert!(rank.0 < world_size, "rank {rank} is outside of a world of {world_size}");
}
