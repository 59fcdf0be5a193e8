//! Which keys a query sees, and how scores become weights.

use std::ops::Range;

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

    /// Pairs of a query and a key that it sees, of one sequence and head; saturates.
    pub fn num_pairs(&self, num_queries: usize, num_keys: usize) -> usize {
        let (queries, keys) = (num_queries as u128, num_keys as u128);
        let pairs = if self.is_causal {
            // Each query sees one key more than the one before, up to so many.
            let most = self.window.map_or(keys, |window| keys.min(window as u128));
            let growing = queries.min(most);
            growing * (growing + 1) / 2 + (queries - growing) * most
        } else {
            queries * keys
        };
        usize::try_from(pairs).unwrap_or(usize::MAX)
    }
}

/// The keys of one sequence as its queries see them.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyView {
    pub(super) rule: AttentionRule,
    /// Keys before the first query.
    pub(super) num_earlier: usize,
    /// Keys that are not padding.
    pub(super) num_keys: usize,
}

impl KeyView {
    /// The keys that a query sees.
    pub(super) fn of_query(&self, query: usize) -> Range<usize> {
        if !self.rule.is_causal {
            return 0..self.num_keys;
        }
        let end = self.num_earlier + query + 1;
        let start = self.rule.window.map_or(0, |window| end.saturating_sub(window));
        start.min(self.num_keys)..end.min(self.num_keys)
    }

    /// The keys that some of these queries see.
    pub(super) fn of_queries(&self, queries: Range<usize>) -> Range<usize> {
        self.of_query(queries.start).start..self.of_query(queries.end - 1).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_counted_as_they_are_seen() {
        for num_queries in [1, 2, 5, 9] {
            for window in [None, Some(1), Some(3), Some(20)] {
                let rule = AttentionRule { window, ..AttentionRule::causal(4) };
                let view = KeyView { rule, num_earlier: 0, num_keys: num_queries };
                let seen: usize = (0..num_queries).map(|query| view.of_query(query).len()).sum();
                assert_eq!(rule.num_pairs(num_queries, num_queries), seen, "{num_queries} {window:?}");
            }
            let full = AttentionRule::full(4);
            assert_eq!(full.num_pairs(num_queries, 7), 7 * num_queries);
        }
        assert_eq!(AttentionRule::causal(1).num_pairs(usize::MAX, usize::MAX), usize::MAX);
    }
}
