//! Global gradient norms of earlier steps. A pipeline that does not drain between updates clips by them.

use crate::error::Result;
use crate::memory::WaitTracker;
use std::collections::VecDeque;
use std::sync::Arc;
use trireme_base::ReduceOp;
use trireme_comm::{Buffer, Group, Work};
use trireme_schedule::ProgramHeader;
use trireme_schedule::pipeline::Schedule;

/// The global gradient norms of the most recent steps.
///
/// The norm from [`lag`](Schedule::norm_lag) steps ago is known without waiting for slower pipeline ranks.
pub(super) struct EarlierNorms {
    /// A group of the pipeline's ranks for these sums alone: their order relative to other operations differs between the ranks.
    group: Arc<Group>,
    lag: usize,
    /// Known norms, the newest last; at most `lag`.
    pub(super) known: VecDeque<f64>,
    /// Pending sums of the squared norms of the steps after `known`.
    pending: VecDeque<Work<Buffer<f64>>>,
    spare: Vec<Buffer<f64>>,
}

impl EarlierNorms {
    pub(super) fn new(header: &ProgramHeader, group: Arc<Group>) -> Self {
        let lag = Schedule::norm_lag(group.world_size(), header.microbatches_per_step());
        EarlierNorms { group, lag, known: VecDeque::new(), pending: VecDeque::new(), spare: Vec::new() }
    }

    /// Starts to sum the squared norm of the current step over the pipeline. `own` is this rank's contribution. Returns the norm from `lag`
    /// steps ago, or `None` if there was no such step.
    pub(super) fn advance(&mut self, own: f64, waiting: &mut WaitTracker) -> Result<Option<f64>> {
        let mut square = match self.spare.pop() {
            Some(square) => square,
            None => self.group.buffer(1)?,
        };
        square[0] = own;
        self.pending.push_back(self.group.all_reduce(square, ReduceOp::Sum));
        self.wait(self.lag, waiting)?;
        let place = (self.known.len() + self.pending.len()).checked_sub(self.lag + 1);
        Ok(place.map(|place| self.known[place]))
    }

    /// Waits until at most `num_left` sums are pending.
    pub(super) fn wait(&mut self, num_left: usize, waiting: &mut WaitTracker) -> Result<()> {
        while self.pending.len() > num_left {
            let square = waiting.wait(self.pending.pop_front().expect("there are more"))?;
            self.push(square[0].sqrt());
            self.spare.push(square);
        }
        Ok(())
    }

    fn push(&mut self, norm: f64) {
        self.known.push_back(norm);
        if self.known.len() > self.lag {
            self.known.pop_front();
        }
    }

    /// Replaces the known norms by `norms`, the norms of an earlier run.
    pub(super) fn restore(&mut self, norms: &[f64]) {
        self.known.clear();
        norms.iter().for_each(|&norm| self.push(norm));
    }
}
