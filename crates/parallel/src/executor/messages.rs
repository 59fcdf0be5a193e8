//! Messages between the ranks of a pipeline: activations go up, gradients come down.

use super::Executor;
use crate::error::ParallelError;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::sync::Arc;
use trireme_base::{DType, Rank};
use trireme_comm::{Buffer, Group, Work};
use trireme_schedule::Action;
use trireme_tensor::{Category, Device, Shape, Tensor, View};

/// Messages that a rank has sent and whose memory is still lent; more wait for the first of them.
const SENDS_MAX: usize = 2;

/// Messages under way.
pub(super) struct Messages {
    group: Arc<Group>,
    pool: Pool<f32>,
    sent: VecDeque<Work<Buffer<f32>>>,
    /// By microbatch: what the rank of the unit below has made.
    activations: Vec<Option<Work<Buffer<f32>>>>,
    /// By microbatch: the gradient from the rank of the unit above.
    grads: Vec<Option<Work<Buffer<f32>>>>,
}

impl Messages {
    pub(super) fn new(ranks: &RankGrid, num_microbatches: usize, device: &Device) -> Self {
        let group = Arc::clone(ranks.pipeline());
        let none = || (0..num_microbatches).map(|_| None).collect();
        Messages {
            pool: Pool::new(&group, device, Category::Communication, false),
            group,
            sent: VecDeque::with_capacity(SENDS_MAX + 1),
            activations: none(),
            grads: none(),
        }
    }

    /// Starts to send a tensor, and gives its memory back.
    pub(super) fn send(
        &mut self,
        tensor: Tensor,
        to: usize,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        // No sooner than it must be, so that the memory which messages take does not depend on time.
        if self.sent.len() >= SENDS_MAX {
            self.finish_first(waiting)?;
        }
        let mut buffer = self.pool.take(tensor.shape().num_elements())?;
        buffer.copy_from_slice(tensor.view().f32s());
        self.sent.push_back(self.group.send(buffer, Rank(to)));
        Ok(())
    }

    fn finish_first(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        if let Some(work) = self.sent.pop_front() {
            self.pool.give(waiting.wait(work)?);
        }
        Ok(())
    }

    /// Waits until everything was sent.
    pub(super) fn finish(&mut self, waiting: &mut Waiting) -> Result<(), ParallelError> {
        while !self.sent.is_empty() {
            self.finish_first(waiting)?;
        }
        Ok(())
    }

    /// Starts to receive `len` elements.
    fn receive(&self, len: usize, from: usize) -> Result<Work<Buffer<f32>>, ParallelError> {
        Ok(self.group.receive(self.pool.take(len)?, Rank(from)))
    }

    /// Waits for a message, and copies it to the device.
    fn arrived(
        &self,
        work: Work<Buffer<f32>>,
        shape: Shape,
        device: &Device,
        waiting: &mut Waiting,
    ) -> Result<Tensor, ParallelError> {
        let buffer = waiting.wait(work)?;
        let mut tensor = device.empty(shape, DType::F32, Category::Activations)?;
        device.convert(View::from_f32s(&buffer, shape), tensor.view_mut());
        self.pool.give(buffer);
        Ok(tensor)
    }
}

impl Executor {
    /// Shape of what units pass on for a batch of `rows` tokens, in f32.
    fn passed_on(&self, rows: usize) -> Shape {
        [rows, self.model.config().hidden_size].into()
    }

    /// Starts a message of a step.
    pub(super) fn exchange_message(&mut self, action: Action) -> Result<(), ParallelError> {
        let Executor { program, in_flight, messages, waiting, .. } = self;
        let outline = &program.outline;
        match action {
            Action::SendForward { unit, microbatch } => {
                let activation = in_flight.take_activation(microbatch);
                messages.send(activation, outline.rank_of(unit + 1), waiting)
            }
            Action::SendBackward { unit, microbatch } => {
                let grad = in_flight.take_grad(microbatch);
                messages.send(grad, outline.rank_of(unit - 1), waiting)
            }
            Action::ReceiveForward { unit, microbatch } => {
                let from = outline.rank_of(unit);
                let len = self.passed_on(self.num_tokens()).num_elements();
                let work = self.messages.receive(len, from)?;
                self.messages.activations[microbatch] = Some(work);
                Ok(())
            }
            Action::ReceiveBackward { unit, microbatch } => {
                let from = outline.rank_of(unit);
                let len = self.passed_on(self.num_tokens()).num_elements();
                let work = self.messages.receive(len, from)?;
                self.messages.grads[microbatch] = Some(work);
                Ok(())
            }
            _ => unreachable!("{action} is no message"),
        }
    }

    /// Tokens of a microbatch.
    fn num_tokens(&self) -> usize {
        self.options.local_batch_size * self.options.seq_len
    }

    /// Waits for the messages that an action works with.
    pub(super) fn await_messages(&mut self, action: Action) -> Result<(), ParallelError> {
        let Some(microbatch) = action.microbatch() else { return Ok(()) };
        let shape = self.passed_on(self.num_tokens());
        let Executor { program, device, in_flight, messages, waiting, .. } = self;
        let is_elsewhere = |unit: usize| unit < program.outline.num_units && !program.outline.holds(unit);
        match action {
            Action::Forward { unit, .. } if unit > 0 && is_elsewhere(unit - 1) => {
                let work = messages.activations[microbatch].take().expect("a valid program receives it");
                in_flight.put_activation(microbatch, messages.arrived(work, shape, device, waiting)?);
            }
            Action::Backward { unit, .. } | Action::BackwardInput { unit, .. } if is_elsewhere(unit + 1) => {
                let work = messages.grads[microbatch].take().expect("a valid program receives it");
                in_flight.put_grad(microbatch, messages.arrived(work, shape, device, waiting)?);
            }
            _ => (),
        }
        Ok(())
    }

    /// Sends what an evaluation has made of `rows` tokens, or receives it.
    pub(super) fn pass_evaluated(
        &mut self,
        action: Action,
        rows: usize,
        activation: &mut Option<Tensor>,
    ) -> Result<(), ParallelError> {
        let (shape, mut waiting) = (self.passed_on(rows), Waiting::default());
        let outline = &self.evaluation.outline;
        match action {
            Action::SendForward { unit, .. } => {
                let made = activation.take().expect("the unit has run");
                let to = outline.rank_of(unit + 1);
                self.messages.send(made, to, &mut waiting)
            }
            Action::ReceiveForward { unit, .. } => {
                let work = self.messages.receive(shape.num_elements(), outline.rank_of(unit))?;
                *activation = Some(self.messages.arrived(work, shape, &self.device, &mut waiting)?);
                Ok(())
            }
            _ => unreachable!("{action} is no message of an evaluation"),
        }
    }
}
