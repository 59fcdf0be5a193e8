use super::order::{Folding, Role};
use super::{Action, Incoming, Outgoing, Step, assert_member};
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
            let partner = Rank(folding.leader(leaf ^ distance));
            let middle = range.start.midpoint(range.end);
            let (lower, upper) = (range.start..middle, middle..range.end);
            let (kept, given) = if leaf & distance == 0 { (lower, upper) } else { (upper, lower) };
            steps.push(Step::both(
                Outgoing { to: partner, range: given },
                Incoming { from: partner, range: kept.clone(), action: Action::Reduce },
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
            let partner = Rank(folding.leader(leaf ^ distance));
            steps.push(Step::both(
                Outgoing { to: partner, range: 0..len },
                Incoming { from: partner, range: 0..len, action: Action::Reduce },
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
            steps.push(Step::send(leader, 0..len));
            steps.push(Step::receive(leader, 0..len, Action::Copy));
        }
        Role::Leader { leaf, follower } => {
            if let Some(follower) = follower {
                steps.push(Step::receive(follower, 0..len, Action::Reduce));
            }
            among_leaves(&folding, leaf, steps);
            if let Some(follower) = follower {
                steps.push(Step::send(follower, 0..len));
            }
        }
    }
}

/// The exchange that undoes a scattering one: each side gives back what it kept.
fn mirrored(step: &Step) -> Step {
    let (Some(send), Some(receive)) = (&step.send, &step.receive) else {
        unreachable!("reduce-scatter by halving is made of exchanges");
    };
    Step::both(
        Outgoing { to: receive.from, range: receive.range.clone() },
        Incoming { from: send.to, range: send.range.clone(), action: Action::Copy },
    )
}
