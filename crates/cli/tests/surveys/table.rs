//! The rows of `docs/surveys.md`.

use std::fmt::Write;
use std::ops::RangeInclusive;

/// A claim of the literature, and the same quantity as computed by Trireme.
pub(crate) struct Row {
    pub(crate) claim: &'static str,
    /// Paper, and section or table.
    pub(crate) source: &'static str,
    /// The computed figures in words.
    pub(crate) computed: String,
    /// The method of computation, and the reason for a difference from the claim.
    pub(crate) why: String,
}

impl Row {
    /// Returns the cell of the claim with its source.
    pub(crate) fn claim_cell(&self) -> String {
        format!("{} ({})", self.claim, self.source)
    }
}

/// Rows about one subject.
pub(crate) struct Section {
    pub(crate) title: &'static str,
    pub(crate) rows: Vec<Row>,
}

impl Section {
    pub(crate) fn markdown(&self) -> String {
        let mut text = format!("## {}\n\n| the surveys say | here | why |\n|---|---|---|\n", self.title);
        for row in &self.rows {
            writeln!(text, "| {} | {} | {} |", row.claim_cell(), row.computed, row.why).unwrap();
        }
        text
    }
}

/// Returns `value`, which must be within `bounds`.
#[track_caller]
pub(crate) fn within(name: &str, value: f64, bounds: RangeInclusive<f64>) -> f64 {
    assert!(bounds.contains(&value), "{name}: {value} is outside of {bounds:?}");
    value
}

/// Formats a number of bytes in decimal units, as papers write them.
pub(crate) fn gigabytes(bytes: f64) -> String {
    match bytes {
        1e12.. => format!("{} TB", short(bytes / 1e12)),
        1e9.. => format!("{} GB", short(bytes / 1e9)),
        _ => format!("{} MB", short(bytes / 1e6)),
    }
}

pub(crate) fn billions(parameters: f64) -> String {
    match parameters {
        1e12.. => format!("{} T", short(parameters / 1e12)),
        1e9.. => format!("{} B", short(parameters / 1e9)),
        _ => format!("{} M", short(parameters / 1e6)),
    }
}

/// Formats a number with two decimals below 10, one below 100, and none from 100 on.
pub(crate) fn short(number: f64) -> String {
    let num_decimals = match number.abs() {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{number:.num_decimals$}")
}

/// Formats the items with semicolons between them.
pub(crate) fn list<T>(items: impl IntoIterator<Item = T>, show: impl Fn(T) -> String) -> String {
    items.into_iter().map(show).collect::<Vec<_>>().join("; ")
}
