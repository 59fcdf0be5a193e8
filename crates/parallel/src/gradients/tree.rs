//! The canonical order of sums over microbatches: a binary tree over the global microbatch index.
//!
//! Terms arrive in order of index. As in a binary counter, equal neighbours are merged at once, so at most `log2(n) + 1` partial
//! sums are held. With a power of two of terms a rank, the tree over the ranks' sums continues a rank's tree.

/// Partial sums on their way to one.
#[derive(Debug)]
pub(crate) struct TreeSum<T> {
    /// Each with the logarithm of the number of terms in it, strictly falling.
    partials: Vec<(u32, T)>,
}

impl<T> TreeSum<T> {
    pub(crate) fn new() -> Self {
        // A step of 2^32 microbatches is beyond any run.
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

    /// The sum of all terms, if there were any; leaves nothing.
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
    fn neighbours_pair_first() {
        assert_eq!(tree(0..0), "");
        assert_eq!(tree(0..1), "0");
        assert_eq!(tree(0..4), "((0+1)+(2+3))");
        assert_eq!(tree(0..7), "(((0+1)+(2+3))+((4+5)+6))");
        // Two ranks' halves make the whole.
        assert_eq!(tree(0..8), format!("({}+{})", tree(0..4), tree(4..8)));
    }
}
