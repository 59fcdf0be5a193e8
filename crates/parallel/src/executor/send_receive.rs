//! Sends and receives the messages of a program.

use super::Executor;
use super::pending_messages::Incoming;
use crate::error::Result;
use trireme_base::DType;
use trireme_schedule::{Action, Message, MessageKind, StateClass};
use trireme_tensor::ParameterSource;

impl Executor {
    pub(super) fn send_message(&mut self, message: Message) -> Result<()> {
        let Message { kind, unit, microbatch } = message;
        let Executor { program, passes, messages, gradients, waiting, .. } = self;
        let peer = program.header.peer(Action::Send(message)).expect("it is for a rank of the pipeline");
        match kind {
            MessageKind::Activation | MessageKind::Gradient => {
                messages.send(passes.in_flight.take(kind, microbatch), peer, waiting)
            }
            MessageKind::TiedGradient => {
                let part = gradients.tied().expect("the unit is tied").take_to_send(microbatch);
                messages.send_vector(part, peer, waiting)
            }
            MessageKind::Parameters => self.send_tied_unit(unit, peer),
        }
    }

    pub(super) fn receive_message(&mut self, message: Message) -> Result<()> {
        let Message { kind, microbatch, .. } = message;
        let Executor { program, passes, messages, gradients, profile, .. } = self;
        let peer = program.header.peer(Action::Receive(message)).expect("it is from a rank of the pipeline");
        let len = match kind {
            MessageKind::Activation | MessageKind::Gradient => {
                passes.in_flight.message_specs(message, profile).map(|spec| spec.num_words()).sum()
            }
            MessageKind::TiedGradient => gradients.tied().expect("the unit is tied").len(),
            MessageKind::Parameters => return self.receive_tied_unit(peer),
        };
        messages.incoming[kind as usize][microbatch] = Some(messages.receive(len, peer)?);
        Ok(())
    }

    /// Sends the parameters of a tied unit to the rank that reads a copy of them.
    fn send_tied_unit(&mut self, unit: usize, to: usize) -> Result<()> {
        let Executor { messages, parameters, device, waiting, .. } = self;
        parameters.await_gathered_unit(unit, waiting)?;
        let whole = parameters.unit(unit);
        let mut vector = messages.pool.take(whole.shape().num_elements())?;
        device.convert(whole, vector.view_mut());
        messages.send_vector(vector, to, waiting)?;
        messages.finish_until(0, waiting)
    }

    fn receive_tied_unit(&mut self, from: usize) -> Result<()> {
        let Executor { messages, parameters, device, waiting, .. } = self;
        let Incoming { work, len } =
            messages.receive(parameters.tied_copy_mut().shape().num_elements(), from)?;
        let vector =
            messages.pool.wrap_received(waiting.wait_on_device(work, DType::F32, len, device)?, len)?;
        device.convert(vector.view(), parameters.tied_copy_mut());
        messages.pool.release(vector);
        Ok(())
    }

    /// Updates the copy of a tied unit on the pipeline rank that reads it, outside of a step. Collective over the pipeline.
    pub(super) fn exchange_tied_units(&mut self) -> Result<()> {
        let is_exchange = |action: &Action| matches!(action, Action::Send(message) | Action::Receive(message) if message.kind == MessageKind::Parameters);
        match self.program.actions.iter().copied().find(is_exchange) {
            Some(Action::Send(message)) if self.program.header.state.is_sharded(StateClass::Parameters) => {
                let (class, unit) = (self.class_of_weights(), message.unit);
                self.fetch_state(class, unit)?;
                self.parameters.unshard(unit)?;
                self.send_message(message)?;
                self.parameters.reshard(unit);
                self.evict_state(class, unit, false)
            }
            Some(Action::Send(message)) => self.send_message(message),
            Some(Action::Receive(message)) => self.receive_message(message),
            _ => Ok(()),
        }
    }

    pub(super) fn await_messages(&mut self, action: Action) -> Result<()> {
        let Some(microbatch) = action.microbatch() else { return Ok(()) };
        let Executor { program, device, passes, messages, gradients, waiting, profile, .. } = self;
        let header = &program.header;
        let is_expected =
            |message: &Message| message.unit < header.chain.num_units && !header.holds(message.unit);
        if let Some(message) = action.awaited_message().filter(is_expected) {
            let incoming = messages.incoming[message.kind as usize][microbatch].take();
            let incoming = incoming.expect("a valid program receives it");
            let specs = passes.in_flight.message_specs(message, profile);
            *passes.in_flight.between_units_slot(message.kind, microbatch) =
                Some(messages.receive_tensors(incoming, specs, waiting)?);
        }
        if let Some((unit, _)) = action.completed_gradient()
            && let Some(tied) = gradients.tied().filter(|tied| tied.span.unit == unit)
            && let Some(incoming) = messages.incoming[MessageKind::TiedGradient as usize][microbatch].take()
        {
            let (Incoming { work, len }, pool) = (incoming, &messages.pool);
            tied.put(
                microbatch,
                pool.wrap_received(waiting.wait_on_device(work, DType::F32, len, device)?, len)?,
            );
        }
        Ok(())
    }
}
