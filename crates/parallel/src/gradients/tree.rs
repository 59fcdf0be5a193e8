//! The canonical order of sums over microbatches: a binary tree over the global microbatch index.
//!
//! Terms arrive in index order. As in a binary counter, two adjacent partial sums of the same size are merged at once. So at most
//! `log2(n)+1` partial sums are stored. If the number of terms per rank is a power of two, the tree over the sums of the ranks continues
//! each rank's tree.

/// A sum over a binary tree whose terms arrive one by one.
#[derive(Debug)]
pub(crate) struct TreeSum<T> {
    /// Partial sums, each with the base-2 logarithm of its number of terms, strictly decreasing.
    partials: Vec<(u32, T)>,
}

impl<T> TreeSum<T> {
    pub(crate) fn new() -> Self {
        // 2^32 terms are more microbatches than any step has.
        TreeSum { partials: Vec::with_capacity(33) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.partials.is_empty()
    }

    /// Adds the next term. `add(left, right)` adds `right` to `left`.
    pub(crate) fn push(&mut self, term: T, mut add: impl FnMut(&mut T, T)) {
        self.partials.push((0, term));
        while let [.., (left, _), (right, _)] = self.partials[..]
            && left == right
        {
            self.merge_last(&mut add);
        }
    }

    /// Returns the sum of all terms, or `None` if there were none. The sum is empty afterwards.
    pub(crate) fn finish(&mut self, mut add: impl FnMut(&mut T, T)) -> Option<T> {
        while self.partials.len() > 1 {
            self.merge_last(&mut add);
        }
        self.partials.pop().map(|(_, sum)| sum)
    }

    fn merge_last(&mut self, add: &mut impl FnMut(&mut T, T)) {
        let (_, right) = self.partials.pop().expect("two partial sums to merge");
        let (level, left) = self.partials.last_mut().expect("two partial sums to merge");
        add(left, right);
        *level += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(terms: std::ops::Range<usize>) -> String {
        let mut sum = TreeSum::new();
        for term in terms {
            sum.push(term.to_string(), |left, right| *left = format!("({left}+{right})"));
        }
        let root = sum.finish(|left, right| *left = format!("({left}+{right})")).unwrap_or_default();
        assert!(sum.partials.is_empty());
        root
    }

    #[test]
    fn neighbors_pair_first() {
        assert_eq!(tree(0..0), "");
        assert_eq!(tree(0..1), "0");
        assert_eq!(tree(0..4), "((0+1)+(2+3))");
        assert_eq!(tree(0..7), "(((0+1)+(2+3))+((4+5)+6))");
        // The trees of two ranks form the tree of all terms.
        assert_eq!(tree(0..8), format!("({}+{})", tree(0..4), tree(4..8)));
    }
}
