//! The outputs of the commands in each round, and statistics of them.

use super::rows::{BenchCommand, Quantity, Row};
use serde_json::Value;

/// The outputs of the commands of one round. Commands that failed are missing.
pub(super) type Round = Vec<(BenchCommand, Vec<Value>)>;

/// Statistics of a number over several rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Returns the statistics of numbers in any order. `None` if there are no numbers.
    fn of(mut numbers: Vec<f64>) -> Option<Self> {
        numbers.sort_by(f64::total_cmp);
        let (min, max) = (*numbers.first()?, *numbers.last()?);
        let middle = numbers.len() / 2;
        let median = if numbers.len().is_multiple_of(2) {
            (numbers[middle - 1] + numbers[middle]) / 2.0
        } else {
            numbers[middle]
        };
        Some(Spread { median, min, max })
    }
}

#[derive(Debug, PartialEq)]
pub(super) struct Comparison {
    /// Name of the best variant.
    pub(super) name: &'static str,
    pub(super) peer: f64,
    /// Our number divided by the peer's, over the rounds that have both.
    pub(super) ratio: Option<Spread>,
}

/// Returns our side of a row: the median of all rounds.
pub(super) fn ours(rounds: &[Round], row: &Row) -> Option<f64> {
    Spread::of(rounds.iter().filter_map(|round| number(round, &row.ours, row.quantity)).collect())
        .map(|spread| spread.median)
}

/// Returns the best of a peer's variants, by the median of all rounds.
pub(super) fn compare(
    rounds: &[Round],
    row: &Row,
    variants: &[(&'static str, BenchCommand)],
) -> Option<Comparison> {
    let quantity = row.quantity;
    let comparison = |(name, run): &(&'static str, BenchCommand)| {
        let peer = Spread::of(rounds.iter().filter_map(|round| number(round, run, quantity)).collect())?;
        let ratio = |round| Some(number(round, &row.ours, quantity)? / number(round, run, quantity)?);
        let ratio = Spread::of(rounds.iter().filter_map(ratio).collect());
        Some(Comparison { name, peer: peer.median, ratio })
    };
    variants.iter().filter_map(comparison).max_by(|left, right| {
        let order = left.peer.total_cmp(&right.peer);
        if quantity.larger_is_better { order } else { order.reverse() }
    })
}

/// Returns the number of one command in one round, in the table's unit.
fn number(round: &Round, run: &BenchCommand, quantity: Quantity) -> Option<f64> {
    let (_, objects) = round.iter().find(|(other, _)| other == run)?;
    let is_meant = |object: &&Value| quantity.bytes.is_none_or(|bytes| object["bytes"] == bytes);
    Some(objects.iter().find(is_meant)?[quantity.key].as_f64()? / quantity.scale)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::rows::{Peer, Program};
    use super::*;
    use serde_json::json;

    pub(in super::super) const SPEED: Quantity =
        Quantity { key: "speed", bytes: None, scale: 1.0, num_decimals: 0, larger_is_better: true };

    pub(in super::super) fn run(arguments: &str) -> BenchCommand {
        BenchCommand { program: Program::Trireme, arguments: arguments.to_owned() }
    }

    pub(in super::super) fn row(quantity: Quantity) -> Row {
        let variants = Vec::from([("eager", run("eager")), ("compiled", run("compiled"))]);
        let peers = Vec::from([Peer { variants }]);
        Row { name: "a step", quantity, ours: run("ours"), peers, bound: None }
    }

    /// Returns rounds in which commands printed these speeds.
    pub(in super::super) fn rounds(speeds: &[&[(&str, f64)]]) -> Vec<Round> {
        let round = |speeds: &&[(&str, f64)]| {
            speeds.iter().map(|&(name, speed)| (run(name), Vec::from([json!({"speed": speed})]))).collect()
        };
        speeds.iter().map(round).collect()
    }

    #[test]
    fn a_median_is_in_the_middle() {
        let spread = |median, min, max| Some(Spread { median, min, max });
        assert_eq!(Spread::of(Vec::new()), None);
        assert_eq!(Spread::of(Vec::from([2.0])), spread(2.0, 2.0, 2.0));
        assert_eq!(Spread::of(Vec::from([9.0, 1.0, 2.0])), spread(2.0, 1.0, 9.0));
        assert_eq!(Spread::of(Vec::from([4.0, 1.0, 2.0, 9.0])), spread(3.0, 1.0, 9.0));
    }

    #[test]
    fn a_ratio_is_the_median_of_the_rounds_ratios() {
        // The medians are 30 and 10, the ratios 1, 4 and 3.
        let rounds = rounds(&[
            &[("ours", 10.0), ("eager", 10.0)],
            &[("ours", 40.0), ("eager", 10.0)],
            &[("ours", 30.0), ("eager", 10.0)],
        ]);
        let row = row(SPEED);
        assert_eq!(ours(&rounds, &row), Some(30.0));
        let found = compare(&rounds, &row, &row.peers[0].variants).unwrap();
        assert_eq!(found.ratio, Some(Spread { median: 3.0, min: 1.0, max: 4.0 }));
    }

    #[test]
    fn the_best_variant_counts() {
        let rounds = rounds(&[&[("ours", 4.0), ("eager", 1.0), ("compiled", 2.0)]]);
        for (larger_is_better, name, ratio) in [(true, "compiled", 2.0), (false, "eager", 4.0)] {
            let row = row(Quantity { larger_is_better, ..SPEED });
            let found = compare(&rounds, &row, &row.peers[0].variants).unwrap();
            assert_eq!((found.name, found.ratio.unwrap().median), (name, ratio));
        }
    }

    #[test]
    fn a_round_in_which_one_side_failed_has_no_ratio() {
        let row = row(SPEED);
        let missing = rounds(&[&[("ours", 4.0)], &[("eager", 2.0)], &[("ours", 6.0), ("eager", 2.0)]]);
        let found = compare(&missing, &row, &row.peers[0].variants).unwrap();
        assert_eq!(found.ratio, Some(Spread { median: 3.0, min: 3.0, max: 3.0 }));
        let never = rounds(&[&[("ours", 4.0)]]);
        assert_eq!(compare(&never, &row, &row.peers[0].variants), None);
        assert_eq!(ours(&rounds(&[&[]]), &row), None);
    }

    #[test]
    fn a_number_is_selected_by_its_size_and_scaled_to_the_tables_unit() {
        let objects = Vec::from([json!({"bytes": 4, "speed": 1.0}), json!({"bytes": 8, "speed": 3000})]);
        let round = Vec::from([(run("ours"), objects)]);
        let quantity = Quantity { bytes: Some(8), scale: 1000.0, ..SPEED };
        assert_eq!(number(&round, &run("ours"), quantity), Some(3.0));
        assert_eq!(number(&round, &run("ours"), SPEED), Some(1.0));
        assert_eq!(number(&round, &run("ours"), Quantity { bytes: Some(5), ..SPEED }), None);
        assert_eq!(number(&round, &run("ours"), Quantity { key: "other", ..SPEED }), None);
    }
}
