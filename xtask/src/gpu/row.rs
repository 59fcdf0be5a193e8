//! The rows of the table.

use std::fmt::Write;

/// A measurement on the GPUs, and the figure to compare it with.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) found: String,
    /// The figure of the peer, or the bound.
    pub(super) reference: String,
    /// The measurement divided by the reference.
    pub(super) ratio: String,
    pub(super) has_failed: bool,
}

impl Row {
    pub(super) fn new(
        name: impl Into<String>,
        found: impl Into<String>,
        reference: impl Into<String>,
    ) -> Self {
        Row {
            name: name.into(),
            found: found.into(),
            reference: reference.into(),
            ratio: String::new(),
            has_failed: false,
        }
    }

    pub(super) fn with_ratio(self, ratio: f64) -> Self {
        Row { ratio: format!("{ratio:.2}"), ..self }
    }

    pub(super) fn failed(name: &str, reason: &str) -> Self {
        // A cell is one line.
        let reason = reason.split_whitespace().collect::<Vec<_>>().join(" ");
        Row { has_failed: true, ..Row::new(name, reason, "") }
    }
}

/// Formats rows as a Markdown table. `title` is the heading of the column of figures.
pub(super) fn table(title: &str, rows: &[Row]) -> String {
    let mut text = format!("| | {title} | reference | ratio |\n|---|---:|---:|---:|\n");
    for Row { name, found, reference, ratio, has_failed } in rows {
        let mark = if *has_failed { "**failed**: " } else { "" };
        let [name, found, reference] = [name, found, reference].map(|cell| cell.replace('|', "\\|"));
        writeln!(text, "| {name} | {mark}{found} | {reference} | {ratio} |")
            .expect("a string takes all text");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_lines_of_one_table() {
        let rows = [Row::new("step", "2 ms", "3 ms").with_ratio(1.5), Row::failed("losses", "no\n a|b: 1")];
        assert_eq!(
            table("GPU", &rows),
            "| | GPU | reference | ratio |\n|---|---:|---:|---:|\n| step | 2 ms | 3 ms | 1.50 |\n\
             | losses | **failed**: no a\\|b: 1 |  |  |\n"
        );
    }
}
