/// Formats numbers in the given order, with runs of three or more shortened: `0-3, 8, 9`. An empty list is `none`.
pub fn format_ranges<N: Into<usize>>(numbers: impl IntoIterator<Item = N>) -> String {
    let numbers: Vec<usize> = numbers.into_iter().map(Into::into).collect();
    let runs = numbers.chunk_by(|first, second| first + 1 == *second).map(|run| match run {
        [first, _, .., last] if run.len() > 2 => format!("{first}-{last}"),
        _ => run.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    });
    if numbers.is_empty() { "none".to_owned() } else { runs.collect::<Vec<_>>().join(", ") }
}

/// Formats ranks like [`format_ranges`], preceded by a noun: `rank 3` or `ranks 0-3, 8`.
pub fn format_ranks<N: Into<usize>>(ranks: impl IntoIterator<Item = N>) -> String {
    let ranks: Vec<usize> = ranks.into_iter().map(Into::into).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", format_ranges(ranks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    #[test]
    fn runs_of_numbers_are_shortened() {
        assert_eq!(format_ranges::<usize>([]), "none");
        assert_eq!(format_ranges([0usize, 1, 2, 8, 4, 5]), "0-2, 8, 4, 5");
        assert_eq!(format_ranks([Rank(7)]), "rank 7");
        assert_eq!(format_ranks((0usize..64).chain([66])), "ranks 0-63, 66");
    }
}
