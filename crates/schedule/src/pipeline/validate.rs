//! Validation of schedules before they run.

use super::clock;
use super::costs::Costs;
use super::error::{PassFault, PassIndex, ScheduleError};
use super::pass::{Pass, PassKind};
use super::range_checks;
use super::schedule::{Schedule, WeightVersions};

/// Checks that a schedule is valid:
/// - every stage runs forward and backward (or both halves of backward) once for every microbatch, on its own rank and in an order that
///   data dependencies allow;
/// - the gradients of each stage, and the losses, are summed in the order of microbatches; losses are computed in the input halves of the
///   last stage;
/// - no rank holds more activations than its bound of `activations_max`, if there are bounds;
/// - weights are updated once per step, and read while their version exists;
/// - all ranks reach their ends, if sends do not block.
///
/// [`validate_pipeline`](crate::validate_pipeline) checks the [programs](super::programs()) of a schedule, which have messages. It checks
/// that ranks reach their ends even if a send blocks until the receiver receives.
///
/// The sizes of activations are taken from `costs`. Takes time linear in the number of passes.
///
/// # Errors
/// The first fault that is found.
pub fn validate(
    schedule: &Schedule,
    costs: &Costs,
    activations_max: Option<&[u64]>,
) -> Result<(), ScheduleError> {
    range_checks::check(schedule, costs)?;
    let mut progress = Progress::new(schedule);
    for (rank, passes) in schedule.ranks.iter().enumerate() {
        for (index, &pass) in passes.iter().enumerate() {
            let at = |fault| ScheduleError::Pass { place: PassIndex { rank, index }, pass, fault };
            progress.check_pass(pass).map_err(at)?;
        }
    }
    progress.check_complete()?;
    if let Some(bounds) = activations_max {
        check_activations(schedule, costs, bounds)?;
    }
    clock::simulate(schedule, costs).map(drop)
}

/// The passes of a stage and microbatch that have run, as bits.
type Done = u8;
const FORWARD: Done = 1;
const INPUT: Done = 2;
const WEIGHT: Done = 4;
const UPDATE: Done = 8;
const BACKWARD: Done = INPUT | WEIGHT;

struct Progress<'a> {
    schedule: &'a Schedule,
    num_microbatches: usize,
    done: Vec<Done>,
    /// Number of updates, by stage.
    num_updates: Vec<usize>,
    /// Number of microbatches with a complete backward, by stage.
    num_gradients: Vec<usize>,
    /// Number of microbatches whose loss has been computed.
    num_losses: usize,
}

impl<'a> Progress<'a> {
    fn new(schedule: &'a Schedule) -> Self {
        let (num_stages, num_microbatches) = (schedule.num_stages(), schedule.total_microbatches());
        Progress {
            schedule,
            num_microbatches,
            done: vec![0; num_stages * num_microbatches],
            num_updates: vec![0; num_stages],
            num_gradients: vec![0; num_stages],
            num_losses: 0,
        }
    }

    fn check_pass(&mut self, pass: Pass) -> Result<(), PassFault> {
        let Pass { kind, stage, microbatch } = pass;
        let (bits, needed, missing) = match kind {
            PassKind::Forward => (FORWARD, 0, pass),
            PassKind::Backward => (BACKWARD, FORWARD, Pass::forward(stage, microbatch)),
            PassKind::BackwardInput => (INPUT, FORWARD, Pass::forward(stage, microbatch)),
            PassKind::BackwardWeight => (WEIGHT, INPUT, Pass::backward_input(stage, microbatch)),
            PassKind::Update => (UPDATE, BACKWARD, Pass::backward(stage, microbatch)),
        };
        let done = &mut self.done[stage * self.num_microbatches + microbatch];
        if *done & bits != 0 {
            return Err(PassFault::Repeated);
        }
        if *done & needed != needed {
            return Err(PassFault::TooEarly(missing));
        }
        *done |= bits;
        match kind {
            PassKind::Forward => self.check_version(pass),
            PassKind::Update => self.check_update(pass),
            _ => self.check_backward(pass, bits),
        }
    }

    /// Checks that a backward pass adds to sums in the order of microbatches.
    fn check_backward(&mut self, pass: Pass, bits: Done) -> Result<(), PassFault> {
        let has_loss = bits & INPUT != 0 && pass.stage + 1 == self.schedule.num_stages();
        let has_gradient = bits & WEIGHT != 0;
        let sums = [(has_loss, &mut self.num_losses), (has_gradient, &mut self.num_gradients[pass.stage])];
        for (_, num_added) in sums.into_iter().filter(|(is_added_to, _)| *is_added_to) {
            if *num_added != pass.microbatch {
                return Err(PassFault::SumMisordered(Pass { microbatch: *num_added, ..pass }));
            }
            *num_added += 1;
        }
        Ok(())
    }

    /// Checks that an update applies exactly the gradients of its step. The gradients of all stages of its rank must be complete, because
    /// the gradient norm is computed from all of them before the first update.
    fn check_update(&mut self, pass: Pass) -> Result<(), PassFault> {
        let rank = self.schedule.stage_ranks[pass.stage];
        let has_all = self.schedule.stages_of(rank).all(|stage| self.num_gradients[stage] > pass.microbatch);
        let updates = &mut self.num_updates[pass.stage];
        let num_microbatches = (*updates + 1) * self.schedule.num_microbatches;
        let is_at_end = [pass.microbatch + 1, self.num_gradients[pass.stage]] == [num_microbatches; 2];
        if self.schedule.weights == WeightVersions::Drained || !is_at_end || !has_all {
            return Err(PassFault::UpdateMisplaced);
        }
        *updates += 1;
        Ok(())
    }

    /// Checks that the version to read exists: a double buffer holds only the newest version and the one before.
    fn check_version(&self, pass: Pass) -> Result<(), PassFault> {
        let newest = self.num_updates[pass.stage];
        let Schedule { weights, num_microbatches, .. } = *self.schedule;
        let version = weights.read_by_forward(num_microbatches, pass.microbatch, newest);
        if version > newest || version + 1 < newest {
            return Err(PassFault::NoSuchVersion { version, newest });
        }
        Ok(())
    }

    fn check_complete(&self) -> Result<(), ScheduleError> {
        let asynchronous = self.schedule.weights != WeightVersions::Drained;
        for (stage, done) in self.done.chunks(self.num_microbatches).enumerate() {
            for (microbatch, done) in done.iter().enumerate() {
                let ends_step = (microbatch + 1).is_multiple_of(self.schedule.num_microbatches);
                let missing = match done {
                    done if done & FORWARD == 0 => Pass::forward(stage, microbatch),
                    done if done & BACKWARD == 0 => Pass::backward(stage, microbatch),
                    done if done & WEIGHT == 0 => Pass::backward_weight(stage, microbatch),
                    done if asynchronous && ends_step && done & UPDATE == 0 => {
                        Pass::update(stage, microbatch)
                    }
                    _ => continue,
                };
                return Err(ScheduleError::Missing { rank: self.schedule.stage_ranks[stage], missing });
            }
        }
        Ok(())
    }
}

/// Returns an error for the first pass with which a rank exceeds its bound.
pub(super) fn check_activations(
    schedule: &Schedule,
    costs: &Costs,
    bounds: &[u64],
) -> Result<(), ScheduleError> {
    if bounds.len() != schedule.num_ranks() {
        return Err(ScheduleError::BoundsDiffer { expected: schedule.num_ranks(), found: bounds.len() });
    }
    for (rank, (passes, &bound)) in schedule.ranks.iter().zip(bounds).enumerate() {
        let mut held = 0;
        for (index, &pass) in passes.iter().enumerate() {
            let (taken, freed) = costs.activations(pass);
            held = held + taken - freed;
            if held > bound {
                let (place, fault) =
                    (PassIndex { rank, index }, PassFault::TooManyActivations { held, bound });
                return Err(ScheduleError::Pass { place, pass, fault });
            }
        }
    }
    Ok(())
}
