/// An error in a text: what was found, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(pub(crate) String);

impl ParseError {
    /// Adds the line at which the error occurred, counted from 1.
    pub(crate) fn at_line(self, line: usize) -> Self {
        ParseError(format!("line {line}: {self}"))
    }
}

/// Returns the lines of a text that are not empty, with their numbers from 1. `#` begins a comment.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    (1..).zip(lines).filter(|(_, line)| !line.is_empty())
}

/// Returns the beginning of a text, as long as an error message may show it.
pub(crate) fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
