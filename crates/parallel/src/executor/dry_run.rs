//! Dry runs: execute a program on counting devices, to find the memory and the operations of a rank.

use super::{Executor, ValidationBatches};
use crate::error::Result;
use crate::step::{GradNorm, StepPlan};
use std::collections::BTreeSet;
use std::time::Instant;
use trireme_base::{Category, CategoryBytes, Journal, JournalEntry, MemoryUse, StepEntries};
use trireme_model::{Batch, TensorSpec};
use trireme_tensor::MemoryCounter;

/// Minimum number of steps in a dry run. In the second step, memory that the first one leaves allocated is present.
const NUM_STEPS_MIN: usize = 2;

/// The number of a step late in a run, in which an optimizer may exchange momentum instead of gradients.
const FIRST_LATE_STEP: u64 = 1 << 40;

/// Number of late steps to search for steps that exchange momentum.
const LATE_STEPS_MAX: u64 = 1 << 12;

/// Memory use found so far.
#[derive(Default)]
struct DryRunResult {
    memory: MemoryUse,
    /// For every action of the program, the peak of each category while the action runs.
    lines: Vec<CategoryBytes>,
}

impl Executor {
    /// Executes some steps, and a validation if `validation` is given, without computing. Returns the peak memory of this rank in bytes,
    /// and for every action of the program the peak of each category while the action runs. The executor must belong to a
    /// [dry](trireme_comm::Group::dry) world, on counting devices.
    ///
    /// Cost: some microseconds for each operation of each microbatch.
    ///
    /// # Errors
    /// Errors of devices, such as an exceeded budget.
    ///
    /// # Panics
    /// If a device is not a counting device.
    pub fn dry_run(self, validation: Option<ValidationBatches>) -> Result<(MemoryUse, Vec<CategoryBytes>)> {
        let (DryRunResult { memory, lines }, _) = self.run_dry(validation, None)?;
        let besides = lines.iter().chain([&memory.at_peak]).map(CategoryBytes::excluding_activations);
        let besides_activations = besides.max().unwrap_or(0);
        Ok((MemoryUse { excluding_activations: besides_activations, ..memory }, lines))
    }

    /// As [`dry_run`](Executor::dry_run), but returns the operations that this rank issues and awaits in a step.
    ///
    /// # Errors
    /// As [`dry_run`](Executor::dry_run).
    ///
    /// # Panics
    /// As [`dry_run`](Executor::dry_run).
    pub fn dry_run_entries(self) -> Result<StepEntries> {
        let journal = Journal::default();
        self.device.keep_journal(&journal);
        self.ranks.world().keep_journal(&journal);
        Ok(self.run_dry(None, Some(&journal))?.1)
    }

    fn run_dry(
        mut self,
        validation: Option<ValidationBatches>,
        journal: Option<&Journal>,
    ) -> Result<(DryRunResult, StepEntries)> {
        assert!(self.device.is_counting() && self.host().is_counting(), "a dry run computes nothing");
        let device = self.device.clone();
        let memory = device.memory();
        let num_actions = self.program.actions.len();
        let mut found = DryRunResult {
            memory: MemoryUse { line: 1, ..MemoryUse::default() },
            lines: vec![CategoryBytes::default(); num_actions],
        };
        found.record_peaks(memory, None);
        let specs: Vec<TensorSpec> = self.profile.batch.iter().map(|tensor| tensor.spec).collect();
        let num_microbatches = self.program.header.num_microbatches;
        // During a run, a compressor may replace its sequence of message rounds. Here, each step uses the next sequence of every
        // compressor, and one more step repeats the last sequences.
        let num_steps = (self.gradients.num_round_sequences() + 1).max(NUM_STEPS_MIN) as u64;
        // The validation comes first, as in a new run, so that the peaks of the steps include the buffers that it leaves in pools.
        if let Some(batches) = validation {
            self.validate_dry(batches)?;
            found.record_peaks(memory, None);
        }
        let take = || journal.map(Journal::take).unwrap_or_default();
        let mut entries = StepEntries { actions: Vec::new(), issued_per_step: 0 };
        let late =
            (FIRST_LATE_STEP..FIRST_LATE_STEP + LATE_STEPS_MAX).filter(|&step| self.exchanges_momentum(step));
        let late: Vec<u64> = late.take(num_steps as usize).collect();
        for step in (1..=num_steps).chain(late) {
            let batches = (0..num_microbatches).map(|_| self.zeros(&specs));
            let batches: Vec<Batch> = batches.collect::<Result<_>>()?;
            let plan = StepPlan { step, lr: 0.0, grad_norm: GradNorm::Measure, has_loss: true };
            let plans = vec![plan; self.program.header.num_steps()];
            let mut noted = vec![Vec::new(); num_actions + 1];
            drop(take());
            let mut see = |index: usize| {
                found.record_peaks(memory, Some(index));
                noted[index] = take();
            };
            self.run_observed(&plans, &mut batches.into_iter(), &mut Vec::new(), &mut see)?;
            found.record_peaks(memory, num_actions.checked_sub(1));
            noted[num_actions] = take();
            // Late steps do not represent the steps of a run's beginning.
            if step == num_steps {
                entries = step_entries(noted);
            }
        }
        found.memory.host = self.host_bytes_peak();
        found.memory.own_between_steps = memory.own().current;
        if !self.host().is_same(&device) {
            found.memory.outside_arena += self.host().memory().outside_arena().peak;
        }
        Ok((found, entries))
    }

    fn zeros(&self, specs: &[TensorSpec]) -> Result<Batch> {
        let zeros = |spec: &TensorSpec| {
            Ok((spec.name, self.device.zeros(spec.shape, spec.dtype, Category::Activations)?))
        };
        specs.iter().map(zeros).collect()
    }

    /// Evaluates one batch of each size that any rank reads in a validation, because the dry run of one rank stands for all ranks of its
    /// pipeline stage.
    fn validate_dry(&mut self, batches: ValidationBatches) -> Result<()> {
        self.allocate_validation_reports(&batches)?;
        let sizes = (0..batches.num_batches()).map(|index| Some(batches.batch(index).1));
        // Some rounds of this rank have no batch, if none is left.
        let own = batches.rounds(&self.ranks).map(|round| round.batch.map(|index| batches.batch(index).1));
        // As in a validation, the largest batches come first.
        let sizes: BTreeSet<_> = sizes.chain(own).collect();
        for num_samples in sizes.into_iter().rev() {
            let before = self.profile.num_samples();
            let specs = self.profile.batch.iter();
            let batch = num_samples.map(|num_samples| {
                let specs = specs.map(|tensor| tensor.spec.with_samples(num_samples, before));
                self.zeros(&specs.collect::<Vec<_>>())
            });
            self.evaluate(batch.transpose()?)?;
        }
        Ok(())
    }
}

fn step_entries(noted: Vec<Vec<(JournalEntry, Instant)>>) -> StepEntries {
    let untimed =
        |entries: Vec<(JournalEntry, Instant)>| entries.into_iter().map(|(entry, _)| entry).collect();
    let actions: Vec<Vec<JournalEntry>> = noted.into_iter().map(untimed).collect();
    let issues = actions.iter().flatten().filter(|entry| matches!(entry, JournalEntry::Issue(..)));
    StepEntries { issued_per_step: issues.count(), actions }
}

impl DryRunResult {
    /// Records the peaks since the previous call. `action` is the index of the action that has run since then, if there was one.
    fn record_peaks(&mut self, counter: &MemoryCounter, action: Option<usize>) {
        let found = Category::ALL.map(|category| counter.usage(category).peak);
        let DryRunResult { memory, lines } = self;
        let line = action.map(|action| &mut lines[action]);
        for peaks in [Some(&mut memory.peaks), line].into_iter().flatten() {
            peaks.0.iter_mut().zip(found).for_each(|(peak, found)| *peak = found.max(*peak));
        }
        if counter.total().peak > memory.total() {
            memory.at_peak = CategoryBytes(counter.at_peak());
            // Lines count from 1, and the first line of a program's text lists sizes.
            memory.line = action.map_or(1, |action| action + 2);
        }
        memory.own = memory.own.max(counter.own().peak);
        memory.outside_arena = memory.outside_arena.max(counter.outside_arena().peak);
        counter.reset_peaks();
    }
}
