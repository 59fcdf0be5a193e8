use std::fmt;

/// One worker of a world or of a group: `0 <= rank < world_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

impl Rank {
    /// The rank that does what only one rank may do: rendezvous, console output, manifests.
    pub const ROOT: Rank = Rank(0);
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Numbers in ascending order as a text, such as "0-3, 8, 9"; "none" without any.
pub fn ranges(numbers: impl IntoIterator<Item = usize>) -> String {
    let numbers: Vec<usize> = numbers.into_iter().collect();
    let runs = numbers.chunk_by(|first, second| first + 1 == *second).map(|run| match run {
        [first, _, .., last] if run.len() > 2 => format!("{first}-{last}"),
        _ => run.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    });
    if numbers.is_empty() { "none".to_owned() } else { runs.collect::<Vec<_>>().join(", ") }
}

/// Ranks in ascending order as a text, such as "rank 3" or "ranks 0-3, 8".
pub fn ranks(numbers: impl IntoIterator<Item = usize>) -> String {
    let numbers: Vec<usize> = numbers.into_iter().collect();
    let noun = if numbers.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", ranges(numbers))
}

/// How a reduction combines two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Addition; integers wrap.
    Sum,
    /// The sum divided by the number of ranks: once, after the whole sum. Integers round toward zero.
    Mean,
    /// Multiplication; integers wrap.
    Prod,
    /// The larger of the two; NaN wins, so that a broken value is not hidden.
    Max,
    /// The smaller of the two; NaN wins.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_ranks_are_a_short_text() {
        assert_eq!(ranges([]), "none");
        assert_eq!(ranges([0, 1, 2, 8, 4, 5]), "0-2, 8, 4, 5");
        assert_eq!(ranks([7]), "rank 7");
        assert_eq!(ranks((0..64).chain([66])), "ranks 0-63, 66");
    }
}
