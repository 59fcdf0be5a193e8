use super::blocks::Blocks;
use super::order::{Folding, Role};
use super::tree::RootedFolding;
use super::{Action, Incoming, Outgoing, Span, Step, assert_member};
use trireme_base::Rank;

/// All-reduce of `len` elements for long vectors: reduce-scatter by vector halving and distance doubling,
/// then the mirror of it (Thakur, Rabenseifner, Gropp: "Optimization of collective communication
/// operations in MPICH", 2005, on reduce and allreduce), with neighbours paired first so that the order is
/// canonical.
///
/// Appends the steps of `rank` to `steps`. A rank of a folded pair sends `len` elements more.
///
/// # Panics
/// If `rank` is not below `world_size`.
pub(super) fn all_reduce_halving_doubling(rank: Rank, world_size: usize, len: usize, steps: &mut Vec<Step>) {
    folded(rank, world_size, len, steps, |folding, leaf, steps| {
        let first_step = steps.len();
        halve(rank, leaf, folding.num_leaves, |leaf| folding.leader(leaf), len, steps);
        for index in (first_step..steps.len()).rev() {
            let (send, receive) = mirrored(&steps[index]);
            steps.push(Step::both(send, receive));
        }
    });
}

/// All-reduce of `len` elements for short vectors: partners at doubling distances exchange whole vectors
/// (same paper), which takes half the steps of [`all_reduce_halving_doubling`] and gives the same
/// bits.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` is not below `world_size`.
pub(super) fn all_reduce_recursive_doubling(
    rank: Rank,
    world_size: usize,
    len: usize,
    steps: &mut Vec<Step>,
) {
    folded(rank, world_size, len, steps, |folding, leaf, steps| {
        let mut distance = 1;
        while distance < folding.num_leaves {
            let partner = folding.leader(leaf ^ distance);
            steps.push(Step::both(
                Outgoing::new(partner, Span::vector(0..len)),
                Incoming::reduce(rank.0, partner, Span::vector(0..len)),
            ));
            distance *= 2;
        }
    });
}

/// Reduction to `root` for long vectors: the first half of [`all_reduce_halving_doubling`], then of each two partners
/// the one on the root's side takes over what the other has (same paper).
pub(super) fn reduce(rank: Rank, world_size: usize, root: Rank, len: usize, steps: &mut Vec<Step>) {
    let folding = RootedFolding::new(world_size, root);
    let Some(leaf) = folding.fold(rank.0, Span::vector(0..len), steps) else { return };
    let first_step = steps.len();
    halve(rank, leaf, folding.num_leaves(), |leaf| folding.leader(leaf), len, steps);
    for index in (first_step..steps.len()).rev() {
        let distance = 1 << (index - first_step);
        let (send, receive) = mirrored(&steps[index]);
        if leaf & distance != folding.root_leaf & distance {
            steps.push(Step::send(send));
            return;
        }
        steps.push(Step::receive(receive));
    }
}

/// Reduce-scatter in canonical order: partners at doubling distances exchange, of all blocks that both still
/// work on, those that the other one's side keeps (recursive halving with neighbours first). These lie apart, so each
/// is a message of its own. The second rank of a folded pair hands in its whole vector and gets its block.
///
/// The blocks must touch if the number of ranks is no power of two.
pub(super) fn reduce_scatter(rank: Rank, world_size: usize, blocks: &Blocks, steps: &mut Vec<Step>) {
    let folding = Folding::new(world_size);
    let whole = || Span::vector(blocks.of_all(0..world_size));
    let (leaf, follower) = match folding.role(rank.0) {
        Role::Follower { leader } => {
            steps.push(Step::send(Outgoing::new(leader, whole())));
            steps.push(Step::receive(Incoming::copy(leader, Span::vector(blocks.of(rank.0)))));
            return;
        }
        Role::Leader { leaf, follower } => (leaf, follower),
    };
    if let Some(follower) = follower {
        steps.push(Step::receive(Incoming::reduce(rank.0, follower, whole())));
    }
    let blocks_of = |leaf: usize| {
        let first = folding.leader(leaf);
        Span::vector(if leaf < folding.extra { blocks.of_all(first..first + 2) } else { blocks.of(first) })
    };
    let mut distance = 1;
    while distance < folding.num_leaves {
        let stride = 2 * distance;
        let partner_leaf = leaf ^ distance;
        let partner = folding.leader(partner_leaf);
        for others in (0..folding.num_leaves).step_by(stride) {
            steps.push(Step::both(
                Outgoing::new(partner, blocks_of(partner_leaf % stride + others)),
                Incoming::reduce(rank.0, partner, blocks_of(leaf % stride + others)),
            ));
        }
        distance = stride;
    }
    if let Some(follower) = follower {
        steps.push(Step::send(Outgoing::new(follower, Span::vector(blocks.of(follower)))));
    }
}

/// Reduce-scatter among a power of two of leaves: partners at doubling distances exchange halves of what both
/// still work on.
fn halve(
    rank: Rank,
    leaf: usize,
    num_leaves: usize,
    leader: impl Fn(usize) -> usize,
    len: usize,
    steps: &mut Vec<Step>,
) {
    let mut range = 0..len;
    let mut distance = 1;
    while distance < num_leaves {
        let partner = leader(leaf ^ distance);
        let middle = range.start.midpoint(range.end);
        let (lower, upper) = (range.start..middle, middle..range.end);
        let (kept, given) = if leaf & distance == 0 { (lower, upper) } else { (upper, lower) };
        steps.push(Step::both(
            Outgoing::new(partner, Span::vector(given)),
            Incoming::reduce(rank.0, partner, Span::vector(kept.clone())),
        ));
        range = kept;
        distance *= 2;
    }
}

/// Wraps an all-reduce among a power of two of leaves: followers hand in their vector and get the result.
fn folded(
    rank: Rank,
    world_size: usize,
    len: usize,
    steps: &mut Vec<Step>,
    among_leaves: impl FnOnce(&Folding, usize, &mut Vec<Step>),
) {
    assert_member(rank, world_size);
    let folding = Folding::new(world_size);
    match folding.role(rank.0) {
        Role::Follower { leader } => {
            steps.push(Step::send(Outgoing::new(leader, Span::vector(0..len))));
            steps.push(Step::receive(Incoming::copy(leader, Span::vector(0..len))));
        }
        Role::Leader { leaf, follower } => {
            if let Some(follower) = follower {
                steps.push(Step::receive(Incoming::reduce(rank.0, follower, Span::vector(0..len))));
            }
            among_leaves(&folding, leaf, steps);
            if let Some(follower) = follower {
                steps.push(Step::send(Outgoing::new(follower, Span::vector(0..len))));
            }
        }
    }
}

/// The exchange that undoes a scattering one: each side gives back what it kept.
fn mirrored(step: &Step) -> (Outgoing, Incoming) {
    let Step::Exchange { send: Some(send), receive: Some(receive) } = step else {
        unreachable!("reduce-scatter by halving is made of exchanges");
    };
    (
        Outgoing { to: receive.from, span: receive.span.clone() },
        Incoming { from: send.to, span: send.span.clone(), action: Action::Copy },
    )
}
