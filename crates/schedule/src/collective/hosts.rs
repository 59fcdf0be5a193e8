use super::assert_member;
use std::ops::Range;
use trireme_base::Rank;

/// Which host each rank of a group is on.
///
/// Hosts are numbered from 0 in the order of their lowest ranks; a rank's number on its host counts the lower ranks
/// there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    host_of: Vec<usize>,
    local_rank: Vec<usize>,
    /// Ranks, host by host.
    ranks: Vec<Rank>,
    /// Where each host begins in `ranks`, and where the last one ends.
    borders: Vec<usize>,
}

impl Hosts {
    /// From anything that tells hosts apart, one for each rank.
    ///
    /// # Panics
    /// If `ids` is empty.
    pub fn new<T: PartialEq>(ids: &[T]) -> Self {
        assert!(!ids.is_empty(), "a world has at least one rank");
        let mut lowest: Vec<usize> = Vec::new();
        let mut hosts = Hosts { host_of: vec![], local_rank: vec![], ranks: vec![], borders: vec![0] };
        for (rank, id) in ids.iter().enumerate() {
            let known = lowest.iter().position(|&lowest| ids[lowest] == *id);
            hosts.host_of.push(known.unwrap_or(lowest.len()));
            if known.is_none() {
                lowest.push(rank);
            }
        }
        hosts.local_rank = vec![0; ids.len()];
        for host in 0..lowest.len() {
            let first = hosts.ranks.len();
            for (rank, _) in hosts.host_of.iter().enumerate().filter(|&(_, &of)| of == host) {
                hosts.local_rank[rank] = hosts.ranks.len() - first;
                hosts.ranks.push(Rank(rank));
            }
            hosts.borders.push(hosts.ranks.len());
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
        self.borders.len() - 1
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
        &self.ranks[self.span(host)]
    }

    /// Ranks of each host, if they are equally many.
    pub fn ranks_per_host(&self) -> Option<usize> {
        let first = self.span(0).len();
        (0..self.num_hosts()).all(|host| self.span(host).len() == first).then_some(first)
    }

    /// Whether the ranks of each host follow each other without a gap.
    pub fn are_runs(&self) -> bool {
        self.host_of.is_sorted()
    }

    fn span(&self, host: usize) -> Range<usize> {
        self.borders[host]..self.borders[host + 1]
    }
}
