use super::order::{Folding, Role};
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
pub fn all_reduce_halving_doubling(rank: Rank, world_size: usize, len: usize, steps: &mut Vec<Step>) {
    folded(rank, world_size, len, steps, |folding, leaf, steps| {
        let first_step = steps.len();
        let mut range = 0..len;
        let mut distance = 1;
        while distance < folding.num_leaves {
            let partner = folding.leader(leaf ^ distance);
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
        for index in (first_step..steps.len()).rev() {
            let gather = mirrored(&steps[index]);
            steps.push(gather);
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
pub fn all_reduce_recursive_doubling(rank: Rank, world_size: usize, len: usize, steps: &mut Vec<Step>) {
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
fn mirrored(step: &Step) -> Step {
    let Step::Exchange { send: Some(send), receive: Some(receive) } = step else {
        unreachable!("reduce-scatter by halving is made of exchanges");
    };
    Step::both(
        Outgoing { to: receive.from, span: receive.span.clone() },
        Incoming { from: send.to, span: send.span.clone(), action: Action::Copy },
    )
}
