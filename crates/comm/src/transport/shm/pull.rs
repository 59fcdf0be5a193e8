//! Who reads what from whom, when every rank's input lies where all can read it.

use crate::Operation;
use std::ops::Range;
use trireme_base::Rank;
use trireme_schedule::collective::block;

/// A part of the vector of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// A member's block.
    Block(usize),
}

/// One thing to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pull {
    /// A part of one member's vector becomes a part of the own.
    Copy { from: usize, source: Part, target: Part },
    /// A part of all members' vectors is reduced and becomes that part of the own.
    Reduce(Part),
}

/// What a member's peers read of its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contribution {
    Nothing,
    Whole,
    OwnBlock,
    EveryBlock,
}

impl Part {
    /// The part's elements in a vector of `len`.
    pub(super) fn range(self, num_members: usize, len: usize) -> Range<usize> {
        match self {
            Part::Whole => 0..len,
            Part::Block(member) => block(Rank(member), num_members, len),
        }
    }

    /// The elements of a window of the part; the window counts from the part's first element.
    pub(super) fn window(self, num_members: usize, len: usize, window: &Range<usize>) -> Range<usize> {
        let all = self.range(num_members, len);
        all.end.min(all.start + window.start)..all.end.min(all.start + window.end)
    }
}

/// What member `own` reads, in the order in which it should. A member's own elements are read too, where
/// `out_of_place` says that they must get from one memory to another.
pub(super) fn pulls(
    operation: Operation,
    own: usize,
    num_members: usize,
    out_of_place: bool,
) -> impl Iterator<Item = Pull> {
    let is_root = operation.root().is_none_or(|root| root.0 == own);
    let reduced = match operation {
        Operation::AllReduce { .. } | Operation::Reduce { .. } if is_root => Some(Part::Whole),
        Operation::ReduceScatter { .. } => Some(Part::Block(own)),
        _ => None,
    };
    // Each member begins with another peer, so that they do not all read from one memory at a time.
    let peers = (0..num_members).map(move |distance| (own + distance) % num_members);
    let copies = peers.filter(move |&from| from != own || out_of_place).filter_map(move |from| {
        let copy = |source, target| Some(Pull::Copy { from, source, target });
        match operation {
            Operation::Broadcast { root, .. } if root.0 == from => copy(Part::Whole, Part::Whole),
            Operation::Scatter { root, .. } if root.0 == from => copy(Part::Block(own), Part::Block(own)),
            Operation::AllGather { .. } => copy(Part::Block(from), Part::Block(from)),
            Operation::Gather { .. } if is_root => copy(Part::Block(from), Part::Block(from)),
            Operation::AllToAll { .. } => copy(Part::Block(own), Part::Block(from)),
            _ => None,
        }
    });
    reduced.map(Pull::Reduce).into_iter().chain(copies)
}

/// What the peers of member `own` read of its input.
pub(super) fn contribution(operation: Operation, own: usize) -> Contribution {
    let is_root = operation.root().is_some_and(|root| root.0 == own);
    match operation {
        Operation::AllReduce { .. } | Operation::Reduce { .. } => Contribution::Whole,
        Operation::Broadcast { .. } if is_root => Contribution::Whole,
        Operation::Scatter { .. } if is_root => Contribution::EveryBlock,
        Operation::AllGather { .. } | Operation::Gather { .. } => Contribution::OwnBlock,
        Operation::ReduceScatter { .. } | Operation::AllToAll { .. } => Contribution::EveryBlock,
        _ => Contribution::Nothing,
    }
}

/// Elements of a stage that the windows of all staged blocks share, and elements over which windows run.
pub(super) fn staging(operation: Operation, num_members: usize, stage_len: usize) -> (usize, usize) {
    let (_, len) = operation.elements();
    let longest_block = block(Rank(0), num_members, len).len();
    match operation {
        Operation::AllReduce { .. } | Operation::Reduce { .. } | Operation::Broadcast { .. } => {
            (stage_len, len)
        }
        Operation::AllGather { .. } | Operation::Gather { .. } => (stage_len, longest_block),
        _ => (stage_len / num_members, longest_block),
    }
}
