//! Given costs: they are not measured, and algorithms are chosen by them.

use crate::support::{on_ranks, small_pieces};
use trireme_comm::{GivenCosts, GroupOptions, TransportKind};
use trireme_schedule::collective::{CollectiveKind, LinkCost};

fn with(costs: GivenCosts) -> GroupOptions {
    GroupOptions { costs, ..small_pieces() }
}

/// Four ranks on two hosts.
#[test]
fn only_unknown_costs_are_measured() {
    let link = LinkCost::of(7.0, 3.0);
    let none = GivenCosts::default();
    let across = GivenCosts { across: Some(link), ..none };
    let both = GivenCosts { within: Some(link), ..across };
    // The measurement ends with an exchange of the results.
    for (given, num_operations) in [(none, 1), (across, 1), (both, 0)] {
        let found = on_ranks(TransportKind::Tcp, 4, &with(given), |group| {
            assert_eq!(group.statistics().num_operations, num_operations);
            group.costs()
        });
        for costs in &found {
            assert_eq!(costs, &found[0]);
            assert_eq!(costs.across == link, given.across.is_some());
            assert_eq!(costs.within == link, given.within.is_some());
        }
    }
}

#[test]
fn algorithms_follow_the_costs() {
    let all_reduce = CollectiveKind::AllReduce.with_len(1000);
    let chosen = |latency_microseconds, gigabytes_per_second| {
        let link = Some(LinkCost::of(latency_microseconds, gigabytes_per_second));
        let costs = GivenCosts { within: link, across: link, direct: None };
        let chosen = on_ranks(TransportKind::Tcp, 4, &with(costs), |group| {
            assert_eq!(group.statistics().num_operations, 0);
            group.algorithm(all_reduce, 4).to_string()
        });
        assert!(chosen.iter().all(|algorithm| *algorithm == chosen[0]), "{chosen:?}");
        chosen[0].clone()
    };
    // Few messages if each one takes long, few bytes if each byte takes long.
    assert_eq!(chosen(1000.0, 10.0), "recursive_doubling");
    assert_eq!(chosen(0.001, 0.01), "halving_doubling");
}
