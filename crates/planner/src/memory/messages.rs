//! Messages between the ranks of a pipeline.

use super::pool::Pool;
use crate::setup::{MemorySetup, TiedLens};
use crate::usage::Usage;
use std::collections::{BTreeSet, VecDeque};
use trireme_base::Category;
use trireme_schedule::{Action, Outline};

/// Messages that were sent and whose memory is still lent, as the executor bounds them.
const SENDS_MAX: usize = 2;

#[derive(Debug)]
pub(super) struct Messages<'a> {
    setup: &'a MemorySetup,
    outline: &'a Outline,
    pool: Pool,
    sent: VecDeque<usize>,
    /// Messages that have come, or are under way: as unit and microbatch, of forward and of backward.
    received: [BTreeSet<(usize, usize)>; 2],
}

impl<'a> Messages<'a> {
    pub(super) fn new(setup: &'a MemorySetup, outline: &'a Outline) -> Self {
        let pool = Pool::new(Category::Communication, size_of::<f32>(), 1, false);
        Messages { setup, outline, pool, sent: VecDeque::new(), received: Default::default() }
    }

    /// What has come for a pass is copied, and its buffer is free again; whether the pass begins with one.
    pub(super) fn begin(&mut self, action: Action) -> bool {
        let key = |unit: usize| (unit, action.microbatch().unwrap_or(0));
        let is_received = match action {
            Action::Forward { unit, .. } if unit > 0 => self.received[0].remove(&key(unit - 1)),
            Action::Backward { unit, .. } | Action::BackwardInput { unit, .. } => {
                self.received[1].remove(&key(unit + 1))
            }
            _ => false,
        };
        if is_received {
            self.pool.give(self.setup.message_len);
        }
        is_received
    }

    /// A message begins.
    pub(super) fn exchange(&mut self, action: Action, usage: &mut Usage) {
        let key = (action.unit(), action.microbatch().unwrap_or(0));
        match action {
            Action::SendForward { .. } | Action::SendBackward { .. } => {
                self.send(self.setup.message_len);
            }
            Action::ReceiveForward { .. } => _ = self.received[0].insert(key),
            Action::ReceiveBackward { .. } => _ = self.received[1].insert(key),
            _ => return self.exchange_tied(action, usage),
        }
        debug_assert!(self.outline.stages.len() > 1, "only pipelines have messages");
        self.pool.take(self.setup.message_len, usage);
    }

    /// A message about parameters that a unit reads which are another one's.
    fn exchange_tied(&mut self, action: Action, usage: &mut Usage) {
        let Some(TiedLens { span, unit }) = self.setup.tied else { return };
        match action {
            // It has its memory since backward of the unit that reads.
            Action::SendGrad { .. } => self.send(span),
            Action::ReceiveGrad { .. } => self.pool.take(span, usage),
            Action::SendParameters { .. } => {
                self.pool.take(unit, usage);
                self.send(unit);
                self.finish();
            }
            Action::ReceiveParameters { .. } => {
                self.pool.take(unit, usage);
                self.pool.give(unit);
            }
            _ => unreachable!("{action} is no message"),
        }
    }

    fn send(&mut self, len: usize) {
        if self.sent.len() >= SENDS_MAX {
            self.finish_first();
        }
        self.sent.push_back(len);
    }

    /// What tied units have for each other's gradients when one of them completes its own.
    pub(super) fn complete(&mut self, unit: usize, usage: &mut Usage) {
        let Some(tied) = self.setup.tied.filter(|_| !self.outline.stages.is_empty()) else { return };
        for &(reader, owner) in &self.outline.ties {
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
