use crate::action::{Action, ParseActionError};
use std::fmt;
use std::str::FromStr;

/// What one rank does in one step, in order.
///
/// The text form is one action a line; `#` begins a comment, and a header line gives the sizes:
/// ```text
/// units 3 microbatches 1
/// F 0 0
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Units of the model.
    pub num_units: usize,
    /// Microbatches of this rank in a step.
    pub num_microbatches: usize,
    /// In order of issue.
    pub actions: Vec<Action>,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "units {} microbatches {}", self.num_units, self.num_microbatches)?;
        self.actions.iter().try_for_each(|action| writeln!(f, "{action}"))
    }
}

/// The text is no program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseProgramError {
    /// The first line does not give the sizes.
    #[error("line {line}: '{found}' should read 'units N microbatches M'")]
    Header {
        /// Line, from 1.
        line: usize,
        /// What stands there.
        found: String,
    },
    /// A line is no action.
    #[error("line {line}: {source}")]
    Action {
        /// Line, from 1.
        line: usize,
        /// Why.
        #[source]
        source: ParseActionError,
    },
}

impl FromStr for Program {
    type Err = ParseProgramError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let lines = (1..).zip(text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()));
        let mut lines = lines.filter(|(_, line)| !line.is_empty());
        let (line, found) = lines.next().unwrap_or((1, ""));
        let header = || ParseProgramError::Header { line, found: found.to_owned() };
        let words: Vec<&str> = found.split_whitespace().collect();
        let ["units", units, "microbatches", microbatches] = words[..] else { return Err(header()) };
        let number = |word: &str| word.parse::<usize>().map_err(|_| header());
        let (num_units, num_microbatches) = (number(units)?, number(microbatches)?);
        let action = |(line, text): (usize, &str)| {
            text.parse().map_err(|source| ParseProgramError::Action { line, source })
        };
        Ok(Program { num_units, num_microbatches, actions: lines.map(action).collect::<Result<_, _>>()? })
    }
}
