//! Collective algorithms, as lists of steps for each rank. The lists are pure data: the same steps are executed, timed and tested.
//!
//! # Canonical order
//! Every canonical reduction ([`is_canonical`]) computes each element by one fixed binary tree over the ranks, so all ranks, all canonical
//! algorithms and all transports compute the same bits. With a power of two of ranks, the tree pairs neighbors first: `(0 + 1) + (2 + 3)`
//! for four ranks. Any other world size is `p + extra` ranks, with `p` the largest power of two below it. The first `2 * extra` ranks are
//! folded into pairs, and the tree pairs the resulting `p` values: `((0 + 1) + 2) + (3 + 4)` for five ranks. The left operand always
//! belongs to the lower ranks. [`canonical_order`] returns the tree as a stack program. Other reductions have a different order, which is
//! the same in every run.
//!
//! # Entry points
//! [`steps`] appends the steps of a rank for a [`Collective`] by an [`Algorithm`]. [`algorithms_for`] lists the algorithms that fit, and
//! [`choose`] predicts the fastest. A hierarchical algorithm is also available as a list of [`phases`], so that an executor may run the
//! phases within a host through shared memory.
//!
//! `docs/collectives.md` lists the steps, bytes and sources of all algorithms, and tests check them.
//!
//! # Adding a collective
//! A new algorithm is a [`FlatAlgorithm`] whose steps for one rank are a pure function in a file of this module, with its cost and source.
//! The interpreter in the tests checks it. A new operation is a [`CollectiveKind`] with its [`DataFlow`], from which the transports (shared
//! memory and links) derive which rank reads which elements. It also needs a method of `Group` (`comm/src/collectives.rs`), and its result
//! in `tests/oracle.rs` here and in `comm/tests/comm/support/operations.rs`.

mod algorithm;
mod all_gather;
mod all_to_all;
mod barrier;
mod blocks;
mod broadcast;
mod cost;
mod double_tree;
mod flat;
mod halving;
mod hierarchy;
mod hosts;
mod kind;
mod linear;
mod order;
mod rank_context;
mod ring;
mod simulate;
mod step;
#[cfg(test)]
mod tests;
mod tree;

pub use algorithm::{Algorithm, FlatAlgorithm, Hierarchy, Leaders};
pub use all_gather::all_gather_pairwise;
pub use all_to_all::{all_to_all_variable, all_to_all_variable_by_hosts};
pub use blocks::{block, owned_range, segments};
pub use cost::{CostModel, DirectCost, LinkCost, choose};
pub use hierarchy::{Members, Phase, phases};
pub use hosts::Hosts;
pub use kind::{Collective, CollectiveKind, Data, DataFlow, RootRole};
pub use order::{StackInstruction, canonical_order, num_partials};
pub use simulate::simulate;
pub use step::{Incoming, Memory, Outgoing, ReceiveAction, Side, Span, Step, scratch_len};

use blocks::Blocks;
use hosts::assert_member;
use trireme_base::Rank;

/// Returns whether `algorithm` implements `collective` on these hosts. [`FlatAlgorithm::Direct`] needs all ranks on one host.
pub fn fits(collective: Collective, algorithm: Algorithm, hosts: &Hosts) -> bool {
    match algorithm {
        Algorithm::Flat(FlatAlgorithm::Direct) => hosts.num_hosts() == 1,
        Algorithm::Flat(flat) => flat.fits(collective, &Blocks::even(hosts.world_size(), collective.len)),
        Algorithm::Hierarchical(levels) => hierarchy::fits(collective, levels, hosts),
    }
}

/// Returns all algorithms that implement `collective` on these hosts. Among algorithms with equal predicted times, [`choose`] returns
/// the first.
pub fn algorithms_for(collective: Collective, hosts: &Hosts) -> Vec<Algorithm> {
    let each = || FlatAlgorithm::ALL.into_iter();
    let levels = [Leaders::One, Leaders::All].into_iter().flat_map(|leaders| {
        each().flat_map(move |within| each().map(move |across| Hierarchy { leaders, within, across }))
    });
    let all = each().map(Algorithm::Flat).chain(levels.map(Algorithm::Hierarchical));
    all.filter(|&algorithm| fits(collective, algorithm, hosts)).collect()
}

/// Returns whether all reductions follow the canonical order. All canonical algorithms give equal bits. Also true for collectives that do
/// not reduce.
pub fn is_canonical(collective: Collective, algorithm: Algorithm, hosts: &Hosts) -> bool {
    match algorithm {
        Algorithm::Flat(flat) => flat.is_canonical(collective),
        Algorithm::Hierarchical(levels) => hierarchy::is_canonical(collective, levels, hosts),
    }
}

/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` or the root is outside the world, the algorithm does not fit ([`fits`]) or has no steps ([`FlatAlgorithm::Direct`]), or the
/// length of an all-to-all is not a multiple of the world size.
pub fn steps(collective: Collective, algorithm: Algorithm, hosts: &Hosts, rank: Rank, steps: &mut Vec<Step>) {
    let world_size = hosts.world_size();
    assert_member(rank, world_size);
    if let Some(root) = collective.root() {
        assert_member(root, world_size);
    }
    if let Collective { kind: CollectiveKind::AllToAll, len, .. } = collective {
        assert!(len.is_multiple_of(world_size), "{len} elements are no {world_size} equal blocks");
    }
    assert!(
        fits(collective, algorithm, hosts),
        "{algorithm} does not fit {collective} of {world_size} ranks"
    );
    match algorithm {
        Algorithm::Flat(flat) => {
            flat.steps(collective, rank.0, Blocks::even(world_size, collective.len), steps);
        }
        Algorithm::Hierarchical(levels) => {
            hierarchy::for_each_phase(collective, levels, hosts, rank, &mut |phase| {
                phase.steps(hosts, rank, steps);
            });
        }
    }
}
