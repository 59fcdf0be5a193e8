//! Passes of units: forward, recomputation, backward, evaluation.

use super::Executor;
use super::asynchronous::PassParameters;
use crate::error::ParallelError;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_model::Batch;
use trireme_schedule::{Action, Keep, Outline};
use trireme_tensor::tape::{Recording, VarId};
use trireme_tensor::{Tape, Tensor};

/// What a unit's forward pass of one microbatch has left for its backward.
pub(super) enum Pass {
    /// All or the products.
    Recorded { tape: Tape, input: VarId, end: End },
    /// The input.
    Input(Tensor),
    /// What the weight half of backward reads.
    Halved(Tape),
}

/// What backward of a unit starts from.
#[derive(Clone, Copy)]
pub(super) enum End {
    /// The gradient of what it made.
    Output(VarId),
    /// The loss.
    Loss { targets: VarId },
}

/// Microbatches under way.
pub(super) struct InFlight {
    num_microbatches: usize,
    /// For each microbatch: what the last unit made, to be read by the next.
    activations: Vec<Option<Tensor>>,
    targets: Vec<Option<Tensor>>,
    /// For each microbatch: gradient of what the unit below made.
    grads: Vec<Option<Tensor>>,
    /// By unit, then microbatch.
    passes: Vec<Option<Pass>>,
    /// Tapes to be used again, so that steps allocate nothing.
    spare_tapes: Vec<Tape>,
}

impl InFlight {
    pub(super) fn new(outline: &Outline) -> Self {
        let Outline { num_units, num_microbatches, .. } = *outline;
        let none = || (0..num_microbatches).map(|_| None).collect();
        InFlight {
            num_microbatches,
            activations: none(),
            targets: none(),
            grads: none(),
            passes: (0..num_units * num_microbatches).map(|_| None).collect(),
            spare_tapes: Vec::with_capacity(num_units * num_microbatches),
        }
    }

    /// Takes in what the first unit reads and the head predicts, if they lie on this rank.
    pub(super) fn begin(&mut self, microbatch: usize, batch: Batch, outline: &Outline) {
        self.activations[microbatch] = outline.holds(0).then_some(batch.inputs);
        self.targets[microbatch] = outline.holds(outline.num_units - 1).then_some(batch.targets);
    }

    pub(super) fn take_activation(&mut self, microbatch: usize) -> Tensor {
        self.activations[microbatch].take().expect("the unit has run")
    }

    pub(super) fn put_activation(&mut self, microbatch: usize, activation: Tensor) {
        self.activations[microbatch] = Some(activation);
    }

    pub(super) fn take_grad(&mut self, microbatch: usize) -> Tensor {
        self.grads[microbatch].take().expect("the unit has run backward")
    }

    pub(super) fn put_grad(&mut self, microbatch: usize, grad: Tensor) {
        self.grads[microbatch] = Some(grad);
    }

    pub(super) fn pass(&mut self, unit: usize, microbatch: usize) -> &mut Option<Pass> {
        &mut self.passes[unit * self.num_microbatches + microbatch]
    }

    fn spare(&mut self, mut tape: Tape) {
        tape.clear();
        self.spare_tapes.push(tape);
    }
}

impl Executor {
    pub(super) fn forward(
        &mut self,
        unit: usize,
        microbatch: usize,
        keep: Keep,
    ) -> Result<(), ParallelError> {
        let input = self.in_flight.activations[microbatch].take().expect("the unit below has run");
        if let Some(updates) = &mut self.updates {
            updates.begin_forward(unit, microbatch, &self.program.outline);
        }
        let pass = self.record(unit, microbatch, input)?;
        let in_flight = &mut self.in_flight;
        let kept = match (keep, pass) {
            (Keep::All, pass) => Some(pass),
            (Keep::Products, Pass::Recorded { mut tape, input, end }) => {
                tape.keep_products();
                Some(Pass::Recorded { tape, input, end })
            }
            (Keep::Input | Keep::Nothing, Pass::Recorded { mut tape, input, end }) => {
                if let End::Loss { targets } = end {
                    in_flight.targets[microbatch] = Some(tape.take_value(targets));
                }
                let input = tape.take_value(input);
                in_flight.spare(tape);
                (keep == Keep::Input).then_some(Pass::Input(input))
            }
            (_, Pass::Input(_) | Pass::Halved(_)) => unreachable!("a pass was recorded"),
        };
        *in_flight.pass(unit, microbatch) = kept;
        Ok(())
    }

    /// Runs a unit on a tape of its own and passes on what it makes.
    fn record(&mut self, unit: usize, microbatch: usize, input: Tensor) -> Result<Pass, ParallelError> {
        let spare = self.in_flight.spare_tapes.pop();
        let mut tape = spare.unwrap_or_else(|| self.new_tape(Recording::On));
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        let in_flight = &mut self.in_flight;
        let input = tape.input(input);
        let place = input.id();
        let is_head = unit + 1 == self.program.outline.num_units;
        let end = if is_head {
            let targets = in_flight.targets[microbatch].take().expect("targets wait for the head");
            let targets = tape.input(targets);
            let end = End::Loss { targets: targets.id() };
            tape.set_loss_scale(self.loss_scaler.scale() as f32);
            self.model.forward_loss(&mut tape.recorder(&parameters), input, targets)?;
            end
        } else {
            let output = self.model.forward(unit, &mut tape.recorder(&parameters), input)?;
            in_flight.activations[microbatch] = Some(tape.take_output(&output)?);
            End::Output(output.id())
        };
        Ok(Pass::Recorded { tape, input: place, end })
    }

    /// Makes again what forward did not keep.
    pub(super) fn recompute(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        let input = match self.in_flight.pass(unit, microbatch).take() {
            Some(Pass::Recorded { mut tape, input, end }) => {
                tape.recompute(&PassParameters::new(
                    &self.parameters,
                    self.updates.as_ref(),
                    unit,
                    microbatch,
                ))?;
                *self.in_flight.pass(unit, microbatch) = Some(Pass::Recorded { tape, input, end });
                return Ok(());
            }
            Some(Pass::Input(input)) => input,
            Some(Pass::Halved(_)) => unreachable!("a pass is recomputed before its backward"),
            None => self.in_flight.activations[microbatch].take().expect("the unit below was recomputed"),
        };
        let pass = self.record(unit, microbatch, input)?;
        *self.in_flight.pass(unit, microbatch) = Some(pass);
        Ok(())
    }

    pub(super) fn backward(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        self.gradients.prepare(unit, microbatch)?;
        let (mut tape, input, output) = self.begin_backward(unit, microbatch);
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        tape.backward(&parameters, output, &mut self.gradients)?;
        self.pass_grad_on(&mut tape, input, microbatch);
        self.in_flight.spare(tape);
        self.gradients.close(unit);
        Ok(())
    }

    /// Makes the gradient of a unit's input. [`backward_weight`](Executor::backward_weight) does the rest.
    pub(super) fn backward_input(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        let (mut tape, input, output) = self.begin_backward(unit, microbatch);
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        tape.backward_input(&parameters, output)?;
        self.pass_grad_on(&mut tape, input, microbatch);
        *self.in_flight.pass(unit, microbatch) = Some(Pass::Halved(tape));
        Ok(())
    }

    pub(super) fn backward_weight(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        self.gradients.prepare(unit, microbatch)?;
        let Some(Pass::Halved(mut tape)) = self.in_flight.pass(unit, microbatch).take() else {
            unreachable!("the input half has run");
        };
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        tape.backward_weight(&parameters, &mut self.gradients)?;
        self.in_flight.spare(tape);
        self.gradients.close(unit);
        Ok(())
    }

    /// The tape of a unit's forward pass, its input, and what backward starts from; `None` for the loss.
    fn begin_backward(&mut self, unit: usize, microbatch: usize) -> (Tape, VarId, Option<(VarId, Tensor)>) {
        let in_flight = &mut self.in_flight;
        let Some(Pass::Recorded { tape, input, end }) = in_flight.pass(unit, microbatch).take() else {
            unreachable!("forward or a recomputation has recorded a pass");
        };
        // What a recomputation has made for a unit above that needs it no more.
        in_flight.activations[microbatch] = None;
        let output = match end {
            End::Output(output) => Some((output, in_flight.take_grad(microbatch))),
            End::Loss { .. } => None,
        };
        (tape, input, output)
    }

    /// Passes the gradient of a unit's input on, and the loss if the unit is the head.
    fn pass_grad_on(&mut self, tape: &mut Tape, input: VarId, microbatch: usize) {
        self.in_flight.grads[microbatch] = tape.take_grad(input);
        if let Some(loss) = tape.loss_sum() {
            // After the last microbatch the losses travel, ahead of the first gradient.
            self.losses.push(microbatch, loss);
        }
    }

    /// Sum of the losses of a batch's rows in nats, without training, where the head lies. Collective over the ranks of a pipeline,
    /// which give the same batch, and where parameters are sharded: a rank without a batch takes part in gathering them.
    pub fn evaluate(&mut self, batch: Option<Batch>) -> Result<Option<f64>, ParallelError> {
        let shape = batch.as_ref().map(|batch| batch.inputs.shape());
        let (mut activation, mut targets) = match batch {
            Some(Batch { inputs, targets }) => (Some(inputs), Some(targets)),
            None => (None, None),
        };
        activation = activation.filter(|_| self.evaluation.outline.holds(0));
        let mut loss = None;
        for index in 0..self.evaluation.actions.len() {
            let action = self.evaluation.actions[index];
            self.await_parameters(action)?;
            self.await_state(action)?;
            match (action, shape) {
                (Action::Fetch(state), _) => self.offloaded.fetch(state)?,
                (Action::Evict(state), _) => self.evict(state)?,
                (Action::Unshard { unit }, _) => self.parameters.unshard(unit)?,
                (Action::Reshard { unit }, _) => self.parameters.reshard(unit),
                (Action::Send(_) | Action::Receive(_), Some(shape)) => {
                    self.pass_evaluated(action, (shape.rows(), shape.cols()), &mut activation)?;
                }
                (Action::Forward { unit, .. }, Some(_)) => {
                    let mut tape = self.new_tape(Recording::Off);
                    let input = tape.input(activation.take().expect("the unit below has run"));
                    if unit + 1 == self.evaluation.outline.num_units {
                        let targets = tape.input(targets.take().expect("the head runs once"));
                        self.model.forward_loss(&mut tape.recorder(&self.parameters), input, targets)?;
                        loss = tape.loss_sum();
                    } else {
                        let output = self.model.forward(unit, &mut tape.recorder(&self.parameters), input)?;
                        activation = Some(tape.take_output(&output)?);
                    }
                }
                _ => (),
            }
        }
        self.messages.finish(&mut Waiting::default())?;
        Ok(loss)
    }

    fn new_tape(&self, recording: Recording) -> Tape {
        let scales = self.fp8.as_ref().map(|fp8| Arc::clone(fp8.state().scales()));
        Tape::new(&self.device, recording, self.options.precision).with_fp8(scales)
    }
}
