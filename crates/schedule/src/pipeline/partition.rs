//! Partition of a model's units into stages.

use std::ops::Range;

/// Partitions units, given their costs, into stages of one or more consecutive units. Minimizes the cost of the most expensive stage. Of
/// equal partitions, returns the one whose last stages have the fewest units.
///
/// Dynamic programming over prefixes of the units: the best partition of a prefix into `n` stages is the best partition of a shorter prefix
/// into `n - 1` stages and one more stage (linear partitioning; Narayanan et al., "PipeDream", 2019, section 3.1, with equal ranks). Cost:
/// the square of the number of units, times the number of stages.
///
/// # Panics
/// If `num_stages` is 0 or above the number of units.
pub fn partition_units(costs: &[u64], num_stages: usize) -> Vec<Range<usize>> {
    assert!(0 < num_stages && num_stages <= costs.len(), "{num_stages} stages of {} units", costs.len());
    let mut sums = vec![0_u64];
    costs.iter().for_each(|cost| sums.push(sums[sums.len() - 1].saturating_add(*cost)));
    // For each prefix: the least possible cost of its largest stage, and the start of its last stage in that partition.
    let mut largest: Vec<u64> = sums.clone();
    let mut starts: Vec<Vec<usize>> = vec![vec![0; sums.len()]];
    for stage in 1..num_stages {
        let mut next = (largest.clone(), vec![0; sums.len()]);
        for end in stage + 1..sums.len() {
            let candidates = (stage..end).map(|start| (largest[start].max(sums[end] - sums[start]), start));
            let best = candidates.min_by_key(|&(cost, start)| (cost, std::cmp::Reverse(start)));
            (next.0[end], next.1[end]) = best.expect("there is a unit for each stage");
        }
        largest = next.0;
        starts.push(next.1);
    }
    let mut stages = Vec::new();
    let mut end = costs.len();
    for starts in starts.iter().rev() {
        stages.push(starts[end]..end);
        end = starts[end];
    }
    stages.reverse();
    stages
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn largest(costs: &[u64], stages: &[Range<usize>]) -> u64 {
        stages.iter().map(|stage| costs[stage.clone()].iter().sum()).max().unwrap()
    }

    /// Returns the cost of the largest stage of the best partition, by exhaustive search.
    fn least(costs: &[u64], num_stages: usize) -> u64 {
        if num_stages == 1 {
            return costs.iter().sum();
        }
        let cuts = 1..=costs.len() + 1 - num_stages;
        let with = |at: usize| least(&costs[at..], num_stages - 1).max(costs[..at].iter().sum());
        cuts.map(with).min().unwrap()
    }

    proptest! {
        #[test]
        fn no_other_partition_is_better(costs in proptest::collection::vec(0_u64..30, 1..9), stages in 1..9_usize) {
            let num_stages = stages.min(costs.len());
            let stages = partition_units(&costs, num_stages);
            prop_assert_eq!(stages.len(), num_stages);
            prop_assert_eq!((stages[0].start, stages[num_stages - 1].end), (0, costs.len()));
            prop_assert!(stages.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(stages.iter().all(|stage| !stage.is_empty()));
            prop_assert_eq!(largest(&costs, &stages), least(&costs, num_stages));
        }
    }
}
