//! Messages between the ranks of a pipeline: activations go up, gradients come down.

use super::Executor;
use crate::error::ParallelError;
use crate::exchanged::Exchanged;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use trireme_base::{Pending, Rank};
use trireme_comm::{Buffer, Work};
use trireme_model::{Bundle, TensorSpec};
use trireme_schedule::{Action, Message, MessageKind, StateClass};
use trireme_tensor::{Category, Device, ParameterSource, Tensor};

/// Messages that a rank has sent and whose memory is still lent; more wait for the first of them.
const SENDS_MAX: usize = 2;

/// Messages under way.
pub(super) struct Messages {
    pool: Pool<f32>,
    sent: VecDeque<Work<Buffer<f32>>>,
    /// What begins to come, by kind and microbatch, until its pass takes it: activations, gradients and parts of a tied gradient.
    incoming: [Vec<Option<Incoming>>; 3],
}

/// A message of so many elements that comes.
struct Incoming {
    work: Work<Buffer<f32>>,
    len: usize,
}

impl Messages {
    pub(super) fn new(ranks: &RankGrid, num_microbatches: usize, device: &Device) -> Self {
        let none = || (0..num_microbatches).map(|_| None).collect();
        Messages {
            pool: Pool::new(ranks.pipeline(), device, Category::Communication, false),
            sent: VecDeque::with_capacity(SENDS_MAX + 1),
            incoming: [none(), none(), none()],
        }
    }

    /// Memory of messages.
    pub(super) fn pool(&self) -> &Pool<f32> {
        &self.pool
    }

    /// Starts to send tensors, and gives their memory back.
    pub(super) fn send(
        &mut self,
        tensors: Bundle<Tensor>,
        to: usize,
        device: &Device,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        self.finish_until(SENDS_MAX - 1, waiting)?;
        let num_words = tensors.specs().map(|spec| spec.num_words()).sum();
        let (mut buffer, mut first) = (self.pool.take_buffer(num_words)?, 0);
        for ((_, tensor), spec) in tensors.iter().zip(tensors.specs()) {
            device.download_later(tensor.view(), &mut buffer, first * size_of::<f32>());
            first += spec.num_words();
        }
        self.sent.push_back(self.pool.group().send(Buffer::pending(buffer, num_words), Rank(to)));
        Ok(())
    }

    /// Starts to send a vector of the pool.
    fn send_vector(
        &mut self,
        vector: Exchanged<f32>,
        to: usize,
        device: &Device,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        self.finish_until(SENDS_MAX - 1, waiting)?;
        let len = vector.len();
        let (buffer, _) = vector.leave(device, 0..len, 0..0);
        self.sent.push_back(self.pool.group().send(buffer, Rank(to)));
        Ok(())
    }

    /// Waits for the first messages until `num_left` are under way: no sooner, so that the memory which they take does not depend on
    /// time.
    pub(super) fn finish_until(
        &mut self,
        num_left: usize,
        waiting: &mut Waiting,
    ) -> Result<(), ParallelError> {
        while self.sent.len() > num_left {
            let first = self.sent.pop_front().expect("messages are under way");
            let buffer = waiting.wait(first)?;
            self.pool.give_buffer(buffer.len(), Pending::new(buffer));
        }
        Ok(())
    }

    /// Starts to receive `len` elements.
    fn receive(&self, len: usize, from: usize) -> Result<Incoming, ParallelError> {
        let buffer = Buffer::pending(self.pool.take_buffer(len)?, len);
        Ok(Incoming { work: self.pool.group().receive(buffer, Rank(from)), len })
    }

    /// Copies the tensors of a message to the device when it has come.
    fn arrived(
        &self,
        Incoming { work, len }: Incoming,
        specs: impl Iterator<Item = TensorSpec>,
        device: &Device,
        waiting: &mut Waiting,
    ) -> Result<Bundle<Tensor>, ParallelError> {
        let mut buffer = waiting.wait_on_device(work, len, device)?;
        let (mut tensors, mut first) = (Bundle::new(), 0);
        for spec in specs {
            let mut tensor = device.empty(spec.shape, spec.dtype, Category::Activations)?;
            device.upload_later(&mut buffer, first * size_of::<f32>(), tensor.view_mut());
            tensors.push(spec.name, tensor);
            first += spec.num_words();
        }
        device.wait_for(&buffer.event());
        self.pool.give_buffer(len, buffer);
        Ok(tensors)
    }
}

impl Executor {
    /// Starts to send a message of a step.
    pub(super) fn send_message(&mut self, message: Message) -> Result<(), ParallelError> {
        let Message { kind, unit, microbatch } = message;
        let Executor { program, device, in_flight, messages, gradients, waiting, .. } = self;
        let peer = program.outline.peer(Action::Send(message)).expect("it is for a rank of the pipeline");
        match kind {
            MessageKind::Activation | MessageKind::Gradient => {
                messages.send(in_flight.take(kind, microbatch), peer, device, waiting)
            }
            MessageKind::TiedGradient => {
                let part = gradients.tied().expect("the unit is tied").take_to_send(microbatch);
                messages.send_vector(part, peer, device, waiting)
            }
            MessageKind::Parameters => self.send_copy(unit, peer),
        }
    }

    /// Starts to receive a message of a step.
    pub(super) fn receive_message(&mut self, message: Message) -> Result<(), ParallelError> {
        let Message { kind, microbatch, .. } = message;
        let Executor { program, in_flight, messages, gradients, rehearsal, .. } = self;
        let peer = program.outline.peer(Action::Receive(message)).expect("it is from a rank of the pipeline");
        let len = match kind {
            MessageKind::Activation | MessageKind::Gradient => {
                in_flight.carried(message, rehearsal).map(|spec| spec.num_words()).sum()
            }
            MessageKind::TiedGradient => gradients.tied().expect("the unit is tied").len(),
            MessageKind::Parameters => return self.receive_copy(peer),
        };
        messages.incoming[kind as usize][microbatch] = Some(messages.receive(len, peer)?);
        Ok(())
    }

    /// Sends a unit's parameters to the rank that has a copy of them.
    fn send_copy(&mut self, unit: usize, to: usize) -> Result<(), ParallelError> {
        let Executor { messages, parameters, device, waiting, .. } = self;
        parameters.ensure(unit, waiting)?;
        let whole = parameters.unit(unit);
        let mut vector = messages.pool.take(whole.shape().num_elements())?;
        device.convert(whole, vector.view_mut());
        messages.send_vector(vector, to, device, waiting)?;
        messages.finish_until(0, waiting)
    }

    /// Receives the parameters of which this rank has a copy.
    fn receive_copy(&mut self, from: usize) -> Result<(), ParallelError> {
        let Executor { messages, parameters, device, waiting, .. } = self;
        let Incoming { work, len } = messages.receive(parameters.copy_mut().shape().num_elements(), from)?;
        let vector = messages.pool.adopt(waiting.wait_on_device(work, len, device)?, len)?;
        device.convert(vector.view(), parameters.copy_mut());
        messages.pool.give(vector);
        Ok(())
    }

    /// Brings copies of units that lie on other ranks up to date, outside of a step. Collective over the ranks of a pipeline.
    pub(super) fn exchange_copies(&mut self) -> Result<(), ParallelError> {
        let is_exchange = |action: &Action| matches!(action, Action::Send(message) | Action::Receive(message) if message.kind == MessageKind::Parameters);
        match self.program.actions.iter().copied().find(is_exchange) {
            Some(Action::Send(message)) if self.program.outline.state.is_sharded(StateClass::Parameters) => {
                let (class, unit) = (self.class_of_weights(), message.unit);
                self.bring_state(class, unit)?;
                self.parameters.unshard(unit)?;
                self.send_message(message)?;
                self.parameters.reshard(unit);
                self.send_state(class, unit, false)
            }
            Some(Action::Send(message)) => self.send_message(message),
            Some(Action::Receive(message)) => self.receive_message(message),
            _ => Ok(()),
        }
    }

    /// Waits for the messages that an action works with.
    pub(super) fn await_messages(&mut self, action: Action) -> Result<(), ParallelError> {
        let Some(microbatch) = action.microbatch() else { return Ok(()) };
        let Executor { program, device, in_flight, messages, gradients, waiting, rehearsal, .. } = self;
        let outline = &program.outline;
        let expected = match action {
            Action::Forward { unit, .. } if unit > 0 => Some((MessageKind::Activation, unit - 1)),
            Action::Backward { unit, .. } | Action::BackwardInput { unit, .. } => {
                Some((MessageKind::Gradient, unit + 1)).filter(|(_, above)| *above < outline.chain.num_units)
            }
            _ => None,
        };
        if let Some((kind, unit)) = expected.filter(|(_, unit)| !outline.holds(*unit)) {
            let incoming =
                messages.incoming[kind as usize][microbatch].take().expect("a valid program receives it");
            let specs = in_flight.carried(Message { kind, unit, microbatch }, rehearsal);
            *in_flight.passing(kind, microbatch) = Some(messages.arrived(incoming, specs, device, waiting)?);
        }
        if let Some((unit, _)) = action.completed_gradient()
            && let Some(tied) = gradients.tied().filter(|tied| tied.span().unit == unit)
            && let Some(incoming) = messages.incoming[MessageKind::TiedGradient as usize][microbatch].take()
        {
            let (Incoming { work, len }, pool) = (incoming, &messages.pool);
            tied.put(microbatch, pool.adopt(waiting.wait_on_device(work, len, device)?, len)?);
        }
        Ok(())
    }
}
