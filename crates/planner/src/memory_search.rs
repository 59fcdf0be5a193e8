//! Chooses recomputation and offloading so that a step fits into memory on every pipeline rank.

use crate::dry_run::DryRun;
use crate::offload::{LayoutCandidate, MemoryBounds, fit_layout};
use crate::recomputation::{fit_keeps, fit_keeps_in_flight};
use crate::sizes::{BatchTensorSize, ModelSizes};
use trireme_base::{Bytes, MemoryUse, UnitPasses};
use trireme_schedule::{Action, Keep, Program, StateClass, StateLayout, Tier};

/// Choices that change the memory use of a step, but not its results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryChoices {
    /// The activations that the forward pass of each unit keeps, in the model's order.
    pub keeps: Vec<Keep>,
    /// The layout: which state ranks shard, and where it is stored between its uses.
    pub state: StateLayout,
}

/// The choices that [`MemorySearch::choose`] may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenChoices {
    /// Whether the search may choose which activations units keep.
    pub may_choose_keeps: bool,
    /// The classes of state that may be offloaded.
    pub offloadable: Vec<StateClass>,
}

/// A search for [`MemoryChoices`] with which the workers of every pipeline rank stay within their memory bounds. `E` is the error type of a
/// dry run.
///
/// The callbacks receive the index of a pipeline rank, from 0.
pub struct MemorySearch<'a, E> {
    /// Returns the sizes of the model's units on a worker of a pipeline rank.
    pub sizes: &'a dyn Fn(usize) -> Result<ModelSizes, E>,
    /// Memory and cost of the passes of each unit, in the model's order.
    pub passes: &'a [UnitPasses],
    /// The tensors of a microbatch.
    pub batch: &'a [BatchTensorSize],
    /// The bounds of each worker.
    pub bounds: MemoryBounds,
    /// Number of pipeline ranks.
    pub num_pipeline_ranks: usize,
    /// Generates the program of a pipeline rank from choices.
    pub program: &'a dyn Fn(usize, &MemoryChoices) -> Program,
    /// Does a dry run of a pipeline rank's program with choices.
    pub run: &'a dyn Fn(usize, &MemoryChoices) -> Result<DryRun, E>,
}

impl<E> MemorySearch<'_, E> {
    /// Returns choices that fit, and a line of text for users about each choice that the search made. If no choices fit, returns the
    /// choices that need the least memory. Choices that are not `open` stay as `given`.
    ///
    /// Recomputation is tried first, because it needs no host memory or disk. If even full recomputation does not suffice, state is
    /// offloaded, and recomputation is then reduced to the amount that is still needed.
    ///
    /// # Errors
    /// The error of a dry run.
    pub fn choose(
        &self,
        given: MemoryChoices,
        open: &OpenChoices,
    ) -> Result<(MemoryChoices, Vec<String>), E> {
        let (mut choices, mut reasons) = (given, Vec::new());
        let mut fits = false;
        if open.may_choose_keeps {
            fits = self.choose_keeps(&mut choices, &mut reasons)?;
        }
        if !fits && !open.offloadable.is_empty() {
            self.choose_tiers(&mut choices, &open.offloadable, &mut reasons)?;
            if open.may_choose_keeps {
                self.choose_keeps(&mut choices, &mut reasons)?;
            }
        }
        Ok((choices, reasons))
    }

    /// Chooses the recomputation on every pipeline rank, and returns whether all pipeline ranks fit.
    fn choose_keeps(&self, choices: &mut MemoryChoices, reasons: &mut Vec<String>) -> Result<bool, E> {
        let (mut operations, mut total, mut fits) = (0_u64, 0, true);
        // Each unit is on one pipeline rank, so its choice uses no memory on the others.
        for pipeline_rank in 0..self.num_pipeline_ranks {
            let run = |keeps: &[Keep]| {
                (self.run)(pipeline_rank, &MemoryChoices { keeps: keeps.to_vec(), state: choices.state })
            };
            let (choice, prediction) = match self.num_pipeline_ranks {
                1 => fit_keeps(self.passes, self.batch, self.bounds, run)?,
                _ => fit_keeps_in_flight(self.passes, &choices.keeps, self.bounds, run)?,
            };
            operations = operations.saturating_add(choice.operations);
            total = total.max(prediction.total());
            fits &= self.bounds.admit(&prediction);
            choices.keeps = choice.keeps;
        }
        if fits {
            let forward = self.passes.iter().map(|passes| passes.forward_cost.operations());
            let forward = forward.fold(0, u64::saturating_add);
            let share = 100.0 * operations as f64 / forward.max(1) as f64;
            reasons.push(format!(
                "recomputation, for at most {} per worker: {}; this repeats {share:.1} % of the forward pass and \
                 takes {}",
                Bytes(self.bounds.device.min(self.bounds.machine) as u64),
                describe_keeps(&choices.keeps),
                Bytes(total as u64)
            ));
        }
        Ok(fits)
    }

    /// Chooses the tiers of the open classes so that all pipeline ranks fit. Minimizes the traffic of the pipeline rank that needs the most
    /// memory.
    fn choose_tiers(
        &self,
        choices: &mut MemoryChoices,
        open: &[StateClass],
        reasons: &mut Vec<String>,
    ) -> Result<(), E> {
        let keeps = &choices.keeps;
        let with = |state| MemoryChoices { keeps: keeps.clone(), state };
        let need = |prediction: &MemoryUse| (self.bounds.excess(prediction), prediction.total());
        let largest = |state| {
            let mut largest: Option<(usize, MemoryUse)> = None;
            for pipeline_rank in 0..self.num_pipeline_ranks {
                let found = (self.run)(pipeline_rank, &with(state))?.memory;
                if largest.as_ref().is_none_or(|(_, largest)| need(&found) > need(largest)) {
                    largest = Some((pipeline_rank, found));
                }
            }
            Ok::<_, E>(largest.expect("a pipeline has a place"))
        };
        let (pipeline_rank, _) = largest(choices.state)?;
        let sizes = (self.sizes)(pipeline_rank)?;
        let program = |state| (self.program)(pipeline_rank, &with(state));
        let run = |state| Ok(largest(state)?.1);
        let candidate = fit_layout(&sizes, choices.state, open, self.bounds, program, run)?;
        if self.bounds.admit(&candidate.prediction) {
            reasons.push(self.describe_tiers(&candidate, open, &program(candidate.state)));
        }
        choices.state = candidate.state;
        Ok(())
    }

    /// Returns a line such as `offload, for at most 512.00MiB per worker: optimizer (host); each step moves …`.
    fn describe_tiers(&self, candidate: &LayoutCandidate, open: &[StateClass], program: &Program) -> String {
        let LayoutCandidate { state, traffic, prediction } = candidate;
        let of_class = |&class: &StateClass| match state.of(class).tier {
            Tier::Device => None,
            tier if class == StateClass::Activations => {
                let units = units_with_offloaded_activations(program);
                let (Some(first), Some(last)) = (units.first(), units.last()) else { return None };
                let (ahead, passes) =
                    (state.fetch_ahead, if state.fetch_ahead == 1 { "pass" } else { "passes" });
                Some(format!(
                    "activations of units {first}-{last} ({}, from their forward pass until {ahead} {passes} before \
                     their use)",
                    tier.name()
                ))
            }
            tier => Some(format!("{} ({})", class.name(), tier.name())),
        };
        let away: Vec<String> = open.iter().filter_map(of_class).collect();
        let moved = if away.is_empty() {
            "everything stays on the device".to_owned()
        } else {
            format!(
                "{}; each step moves {} to and from the host, and {} to and from disk",
                away.join(", "),
                Bytes(traffic.host),
                Bytes(traffic.disk)
            )
        };
        format!(
            "offload, for at most {} per worker: {moved}; takes {} on the device and {} of host memory",
            Bytes(self.bounds.device.min(self.bounds.machine) as u64),
            Bytes(prediction.total() as u64),
            Bytes(prediction.host as u64)
        )
    }
}

fn units_with_offloaded_activations(program: &Program) -> Vec<usize> {
    let moved = |action: &Action| match action {
        Action::Evict(state) if state.class == StateClass::Activations => Some(state.unit),
        _ => None,
    };
    let mut units: Vec<usize> = program.actions.iter().filter_map(moved).collect();
    units.sort_unstable();
    units.dedup();
    units
}

/// Returns a text such as `units 0-3 keep all, units 4-6 keep input`.
fn describe_keeps(keeps: &[Keep]) -> String {
    let mut first = 0;
    let describe = |run: &[Keep]| {
        let units = match run.len() {
            1 => format!("unit {first} keeps"),
            len => format!("units {first}-{} keep", first + len - 1),
        };
        first += run.len();
        format!("{units} {}", run[0].name())
    };
    keeps.chunk_by(|left, right| left == right).map(describe).collect::<Vec<_>>().join(", ")
}
