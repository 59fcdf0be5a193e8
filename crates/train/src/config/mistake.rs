use std::fmt;
use std::io;
use std::path::PathBuf;

/// The size of the largest file that is read as a config.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 20;

/// A config that cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ConfigError {
    #[error("cannot read the config {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the config {} has more than {} bytes; is it the right file?", path.display(), FILE_BYTES_MAX)]
    TooLarge { path: PathBuf },
    /// The config contains mistakes. Mistakes in the file come first, in the order of lines, then mistakes in `--set` options.
    #[error("{}", list(mistakes))]
    Invalid { mistakes: Vec<Mistake> },
    #[error("no section is named '{section}', and no key mentions it; {hint}")]
    UnknownSection { section: String, hint: String },
}

/// Characters of the offending text that a message quotes.
const TEXT_CHARS_MAX: usize = 200;

const LISTED_MAX: usize = 20;

fn list(mistakes: &[Mistake]) -> String {
    let count = match mistakes.len() {
        1 => "1 mistake".to_owned(),
        count => format!("{count} mistakes"),
    };
    let lines: String = mistakes.iter().take(LISTED_MAX).map(|mistake| format!("\n  {mistake}")).collect();
    let more = match mistakes.len().saturating_sub(LISTED_MAX) {
        0 => String::new(),
        count => format!("\n  and {count} more"),
    };
    format!("{count} in the config:{lines}{more}")
}

/// One mistake in a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The position of the mistake.
    pub position: KeyPosition,
    /// The offending text, on one line.
    pub text: String,
    /// The reason and a remedy.
    pub explanation: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.position {
            KeyPosition::File { path, line } => write!(f, "{}:{line}: ", path.display())?,
            KeyPosition::Override { .. } => f.write_str("--set ")?,
        }
        match self.text.char_indices().nth(TEXT_CHARS_MAX) {
            None => write!(f, "{}: {}", self.text, self.explanation),
            Some((end, _)) => write!(f, "{}…: {}", &self.text[..end], self.explanation),
        }
    }
}

/// The position at which a key is set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyPosition {
    /// In the config file.
    File {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// On the command line.
    Override {
        /// Position among the `--set` options.
        index: usize,
    },
}

/// Returns the element of `known` that is most similar to `found`, or `None` if none is similar enough.
pub(super) fn nearest<'a>(found: &str, known: &[&'a str]) -> Option<&'a str> {
    // `batch_size` and `local_batch_size` have a low edit similarity, but one contains the other.
    let similarity = |candidate: &str| {
        let contains = found.len() >= 3 && (candidate.contains(found) || found.contains(candidate));
        strsim::jaro_winkler(found, candidate).max(if contains { 0.85 } else { 0.0 })
    };
    known
        .iter()
        .map(|candidate| (similarity(candidate), *candidate))
        .filter(|(similarity, _)| *similarity >= 0.8)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}
