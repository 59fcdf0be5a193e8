//! All-reduce along two binary trees at once (Sanders, Speck, Träff: "Two-tree algorithms for full bandwidth broadcast, reduction and
//! scan", 2009). Each tree carries half of the vector, chunk by chunk. A rank that is an inner node of one tree is a leaf of the other, so
//! all links are busy in both directions.

use super::blocks::Blocks;
use super::rank_context::RankContext;
use super::{Incoming, Outgoing, ReceiveAction, Side, Step};
use trireme_base::Rank;

/// Elements of a chunk, if there are not more than [`CHUNKS_MAX`] chunks.
const CHUNK_LEN: usize = 16 * 1024;
const CHUNKS_MAX: usize = 64;

/// Returns the number of chunks into which each half of a vector of `len` elements is split.
pub(super) fn num_chunks(len: usize) -> usize {
    (len / 2).div_ceil(CHUNK_LEN).clamp(1, CHUNKS_MAX)
}

/// Appends the steps of an all-reduce: up both trees, then down both.
///
/// All ranks share time slots. In each slot, a rank sends at most one message and receives at most one. An edge of color `c` carries
/// chunks in the slots whose number is `c` modulo 2. On the way up, an edge carries its first chunk when the subtree below it has had
/// enough slots to reduce that chunk.
pub(super) fn all_reduce(own: &RankContext, steps: &mut Vec<Step>) {
    all_reduce_by(num_chunks(own.blocks.len), own, steps);
}

pub(super) fn all_reduce_by(num_chunks: usize, own: &RankContext, steps: &mut Vec<Step>) {
    let (rank, world_size, len) = (own.rank, own.world_size(), own.blocks.len);
    if world_size == 1 {
        return;
    }
    let trees = Trees { world_size };
    let edges = trees.edges_of(rank);
    let height = world_size.ilog2() as usize;
    let chunk = |tree: usize, index: usize| {
        let half = Blocks::even(2, len).of(tree);
        let chunk = Blocks::even(num_chunks, half.len()).of(index);
        half.start + chunk.start..half.start + chunk.end
    };
    // The chunk that passes an edge in a slot. Each pair of slots carries one chunk, and the edge starts in pair `delay`, counted from 0.
    let passing = |edge: &Edge, slot: usize, delay: usize| {
        let index = (slot / 2).checked_sub(delay).filter(|&index| index < num_chunks)?;
        (slot % 2 == edge.color).then(|| chunk(edge.tree, index))
    };
    let slots = || 0..2 * (num_chunks + height);
    for slot in slots() {
        let on = |edge: &Edge| passing(edge, slot, edge.level);
        let send = edges.up.iter().flatten().find_map(|edge| Some(Outgoing::new(edge.parent, on(edge)?)));
        let receive = edges.down.iter().flatten().find_map(|edge| {
            let action = ReceiveAction::Reduce { own_side: edge.side_of_parent };
            Some(Incoming { from: Rank(edge.child), span: on(edge)?.into(), action })
        });
        push_exchange(send, receive, steps);
    }
    for slot in slots() {
        // The edges of the root start first. The subtrees below them have at most `height - 1` levels.
        let on = |edge: &Edge| passing(edge, slot, height - 1 - edge.level);
        let send = edges.down.iter().flatten().find_map(|edge| Some(Outgoing::new(edge.child, on(edge)?)));
        let receive = edges.up.iter().flatten().find_map(|edge| Some(Incoming::copy(edge.parent, on(edge)?)));
        push_exchange(send, receive, steps);
    }
}

fn push_exchange(send: Option<Outgoing>, receive: Option<Incoming>, steps: &mut Vec<Step>) {
    if send.is_some() || receive.is_some() {
        steps.push(Step::Exchange { send, receive });
    }
}

/// Two binary trees over the same ranks. A tree is a numbering of the ranks from 1. The parent of a number has the number's lowest set bit
/// cleared and the next higher bit set, so odd numbers are leaves and even numbers are inner nodes. Ranks with an even number in the first
/// tree have an odd number in the second.
struct Trees {
    world_size: usize,
}

/// The edge between a rank and its parent in one of the trees.
#[derive(Debug, Clone, Copy)]
struct Edge {
    tree: usize,
    child: usize,
    parent: usize,
    /// Number of levels below the child.
    level: usize,
    /// The side of a reduction on which the parent's elements are. Elements of lower tree numbers are on the left.
    side_of_parent: Side,
    color: usize,
}

struct Edges {
    /// Edges from a rank to its parents, one per tree. `None` in the tree of which the rank is the root.
    up: [Option<Edge>; 2],
    /// Edges from the same rank to its children, which are all in one of the trees.
    down: [Option<Edge>; 2],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Child,
    Parent,
}

impl Trees {
    /// Returns the number of a rank in a tree.
    fn number(&self, tree: usize, rank: usize) -> usize {
        match (tree, self.world_size.is_multiple_of(2)) {
            (0, _) => rank + 1,
            (_, true) => self.world_size - rank,
            (_, false) => (rank + 1) % self.world_size + 1,
        }
    }

    /// Returns the rank of a number in a tree.
    fn rank(&self, tree: usize, number: usize) -> usize {
        match (tree, self.world_size.is_multiple_of(2)) {
            (0, _) => number - 1,
            (_, true) => self.world_size - number,
            (_, false) => (number + self.world_size - 2) % self.world_size,
        }
    }

    /// Returns the number of the parent; 0 for the root. If the number that [`Trees`] defines exceeds `world_size`, the parent is the
    /// nearest ancestor that does not.
    fn parent(&self, number: usize) -> usize {
        let bit = number & number.wrapping_neg();
        let above = (number ^ bit) | (bit << 1);
        if above <= self.world_size { above } else { number ^ bit }
    }

    /// Returns the other number with the same parent.
    fn sibling(&self, number: usize) -> Option<usize> {
        self.children(self.parent(number)).into_iter().flatten().find(|&child| child != number)
    }

    fn children(&self, number: usize) -> [Option<usize>; 2] {
        let bit = number & number.wrapping_neg();
        let lower = (bit > 1).then(|| number - bit / 2);
        let distances = std::iter::successors(Some(bit / 2), |&distance| Some(distance / 2));
        let mut higher = distances.take_while(|&distance| distance > 0).map(|distance| number + distance);
        [lower, higher.find(|&higher| higher <= self.world_size)]
    }

    fn edges_of(&self, rank: usize) -> Edges {
        let numbers = [0, 1].map(|tree| self.number(tree, rank));
        let inner = usize::from(numbers[0] % 2 == 1);
        let children = self.children(numbers[inner]);
        Edges {
            up: [0, 1].map(|tree| self.edge(tree, numbers[tree])),
            down: children.map(|child| self.edge(inner, child?)),
        }
    }

    /// Returns the edge above a number; `None` for the root.
    fn edge(&self, tree: usize, number: usize) -> Option<Edge> {
        let parent = self.parent(number);
        (parent != 0).then(|| Edge {
            tree,
            child: self.rank(tree, number),
            parent: self.rank(tree, parent),
            level: number.trailing_zeros() as usize,
            side_of_parent: if number < parent { Side::Right } else { Side::Left },
            color: self.color((tree, number)),
        })
    }

    /// Returns the color of an edge, 0 or 1. The edges to a rank's two parents have different colors, and so have the edges to its two
    /// children. Each edge thus constrains at most two others, and colors alternate along the resulting chains and rings. In each chain or
    /// ring, the edge with the smallest pair of tree and number has color 0.
    fn color(&self, edge: (usize, usize)) -> usize {
        let mut lowest = (edge, 0);
        for first_end in [End::Child, End::Parent] {
            let (mut at, mut end, mut color) = (edge, first_end, 0);
            while let Some(bound) = self.conflicting_edge(at, end) {
                if bound == edge {
                    break;
                }
                at = bound;
                end = if end == End::Child { End::Parent } else { End::Child };
                color = 1 - color;
                lowest = lowest.min((at, color));
            }
        }
        lowest.1
    }

    /// Returns the other edge at an end of this edge, which must have a different color.
    fn conflicting_edge(&self, (tree, number): (usize, usize), end: End) -> Option<(usize, usize)> {
        if end == End::Parent {
            return self.sibling(number).map(|sibling| (tree, sibling));
        }
        let other = self.number(1 - tree, self.rank(tree, number));
        (self.parent(other) != 0).then_some((1 - tree, other))
    }
}
