/// A text is not what it should be: what it is, and what it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParseError(pub(crate) String);

impl ParseError {
    /// The same with the line at which it occurred, from 1.
    pub(crate) fn at_line(self, line: usize) -> Self {
        ParseError(format!("line {line}: {self}"))
    }
}

/// The lines of a text that say something, with their numbers from 1. `#` begins a comment.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    (1..).zip(lines).filter(|(_, line)| !line.is_empty())
}

/// As much of a text as an error shows.
pub(crate) fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
