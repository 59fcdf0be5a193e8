//! The text form of schedules.

use super::pass::Pass;
use super::schedule::{PASSES_MAX, Schedule, WeightVersions};
use crate::parse::{ParseError, lines, shortened};
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

/// Parses a header. Returns the number of ranks, and a schedule without ranks.
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
            ["weights", name] => schedule.weights = WeightVersions::named(name)?,
            _ => return None,
        }
    }
    odd.is_empty().then_some((ranks.parse().ok()?, schedule))
}

impl FromStr for Schedule {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut lines = lines(text);
        let (line, found) = lines.next().unwrap_or((1, ""));
        let (num_ranks, mut schedule) = parse_header(found).ok_or_else(|| {
            let message = "should read 'ranks P placement R,R,... microbatches M', optionally followed by 'steps K' and \
                 'weights stashed' or 'weights double-buffered'";
            ParseError(format!("'{}' {message}", shortened(found))).at_line(line)
        })?;
        let mut num_left = PASSES_MAX;
        for (rank, (line, text)) in lines.enumerate() {
            let passes = text.strip_prefix("rank ").and_then(|text| text.split_once(':'));
            let passes = passes.filter(|(number, _)| number.trim().parse() == Ok(rank));
            let expected = || ParseError(format!("expected 'rank {rank}:' followed by its passes"));
            let passes = passes.ok_or_else(expected).and_then(|(_, passes)| parse_passes(passes, num_left));
            let passes = passes.map_err(|error| error.at_line(line))?;
            num_left -= passes.len();
            schedule.ranks.push(passes);
        }
        match schedule.num_ranks() {
            found if found == num_ranks => Ok(schedule),
            found => Err(ParseError(format!("the header declares {num_ranks} ranks, but {found} follow"))),
        }
    }
}

fn parse_passes(text: &str, num_max: usize) -> Result<Vec<Pass>, ParseError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    if text.split(',').count() > num_max {
        return Err(ParseError(format!("more than {PASSES_MAX} passes")));
    }
    text.split(',').map(|pass| pass.trim().parse()).collect()
}
