//! Programs of several steps, of a pipeline that does not drain between updates.
//!
//! A rank updates its units as soon as their gradients are there, whatever the other ranks are at. So it clips by the norm of all gradients of an
//! earlier step; what is told of a step is known when the program has ended.

use super::Executor;
use super::earlier_norms::EarlierNorms;
use crate::error::ParallelError;
use crate::parameters::RankParameters;
use crate::ranks::RankGrid;
use crate::step::{GradNorm, NonFinite, Skipped, StepOutcome, StepPlan};
use std::collections::VecDeque;
use trireme_base::{DType, ReduceOp};
use trireme_codec::CompressionStatistics;
use trireme_comm::Buffer;
use trireme_optim::StepSettings;
use trireme_schedule::Outline;
use trireme_tensor::{Category, Device, ParameterSource, Tensor, View};

/// Versions of a rank's parameters, and updates under way.
pub(super) struct Updates {
    units: Vec<UnitVersions>,
    /// The step whose gradients were reduced last, and how to update by them, unless the step is skipped.
    settings: Option<(usize, Option<StepSettings>)>,
    /// By step, squares of the norms of this rank's gradients. Present while they are not being summed.
    squares: Option<Buffer<f64>>,
    /// What to clip by.
    pub(super) norms: EarlierNorms,
    /// By step, whether its squares are those of gradients: momentum in their place has no norm.
    has_norms: Vec<bool>,
    /// By step, what compression did.
    compression: Vec<Option<CompressionStatistics>>,
}

/// Versions are counted by the updates of the program that made them.
#[derive(Default)]
struct UnitVersions {
    newest: usize,
    /// Copies of older ones, the oldest one first.
    stashed: VecDeque<(usize, Tensor)>,
    /// Memory of copies that were given back.
    spare: Vec<Tensor>,
    /// By microbatch: what its passes read.
    read: Vec<usize>,
}

impl Updates {
    /// Of the programs of `outline`, if they do not drain between updates.
    pub(super) fn new(outline: &Outline, ranks: &mut RankGrid) -> Result<Option<Self>, ParallelError> {
        if outline.asynchronous.is_none() {
            return Ok(None);
        }
        let unit = |_| UnitVersions { read: vec![0; outline.num_microbatches], ..UnitVersions::default() };
        let units = (0..outline.chain.num_units).map(unit).collect();
        let squares = Some(ranks.pipeline().buffer(outline.num_steps())?);
        let norms = EarlierNorms::new(outline, ranks.split_pipeline("norms")?);
        let (has_norms, compression) = (vec![true; outline.num_steps()], vec![None; outline.num_steps()]);
        Ok(Some(Updates { units, settings: None, squares, norms, has_norms, compression }))
    }

    /// Updates of a unit that the program has made.
    pub(super) fn num_updates(&self, unit: usize) -> usize {
        self.units[unit].newest
    }

    /// Forward of a unit begins.
    pub(super) fn begin_forward(&mut self, unit: usize, microbatch: usize, outline: &Outline) {
        let state = &mut self.units[unit];
        state.read[microbatch] = outline.version_read(microbatch, state.newest);
    }

    /// Keeps a copy of a unit's parameters.
    pub(super) fn stash(
        &mut self,
        unit: usize,
        whole: View<'_>,
        device: &Device,
    ) -> Result<(), ParallelError> {
        let state = &mut self.units[unit];
        let mut copy = match state.spare.pop() {
            Some(copy) => copy,
            None => device.empty(whole.shape(), DType::F32, Category::Parameters)?,
        };
        device.convert(whole, copy.view_mut());
        state.stashed.push_back((state.newest, copy));
        Ok(())
    }

    /// Gives the oldest copy of a unit's parameters back.
    pub(super) fn unstash(&mut self, unit: usize) {
        let state = &mut self.units[unit];
        let (_, copy) = state.stashed.pop_front().expect("a valid program has stashed one");
        state.spare.push(copy);
    }

    /// The copy that passes of a unit for a microbatch read; `None` if they read what is newest.
    fn copy(&self, unit: usize, microbatch: usize) -> Option<View<'_>> {
        let UnitVersions { newest, stashed, read, .. } = &self.units[unit];
        let version = read[microbatch];
        if version == *newest {
            return None;
        }
        let copy = stashed.iter().find(|(stashed, _)| *stashed == version);
        Some(copy.expect("a valid program has stashed it").1.view())
    }
}

/// Parameters as the passes of a unit for a microbatch read them.
#[derive(Debug)]
pub(super) struct PassParameters<'a> {
    newest: &'a RankParameters,
    unit: usize,
    /// An older version of the unit.
    copy: Option<View<'a>>,
}

impl<'a> PassParameters<'a> {
    pub(super) fn new(
        newest: &'a RankParameters,
        updates: Option<&'a Updates>,
        unit: usize,
        microbatch: usize,
    ) -> Self {
        PassParameters { newest, unit, copy: updates.and_then(|updates| updates.copy(unit, microbatch)) }
    }
}

impl ParameterSource for PassParameters<'_> {
    fn unit(&self, unit: usize) -> View<'_> {
        match self.copy {
            Some(copy) if unit == self.unit => copy,
            _ => self.newest.unit(unit),
        }
    }
}

fn not_finite(step: u64, what: NonFinite, value: f64) -> ParallelError {
    ParallelError::NotFinite { step, what, value, is_ahead: true }
}

impl Executor {
    /// Updates a unit by the gradients of its next step.
    pub(super) fn step_ahead(&mut self, unit: usize, plans: &[StepPlan]) -> Result<(), ParallelError> {
        let updates = self.updates.as_ref().expect("the program does not drain");
        let step = updates.units[unit].newest;
        let settings = match updates.settings {
            Some((of, settings)) if of == step => settings,
            _ => self.settings_of(step, plans[step])?,
        };
        match settings {
            Some(settings) => self.update(unit, plans[step].step, settings)?,
            None => self.gradients.free_gathered(unit),
        }
        let updates = self.updates.as_mut().expect("it was there");
        updates.settings = Some((step, settings));
        updates.units[unit].newest += 1;
        Ok(())
    }

    /// Waits for the reductions of this rank, and judges what they have come to: how to update by them, unless the step is skipped.
    fn settings_of(&mut self, step: usize, plan: StepPlan) -> Result<Option<StepSettings>, ParallelError> {
        if !plan.has_loss {
            self.loss_scaler.skip();
            let updates = self.updates.as_mut().expect("the program does not drain");
            updates.squares.as_mut().expect("they are summed at the end")[step] = 0.0;
            (updates.has_norms[step], updates.compression[step]) = (false, None);
            return Ok(None);
        }
        self.collect_waiting();
        let waited = self.waiting.total();
        self.gradients.wait()?;
        self.await_outcomes()?;
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut found = None;
        if plan.grad_norm != GradNorm::Off {
            let norm = self.sum_of_squares(false, &mut waiting)?.sqrt() * self.grad_scale();
            if !norm.is_finite() {
                return Err(not_finite(plan.step, NonFinite::GradNorm, norm));
            }
            let has_momentum = self.may_have_momentum(self.update_number(plan));
            let updates = self.updates.as_mut().expect("the program does not drain");
            updates.has_norms[step] = !has_momentum;
            updates.squares.as_mut().expect("they are summed at the end")[step] = norm * norm;
            found = Some(norm);
            if let GradNorm::Clip(_) = plan.grad_norm {
                // Before the first steps of a run there is none but this rank's own.
                let earlier = updates.norms.next(norm * norm, &mut waiting)?;
                found = earlier.or(found);
            }
        }
        if !matches!(plan.grad_norm, GradNorm::Clip(_)) {
            self.updates.as_mut().expect("the program does not drain").norms.forget();
        }
        let compression = self.compression_statistics();
        self.updates.as_mut().expect("the program does not drain").compression[step] = compression;
        self.timeline.has_waited(waiting.total() - waited);
        self.waiting = waiting;
        Ok(Some(self.settings_by(plan, self.grad_scale(), found)))
    }

    /// The end of a program: adds what its steps have come to.
    pub(super) fn finish_steps(
        &mut self,
        plans: &[StepPlan],
        outcomes: &mut Vec<StepOutcome>,
    ) -> Result<(), ParallelError> {
        self.messages.finish_until(0, &mut self.waiting)?;
        self.await_outcomes()?;
        let mut waiting = std::mem::take(&mut self.waiting);
        let Executor { updates, means, ranks, loss_scaler, .. } = self;
        let updates = updates.as_mut().expect("the program does not drain");
        updates.settings = None;
        updates.units.iter_mut().for_each(|unit| unit.newest = 0);
        // Before anything else of all ranks: those that report have sent theirs or, on a device that works later, send them here.
        let losses = means.wait(&mut waiting)?;
        updates.norms.wait(0, &mut waiting)?;
        let squares = updates.squares.take().expect("they are summed once a program");
        let squares = waiting.wait(ranks.pipeline().all_reduce(squares, ReduceOp::Sum))?;
        let comm_exposed = waiting.total() / plans.len() as u32;
        for (step, ((&loss, plan), square)) in losses.iter().zip(plans).zip(&squares[..]).enumerate() {
            if plan.has_loss && !loss.is_finite() {
                return Err(not_finite(plan.step, NonFinite::Loss, loss));
            }
            outcomes.push(StepOutcome {
                loss: if plan.has_loss { loss } else { f64::NAN },
                grad_norm: (plan.grad_norm != GradNorm::Off && updates.has_norms[step])
                    .then_some(square.sqrt()),
                loss_scale: loss_scaler.scale(),
                skipped: (!plan.has_loss).then_some(Skipped::NoLoss),
                comm_exposed,
                compression: updates.compression[step],
            });
        }
        updates.squares = Some(squares);
        Ok(())
    }
}
