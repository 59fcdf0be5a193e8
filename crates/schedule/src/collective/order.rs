use trireme_base::Rank;

/// One instruction of the canonical order, as a program for a stack of partial results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Term {
    /// Pushes the rank's elements.
    Load(Rank),
    /// Reduces the top with the rank's elements as the right operand.
    Reduce(Rank),
    /// Pops the right operand and reduces the new top with it.
    Combine,
}

/// The canonical order over `world_size` ranks in postfix form: run over a range of elements, it leaves
/// the result as the only partial on the stack, which never holds more than [`num_partials`].
///
/// # Panics
/// If `world_size` is 0.
pub fn canonical_terms(world_size: usize) -> Vec<Term> {
    let folding = Folding::new(world_size);
    let mut terms = Vec::new();
    push_subtree(&folding, 0, folding.num_leaves, &mut terms);
    terms
}

/// Partial results that [`canonical_terms`] needs at once.
pub fn num_partials(world_size: usize) -> usize {
    let mut depth = 0;
    let mut deepest = 0;
    for term in canonical_terms(world_size) {
        match term {
            Term::Load(_) => depth += 1,
            Term::Reduce(_) => {}
            Term::Combine => depth -= 1,
        }
        deepest = deepest.max(depth);
    }
    deepest
}

fn push_subtree(folding: &Folding, first: usize, end: usize, terms: &mut Vec<Term>) {
    if end - first == 1 {
        let rank = folding.leader(first);
        terms.push(Term::Load(Rank(rank)));
        if first < folding.extra {
            terms.push(Term::Reduce(Rank(rank + 1)));
        }
        return;
    }
    let middle = first.midpoint(end);
    push_subtree(folding, first, middle, terms);
    if end - middle == 1 && middle >= folding.extra {
        terms.push(Term::Reduce(Rank(folding.leader(middle))));
    } else {
        push_subtree(folding, middle, end, terms);
        terms.push(Term::Combine);
    }
}

/// How ranks become the leaves of a balanced tree: the first `extra` leaves are pairs of neighbours.
pub(super) struct Folding {
    pub(super) num_leaves: usize,
    pub(super) extra: usize,
}

/// What a rank does in a folded world.
pub(super) enum Role {
    /// Stands for leaf `leaf`, together with `follower` if there is one.
    Leader { leaf: usize, follower: Option<usize> },
    /// Hands its vector to `leader` and gets the result from it.
    Follower { leader: usize },
}

impl Folding {
    pub(super) fn new(world_size: usize) -> Self {
        assert!(world_size > 0, "a world has at least one rank");
        let num_leaves = 1 << world_size.ilog2();
        Folding { num_leaves, extra: world_size - num_leaves }
    }

    /// The rank that stands for a leaf.
    pub(super) fn leader(&self, leaf: usize) -> usize {
        if leaf < self.extra { 2 * leaf } else { leaf + self.extra }
    }

    pub(super) fn role(&self, rank: usize) -> Role {
        if rank >= 2 * self.extra {
            Role::Leader { leaf: rank - self.extra, follower: None }
        } else if rank.is_multiple_of(2) {
            Role::Leader { leaf: rank / 2, follower: Some(rank + 1) }
        } else {
            Role::Follower { leader: rank - 1 }
        }
    }
}
