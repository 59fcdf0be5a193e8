//! Tests every collective × algorithm × world size × length × root against the oracle.

use super::super::*;
use super::interpreter::*;
use super::oracle::*;

/// Returns the steps of all ranks.
pub(super) fn programs_of(collective: Collective, algorithm: Algorithm, hosts: &Hosts) -> Vec<Vec<Step>> {
    programs(hosts.world_size(), |rank, out| steps(collective, algorithm, hosts, rank, out))
}

/// Executes an algorithm and compares the bits of its result. If the algorithm claims to be canonical, the inputs have sums that depend on
/// the order of summation. Otherwise their sums do not depend on it.
pub(super) fn check(collective: Collective, algorithm: Algorithm, hosts: &Hosts) {
    let world_size = hosts.world_size();
    let what = format!("{collective:?} by {algorithm} on {hosts:?}");
    let programs = programs_of(collective, algorithm, hosts);
    assert_needs_no_queue(&programs);
    let value = if is_canonical(collective, algorithm, hosts) { fractions } else { whole_numbers };
    let mut memories = inputs(collective, world_size, value);
    interpret(&programs, &mut memories, |a, b| a + b);
    for (rank, memories) in memories.iter().enumerate() {
        let (range, expected) = expected(collective, world_size, rank, value);
        let got = &memories.vector[range];
        let is_equal = got.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(is_equal && got.len() == expected.len(), "{what}, rank {rank}: {got:?}, not {expected:?}");
    }
}

pub(super) fn has_steps(algorithm: &Algorithm) -> bool {
    !algorithm.to_string().contains("direct")
}

#[test]
fn every_flat_algorithm_gives_what_the_oracle_says() {
    for world_size in 1..=17 {
        let hosts = Hosts::single(world_size);
        for len in lens(world_size) {
            for collective in collectives(world_size, len) {
                let algorithms = algorithms_for(collective, &hosts);
                assert!(algorithms.len() >= 2, "{collective} has an algorithm besides direct");
                algorithms
                    .into_iter()
                    .filter(has_steps)
                    .for_each(|algorithm| check(collective, algorithm, &hosts));
            }
        }
    }
}

/// In an all-reduce, all ranks get the same bits, even if the algorithm is not canonical.
#[test]
fn all_ranks_agree_on_every_bit() {
    for world_size in 2..=17 {
        let hosts = Hosts::single(world_size);
        let collective = CollectiveKind::AllReduce.with_len(2 * world_size + 1);
        for algorithm in algorithms_for(collective, &hosts).into_iter().filter(has_steps) {
            let mut memories = inputs(collective, world_size, fractions);
            interpret(&programs_of(collective, algorithm, &hosts), &mut memories, |a, b| a + b);
            assert!(memories.iter().all(|other| other.vector == memories[0].vector), "{algorithm}");
        }
    }
}

/// Returns hosts of equally many consecutive ranks.
pub(super) fn consecutive(num_hosts: usize, ranks_per_host: usize) -> Hosts {
    Hosts::new(&Vec::from_iter((0..num_hosts * ranks_per_host).map(|rank| rank / ranks_per_host)))
}

/// Returns hosts of equally many ranks, assigned round-robin.
pub(super) fn round_robin(num_hosts: usize, ranks_per_host: usize) -> Hosts {
    Hosts::new(&Vec::from_iter((0..num_hosts * ranks_per_host).map(|rank| rank % num_hosts)))
}

/// Returns some placements of ranks: consecutive, round-robin, unequal.
pub(super) fn placements() -> Vec<Hosts> {
    let mut placements = Vec::new();
    for (num_hosts, ranks_per_host) in [
        (1, 1),
        (2, 1),
        (2, 2),
        (2, 3),
        (3, 2),
        (2, 4),
        (4, 2),
        (3, 3),
        (3, 4),
        (4, 3),
        (5, 2),
        (7, 2),
        (4, 4),
    ] {
        placements.push(consecutive(num_hosts, ranks_per_host));
        placements.push(round_robin(num_hosts, ranks_per_host));
    }
    placements.extend(
        [&[0, 1, 1, 1][..], &[4, 4, 4, 2, 2, 2, 2, 2], &[1, 0, 1, 0, 2, 1, 1], &[0, 1, 2, 2, 3, 3]]
            .map(Hosts::new),
    );
    placements
}

#[test]
fn every_hierarchy_gives_what_the_oracle_says() {
    for hosts in placements() {
        let world_size = hosts.world_size();
        for len in [0, 1, world_size + 1, 3 * world_size + 2] {
            for collective in collectives(world_size, len) {
                let all = algorithms_for(collective, &hosts).into_iter().filter(has_steps);
                all.filter(|algorithm| matches!(algorithm, Algorithm::Hierarchical(_)))
                    .for_each(|algorithm| check(collective, algorithm, &hosts));
            }
        }
    }
}

/// The condition for a hierarchy to be canonical is not too strict: placements that do not satisfy it give other bits.
#[test]
fn other_placements_give_other_bits() {
    let order_of = |hosts: &Hosts| {
        let collective = CollectiveKind::AllReduce.with_len(50);
        let levels = Hierarchy {
            leaders: Leaders::One,
            within: FlatAlgorithm::BinomialTree,
            across: FlatAlgorithm::RecursiveDoubling,
        };
        let algorithm = Algorithm::Hierarchical(levels);
        let mut memories = inputs(collective, hosts.world_size(), fractions);
        interpret(&programs_of(collective, algorithm, hosts), &mut memories, |a, b| a + b);
        let is_same = memories[0].vector == canonical(&vectors(hosts.world_size(), 50, fractions));
        (is_canonical(collective, algorithm, hosts), is_same)
    };
    assert_eq!(order_of(&consecutive(3, 4)), (true, true));
    for others in [round_robin(2, 4), consecutive(2, 3), Hosts::new(&[0, 1, 1, 1])] {
        assert_eq!(order_of(&others), (false, false), "{others:?}");
    }
}
