//! Finds the least recomputation that fits into a given memory.

mod in_flight;

pub(crate) use in_flight::fit_keeps_in_flight;

use crate::dry_run::DryRun;
use crate::offload::MemoryBounds;
use crate::sizes::BatchTensorSize;
use trireme_base::{MemoryUse, UnitPasses};
use trireme_schedule::{Action, Keep};

/// Bytes at two times: during the forward pass of a unit, and during its recomputation and backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PassBytes {
    pub(crate) forward: usize,
    pub(crate) backward: usize,
}

/// The activations that the forward pass of each unit keeps, and the cost of recomputing the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecomputationChoice {
    pub(crate) keeps: Vec<Keep>,
    /// Floating-point operations that are recomputed for a microbatch.
    pub(crate) operations: u64,
}

/// Maximum number of choices for which a dry run is done, after the first dry run. Another choice is tried only if the previous one needs
/// more memory than estimated.
const ATTEMPTS_MAX: usize = 8;

/// Returns the choice with the least recomputation among those that keep a step within `bounds`, and the memory use of the step. `run` does
/// a dry run of the program with a choice; in this program, microbatches run one after another. `batch` lists the tensors of a microbatch.
/// If no choice that was tried fits, returns the choice that needs the least memory.
///
/// The first dry run measures the memory for everything except activations. In this run, units keep only their inputs. Another choice may
/// need more of this memory, for example if parameters are gathered earlier. The next attempt then leaves less room for activations.
///
/// # Errors
/// Errors of `run`.
pub(crate) fn fit_keeps<E>(
    passes: &[UnitPasses],
    batch: &[BatchTensorSize],
    bounds: MemoryBounds,
    mut run: impl FnMut(&[Keep]) -> Result<DryRun, E>,
) -> Result<(RecomputationChoice, MemoryUse), E> {
    let least = inputs_only(passes);
    let found = run(&least.keeps)?;
    let (others, prediction) = (peaks_without_activations(passes.len(), batch, &found), found.memory);
    let mut room_total = bounds.device_budget(&prediction);
    let mut smallest = (least, prediction);
    let choose = |room_total: usize| {
        let room = |others: &PassBytes| PassBytes {
            forward: room_total.saturating_sub(others.forward),
            backward: room_total.saturating_sub(others.backward),
        };
        cheapest_keeps(passes, &others.iter().map(room).collect::<Vec<_>>())
    };
    let mut last: Option<RecomputationChoice> = None;
    for _ in 0..ATTEMPTS_MAX {
        let mut choice = choose(room_total);
        if last.is_some() && choice == last {
            // The reduced room still leads to the choice that does not fit.
            room_total = largest_where(room_total, |room| choose(room) != last);
            choice = choose(room_total);
        }
        let Some(choice) = choice.filter(|choice| Some(choice) != last.as_ref()) else { break };
        let found = run(&choice.keeps)?.memory;
        let excess = bounds.excess(&found);
        if excess == 0 {
            return Ok((choice, found));
        }
        last = Some(choice.clone());
        room_total = room_total.saturating_sub(excess);
        smallest = if found.total() < smallest.1.total() { (choice, found) } else { smallest };
    }
    Ok(smallest)
}

/// Returns the largest number below `end` that is `accepted`, or 0, by binary search: no number below an accepted one is rejected, because
/// a choice that does not fit into some room does not fit into less.
fn largest_where(end: usize, accepted: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if accepted(middle) { low = middle } else { high = middle }
    }
    low
}

/// Returns the choice in which every unit that keeps activations keeps only its input.
fn inputs_only(passes: &[UnitPasses]) -> RecomputationChoice {
    let keep = |passes: &UnitPasses| if passes.keeps_activations() { Keep::Input } else { Keep::All };
    let operations = passes
        .iter()
        .filter(|passes| passes.keeps_activations())
        .map(|passes| passes.forward_cost.operations());
    RecomputationChoice {
        keeps: passes.iter().map(keep).collect(),
        operations: operations.fold(0, u64::saturating_add),
    }
}

/// Returns, for each unit, the peak of all memory except kept activations during its passes. The tensors of microbatches are included.
fn peaks_without_activations(num_units: usize, batch: &[BatchTensorSize], run: &DryRun) -> Vec<PassBytes> {
    let mut others = vec![PassBytes::default(); num_units];
    for (&action, peaks) in run.program.actions.iter().zip(&run.action_peaks) {
        // Tensors of microbatches count as activations, but no unit keeps them. Each is freed after the backward pass of its first reader.
        let tensors = |is_counted: &dyn Fn(&BatchTensorSize) -> bool| -> usize {
            batch.iter().filter(|tensor| is_counted(tensor)).map(|tensor| tensor.bytes).sum()
        };
        let batches = run.program.header.num_microbatches * tensors(&|tensor| !tensor.readers.is_empty());
        let found = peaks.excluding_activations() + batches;
        let unit = &mut others[action.unit()];
        match action {
            Action::Forward { .. } => unit.forward = unit.forward.max(found),
            Action::Recompute { .. } | Action::Backward { .. } | Action::BackwardInput { .. } => {
                let freed = tensors(&|tensor| tensor.readers.iter().min() > Some(&action.unit()));
                unit.backward = unit.backward.max(found - freed);
            }
            _ => (),
        }
    }
    others
}

/// Returns the choice with the fewest recomputed operations whose activations fit into `room`, if microbatches run one after another. Among
/// equal choices, returns the one that keeps the fewest bytes. Units that [keep](UnitPasses::keeps_activations) no activations are not
/// recomputed. Returns `None` if no choice fits.
///
/// The algorithm is dynamic programming over prefixes of the units. Later units depend only on how many bytes a prefix keeps and how many
/// operations it recomputes, so only the Pareto-optimal choices of each prefix are extended. During the backward pass of a unit, the
/// activations of the units below are in memory. Cost: the square of the number of units, times the number of Pareto-optimal choices.
pub(crate) fn cheapest_keeps(passes: &[UnitPasses], room: &[PassBytes]) -> Option<RecomputationChoice> {
    let mut search = Search { passes, room, nodes: vec![Node::default()], fronts: Vec::new() };
    search.fronts = vec![Vec::new(); passes.len() + 1];
    search.fronts[0].push(0);
    for unit in 0..passes.len() {
        search.prune(unit);
        for index in 0..search.fronts[unit].len() {
            let node = search.fronts[unit][index];
            search.extend(unit, node);
        }
    }
    search.prune(passes.len());
    search.best()
}

/// A choice for a prefix of the units. The last segment of the prefix is a run of units that are recomputed together.
#[derive(Debug, Clone, Copy, Default)]
struct Node {
    kept: usize,
    /// Recomputed operations of the prefix.
    operations: u64,
    /// Index of the node for the units below the last segment.
    below: usize,
    /// The activations that the first unit of the last segment keeps. The other units keep nothing.
    keep: Keep,
    /// Number of units in the last segment.
    len: usize,
}

struct Search<'a> {
    passes: &'a [UnitPasses],
    /// Bytes available to activations, for each unit.
    room: &'a [PassBytes],
    nodes: Vec<Node>,
    /// Indices of the nodes, by the length of their prefix.
    fronts: Vec<Vec<usize>>,
}

impl Search<'_> {
    /// Drops the nodes of a prefix that are not Pareto-optimal.
    fn prune(&mut self, len: usize) {
        let nodes = &self.nodes;
        let front = &mut self.fronts[len];
        front.sort_by_key(|&node| (nodes[node].operations, nodes[node].kept));
        let mut least_kept = usize::MAX;
        front.retain(|&node| {
            let is_better = nodes[node].kept < least_kept;
            least_kept = least_kept.min(nodes[node].kept);
            is_better
        });
    }

    /// Adds the nodes that extend the node `below` by a segment which starts at `unit` and fits.
    fn extend(&mut self, unit: usize, below: usize) {
        let (passes, room) = (self.passes[unit], self.room[unit]);
        let kept_below = self.nodes[below].kept;
        if kept_below + passes.forward_peak > room.forward {
            return;
        }
        if kept_below + passes.backward_peak <= room.backward {
            self.push(unit, Node { kept: passes.saved, below, keep: Keep::All, len: 1, operations: 0 });
            let can_recompute =
                kept_below + passes.recompute_peak + self.output_grad_bytes(unit) <= room.backward;
            if passes.keeps_activations() && can_recompute {
                let (kept, operations) = (passes.products, passes.recompute_cost.operations());
                self.push(unit, Node { kept, operations, below, keep: Keep::Products, len: 1 });
            }
        }
        if passes.keeps_activations() {
            self.extend_by_segments(unit, below);
        }
    }

    /// Adds a node for each segment that starts at `first`, keeps only the input of its first unit, and fits.
    fn extend_by_segments(&mut self, first: usize, below: usize) {
        let kept = self.passes[first].input;
        let kept_below = self.nodes[below].kept;
        let (mut operations, mut saved) = (0_u64, 0);
        // Peak of recomputing the segment, without the output gradient that is in memory at the same time.
        let mut recompute_peak = 0;
        for unit in first..self.passes.len() {
            let (passes, room) = (self.passes[unit], self.room[unit]);
            if !passes.keeps_activations() {
                return;
            }
            let held = if unit > first { kept } else { 0 };
            let is_forward_fitting = kept_below + held + passes.forward_peak <= room.forward;
            let is_backward_fitting = kept_below + saved + passes.backward_peak <= room.backward;
            if !is_forward_fitting || !is_backward_fitting {
                // A longer segment contains these passes too, so it does not fit either.
                return;
            }
            recompute_peak = recompute_peak.max(saved + passes.forward_peak);
            saved += passes.saved;
            operations = operations.saturating_add(passes.forward_cost.operations());
            if kept_below + recompute_peak + self.output_grad_bytes(unit) <= room.backward {
                let len = unit + 1 - first;
                self.push(first, Node { kept, operations, below, keep: Keep::Input, len });
            }
        }
    }

    /// Returns the bytes of the output gradient of `unit`, which is in memory while `unit` is recomputed.
    fn output_grad_bytes(&self, unit: usize) -> usize {
        self.passes.get(unit + 1).map_or(0, |above| above.input_grad)
    }

    /// Adds a node whose last segment starts at `first`. The fields `kept` and `operations` of the argument count this segment alone.
    fn push(&mut self, first: usize, node: Node) {
        let Node { kept, operations, .. } = self.nodes[node.below];
        self.fronts[first + node.len].push(self.nodes.len());
        let operations = operations.saturating_add(node.operations);
        self.nodes.push(Node { kept: kept + node.kept, operations, ..node });
    }

    fn best(&self) -> Option<RecomputationChoice> {
        let &best = self.fronts[self.passes.len()].first()?;
        let mut keeps = Vec::new();
        let mut node = self.nodes[best];
        while node.len > 0 {
            keeps.extend(std::iter::repeat_n(Keep::Nothing, node.len - 1));
            keeps.push(node.keep);
            node = self.nodes[node.below];
        }
        keeps.reverse();
        Some(RecomputationChoice { keeps, operations: self.nodes[best].operations })
    }
}

#[cfg(test)]
mod tests;
