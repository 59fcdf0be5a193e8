//! Text of memory predictions and measurements.

use trireme_base::{Bytes, Category, CategoryBytes, MemoryUse};
use trireme_schedule::Program;

/// Formats a table of memory use with a row for each category and one for the total. Each of `columns` is a heading, the peaks of the
/// categories and the peak of the total, in bytes.
pub fn format_memory_table(columns: &[(&str, CategoryBytes, usize)]) -> String {
    let width = |heading: &str| heading.len().max(10) + 2;
    let mut text = format!("{:<14}", "memory");
    for (heading, ..) in columns {
        text += &format!("{heading:>0$}", width(heading));
    }
    let mut row = |name: &str, bytes: &dyn Fn(&(&str, CategoryBytes, usize)) -> usize| {
        text += &format!("\n{name:<14}");
        for column in columns {
            text += &format!("{:>1$}", Bytes(bytes(column) as u64), width(column.0));
        }
    };
    for category in Category::ALL {
        row(category.name(), &|(_, peaks, _)| peaks.get(category));
    }
    row("total", &|(_, _, total)| *total);
    text + "\n"
}

/// Returns where in the program the total peaks, such as `line 17 (backward, unit 4, microbatch 1)`.
pub fn peak_location(memory: &MemoryUse, program: &Program) -> String {
    match memory.line.checked_sub(2).and_then(|index| program.actions.get(index)) {
        Some(action) => format!("line {} ({})", memory.line, action.words()),
        None => "the start of the program".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_each_category() {
        let peaks = CategoryBytes([1 << 20, 1 << 10, 0, 5, 7]);
        let text = format_memory_table(&[("predicted", peaks, 1 << 20), ("measured on rank 0", peaks, 9)]);
        let expected = "\
memory           predicted  measured on rank 0
parameters         1.00MiB             1.00MiB
gradients          1.00KiB             1.00KiB
optimizer               0B                  0B
activations             5B                  5B
communication           7B                  7B
total              1.00MiB                  9B
";
        assert_eq!(text, expected);
    }
}
