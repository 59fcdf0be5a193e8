//! Which keys a query sees, and how scores become weights.

use super::shape::AttentionShape;
use std::ops::Range;
use trireme_base::Positions;

/// Which keys a query sees, and how scores become weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionRule {
    /// A query sees no key after its own position; else all keys of its sequence.
    pub is_causal: bool,
    /// A causal query sees at most so many keys, the last of them at its own position (sliding window; Beltagy et al.,
    /// "Longformer", 2020).
    pub window: Option<usize>,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
    /// Scores `s` become `c tanh(s / c)` (Gemma team, "Gemma 2", 2024).
    pub soft_cap: Option<f32>,
}

impl AttentionRule {
    /// Causal, with scores of unit variance if queries and keys have it (Vaswani et al., 2017, section 3.2.1).
    pub fn causal(head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        AttentionRule { is_causal: true, window: None, scale, soft_cap: None }
    }

    /// The same, in which each query sees all keys.
    pub fn full(head_dim: usize) -> Self {
        AttentionRule { is_causal: false, ..AttentionRule::causal(head_dim) }
    }
}

/// Which positions of sequences the queries and keys of a kernel are of, and what queries see.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AttentionScope {
    /// What queries see.
    pub(crate) rule: AttentionRule,
    /// Of the queries of each sequence.
    pub(crate) queries: Positions,
    /// Of its keys.
    pub(crate) keys: Positions,
}

impl AttentionScope {
    /// All queries and keys of sequences.
    pub(crate) fn whole(shape: AttentionShape, rule: AttentionRule) -> Self {
        AttentionScope::after(0, shape, rule)
    }

    /// Queries that follow `num_earlier` positions, and all keys.
    pub(crate) fn after(num_earlier: usize, shape: AttentionShape, rule: AttentionRule) -> Self {
        let queries = Positions::run(num_earlier, shape.seq_len);
        AttentionScope { rule, queries, keys: Positions::run(0, num_earlier + shape.num_keys) }
    }

    /// Pairs of a query and a key that it sees, of one sequence and head, where none is padding and none in another document;
    /// saturates.
    pub(crate) fn num_pairs(&self) -> usize {
        let AttentionScope { rule, queries, keys } = self;
        let pairs = if rule.is_causal {
            let runs = queries
                .runs()
                .flat_map(|(_, queries)| keys.runs().map(move |(_, keys)| (queries.clone(), keys)));
            let seen = runs.map(|(queries, keys)| {
                // Those from the first position on, less those before the window.
                let outside =
                    rule.window.map_or(0, |window| num_not_after(queries.clone(), keys.clone(), window));
                num_not_after(queries, keys, 0) - outside
            });
            seen.sum()
        } else {
            queries.len() as u128 * keys.len() as u128
        };
        usize::try_from(pairs).unwrap_or(usize::MAX)
    }
}

/// Pairs of a query and a key at least `distance` positions before it.
fn num_not_after(queries: Range<usize>, keys: Range<usize>, distance: usize) -> u128 {
    let [start, end, first, distance] =
        [queries.start, queries.end, keys.start, distance].map(|at| at as u128);
    let num_keys = keys.len() as u128;
    // A query at `first + distance` sees one key, each later one another one more, until they see all.
    let growing = |end: u128| {
        let num_seeing = end.saturating_sub(first + distance);
        let num_partial = num_seeing.min(num_keys);
        num_partial * (num_partial + 1) / 2 + (num_seeing - num_partial) * num_keys
    };
    growing(end) - growing(start)
}

/// The keys of one sequence as its queries see them.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyView<'a> {
    pub(super) scope: AttentionScope,
    /// The position from which on keys are padding.
    pub(super) end: usize,
    /// For each query, the position at which its document begins; `None` if that of the sequence is one.
    pub(super) document_starts: Option<&'a [u32]>,
}

impl KeyView<'_> {
    /// The keys that a query sees.
    pub(super) fn of_query(&self, query: usize) -> Range<usize> {
        let AttentionScope { rule, queries, keys } = &self.scope;
        if !rule.is_causal {
            return 0..keys.before(self.end);
        }
        let end = queries.at(query) + 1;
        let start = rule.window.map_or(0, |window| end.saturating_sub(window));
        let start = self.document_starts.map_or(start, |starts| start.max(starts[query] as usize));
        keys.before(start.min(self.end))..keys.before(end.min(self.end))
    }

    /// The keys that some of these queries see.
    pub(super) fn of_queries(&self, queries: Range<usize>) -> Range<usize> {
        all_seen(&[self.of_query(queries.start), self.of_query(queries.end - 1)])
    }
}

/// The keys that some of several queries see, in order. Later queries begin and end with no earlier keys.
pub(super) fn all_seen(of_queries: &[Range<usize>]) -> Range<usize> {
    let seen = match of_queries {
        [] => 0..0,
        [first, ..] => first.start..of_queries[of_queries.len() - 1].end,
    };
    if seen.is_empty() { 0..0 } else { seen }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::AxisPlace;

    #[test]
    fn pairs_are_counted_as_they_are_seen() {
        let of_ranks = |len| {
            let zig_zag = AxisPlace::all(3).map(move |place| Positions::zig_zag(len, place));
            zig_zag.chain([Positions::run(0, len), Positions::run(5, 7)])
        };
        for (queries, keys) in of_ranks(18).flat_map(|queries| of_ranks(18).map(move |keys| (queries, keys)))
        {
            for window in [None, Some(1), Some(3), Some(20)] {
                let rule = AttentionRule { window, ..AttentionRule::causal(4) };
                let scope = AttentionScope { rule, queries, keys };
                let view = KeyView { scope, end: usize::MAX, document_starts: None };
                let seen: usize = (0..queries.len()).map(|query| view.of_query(query).len()).sum();
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
    fn a_query_sees_what_is_of_its_document_and_no_padding() {
        let (queries, keys) = (Positions::run(4, 4), Positions::zig_zag(12, AxisPlace::new(0, 2)));
        let scope = AttentionScope { rule: AttentionRule::causal(4), queries, keys };
        // Keys are at the positions 0, 1, 2, 9, 10 and 11.
        let seen = |end, document_starts: Option<&[u32]>| {
            let view = KeyView { scope, end, document_starts };
            (0..4).map(|query| view.of_query(query)).collect::<Vec<_>>()
        };
        assert_eq!(seen(usize::MAX, None), [0..3, 0..3, 0..3, 0..3]);
        assert_eq!(seen(2, None), [0..2, 0..2, 0..2, 0..2]);
        assert_eq!(seen(usize::MAX, Some(&[1, 1, 2, 7])), [1..3, 1..3, 2..3, 3..3]);
    }
}
