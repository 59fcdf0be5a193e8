//! Algorithms as text: their names, and the steps of a rank.

use super::super::*;
use super::matrix::{consecutive, has_steps, programs_of};

fn text(collective: Collective, algorithm: &str, hosts: &Hosts, rank: usize) -> String {
    let algorithm = algorithm.parse().expect("a name");
    let steps = &programs_of(collective, algorithm, hosts)[rank];
    steps.iter().map(|step| step_text(step) + "\n").collect()
}

/// Writes both halves of an exchange with a bar between them, or `copy vector[0..4] to scratch[0..4]`.
fn step_text(step: &Step) -> String {
    match step {
        Step::Exchange { send, receive } => {
            let halves = [send.as_ref().map(send_text), receive.as_ref().map(receive_text)];
            halves.into_iter().flatten().collect::<Vec<_>>().join(" | ")
        }
        Step::Copy { from, to } => format!("copy {} to {}", span_text(from), span_text(to)),
    }
}

/// Writes `send 3 vector[0..16]`.
fn send_text(send: &Outgoing) -> String {
    format!("send {} {}", send.to, span_text(&send.span))
}

/// Writes `receive 2 vector[16..32]`, followed by `reduce left` or `reduce right`: the side of the elements already there.
fn receive_text(receive: &Incoming) -> String {
    let reduce = match receive.action {
        ReceiveAction::Copy => "",
        ReceiveAction::Reduce { own_side: Side::Left } => " reduce left",
        ReceiveAction::Reduce { own_side: Side::Right } => " reduce right",
    };
    format!("receive {} {}{reduce}", receive.from, span_text(&receive.span))
}

/// Writes `vector[16..32]`.
fn span_text(Span { memory, range }: &Span) -> String {
    format!("{}[{}..{}]", format!("{memory:?}").to_lowercase(), range.start, range.end)
}

#[test]
fn a_ring_of_three() {
    let text = text(CollectiveKind::AllReduce.with_len(6), "ring", &Hosts::single(3), 1);
    assert_eq!(
        text,
        "\
send 2 vector[0..2] | receive 0 vector[4..6] reduce right
send 2 vector[4..6] | receive 0 vector[2..4] reduce right
send 2 vector[2..4] | receive 0 vector[0..2]
send 2 vector[0..2] | receive 0 vector[4..6]
"
    );
}

#[test]
fn neighbors_reduce_first() {
    let text = text(CollectiveKind::AllReduce.with_len(8), "halving_doubling", &Hosts::single(5), 0);
    assert_eq!(
        text,
        "\
receive 1 vector[0..8] reduce left
send 2 vector[4..8] | receive 2 vector[0..4] reduce left
send 3 vector[2..4] | receive 3 vector[0..2] reduce left
send 3 vector[0..2] | receive 3 vector[2..4]
send 2 vector[0..4] | receive 2 vector[4..8]
send 1 vector[0..8]
"
    );
}

#[test]
fn the_root_of_a_tree_only_receives() {
    let collective = CollectiveKind::Reduce.with_root(Rank(2), 4);
    let hosts = Hosts::single(4);
    assert_eq!(
        text(collective, "binomial_tree", &hosts, 2),
        "receive 3 vector[0..4] reduce left\nreceive 0 vector[0..4] reduce right\n"
    );
    assert_eq!(
        text(collective, "binomial_tree", &hosts, 0),
        "receive 1 vector[0..4] reduce left\nsend 2 vector[0..4]\n"
    );
}

#[test]
fn blocks_travel_packed() {
    let text = text(CollectiveKind::AllToAll.with_len(3), "bruck", &Hosts::single(3), 1);
    assert_eq!(
        text,
        "\
copy vector[1..2] to scratch[0..1]
copy vector[2..3] to scratch[1..2]
copy vector[0..1] to scratch[2..3]
copy scratch[1..2] to scratch[3..4]
send 2 scratch[3..4] | receive 0 scratch[4..5]
copy scratch[4..5] to scratch[1..2]
copy scratch[2..3] to scratch[3..4]
send 0 scratch[3..4] | receive 2 scratch[4..5]
copy scratch[4..5] to scratch[2..3]
copy scratch[0..1] to vector[1..2]
copy scratch[1..2] to vector[0..1]
copy scratch[2..3] to vector[2..3]
"
    );
}

#[test]
fn all_leaders_reduce_a_block_each_across_hosts() {
    let text =
        text(CollectiveKind::AllReduce.with_len(8), "hierarchical:all:ring:ring", &consecutive(2, 2), 3);
    assert_eq!(
        text,
        "\
send 2 vector[0..4] | receive 2 vector[4..8] reduce right
send 1 vector[4..6] | receive 1 vector[6..8] reduce right
send 1 vector[6..8] | receive 1 vector[4..6]
send 2 vector[4..8] | receive 2 vector[0..4]
"
    );
}

#[test]
fn phases_name_members_and_ranges() {
    let levels =
        Hierarchy { leaders: Leaders::All, within: FlatAlgorithm::Direct, across: FlatAlgorithm::Ring };
    let hosts = consecutive(2, 2);
    let mut all = Vec::new();
    phases(CollectiveKind::AllReduce.with_len(8), levels, &hosts, Rank(3), &mut all);
    let seen: Vec<_> = all
        .iter()
        .map(|phase| {
            let members = (0..phase.members.len(&hosts)).map(|index| phase.members.rank(&hosts, index).0);
            (
                phase.collective.to_string(),
                phase.algorithm.name(),
                Vec::from_iter(members),
                phase.range.clone(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("reduce_scatter".to_owned(), "direct", vec![2, 3], 0..8),
            ("all_reduce".to_owned(), "ring", vec![1, 3], 4..8),
            ("all_gather".to_owned(), "direct", vec![2, 3], 0..8),
        ]
    );
}

#[test]
fn names_read_back() {
    for algorithm in algorithms_for(CollectiveKind::AllReduce.with_len(1), &consecutive(2, 2)) {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    assert!(FlatAlgorithm::ALL.iter().all(|flat| flat.to_string().parse() == Ok(Algorithm::Flat(*flat))));
    assert!(has_steps(&"hierarchical:one:binomial_tree:ring".parse().expect("two levels")));
}

#[test]
fn unknown_algorithm_names_are_refused() {
    let refusal = |text: &str| text.parse::<Algorithm>().expect_err("no algorithm").to_string();
    assert!(refusal("rings").starts_with("'rings' is not an algorithm; choose one of direct, "));
    for text in
        ["hierarchical", "hierarchical:all:ring", "hierarchical:two:ring:ring", "hierarchical:all:a:b:c"]
    {
        assert!(
            refusal(text).starts_with(&format!("'{text}' should have the form hierarchical:<one|all>")),
            "{text}"
        );
    }
    assert!(refusal("hierarchical:all:ring:rings").starts_with("'rings' is not an algorithm"));
}

#[test]
#[should_panic(expected = "recursive_doubling does not fit all_gather of 3 ranks")]
fn an_algorithm_that_does_not_fit_is_a_bug_of_the_caller() {
    let algorithm = FlatAlgorithm::RecursiveDoubling.into();
    steps(CollectiveKind::AllGather.with_len(3), algorithm, &Hosts::single(3), Rank(0), &mut Vec::new());
}

#[test]
#[should_panic(expected = "rank 3 is outside of a world of 3")]
fn a_root_is_one_of_the_ranks() {
    let collective = CollectiveKind::Gather.with_root(Rank(3), 3);
    steps(collective, FlatAlgorithm::Linear.into(), &Hosts::single(3), Rank(0), &mut Vec::new());
}

#[test]
#[should_panic(expected = "4 elements are no 3 equal blocks")]
fn all_to_all_has_equal_blocks() {
    let collective = CollectiveKind::AllToAll.with_len(4);
    steps(collective, FlatAlgorithm::Pairwise.into(), &Hosts::single(3), Rank(0), &mut Vec::new());
}
