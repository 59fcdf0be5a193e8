//! Every operation × algorithm × transport × number and placement of ranks × awkward length × kind of memory: results against a naive
//! oracle, and bytes sent against the algorithm's steps, which separate tests compare with the formulas.

use crate::support::operations::{MemoryKind, check, check_algorithm, kinds};
use crate::support::{on_hosts, small_pieces};
use std::collections::HashSet;
use trireme_comm::{GroupOptions, TransportKind};
use trireme_schedule::collective::{Algorithm, FlatAlgorithm, Hosts, algorithms_for, fits, is_canonical};

/// Placements of ranks: the host of each rank.
const ONE_HOST: [&[usize]; 4] = [&[0, 0], &[0, 0, 0], &[0, 0, 0, 0], &[0, 0, 0, 0, 0]];
const SEVERAL_HOSTS: [&[usize]; 7] =
    [&[0, 1], &[0, 0, 1], &[0, 1, 0], &[0, 0, 1, 1], &[0, 1, 0, 1], &[0, 0, 0, 1, 1], &[0, 1, 1, 1, 1]];

/// All algorithms that at least one operation supports with this placement of ranks.
fn algorithms(hosts: &Hosts) -> Vec<Algorithm> {
    let mut seen = HashSet::new();
    let kinds = kinds(hosts.world_size()).into_iter();
    let all = kinds.flat_map(|kind| algorithms_for(kind.collective(1000), hosts));
    all.filter(|algorithm| seen.insert(*algorithm)).collect()
}

fn check_all(transport: TransportKind, placement: &[usize]) {
    let hosts = Hosts::new(placement);
    for algorithm in algorithms(&hosts) {
        let shares_memory = matches!(transport, TransportKind::Shm | TransportKind::ShmAndTcp);
        if algorithm.needs_shared_memory() && !shares_memory {
            continue;
        }
        let options = GroupOptions { keeps_order: false, algorithm: Some(algorithm), ..small_pieces() };
        on_hosts(transport, placement, &options, |group| check_algorithm(&group, algorithm));
    }
}

#[test]
fn by_threads() {
    ONE_HOST.iter().for_each(|placement| check_all(TransportKind::Inproc, placement));
}

#[test]
fn by_shared_memory() {
    ONE_HOST.iter().for_each(|placement| check_all(TransportKind::Shm, placement));
}

#[test]
fn by_sockets() {
    ONE_HOST.iter().for_each(|placement| check_all(TransportKind::Tcp, placement));
    SEVERAL_HOSTS.iter().for_each(|placement| check_all(TransportKind::Tcp, placement));
}

#[test]
fn by_shared_memory_within_hosts_and_sockets_across() {
    SEVERAL_HOSTS
        .iter()
        .filter(|placement| placement.len() > 2)
        .for_each(|placement| check_all(TransportKind::ShmAndTcp, placement));
}

/// Under the canonical order, a requested algorithm is used only for operations in which it keeps the order.
#[test]
fn a_non_canonical_algorithm_is_not_used_under_the_canonical_order() {
    for algorithm in FlatAlgorithm::ALL.map(Algorithm::from) {
        let options = GroupOptions { algorithm: Some(algorithm), ..small_pieces() };
        on_hosts(TransportKind::Tcp, &[0, 0, 0, 0], &options, |group| {
            for kind in kinds(4) {
                let collective = kind.collective(1000);
                let taken = group.algorithm(collective, 4);
                assert!(is_canonical(collective, taken, group.hosts()), "{kind:?} by {taken}");
                let fits = fits(collective, algorithm, group.hosts()) && !algorithm.needs_shared_memory();
                if fits && is_canonical(collective, algorithm, group.hosts()) {
                    assert_eq!(taken, algorithm);
                }
                check::<f32>(&group, kind, MemoryKind::Group, &[101]);
            }
        });
    }
}
