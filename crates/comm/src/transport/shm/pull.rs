//! The reads of each rank in an operation whose inputs all ranks can read.

use crate::Operation;
use std::ops::Range;
use trireme_base::Rank;
use trireme_schedule::collective::{Collective, CollectiveKind, Data, DataFlow, block};

/// A part of an operation's vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Full,
    Block(usize),
}

/// One read from the members' inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pull {
    /// Copies a part of one member's vector to a part of this member's output.
    Copy { from: usize, source: Part, target: Part },
    /// Reduces a part of all members' vectors into the same part of this member's output.
    Reduce(Part),
}

/// The part of a member's input that its peers read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contribution {
    Nothing,
    Full,
    OwnBlock,
    EveryBlock,
}

impl Part {
    /// The part's elements in a vector of `len`.
    pub(super) fn range(self, num_members: usize, len: usize) -> Range<usize> {
        match self {
            Part::Full => 0..len,
            Part::Block(member) => block(Rank(member), num_members, len),
        }
    }

    /// The elements of a window of the part. `window` counts from the part's first element.
    pub(super) fn window(self, num_members: usize, len: usize, window: &Range<usize>) -> Range<usize> {
        let all = self.range(num_members, len);
        all.end.min(all.start + window.start)..all.end.min(all.start + window.end)
    }
}

fn collective_of(operation: Operation) -> Collective {
    operation.collective().expect("operations on vectors are collectives")
}

/// Returns the reads of member `own`, in the order in which it executes them. If `out_of_place`, they include its own elements, which are
/// copied to the output.
pub(super) fn pulls(
    operation: Operation,
    own: usize,
    num_members: usize,
    out_of_place: bool,
) -> impl Iterator<Item = Pull> {
    let collective = collective_of(operation);
    let DataFlow { input, output, reduces, .. } = collective.kind.data_flow();
    let has_output = collective.has_output(Rank(own));
    let target = if output == Data::Block { Part::Block(own) } else { Part::Full };
    let reduced = (reduces && has_output).then_some(Pull::Reduce(target));
    // Each member starts with a different peer, so that they do not all read from one memory at the same time.
    let peers = (0..num_members).map(move |distance| (own + distance) % num_members);
    let sources = peers.filter(move |&from| {
        let is_read = collective.has_input(Rank(from)) && (from != own || out_of_place);
        !reduces && has_output && is_read
    });
    let copies = sources.map(move |from| {
        let (source, target) = match input {
            Data::Blocks => (Part::Block(own), Part::Block(from)),
            Data::Block => (Part::Block(from), Part::Block(from)),
            Data::Whole | Data::Nothing => (target, target),
        };
        Pull::Copy { from, source, target }
    });
    reduced.into_iter().chain(copies)
}

/// The part of the input of member `own` that its peers read.
pub(super) fn contribution(operation: Operation, own: usize) -> Contribution {
    let collective = collective_of(operation);
    if collective.has_input(Rank(own)) {
        contribution_of_sources(collective.kind)
    } else {
        Contribution::Nothing
    }
}

/// The part of a member's input that its peers read, if the member has an input.
fn contribution_of_sources(kind: CollectiveKind) -> Contribution {
    let DataFlow { input, output, .. } = kind.data_flow();
    match (input, output) {
        (Data::Nothing, _) => Contribution::Nothing,
        (Data::Blocks, _) | (_, Data::Block) => Contribution::EveryBlock,
        (Data::Block, _) => Contribution::OwnBlock,
        (Data::Whole, _) => Contribution::Full,
    }
}

/// Returns two numbers of elements: how many of each staged part fit into a stage, which bounds the length of a window, and the total
/// length of all windows.
pub(super) fn window_lens(operation: Operation, num_members: usize, stage_len: usize) -> (usize, usize) {
    let collective = collective_of(operation);
    let longest_block = block(Rank(0), num_members, collective.len).len();
    match contribution_of_sources(collective.kind) {
        Contribution::Full => (stage_len, collective.len),
        Contribution::OwnBlock => (stage_len, longest_block),
        Contribution::EveryBlock | Contribution::Nothing => (stage_len / num_members, longest_block),
    }
}
