//! The least recomputation that fits into a given memory.

mod in_flight;

pub(crate) use in_flight::fit_keeps_in_flight;

use crate::offload::MemoryBounds;
use crate::sizes::BatchMemory;
use crate::usage::DryRun;
use trireme_base::{MemoryUse, UnitPasses};
use trireme_schedule::{Action, Keep};

/// Bytes while a unit's passes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PassBytes {
    pub(crate) forward: usize,
    /// During recomputation and backward.
    pub(crate) backward: usize,
}

/// What each unit's forward pass keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    /// For each unit.
    pub(crate) keeps: Vec<Keep>,
    /// Floating-point operations of a microbatch that are made again.
    pub(crate) operations: u64,
}

/// Choices that are run at most, where one takes more than was reckoned with.
const NUM_ATTEMPTS: usize = 8;

/// The least recomputation with which a step takes no more than `bounds`, with what it takes; `run` makes the program of a choice,
/// with one microbatch after the other, and finds what it takes. `batch` are the tensors of a microbatch.
///
/// What all but activations take is looked at where every unit that [keeps](UnitPasses::keeps) something keeps its input; where another
/// choice takes more, as with parameters that are gathered earlier, there is less room in a next attempt. If nothing fits, of
/// what was tried, the choice that takes least.
///
/// # Errors
/// Those of `run`.
pub(crate) fn fit_keeps<E>(
    passes: &[UnitPasses],
    batch: &[BatchMemory],
    bounds: MemoryBounds,
    mut run: impl FnMut(&[Keep]) -> Result<DryRun, E>,
) -> Result<(Choice, MemoryUse), E> {
    let least = inputs_only(passes);
    let found = run(&least.keeps)?;
    let (others, prediction) = (others(passes.len(), batch, &found), found.prediction);
    let mut room_total = bounds.device_total(&prediction);
    let mut smallest = (least, prediction);
    let mut last: Option<(Vec<Keep>, usize)> = None;
    let mut num_runs = 0;
    while num_runs < NUM_ATTEMPTS && room_total > 0 {
        let room = |others: &PassBytes| PassBytes {
            forward: room_total.saturating_sub(others.forward),
            backward: room_total.saturating_sub(others.backward),
        };
        let room: Vec<PassBytes> = others.iter().map(room).collect();
        let Some(choice) = choose_keeps(passes, &room) else { break };
        if let Some((_, excess)) = last.as_ref().filter(|(keeps, _)| *keeps == choice.keeps) {
            // It was reckoned with less room than there was.
            room_total = room_total.saturating_sub(*excess);
            continue;
        }
        let found = run(&choice.keeps)?.prediction;
        num_runs += 1;
        let excess = bounds.excess(&found);
        if excess == 0 {
            return Ok((choice, found));
        }
        last = Some((choice.keeps.clone(), excess));
        room_total = room_total.saturating_sub(excess);
        smallest = if found.total() < smallest.1.total() { (choice, found) } else { smallest };
    }
    Ok(smallest)
}

/// Every unit that keeps something keeps its input.
fn inputs_only(passes: &[UnitPasses]) -> Choice {
    let keep = |passes: &UnitPasses| if passes.keeps() { Keep::Input } else { Keep::All };
    let operations =
        passes.iter().filter(|passes| passes.keeps()).map(|passes| passes.forward_cost.operations());
    Choice { keeps: passes.iter().map(keep).collect(), operations: operations.fold(0, u64::saturating_add) }
}

/// What is in use beside activations during each unit's passes, at most.
fn others(num_units: usize, batch: &[BatchMemory], run: &DryRun) -> Vec<PassBytes> {
    let mut others = vec![PassBytes::default(); num_units];
    for (&action, peaks) in run.program.actions.iter().zip(&run.lines) {
        // The tensors of microbatches are activations that no unit keeps: each until its first reader has run backward.
        let tensors = |is_one: &dyn Fn(&BatchMemory) -> bool| -> usize {
            batch.iter().filter(|tensor| is_one(tensor)).map(|tensor| tensor.bytes).sum()
        };
        let batches = run.program.outline.num_microbatches * tensors(&|tensor| !tensor.readers.is_empty());
        let found = peaks.besides_activations() + batches;
        let unit = &mut others[action.unit()];
        match action {
            Action::Forward { .. } => unit.forward = unit.forward.max(found),
            Action::Recompute { .. } | Action::Backward { .. } | Action::BackwardInput { .. } => {
                let gone = tensors(&|tensor| tensor.readers.iter().min() > Some(&action.unit()));
                unit.backward = unit.backward.max(found - gone);
            }
            _ => (),
        }
    }
    others
}

/// The choice that makes least again and whose activations fit into `room`, where microbatches run one after the other; of
/// equal ones, the one that keeps least. Units that [keep](UnitPasses::keeps) nothing for later are not recomputed.
///
/// Dynamic programming over prefixes of the units: of a prefix, only how much it keeps and makes again counts for what comes
/// after, so of all choices for it the ones stay that no other beats in both. Backward of a unit works beside what the units
/// below keep. Cost: the square of the units, times the choices that stay.
pub(crate) fn choose_keeps(passes: &[UnitPasses], room: &[PassBytes]) -> Option<Choice> {
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

/// A choice for a prefix of the units.
#[derive(Debug, Clone, Copy, Default)]
struct Node {
    kept: usize,
    /// Operations that it makes again.
    operations: u64,
    /// The choice for the units below its last piece.
    below: usize,
    /// What the first unit of the last piece keeps; the others keep nothing.
    keep: Keep,
    /// Units of the last piece.
    len: usize,
}

struct Search<'a> {
    passes: &'a [UnitPasses],
    /// Bytes that activations may take.
    room: &'a [PassBytes],
    nodes: Vec<Node>,
    /// For each length of a prefix, choices for it.
    fronts: Vec<Vec<usize>>,
}

impl Search<'_> {
    /// Drops the choices for a prefix that another one beats.
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

    /// All that may come after the choice `below` for the units below `unit`.
    fn extend(&mut self, unit: usize, below: usize) {
        let (passes, room) = (self.passes[unit], self.room[unit]);
        let kept_below = self.nodes[below].kept;
        if kept_below + passes.forward_peak > room.forward {
            return;
        }
        if kept_below + passes.backward_peak <= room.backward {
            self.push(unit, Node { kept: passes.record, below, keep: Keep::All, len: 1, operations: 0 });
            let is_renewable = kept_below + passes.renewal_peak + self.grad(unit) <= room.backward;
            if passes.keeps() && is_renewable {
                let (kept, operations) = (passes.products, passes.renewal_cost.operations());
                self.push(unit, Node { kept, operations, below, keep: Keep::Products, len: 1 });
            }
        }
        if passes.keeps() {
            self.extend_by_segments(unit, below);
        }
    }

    /// Segments of units, of which the first keeps its input.
    fn extend_by_segments(&mut self, first: usize, below: usize) {
        let kept = self.passes[first].input;
        let during = self.nodes[below].kept;
        let (mut operations, mut records) = (0_u64, 0);
        // Of recomputation, before the gradient is added; and of backward.
        let mut made_again = 0;
        for unit in first..self.passes.len() {
            let (passes, room) = (self.passes[unit], self.room[unit]);
            if !passes.keeps() {
                return;
            }
            let held = if unit > first { kept } else { 0 };
            let is_forward_fitting = during + held + passes.forward_peak <= room.forward;
            let is_backward_fitting = during + records + passes.backward_peak <= room.backward;
            if !is_forward_fitting || !is_backward_fitting {
                // A longer segment contains the same passes.
                return;
            }
            made_again = made_again.max(records + passes.forward_peak);
            records += passes.record;
            operations = operations.saturating_add(passes.forward_cost.operations());
            if during + made_again + self.grad(unit) <= room.backward {
                let len = unit + 1 - first;
                self.push(first, Node { kept, operations, below, keep: Keep::Input, len });
            }
        }
    }

    /// The gradient that waits while `unit` is recomputed.
    fn grad(&self, unit: usize) -> usize {
        self.passes.get(unit + 1).map_or(0, |above| above.input_grad)
    }

    /// Adds a choice whose last piece, which begins at `first`, keeps and makes again what `node` says.
    fn push(&mut self, first: usize, node: Node) {
        let Node { kept, operations, .. } = self.nodes[node.below];
        self.fronts[first + node.len].push(self.nodes.len());
        let operations = operations.saturating_add(node.operations);
        self.nodes.push(Node { kept: kept + node.kept, operations, ..node });
    }

    fn best(&self) -> Option<Choice> {
        let &best = self.fronts[self.passes.len()].first()?;
        let mut keeps = Vec::new();
        let mut node = self.nodes[best];
        while node.len > 0 {
            keeps.extend(std::iter::repeat_n(Keep::Nothing, node.len - 1));
            keeps.push(node.keep);
            node = self.nodes[node.below];
        }
        keeps.reverse();
        Some(Choice { keeps, operations: self.nodes[best].operations })
    }
}

#[cfg(test)]
mod tests;
