//! Messages between the ranks of a pipeline.

use super::pool::Pool;
use crate::setup::MemorySetup;
use crate::usage::Usage;
use std::collections::{BTreeSet, VecDeque};
use trireme_base::Category;
use trireme_schedule::{Action, Message, MessageKind, Outline};

/// Messages that were sent and whose memory is still lent, as the executor bounds them.
const SENDS_MAX: usize = 2;

#[derive(Debug)]
pub(super) struct Messages<'a> {
    setup: &'a MemorySetup,
    outline: &'a Outline,
    pool: Pool,
    sent: VecDeque<usize>,
    /// Messages for passes that have come, or are under way.
    received: BTreeSet<Message>,
}

impl<'a> Messages<'a> {
    pub(super) fn new(setup: &'a MemorySetup, outline: &'a Outline) -> Self {
        let pool = Pool::new(Category::Communication, size_of::<f32>(), 1, false);
        Messages { setup, outline, pool, sent: VecDeque::new(), received: BTreeSet::new() }
    }

    /// What has come for a pass is copied, and its buffer is free again; whether the pass begins with one.
    pub(super) fn begin(&mut self, action: Action) -> bool {
        let message = match action {
            Action::Forward { unit, microbatch, .. } if unit > 0 => Message::activation(unit - 1, microbatch),
            Action::Backward { unit, microbatch } | Action::BackwardInput { unit, microbatch } => {
                Message::gradient(unit + 1, microbatch)
            }
            _ => return false,
        };
        let is_received = self.received.remove(&message);
        if is_received {
            self.pool.give(self.len_of(message));
        }
        is_received
    }

    /// A message is sent.
    pub(super) fn send(&mut self, message: Message, usage: &mut Usage) {
        let len = self.len_of(message);
        match message.kind {
            MessageKind::Activation | MessageKind::Gradient => {
                self.lend(len);
                self.pool.take(len, usage);
            }
            // It has its memory since backward of the unit that reads.
            MessageKind::TiedGradient => self.lend(len),
            MessageKind::Parameters => {
                self.pool.take(len, usage);
                self.lend(len);
                self.finish();
            }
        }
    }

    /// A message begins to come.
    pub(super) fn receive(&mut self, message: Message, usage: &mut Usage) {
        let len = self.len_of(message);
        self.pool.take(len, usage);
        match message.kind {
            MessageKind::Activation | MessageKind::Gradient => _ = self.received.insert(message),
            MessageKind::TiedGradient => (),
            // It is waited for at once.
            MessageKind::Parameters => self.pool.give(len),
        }
    }

    /// Elements of a message.
    fn len_of(&self, Message { kind, unit, .. }: Message) -> usize {
        let tied = || self.setup.tied.expect("a unit reads another one's parameters");
        match kind {
            MessageKind::Activation => self.setup.units[unit].activation_len,
            MessageKind::Gradient => self.setup.units[unit - 1].gradient_len,
            MessageKind::TiedGradient => tied().span,
            MessageKind::Parameters => tied().unit,
        }
    }

    /// The first of too many lent buffers has to come back before another one is lent.
    fn lend(&mut self, len: usize) {
        if self.sent.len() >= SENDS_MAX {
            self.finish_first();
        }
        self.sent.push_back(len);
    }

    /// What tied units have for each other's gradients when one of them completes its own.
    pub(super) fn complete(&mut self, unit: usize, usage: &mut Usage) {
        let Some(tied) = self.setup.tied.filter(|_| !self.outline.stages.is_empty()) else { return };
        for &(reader, owner) in &self.outline.chain.ties {
            if unit == reader {
                self.pool.take(tied.span, usage);
            }
            if unit == owner {
                self.pool.give(tied.span);
            }
        }
    }

    fn finish_first(&mut self) {
        if let Some(len) = self.sent.pop_front() {
            self.pool.give(len);
        }
    }

    /// All that was sent has gone.
    pub(super) fn finish(&mut self) {
        while !self.sent.is_empty() {
            self.finish_first();
        }
    }
}
