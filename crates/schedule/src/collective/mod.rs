//! Collective algorithms as per-rank steps: pure data that is executed, timed and tested alike.
//!
//! # Canonical order
//! Every reduction gives each element as one fixed binary tree over the ranks, so all ranks, all
//! algorithms of this module and all transports compute the same bits. For a power of two it pairs
//! neighbours first: `(0 + 1) + (2 + 3)` for four ranks. Any other world size is `p + extra` ranks, with
//! `p` the largest power of two below it: the first `2 * extra` ranks are folded into pairs, and the tree
//! pairs the resulting `p` values: `((0 + 1) + 2) + (3 + 4)` for five ranks. The left operand always belongs
//! to the lower ranks. [`canonical_terms`] writes the tree down.
//!
//! # Cost
//! `N` ranks, `p` the largest power of two not above `N`, `extra = N - p`, a vector of `D` bytes.
//! Steps are those of the longest path; bytes are what one rank sends.
//!
//! | algorithm | steps | bytes sent by a rank |
//! |---|---|---|
//! | [`all_reduce_halving_doubling`] | `2 log2 p` (+ 2 if `extra > 0`) | `2 D (p - 1) / p`; folded pairs: + `D` each |
//! | [`all_reduce_recursive_doubling`] | `log2 p` (+ 2 if `extra > 0`) | `D log2 p`; folded pairs: + `D` each |
//! | [`broadcast_binomial`] | `ceil(log2 N)` | at most `D ceil(log2 N)` (the root); `D (N - 1)` over all ranks |
//! | [`all_gather_pairwise`] | `N - 1` | own block `* (N - 1)` |
//! | [`barrier_dissemination`] | `ceil(log2 N)` | 0 (headers only) |
//! | direct, by [`owned_range`] | 2 synchronisations | reads and writes `2 D (N - 1) / N` of others' memory |

mod all_reduce;
mod direct;
mod order;
mod spread;
#[cfg(test)]
mod tests;

pub use all_reduce::{all_reduce_halving_doubling, all_reduce_recursive_doubling};
pub use direct::owned_range;
pub use order::{Term, canonical_terms, num_partials};
pub use spread::{all_gather_pairwise, barrier_dissemination, broadcast_binomial};

use std::ops::Range;
use trireme_base::Rank;

/// One step of one rank: at most one message out and one in, which travel at the same time.
///
/// What is sent is the range as it was before the step, even where the received message changes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The message to send.
    pub send: Option<Outgoing>,
    /// The message to wait for.
    pub receive: Option<Incoming>,
}

/// A message out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Who gets it.
    pub to: Rank,
    /// The elements of the buffer it carries; may be empty, and is sent all the same.
    pub range: Range<usize>,
}

/// A message in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incoming {
    /// Who sends it.
    pub from: Rank,
    /// The elements of the buffer it is for.
    pub range: Range<usize>,
    /// What becomes of them.
    pub action: Action,
}

/// What a received message does to the range it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Replaces it.
    Copy,
    /// Is reduced with it; the left operand is the value of the lower rank.
    Reduce,
}

impl Step {
    /// A message out only.
    fn send(to: usize, range: Range<usize>) -> Self {
        Step { send: Some(Outgoing { to: Rank(to), range }), receive: None }
    }

    /// A message in only.
    fn receive(from: usize, range: Range<usize>, action: Action) -> Self {
        Step { send: None, receive: Some(Incoming { from: Rank(from), range, action }) }
    }

    /// A message out and one in.
    fn both(send: Outgoing, receive: Incoming) -> Self {
        Step { send: Some(send), receive: Some(receive) }
    }
}

/// Panics unless `rank` is one of `world_size` ranks: no algorithm has steps for another.
fn assert_member(rank: Rank, world_size: usize) {
    assert!(rank.0 < world_size, "rank {rank} is outside of a world of {world_size}");
}
