//! Compares simulated times with formulas, and tests the algorithms that are chosen by simulated time.

use super::super::cost::Predictor;
use super::super::*;
use super::interpreter::programs;
use super::matrix::{consecutive, placements, programs_of, round_robin};
use super::oracle::*;
use FlatAlgorithm as A;

const MODEL: CostModel = CostModel {
    within: LinkCost { latency_seconds: 5e-6, seconds_per_byte: 2e-10 },
    across: LinkCost { latency_seconds: 5e-5, seconds_per_byte: 8e-9 },
    direct: Some(DirectCost { synchronization_seconds: 2e-6, seconds_per_byte: 1e-10 }),
    reduce_seconds_per_byte: 1e-10,
    copy_seconds_per_byte: 5e-11,
};

/// Returns the predicted seconds of `collective` by `algorithm`.
fn predict(collective: Collective, algorithm: Algorithm, hosts: &Hosts) -> f64 {
    Predictor::new(collective, hosts, 4, &MODEL).predict(algorithm)
}

fn assert_close(seconds: f64, expected: f64, within: f64, what: &str) {
    assert!((seconds / expected - 1.0).abs() <= within, "{what}: {seconds} s, expected {expected} s");
}

#[test]
fn simulated_times_match_the_formulas() {
    let LinkCost { latency_seconds: alpha, seconds_per_byte: beta } = MODEL.within;
    let (gamma, delta) = (MODEL.reduce_seconds_per_byte, MODEL.copy_seconds_per_byte);
    for n in [2_usize, 4, 8, 16] {
        let (len, hosts) = (n * n * 1000, Hosts::single(n));
        let d = (4 * len) as f64;
        let (ranks, log) = (n as f64, n.ilog2() as f64);
        let most = d * (ranks - 1.0) / ranks;
        let root = Rank(n - 1);
        let formulas = [
            (
                CollectiveKind::AllReduce.with_len(len),
                A::Ring,
                2.0 * (ranks - 1.0) * alpha + most * (2.0 * beta + gamma),
            ),
            (
                CollectiveKind::AllReduce.with_len(len),
                A::HalvingDoubling,
                2.0 * log * alpha + most * (2.0 * beta + gamma),
            ),
            (
                CollectiveKind::AllReduce.with_len(len),
                A::RecursiveDoubling,
                log * (alpha + d * (beta + gamma)),
            ),
            (
                CollectiveKind::AllReduce.with_len(len),
                A::BinomialTree,
                log * (2.0 * alpha + d * (2.0 * beta + gamma)),
            ),
            (
                CollectiveKind::Reduce.with_root(root, len),
                A::BinomialTree,
                log * (alpha + d * (beta + gamma)),
            ),
            (CollectiveKind::Broadcast.with_root(root, len), A::BinomialTree, log * (alpha + d * beta)),
            (
                CollectiveKind::Broadcast.with_root(root, len),
                A::ScatterAllGather,
                (log + ranks - 1.0) * alpha + 2.0 * most * beta,
            ),
            (CollectiveKind::AllGather.with_len(len), A::Ring, (ranks - 1.0) * alpha + most * beta),
            (CollectiveKind::AllGather.with_len(len), A::RecursiveDoubling, log * alpha + most * beta),
            (CollectiveKind::AllGather.with_len(len), A::Bruck, log * alpha + most * beta + d * delta),
            (
                CollectiveKind::ReduceScatter.with_len(len),
                A::Ring,
                (ranks - 1.0) * alpha + most * (beta + gamma),
            ),
            (
                CollectiveKind::ReduceScatter.with_len(len),
                A::RecursiveHalving,
                (ranks - 1.0) * alpha + most * (beta + gamma),
            ),
            (CollectiveKind::Gather.with_root(root, len), A::BinomialTree, log * alpha + most * beta),
            (CollectiveKind::Scatter.with_root(root, len), A::Linear, (ranks - 1.0) * alpha + most * beta),
            (CollectiveKind::AllToAll.with_len(len), A::Pairwise, (ranks - 1.0) * alpha + most * beta),
            (
                CollectiveKind::AllToAll.with_len(len),
                A::Bruck,
                log * (alpha + d / 2.0 * beta) + (2.0 + log) * d * delta,
            ),
            (CollectiveKind::Barrier.with_len(0), A::Dissemination, log * alpha),
        ];
        for (collective, algorithm, expected) in formulas {
            let seconds = predict(collective, algorithm.into(), &hosts);
            assert_close(seconds, expected, 1e-9, &format!("{collective} by {algorithm}, {n} ranks"));
        }
    }
}

#[test]
fn a_message_occupies_its_sender() {
    let LinkCost { latency_seconds: alpha, seconds_per_byte: beta } = MODEL.within;
    let long = || Span::from(0..1000);
    let short = || Span::from(0..10);
    let programs = [
        vec![
            Step::both(Outgoing::new(1, long()), Incoming::copy(1, short())),
            Step::send(Outgoing::new(2, short())),
        ],
        vec![Step::both(Outgoing::new(0, short()), Incoming::copy(0, long()))],
        vec![Step::receive(Incoming::copy(0, short()))],
    ];
    let seconds = simulate(&programs, &Hosts::single(3), 4, &MODEL);
    assert_close(seconds, 2.0 * alpha + 4040.0 * beta, 1e-9, "a long message, then a short one");
}

#[test]
fn ranks_of_a_host_share_its_link() {
    let LinkCost { latency_seconds: alpha, seconds_per_byte: beta } = MODEL.across;
    let span = || Span::from(0..1000);
    let send = |to| vec![Step::send(Outgoing::new(to, span()))];
    let receive = |from| vec![Step::receive(Incoming::copy(from, span()))];
    let programs = [send(2), send(3), receive(0), receive(1)];
    let seconds = |ids: &[usize]| simulate(&programs, &Hosts::new(ids), 1, &MODEL);
    assert_close(seconds(&[0, 1, 2, 3]), alpha + 1000.0 * beta, 1e-9, "each with a link of its own");
    assert_close(seconds(&[0, 0, 1, 2]), alpha + 2000.0 * beta, 1e-9, "one link out");
    assert_close(seconds(&[0, 1, 2, 2]), alpha + 2000.0 * beta, 1e-9, "one link in");
}

/// The ranks of a host share its link, and a message across hosts has ten times the latency.
#[test]
fn an_all_to_all_by_hosts_is_faster_where_blocks_are_short() {
    let seconds = |hosts: &Hosts, block_len: usize| {
        let n = hosts.world_size();
        let (row, all) = (vec![block_len; n], vec![block_len; n * n]);
        let pairwise = programs(n, |rank, steps| all_to_all_variable(rank, &row, &row, steps));
        let by_hosts = programs(n, |rank, steps| all_to_all_variable_by_hosts(rank, hosts, &all, steps));
        [pairwise, by_hosts].map(|programs| simulate(&programs, hosts, 4, &MODEL))
    };
    for hosts in [consecutive(4, 4), round_robin(4, 4)] {
        let [pairwise, by_hosts] = seconds(&hosts, 8);
        assert!(2.0 * by_hosts < pairwise, "{by_hosts} s, {pairwise} s on {hosts:?}");
        // The time of long blocks is determined by the link between hosts.
        let [pairwise, by_hosts] = seconds(&hosts, 1 << 16);
        assert!(by_hosts < 1.2 * pairwise, "{by_hosts} s, {pairwise} s on {hosts:?}");
    }
}

/// The sum over phases, each simulated alone, is close to the time of all steps together.
#[test]
fn phases_predict_what_whole_programs_take() {
    for hosts in placements() {
        let collective = CollectiveKind::AllReduce.with_len(100 * hosts.world_size() * hosts.world_size());
        for algorithm in algorithms_for(collective, &hosts) {
            if !algorithm.to_string().starts_with("hierarchical") || algorithm.to_string().contains("direct")
            {
                continue;
            }
            let predicted = predict(collective, algorithm, &hosts);
            let simulated = simulate(&programs_of(collective, algorithm, &hosts), &hosts, 4, &MODEL);
            assert_close(predicted, simulated, 0.5, &format!("{algorithm} on {hosts:?}"));
        }
    }
}

#[test]
fn choices_follow_size_and_topology() {
    let chosen =
        |collective, hosts: &Hosts, model: &CostModel| choose(collective, hosts, 4, model, false).to_string();
    let sockets = CostModel { direct: None, ..MODEL };
    let (short, long) = (CollectiveKind::AllReduce.with_len(16), CollectiveKind::AllReduce.with_len(1 << 22));
    assert_eq!(chosen(short, &Hosts::single(8), &sockets), "recursive_doubling");
    assert_eq!(chosen(long, &Hosts::single(8), &sockets), "halving_doubling");
    assert_eq!(chosen(long, &Hosts::single(7), &sockets), "ring");
    assert_eq!(chosen(long, &Hosts::single(8), &MODEL), "direct");
    assert!(chosen(long, &round_robin(4, 4), &sockets).starts_with("hierarchical:all"));
    assert_eq!(chosen(short, &round_robin(4, 4), &MODEL), "hierarchical:all:direct:recursive_doubling");
    let canonical = choose(long, &Hosts::single(7), 4, &sockets, true);
    assert!(is_canonical(long, canonical, &Hosts::single(7)));
}

#[test]
fn the_canonical_choice_is_the_fastest_canonical_algorithm() {
    for hosts in placements() {
        for collective in collectives(hosts.world_size(), 1000) {
            let algorithm = choose(collective, &hosts, 4, &MODEL, true);
            assert!(is_canonical(collective, algorithm, &hosts));
            let fastest = predict(collective, algorithm, &hosts);
            let all = algorithms_for(collective, &hosts).into_iter();
            let canonical = all.filter(|&other| is_canonical(collective, other, &hosts));
            canonical.for_each(|other| assert!(predict(collective, other, &hosts) >= fastest));
        }
    }
}
