//! Attention masks and the computation of weights from scores.

use super::shape::AttentionShape;
use std::ops::Range;
use trireme_base::Positions;

/// The mask of an attention operation, and how scores become weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionRule {
    /// Whether a query sees no key after its own position. Otherwise, it sees all keys of its sequence.
    pub is_causal: bool,
    /// Maximum number of keys that a causal query sees, the last of them at its own position (sliding window; Beltagy et al., "Longformer",
    /// 2020).
    pub window: Option<usize>,
    /// Factor of the dot products of queries and keys.
    pub scale: f32,
    /// Replaces scores `s` by `c tanh(s / c)` (Gemma team, "Gemma 2", 2024).
    pub soft_cap: Option<f32>,
}

impl AttentionRule {
    /// Creates a causal rule with the scale `1 / sqrt(head_dim)`: scores have unit variance if the elements of queries and keys do (Vaswani
    /// et al., 2017, section 3.2.1).
    pub fn causal(head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        AttentionRule { is_causal: true, window: None, scale, soft_cap: None }
    }

    /// Creates a rule without a mask; otherwise like [`causal`](AttentionRule::causal).
    pub fn full(head_dim: usize) -> Self {
        AttentionRule { is_causal: false, ..AttentionRule::causal(head_dim) }
    }
}

/// The positions of a kernel's queries and keys, and the mask.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttentionScope {
    /// The mask, and how scores become weights.
    pub(crate) rule: AttentionRule,
    /// Positions of the queries of each sequence.
    pub(crate) queries: Positions,
    /// Positions of the keys of each sequence.
    pub(crate) keys: Positions,
}

impl AttentionScope {
    /// Covers all queries and keys of sequences.
    pub(crate) fn whole(shape: AttentionShape, rule: AttentionRule) -> Self {
        AttentionScope::after(0, shape, rule)
    }

    /// Covers queries after `num_earlier` cached positions, and all keys.
    pub(crate) fn after(num_earlier: usize, shape: AttentionShape, rule: AttentionRule) -> Self {
        let queries = Positions::run(num_earlier, shape.seq_len);
        AttentionScope { rule, queries, keys: Positions::run(0, num_earlier + shape.num_keys) }
    }

    /// Returns the number of visible query-key pairs of one sequence and head, as if there were no padding and one document; saturates.
    pub(crate) fn num_pairs(&self) -> usize {
        let AttentionScope { rule, queries, keys } = self;
        let pairs = if rule.is_causal {
            let runs = queries
                .runs()
                .flat_map(|(_, queries)| keys.runs().map(move |(_, keys)| (queries.clone(), keys)));
            let seen = runs.map(|(queries, keys)| {
                // Pairs at distance 0 or more, minus pairs beyond the window.
                let outside =
                    rule.window.map_or(0, |window| num_distant_pairs(queries.clone(), keys.clone(), window));
                num_distant_pairs(queries, keys, 0) - outside
            });
            seen.sum()
        } else {
            queries.len() as u128 * keys.len() as u128
        };
        usize::try_from(pairs).unwrap_or(usize::MAX)
    }
}

/// Returns the number of pairs of a query and a key at least `distance` positions before it.
fn num_distant_pairs(queries: Range<usize>, keys: Range<usize>, distance: usize) -> u128 {
    let [start, end, first, distance] =
        [queries.start, queries.end, keys.start, distance].map(|at| at as u128);
    let num_keys = keys.len() as u128;
    // The query at `first + distance` sees one key, and each later one sees one more, until all keys are visible.
    let num_pairs_before = |end: u128| {
        let num_seeing = end.saturating_sub(first + distance);
        let num_partial = num_seeing.min(num_keys);
        num_partial * (num_partial + 1) / 2 + (num_seeing - num_partial) * num_keys
    };
    num_pairs_before(end) - num_pairs_before(start)
}

/// The mask of one sequence: the keys that each query sees.
#[derive(Debug, Clone, Copy)]
pub(super) struct SequenceMask<'a> {
    pub(super) scope: AttentionScope,
    /// Position from which on keys are padding.
    pub(super) end: usize,
    /// For each query, the position at which its document begins; `None` if the sequence is one document.
    pub(super) document_starts: Option<&'a [u32]>,
}

impl SequenceMask<'_> {
    /// Returns the keys that a query sees.
    pub(super) fn keys_of_query(&self, query: usize) -> Range<usize> {
        let AttentionScope { rule, queries, keys } = &self.scope;
        if !rule.is_causal {
            return 0..keys.num_before(self.end);
        }
        let end = queries.at(query) + 1;
        let start = rule.window.map_or(0, |window| end.saturating_sub(window));
        let start = self.document_starts.map_or(start, |starts| start.max(starts[query] as usize));
        keys.num_before(start.min(self.end))..keys.num_before(end.min(self.end))
    }

    /// Returns the range of keys that at least one of the queries sees.
    pub(super) fn keys_of_queries(&self, queries: Range<usize>) -> Range<usize> {
        seen_by_any(&[self.keys_of_query(queries.start), self.keys_of_query(queries.end - 1)])
    }
}

/// Returns the range of keys that at least one of several consecutive queries sees. Starts and ends must not decrease.
pub(super) fn seen_by_any(of_queries: &[Range<usize>]) -> Range<usize> {
    let seen = match of_queries {
        [] => 0..0,
        [first, ..] => first.start..of_queries[of_queries.len() - 1].end,
    };
    if seen.is_empty() { 0..0 } else { seen }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::AxisRank;

    #[test]
    fn pairs_are_counted_as_they_are_seen() {
        let of_ranks = |len| {
            let zig_zag = AxisRank::all(3).map(move |place| Positions::zig_zag(len, place));
            zig_zag.chain([Positions::run(0, len), Positions::run(5, 7)])
        };
        for (queries, keys) in of_ranks(18).flat_map(|queries| of_ranks(18).map(move |keys| (queries, keys)))
        {
            for window in [None, Some(1), Some(3), Some(20)] {
                let rule = AttentionRule { window, ..AttentionRule::causal(4) };
                let scope = AttentionScope { rule, queries, keys };
                let view = SequenceMask { scope, end: usize::MAX, document_starts: None };
                let seen: usize = (0..queries.len()).map(|query| view.keys_of_query(query).len()).sum();
                assert_eq!(scope.num_pairs(), seen, "{scope:?}");
            }
            let full = AttentionScope { rule: AttentionRule::full(4), queries, keys };
            assert_eq!(full.num_pairs(), queries.len() * keys.len());
        }
        let largest = Positions::run(0, usize::MAX);
        let scope = AttentionScope { rule: AttentionRule::causal(1), queries: largest, keys: largest };
        assert_eq!(scope.num_pairs(), usize::MAX);
    }

    #[test]
    fn a_query_sees_its_document_and_no_padding() {
        let (queries, keys) = (Positions::run(4, 4), Positions::zig_zag(12, AxisRank::new(0, 2)));
        let scope = AttentionScope { rule: AttentionRule::causal(4), queries, keys };
        // The keys have the positions 0, 1, 2, 9, 10 and 11.
        let seen = |end, document_starts: Option<&[u32]>| {
            let view = SequenceMask { scope, end, document_starts };
            (0..4).map(|query| view.keys_of_query(query)).collect::<Vec<_>>()
        };
        assert_eq!(seen(usize::MAX, None), [0..3, 0..3, 0..3, 0..3]);
        assert_eq!(seen(2, None), [0..2, 0..2, 0..2, 0..2]);
        assert_eq!(seen(usize::MAX, Some(&[1, 1, 2, 7])), [1..3, 1..3, 2..3, 3..3]);
    }
}
