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

/// Memory that steps work on, in elements of the operation's dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    /// What the operation gives back. An operation in place finds its input here, too.
    Vector,
    /// What an operation out of place reads, and leaves as it is.
    Input,
    /// Memory of the executor, as long as [`scratch_len`] of a rank's steps; undefined at first.
    Scratch,
}

/// A range of elements of some memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Where.
    pub memory: Memory,
    /// Which elements.
    pub range: Range<usize>,
}

/// One step of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// At most one message out and one in, which travel at the same time. What is sent are the elements as they
    /// were before the step, even where the received message changes them.
    Exchange {
        /// The message to send.
        send: Option<Outgoing>,
        /// The message to wait for.
        receive: Option<Incoming>,
    },
    /// Copies elements within the rank; the spans do not overlap.
    Copy {
        /// From here.
        from: Span,
        /// To here; as long as `from`.
        to: Span,
    },
}

/// A message out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// Who gets it.
    pub to: Rank,
    /// The elements it carries; may be empty, and is sent all the same.
    pub span: Span,
}

/// A message in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incoming {
    /// Who sends it.
    pub from: Rank,
    /// The elements it is for.
    pub span: Span,
    /// What becomes of them.
    pub action: Action,
}

/// What a received message does to the elements it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Replaces them.
    Copy,
    /// Is reduced with them.
    Reduce {
        /// On which side of the operation the elements already there stand.
        own: Side,
    },
}

/// A side of an operation with two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The left operand.
    Left,
    /// The right operand.
    Right,
}

impl Span {
    /// Elements of [`Memory::Vector`].
    pub fn vector(range: Range<usize>) -> Self {
        Span { memory: Memory::Vector, range }
    }

    /// Elements of [`Memory::Input`].
    pub fn input(range: Range<usize>) -> Self {
        Span { memory: Memory::Input, range }
    }

    /// Elements of [`Memory::Scratch`].
    pub fn scratch(range: Range<usize>) -> Self {
        Span { memory: Memory::Scratch, range }
    }
}

impl Outgoing {
    /// A message out.
    pub fn new(to: usize, span: Span) -> Self {
        Outgoing { to: Rank(to), span }
    }
}

impl Incoming {
    /// A message that replaces what was there.
    pub fn copy(from: usize, span: Span) -> Self {
        Incoming { from: Rank(from), span, action: Action::Copy }
    }

    /// A message that is reduced with what is there; the value of the lower rank is the left operand.
    pub fn reduce(own: usize, from: usize, span: Span) -> Self {
        let own = if own < from { Side::Left } else { Side::Right };
        Incoming { from: Rank(from), span, action: Action::Reduce { own } }
    }
}

impl Step {
    /// A message out only.
    pub fn send(send: Outgoing) -> Self {
        Step::Exchange { send: Some(send), receive: None }
    }

    /// A message in only.
    pub fn receive(receive: Incoming) -> Self {
        Step::Exchange { send: None, receive: Some(receive) }
    }

    /// A message out and one in.
    pub fn both(send: Outgoing, receive: Incoming) -> Self {
        Step::Exchange { send: Some(send), receive: Some(receive) }
    }

    fn spans(&self) -> impl Iterator<Item = &Span> {
        let spans = match self {
            Step::Exchange { send, receive } => {
                [send.as_ref().map(|send| &send.span), receive.as_ref().map(|receive| &receive.span)]
            }
            Step::Copy { from, to } => [Some(from), Some(to)],
        };
        spans.into_iter().flatten()
    }
}

/// Elements of [`Memory::Scratch`] that a rank's steps use.
pub fn scratch_len(steps: &[Step]) -> usize {
    let scratch = steps.iter().flat_map(Step::spans).filter(|span| span.memory == Memory::Scratch);
    scratch.map(|span| span.range.end).max().unwrap_or(0)
}

/// Panics unless `rank` is one of `world_size` ranks: no algorithm has steps for another.
fn assert_member(rank: Rank, world_size: usize) {
    assert!(rank.0 < world_size, "rank {rank} is outside of a world of {world_size}");
}
