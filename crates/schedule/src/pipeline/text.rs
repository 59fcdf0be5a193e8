//! The text form of schedules.

use super::pass::{ParsePassError, Pass, shortened};
use super::schedule::{PASSES_MAX, Schedule, WeightVersions};
use std::fmt;
use std::str::FromStr;

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let placement: Vec<String> = self.stage_ranks.iter().map(usize::to_string).collect();
        write!(f, "ranks {} placement {} ", self.num_ranks(), placement.join(","))?;
        write!(f, "microbatches {}", self.num_microbatches)?;
        if (self.num_steps, self.weights) != (1, WeightVersions::Drained) {
            write!(f, " steps {} weights {}", self.num_steps, self.weights.name())?;
        }
        writeln!(f)?;
        for (rank, passes) in self.ranks.iter().enumerate() {
            write!(f, "rank {rank}:")?;
            for (index, pass) in passes.iter().enumerate() {
                write!(f, "{} {pass}", if index == 0 { "" } else { "," })?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The text is no schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseScheduleError {
    /// The first line does not give the sizes.
    #[error(
        "line {line}: '{found}' should read 'ranks P placement R,R,... microbatches M', optionally followed by \
         'steps K' and 'weights stashed' or 'weights double-buffered'"
    )]
    Header {
        /// Line, from 1.
        line: usize,
        /// What stands there.
        found: String,
    },
    /// Not the line of the rank that comes next.
    #[error("line {line}: expected 'rank {rank}:' followed by its passes")]
    Rank {
        /// Line, from 1.
        line: usize,
        /// The rank that comes next.
        rank: usize,
    },
    /// Fewer or more lines than ranks.
    #[error("the header declares {expected} ranks, but {found} follow")]
    NumRanks {
        /// Ranks of the header.
        expected: usize,
        /// Ranks that follow.
        found: usize,
    },
    /// What stands between two commas is no pass.
    #[error("line {line}: {source}")]
    Pass {
        /// Line, from 1.
        line: usize,
        /// Why.
        #[source]
        source: ParsePassError,
    },
    /// Longer than any schedule that is worked with.
    #[error("line {line}: more than {PASSES_MAX} passes")]
    TooLarge {
        /// Line, from 1.
        line: usize,
    },
}

/// Ranks, and a schedule that has none yet.
fn parse_header(text: &str) -> Option<(usize, Schedule)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let ["ranks", ranks, "placement", placement, "microbatches", microbatches, rest @ ..] = &words[..] else {
        return None;
    };
    let mut schedule = Schedule {
        num_microbatches: microbatches.parse().ok()?,
        num_steps: 1,
        weights: WeightVersions::Drained,
        stage_ranks: placement.split(',').map(|rank| rank.parse().ok()).collect::<Option<_>>()?,
        ranks: Vec::new(),
    };
    let (pairs, odd) = rest.as_chunks::<2>();
    for pair in pairs {
        match pair {
            ["steps", steps] => schedule.num_steps = steps.parse().ok()?,
            ["weights", name] => {
                schedule.weights = WeightVersions::ALL.into_iter().find(|rule| rule.name() == *name)?;
            }
            _ => return None,
        }
    }
    odd.is_empty().then_some((ranks.parse().ok()?, schedule))
}

impl FromStr for Schedule {
    type Err = ParseScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let lines = (1..).zip(text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()));
        let mut lines = lines.filter(|(_, line)| !line.is_empty());
        let (line, found) = lines.next().unwrap_or((1, ""));
        let (num_ranks, mut schedule) = parse_header(found)
            .ok_or_else(|| ParseScheduleError::Header { line, found: shortened(found) })?;
        let mut num_left = PASSES_MAX;
        for (rank, (line, text)) in lines.enumerate() {
            let passes = text.strip_prefix("rank ").and_then(|text| text.split_once(':'));
            let (_, passes) = passes
                .filter(|(number, _)| number.trim().parse() == Ok(rank))
                .ok_or(ParseScheduleError::Rank { line, rank })?;
            let passes = parse_passes(line, passes, num_left)?;
            num_left -= passes.len();
            schedule.ranks.push(passes);
        }
        let found = schedule.num_ranks();
        if found == num_ranks {
            Ok(schedule)
        } else {
            Err(ParseScheduleError::NumRanks { expected: num_ranks, found })
        }
    }
}

fn parse_passes(line: usize, text: &str, num_max: usize) -> Result<Vec<Pass>, ParseScheduleError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    if text.split(',').count() > num_max {
        return Err(ParseScheduleError::TooLarge { line });
    }
    let parse = |pass: &str| pass.trim().parse();
    text.split(',')
        .map(parse)
        .collect::<Result<_, _>>()
        .map_err(|source| ParseScheduleError::Pass { line, source })
}
