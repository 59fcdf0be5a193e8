//! The tables as Markdown.

use super::results::{Round, Spread, compare, ours};
use super::rows::{Peer, Quantity, Row};

/// Returns the rows with both sides. `is_installed` tells whether a peer is installed.
pub(super) fn table(rows: &[Row], rounds: &[Round], is_installed: impl Fn(&Peer) -> bool) -> String {
    let mut text = String::from("| | Trireme | peer | ratio |\n|---|---|---|---|\n");
    for row in rows {
        let trireme = match ours(rounds, row) {
            Some(number) => show(number, row.quantity),
            None => "failed".to_owned(),
        };
        let cells = row.peers.iter().map(|peer| peer_cells(row, peer, rounds, is_installed(peer)));
        let (peers, ratios): (Vec<String>, Vec<String>) = cells.unzip();
        let (peers, ratios) = (peers.join(", "), ratios.join(", "));
        text.push_str(&format!("| {} | {trireme} | {peers} | {ratios} |\n", row.name));
    }
    text
}

/// Returns a peer's cells in the columns `peer` and `ratio`.
fn peer_cells(row: &Row, peer: &Peer, rounds: &[Round], is_installed: bool) -> (String, String) {
    let name = peer.variants[0].0;
    let absent = |why| (format!("{why} ({name})"), "–".to_owned());
    if !is_installed {
        return absent("not installed");
    }
    match compare(rounds, row, &peer.variants) {
        Some(found) => {
            let cell = format!("{} ({})", show(found.peer, row.quantity), found.name);
            (cell, found.ratio.map_or("–".to_owned(), show_ratio))
        }
        None => absent("failed"),
    }
}

fn show(number: f64, quantity: Quantity) -> String {
    with_separators(number, quantity.num_decimals)
}

/// Formats a number with a comma before each group of three digits.
pub(super) fn with_separators(number: f64, num_decimals: usize) -> String {
    let mut text = format!("{number:.num_decimals$}");
    let mut place = text.find('.').unwrap_or(text.len());
    while place > 3 {
        place -= 3;
        text.insert(place, ',');
    }
    text
}

/// Formats the median, and the range if the rounds differ.
fn show_ratio(ratio: Spread) -> String {
    let num_decimals = if ratio.median < 0.1 { 3 } else { 2 };
    let [median, min, max] =
        [ratio.median, ratio.min, ratio.max].map(|number| format!("{number:.num_decimals$}"));
    if min == max { median } else { format!("{median} ({min}–{max})") }
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::{SPEED, rounds, row, run};
    use super::*;

    fn lines(rows: &[Row], rounds: &[Round], is_installed: bool) -> Vec<String> {
        table(rows, rounds, |_| is_installed).lines().skip(2).map(str::to_owned).collect()
    }

    #[test]
    fn a_row_has_both_sides_and_their_ratio() {
        let rounds = rounds(&[
            &[("ours", 12_000.0), ("eager", 4000.0), ("compiled", 6000.0)],
            &[("ours", 15_000.0), ("eager", 4000.0), ("compiled", 5000.0)],
        ]);
        let expected = "| a step | 13,500 | 5,500 (compiled) | 2.50 (2.00–3.00) |";
        assert_eq!(lines(&[row(SPEED)], &rounds, true), [expected]);
    }

    #[test]
    fn several_peers_share_a_cell() {
        let mut row = row(SPEED);
        row.peers.push(Peer { variants: Vec::from([("other", run("other"))]) });
        let rounds = rounds(&[&[("ours", 1.0), ("eager", 40.0), ("other", 2.0)]]);
        assert_eq!(lines(&[row], &rounds, true), ["| a step | 1 | 40 (eager), 2 (other) | 0.025, 0.50 |"]);
    }

    #[test]
    fn what_is_missing_says_why() {
        let some = rounds(&[&[("ours", 1.0)]]);
        assert_eq!(lines(&[row(SPEED)], &some, false), ["| a step | 1 | not installed (eager) | – |"]);
        assert_eq!(lines(&[row(SPEED)], &some, true), ["| a step | 1 | failed (eager) | – |"]);
        let none = rounds(&[&[("eager", 2.0)]]);
        assert_eq!(lines(&[row(SPEED)], &none, true), ["| a step | failed | 2 (eager) | – |"]);
    }

    #[test]
    fn numbers_have_their_decimals_and_separators() {
        for (number, num_decimals, expected) in [
            (0.0, 0, "0"),
            (999.4, 0, "999"),
            (999.6, 0, "1,000"),
            (1_234_567.0, 0, "1,234,567"),
            (0.384, 2, "0.38"),
            (12_345.678, 2, "12,345.68"),
        ] {
            assert_eq!(with_separators(number, num_decimals), expected);
        }
    }
}
