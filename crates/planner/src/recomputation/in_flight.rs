//! Chooses recomputation on a pipeline rank, which has several microbatches in flight.

use super::{RecomputationChoice, inputs_only};
use crate::dry_run::DryRun;
use crate::offload::MemoryBounds;
use trireme_base::{MemoryUse, UnitPasses};
use trireme_schedule::{Action, Keep, Program};

/// Returns a choice with which a pipeline rank stays within `bounds`, and its memory use. `run` does a dry run of the rank's program with a
/// choice. Units on other ranks keep the activations that `given` says. If the rank does not fit even if its units keep only their inputs,
/// returns that choice.
///
/// The search is greedy. It starts with units that keep only their inputs. Then it lets units keep more, in descending order of the
/// operations that are saved per byte (counting all microbatches in flight), as long as the step fits. Unlike
/// [`fit_keeps`](super::fit_keeps), this function recomputes every unit from its own input, and it may miss the least recomputation.
///
/// Cost: one run for each step of a binary search over the upgrades. A unit has at most two upgrades.
///
/// # Errors
/// Errors of `run`.
pub(crate) fn fit_keeps_in_flight<E>(
    passes: &[UnitPasses],
    given: &[Keep],
    bounds: MemoryBounds,
    mut run: impl FnMut(&[Keep]) -> Result<DryRun, E>,
) -> Result<(RecomputationChoice, MemoryUse), E> {
    let inputs = inputs_only(passes).keeps;
    let found = run(&inputs)?;
    let in_flight = most_in_flight(&found.program, passes.len());
    let mut upgrades: Vec<Upgrade> =
        (0..passes.len()).flat_map(|unit| Upgrade::of(unit, passes, in_flight[unit])).collect();
    upgrades.sort_by(|left, right| right.saved_per_byte().total_cmp(&left.saved_per_byte()));
    let choice = |num_upgrades: usize| {
        let mut keeps: Vec<Keep> = (0..passes.len())
            .map(|unit| if in_flight[unit] > 0 { inputs[unit] } else { given[unit] })
            .collect();
        upgrades[..num_upgrades].iter().for_each(|upgrade| keeps[upgrade.unit] = upgrade.keep);
        let held = (0..passes.len()).filter(|&unit| in_flight[unit] > 0);
        let repeated = held.map(|unit| keeps[unit].recompute_operations(&passes[unit]));
        let operations = repeated.fold(0, u64::saturating_add);
        RecomputationChoice { keeps, operations }
    };
    let mut best = (choice(0), found.memory);
    if !bounds.admit(&found.memory) {
        return Ok(best);
    }
    // Binary search: the first `fits` upgrades fit, and the first `too_many` do not. The search starts with all upgrades, because they
    // often fit.
    let (mut fits, mut too_many) = (0, upgrades.len() + 1);
    let mut next = upgrades.len();
    while too_many - fits > 1 {
        let choice = choice(next);
        let prediction = run(&choice.keeps)?.memory;
        if bounds.admit(&prediction) {
            (fits, best) = (next, (choice, prediction));
        } else {
            too_many = next;
        }
        next = fits + (too_many - fits) / 2;
    }
    Ok(best)
}

/// Returns for each unit the maximum number of microbatches that have run forward but not backward; 0 if the unit is on another rank.
fn most_in_flight(program: &Program, num_units: usize) -> Vec<usize> {
    let (mut now, mut most) = (vec![0_usize; num_units], vec![0; num_units]);
    for action in &program.actions {
        match *action {
            Action::Forward { unit, .. } => {
                now[unit] += 1;
                most[unit] = most[unit].max(now[unit]);
            }
            Action::Backward { unit, .. } | Action::BackwardInput { unit, .. } => now[unit] -= 1,
            _ => (),
        }
    }
    most
}

/// A change of a unit's choice to one that keeps more activations.
struct Upgrade {
    unit: usize,
    keep: Keep,
    /// Operations of a microbatch that are no longer recomputed.
    operations: u64,
    /// Additional bytes for all microbatches in flight.
    bytes: usize,
}

impl Upgrade {
    /// Returns the upgrades of a unit, in descending order of the operations saved per byte.
    fn of(unit: usize, passes: &[UnitPasses], in_flight: usize) -> Vec<Upgrade> {
        let passes = &passes[unit];
        if in_flight == 0 || !passes.keeps_activations() {
            return Vec::new();
        }
        let (forward, recompute) = (passes.forward_cost.operations(), passes.recompute_cost.operations());
        let upgrade = |keep, operations: u64, [from, to]: [usize; 2]| {
            let bytes = in_flight * to.saturating_sub(from);
            Upgrade { unit, keep, operations, bytes }
        };
        let products =
            upgrade(Keep::Products, forward.saturating_sub(recompute), [passes.input, passes.products]);
        let rest = upgrade(Keep::All, recompute, [passes.products, passes.saved]);
        if products.saved_per_byte() >= rest.saved_per_byte() {
            return vec![products, rest];
        }
        vec![upgrade(Keep::All, forward, [passes.input, passes.saved])]
    }

    fn saved_per_byte(&self) -> f64 {
        self.operations as f64 / self.bytes.max(1) as f64
    }
}
