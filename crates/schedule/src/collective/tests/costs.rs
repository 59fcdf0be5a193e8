//! Counted bytes and steps against the formulas of docs/collectives.md.

use super::super::*;
use super::interpreter::*;
use super::matrix::{consecutive, programs_of, round_robin};
use super::oracle::*;
use FlatAlgorithm as A;

struct Counted {
    traffic: Traffic,
    /// Steps of the longest program.
    longest: usize,
}

fn count(collective: Collective, algorithm: impl Into<Algorithm>, hosts: &Hosts) -> Counted {
    let programs = programs_of(collective, algorithm.into(), hosts);
    let mut memories = inputs(collective, hosts.world_size(), whole_numbers);
    let traffic = interpret(&programs, &mut memories, |a, b| a + b);
    Counted { traffic, longest: programs.iter().map(Vec::len).max().unwrap_or(0) }
}

fn assert_all_send(counted: &Counted, world_size: usize, expected: usize) {
    for rank in 0..world_size {
        assert_eq!(counted.traffic.sent_by(rank), expected, "rank {rank} of {world_size}");
    }
}

/// Returns N, p, extra, ceil(log2 N).
fn sizes() -> impl Iterator<Item = (usize, usize, usize, usize)> {
    (1..=17_usize).map(|world_size| {
        let num_leaves = 1 << world_size.ilog2();
        (world_size, num_leaves, world_size - num_leaves, world_size.next_power_of_two().ilog2() as usize)
    })
}

#[test]
fn rings_send_what_their_formulas_say() {
    for (n, _, _, _) in sizes() {
        let (len, hosts) = (3 * n, Hosts::single(n));
        let counted = count(CollectiveKind::AllReduce.with_len(len), A::Ring, &hosts);
        assert_all_send(&counted, n, 2 * len * (n - 1) / n);
        assert_eq!(counted.longest, 2 * (n - 1));
        for collective in
            [CollectiveKind::AllGather.with_len(len), CollectiveKind::ReduceScatter.with_len(len)]
        {
            let counted = count(collective, A::Ring, &hosts);
            assert_all_send(&counted, n, len * (n - 1) / n);
            assert_eq!(counted.longest, n - 1);
        }
    }
}

#[test]
fn halving_and_doubling_send_what_their_formulas_say() {
    for (n, p, extra, _) in sizes() {
        let (len, hosts) = (3 * n * p, Hosts::single(n));
        let log = p.ilog2() as usize;
        let fold = usize::from(extra > 0);
        // `expected` holds the elements that are sent by the first rank of a folded pair, by the second rank of a pair, and by any other
        // rank.
        let of_ranks = |counted: &Counted, expected: [usize; 3]| {
            for rank in 0..n {
                let role = if rank >= 2 * extra { 2 } else { rank % 2 };
                assert_eq!(counted.traffic.sent_by(rank), expected[role], "rank {rank} of {n}");
            }
        };
        let counted = count(CollectiveKind::AllReduce.with_len(len), A::HalvingDoubling, &hosts);
        let among_leaves = 2 * len * (p - 1) / p;
        of_ranks(&counted, [among_leaves + len, len, among_leaves]);
        assert_eq!(counted.longest, 2 * log + 2 * fold);

        let counted = count(CollectiveKind::AllReduce.with_len(len), A::RecursiveDoubling, &hosts);
        of_ranks(&counted, [len * log + len, len, len * log]);
        assert_eq!(counted.longest, log + 2 * fold);

        let counted = count(CollectiveKind::ReduceScatter.with_len(len), A::RecursiveHalving, &hosts);
        assert_eq!(counted.longest, p - 1 + 2 * fold);
        if extra == 0 {
            assert_all_send(&counted, n, len * (n - 1) / n);
            let counted = count(CollectiveKind::AllGather.with_len(len), A::RecursiveDoubling, &hosts);
            assert_all_send(&counted, n, len * (n - 1) / n);
            assert_eq!(counted.longest, log);
        } else {
            // A pair keeps two of the N blocks, any other leaf one. The first rank of a pair sends one of its blocks on.
            let share = len / n;
            of_ranks(&counted, [len - 2 * share + share, len, len - share]);
        }

        let root = Rank(n / 2);
        let counted = count(CollectiveKind::Reduce.with_root(root, len), A::HalvingDoubling, &hosts);
        assert!(counted.longest <= 2 * log + fold);
        let root_received = counted.traffic.received_by(root.0);
        let root_is_folded = usize::from(root.0 < 2 * extra);
        assert_eq!(root_received, 2 * len * (p - 1) / p + root_is_folded * len);
    }
}

#[test]
fn trees_send_what_their_formulas_say() {
    for (n, _, extra, rounds) in sizes() {
        let (len, hosts) = (2 * n, Hosts::single(n));
        let log = n.ilog2() as usize;
        for root in (0..n).map(Rank) {
            let counted = count(CollectiveKind::Reduce.with_root(root, len), A::BinomialTree, &hosts);
            assert_eq!(counted.traffic.total(), len * (n - 1));
            assert_eq!(counted.traffic.sent_by(root.0), 0);
            assert!((0..n).all(|rank| rank == root.0 || counted.traffic.sent_by(rank) == len));
            assert!(counted.longest <= log + usize::from(extra > 0));

            let counted = count(CollectiveKind::Broadcast.with_root(root, len), A::BinomialTree, &hosts);
            assert_eq!(counted.traffic.total(), len * (n - 1));
            assert_eq!(counted.traffic.sent_by(root.0), len * rounds);

            for collective in
                [CollectiveKind::Gather.with_root(root, len), CollectiveKind::Scatter.with_root(root, len)]
            {
                for (algorithm, longest) in [(A::BinomialTree, rounds), (A::Linear, n - 1)] {
                    let counted = count(collective, algorithm, &hosts);
                    let (sent, received) =
                        (counted.traffic.sent_by(root.0), counted.traffic.received_by(root.0));
                    assert_eq!(sent + received, len - len / n, "the root's bytes");
                    assert_eq!(counted.longest, longest);
                }
            }
            let counted = count(CollectiveKind::Broadcast.with_root(root, len), A::ScatterAllGather, &hosts);
            assert_eq!(counted.longest, rounds + n - 1);
            assert_eq!(counted.traffic.sent_by(root.0), 2 * (len - len / n));

            let counted = count(CollectiveKind::Reduce.with_root(root, len), A::Ring, &hosts);
            assert!(counted.longest <= n - 1 + rounds);
            assert_eq!(counted.traffic.received_by(root.0), 2 * (len - len / n));
        }
        let counted = count(CollectiveKind::AllReduce.with_len(len), A::BinomialTree, &hosts);
        assert_eq!(counted.traffic.total(), 2 * len * (n - 1));
        assert!(counted.longest <= log + usize::from(extra > 0) + rounds);

        let counted = count(CollectiveKind::AllReduce.with_len(len), A::DoubleBinaryTree, &hosts);
        assert_eq!(counted.traffic.total(), 2 * len * (n - 1));
        assert!((0..n).all(|rank| counted.traffic.sent_by(rank) <= 2 * len));
    }
}

#[test]
fn exchanges_of_blocks_send_what_their_formulas_say() {
    for (n, _, _, rounds) in sizes() {
        let (len, hosts) = (3 * n, Hosts::single(n));
        let copies = |programs: &[Vec<Step>]| {
            programs[0].iter().filter(|step| matches!(step, Step::Copy { .. })).count()
        };
        let counted = count(CollectiveKind::AllGather.with_len(len), A::Pairwise, &hosts);
        assert_all_send(&counted, n, len * (n - 1) / n);
        assert_eq!(counted.longest, n - 1);

        let counted = count(CollectiveKind::AllGather.with_len(len), A::Bruck, &hosts);
        assert_all_send(&counted, n, len * (n - 1) / n);
        let programs = programs_of(CollectiveKind::AllGather.with_len(len), A::Bruck.into(), &hosts);
        assert_eq!(counted.longest - copies(&programs), rounds);

        let counted = count(CollectiveKind::AllToAll.with_len(len), A::Pairwise, &hosts);
        assert_all_send(&counted, n, len * (n - 1) / n);
        assert_eq!(counted.longest, n - 1);

        let counted = count(CollectiveKind::AllToAll.with_len(len), A::Bruck, &hosts);
        let hops: usize = (0..n).map(|distance| distance.count_ones() as usize).sum();
        assert_all_send(&counted, n, len / n * hops);
        let programs = programs_of(CollectiveKind::AllToAll.with_len(len), A::Bruck.into(), &hosts);
        assert_eq!(counted.longest - copies(&programs), rounds);

        let counted = count(CollectiveKind::Barrier.with_len(0), A::Dissemination, &hosts);
        assert_eq!((counted.longest, counted.traffic.total()), (rounds, 0));
    }
}

/// Returns the elements that the busiest rank and the busiest host send to other hosts.
fn across(counted: &Counted, hosts: &Hosts) -> (usize, usize) {
    let by = |rank: &Rank| counted.traffic.across_by(rank.0, hosts);
    let of_host = |host| hosts.ranks(host).iter().map(by).sum();
    let busiest_rank = (0..hosts.world_size()).map(|rank| by(&Rank(rank))).max();
    (busiest_rank.unwrap_or(0), (0..hosts.num_hosts()).map(of_host).max().unwrap_or(0))
}

fn hierarchical(leaders: Leaders, within: A, across: A) -> Algorithm {
    Algorithm::Hierarchical(Hierarchy { leaders, within, across })
}

#[test]
fn a_hierarchical_all_reduce_spares_the_links_between_hosts() {
    for (num_hosts, ranks_per_host) in [(2, 2), (2, 4), (4, 2), (4, 4), (3, 4)] {
        let (h, l) = (num_hosts, ranks_per_host);
        let n = h * l;
        let len = 12 * n;
        let collective = CollectiveKind::AllReduce.with_len(len);
        for hosts in [consecutive(h, l), round_robin(h, l)] {
            let all = count(collective, hierarchical(Leaders::All, A::Ring, A::Ring), &hosts);
            assert_eq!(across(&all, &hosts), (2 * (len / l) * (h - 1) / h, 2 * len * (h - 1) / h));
            let one = count(collective, hierarchical(Leaders::One, A::BinomialTree, A::Ring), &hosts);
            assert_eq!(across(&one, &hosts), (2 * len * (h - 1) / h, 2 * len * (h - 1) / h));
        }
        // If hosts hold consecutive ranks, one rank of each host sends across hosts in a flat ring; otherwise every rank does.
        let flat = count(collective, A::Ring, &consecutive(h, l));
        assert_eq!(across(&flat, &consecutive(h, l)).1, 2 * len * (n - 1) / n);
        let flat = count(collective, A::Ring, &round_robin(h, l));
        assert_eq!(across(&flat, &round_robin(h, l)).1, l * (2 * len * (n - 1) / n));
        if n.is_power_of_two() {
            // In recursive doubling, every rank sends its full vector across hosts.
            let flat = count(collective, A::RecursiveDoubling, &consecutive(h, l));
            assert_eq!(across(&flat, &consecutive(h, l)).1, l * len * h.ilog2() as usize);
        }
    }
}

#[test]
fn the_other_hierarchies_send_each_byte_across_hosts_once() {
    for (h, l) in [(2, 2), (2, 4), (3, 2), (4, 4)] {
        let hosts = consecutive(h, l);
        let len = 2 * h * l;
        for leaders in [Leaders::One, Leaders::All] {
            let within = if leaders == Leaders::One { A::BinomialTree } else { A::Ring };
            for collective in
                [CollectiveKind::AllGather.with_len(len), CollectiveKind::ReduceScatter.with_len(len)]
            {
                let counted = count(collective, hierarchical(leaders, within, A::Ring), &hosts);
                assert_eq!(across(&counted, &hosts).1, len * (h - 1) / h, "{collective}");
            }
            for root in (0..h * l).map(Rank) {
                for collective in [
                    CollectiveKind::Broadcast.with_root(root, len),
                    CollectiveKind::Reduce.with_root(root, len),
                ] {
                    let algorithm = hierarchical(leaders, within, A::BinomialTree);
                    let counted = count(collective, algorithm, &hosts);
                    let crossing: usize =
                        (0..h * l).map(|rank| counted.traffic.across_by(rank, &hosts)).sum();
                    assert_eq!(crossing, len * (h - 1), "{collective}");
                }
            }
        }
    }
}
