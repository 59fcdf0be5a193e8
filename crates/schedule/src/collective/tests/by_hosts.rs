//! The two-level all-to-all: the blocks that arrive, and the elements that cross hosts.

use super::super::*;
use super::interpreter::*;
use super::matrix::{consecutive, round_robin};
use proptest::prelude::*;

/// Returns placements on several hosts of equally many ranks.
fn several_hosts() -> Vec<Hosts> {
    let sizes = [(2, 2), (3, 2), (2, 3), (2, 4), (4, 3), (5, 2)];
    let mut all: Vec<Hosts> =
        sizes.iter().flat_map(|&(h, l)| [consecutive(h, l), round_robin(h, l)]).collect();
    all.extend([&[0, 1, 1, 0][..], &[0, 1, 2, 1, 0, 2], &[0, 0, 1, 0, 1, 1]].map(Hosts::new));
    all
}

/// Runs all ranks' steps, and checks the results, the sent elements, and the elements that cross hosts.
fn check(hosts: &Hosts, lens: &[usize]) {
    let n = hosts.world_size();
    let len = |from: usize, to: usize| lens[from * n + to];
    let programs = programs(n, |rank, steps| all_to_all_variable_by_hosts(rank, hosts, lens, steps));
    assert_needs_no_queue(&programs);
    let block = |from: usize, to: usize| {
        (0..len(from, to)).map(move |index| ((from * n + to) * 10_000 + index) as f64)
    };
    let vector_len = |rank| (0..n).map(|from| len(from, rank)).sum();
    let memories = |rank| Memories {
        input: (0..n).flat_map(|to| block(rank, to)).collect(),
        ..Memories::in_place(vec![f64::NAN; vector_len(rank)])
    };
    let mut memories = Vec::from_iter((0..n).map(memories));
    let traffic = interpret(&programs, &mut memories, |_, _| unreachable!("nothing is reduced"));
    for (rank, memories) in memories.iter().enumerate() {
        let expected = Vec::from_iter((0..n).flat_map(|from| block(from, rank)));
        assert_eq!(memories.vector, expected, "rank {rank} of {hosts:?}, {lens:?}");
    }

    for (rank, steps) in programs.iter().enumerate() {
        let host = hosts.host_of(Rank(rank));
        let is_across = |to: Rank| hosts.host_of(to) != host;
        let sent_to = Vec::from_iter(steps.iter().filter_map(|step| Some(parts(step).0?.to)));
        assert_eq!(sent_to.len(), n - 1);
        assert_eq!(sent_to.iter().filter(|&&to| is_across(to)).count(), hosts.num_hosts() - 1);
        let has_own_number = |to: usize| hosts.local_rank(Rank(to)) == hosts.local_rank(Rank(rank));
        let passed_on = (0..n).filter(|&to| !has_own_number(to)).map(|to| len(rank, to));
        let carried = (0..n).filter(|&to| has_own_number(to) && is_across(Rank(to)));
        let carried: usize =
            carried.flat_map(|to| hosts.ranks(host).iter().map(move |from| len(from.0, to))).sum();
        assert_eq!(traffic.across_by(rank, hosts), carried, "rank {rank} of {hosts:?}, {lens:?}");
        assert_eq!(traffic.sent_by(rank), passed_on.sum::<usize>() + carried);
    }
    // Blocks for ranks of other hosts cross hosts once.
    let across = |host: usize| hosts.ranks(host).iter().map(|rank| traffic.across_by(rank.0, hosts));
    for host in 0..hosts.num_hosts() {
        let own = hosts.ranks(host);
        let others = (0..n).filter(|&to| hosts.host_of(Rank(to)) != host);
        let blocks: usize = others.flat_map(|to| own.iter().map(move |from| len(from.0, to))).sum();
        assert_eq!(across(host).sum::<usize>(), blocks);
    }
}

#[test]
fn every_block_arrives_and_crosses_hosts_once() {
    for hosts in several_hosts() {
        let n = hosts.world_size();
        let square = |len: fn(usize, usize) -> usize| {
            Vec::from_iter((0..n * n).map(|index| len(index / n, index % n)))
        };
        check(&hosts, &square(|_, _| 0));
        check(&hosts, &square(|_, _| 3));
        check(&hosts, &square(|from, to| (from * 7 + to * 3) % 5));
        // All blocks are for one rank, all blocks are from one rank, and there is a single block.
        check(&hosts, &square(|_, to| if to == 1 { 4 } else { 0 }));
        check(&hosts, &square(|from, _| if from == 1 { 4 } else { 0 }));
        for one in 0..n * n {
            let mut lens = vec![0; n * n];
            lens[one] = 1000;
            check(&hosts, &lens);
        }
    }
}

/// Checks the formulas of `docs/collectives.md` for blocks of equal length.
#[test]
fn equal_blocks_send_what_their_formulas_say() {
    for (h, l) in [(2, 2), (3, 2), (2, 4), (4, 4)] {
        for hosts in [consecutive(h, l), round_robin(h, l)] {
            let n = h * l;
            let (whole, lens) = (6 * n, vec![6; n * n]);
            for rank in 0..n {
                let mut steps = Vec::new();
                all_to_all_variable_by_hosts(Rank(rank), &hosts, &lens, &mut steps);
                let sent = |is_counted: &dyn Fn(Rank) -> bool| -> usize {
                    let sent = steps.iter().filter_map(|step| parts(step).0);
                    sent.filter(|send| is_counted(send.to)).map(|send| send.span.range.len()).sum()
                };
                let is_within = |to: Rank| hosts.host_of(to) == hosts.host_of(Rank(rank));
                assert_eq!(sent(&is_within), whole * (l - 1) / l);
                assert_eq!(sent(&|to| !is_within(to)), whole * (h - 1) / h);
                let copies = steps.iter().filter(|step| matches!(step, Step::Copy { .. })).count();
                assert_eq!(copies, h + if hosts.are_consecutive() { 0 } else { n - l });
                assert_eq!(
                    scratch_len(&steps),
                    whole * (h - 1) / h + if hosts.are_consecutive() { 0 } else { whole / h }
                );
            }
        }
    }
}

#[test]
fn without_two_levels_the_algorithm_is_pairwise() {
    let unequal = Hosts::new(&[0, 0, 1, 1, 1]);
    for hosts in [Hosts::single(1), Hosts::single(4), Hosts::separate(5), unequal] {
        let n = hosts.world_size();
        let lens = Vec::from_iter((0..n * n).map(|index| index % 4));
        for rank in 0..n {
            let (mut by_hosts, mut pairwise) = (Vec::new(), Vec::new());
            all_to_all_variable_by_hosts(Rank(rank), &hosts, &lens, &mut by_hosts);
            let receive_lens = Vec::from_iter((0..n).map(|from| lens[from * n + rank]));
            all_to_all_variable(Rank(rank), &lens[rank * n..][..n], &receive_lens, &mut pairwise);
            assert_eq!(by_hosts, pairwise);
        }
    }
}

proptest! {
    #[test]
    fn blocks_of_any_lengths_arrive_wherever_ranks_are(
        num_hosts in 2..4_usize,
        ranks_per_host in 2..4_usize,
        order in any::<[u64; 9]>(),
        lens in proptest::collection::vec(0..9_usize, 81),
    ) {
        let n = num_hosts * ranks_per_host;
        let mut ranks = Vec::from_iter(0..n);
        ranks.sort_by_key(|&rank| order[rank]);
        let hosts = Hosts::new(&Vec::from_iter(ranks.iter().map(|&rank| rank / ranks_per_host)));
        check(&hosts, &lens[..n * n]);
    }
}
