//! Hashes of gradients and parameters, to compare runs.

use super::hashes::{ParameterHasher, sum_over_ranks};
use super::{Executor, HashRecorder, StepHashes};
use crate::error::Result;
use std::sync::Arc;

impl Executor {
    /// Records [`StepHashes`] of each step whose number is a multiple of `interval`, unless the step is skipped; records none if `interval`
    /// is 0. Must be called in the same way on all ranks.
    ///
    /// A recorded step copies the gradients and parameters that this rank updates to the host, in chunks, and hashes them there.
    pub fn record_hashes(&mut self, interval: u64) {
        self.optimization.hashes = HashRecorder::new(interval);
    }

    /// Removes and returns the hashes that were recorded since the previous call, summed over all ranks. Collective.
    ///
    /// # Errors
    /// Errors of the group of all ranks.
    pub fn take_hashes(&mut self) -> Result<Vec<StepHashes>> {
        let mut steps = self.optimization.hashes.take();
        for StepHashes { gradients, parameters, .. } in &mut steps {
            sum_over_ranks(self.group(), gradients)?;
            sum_over_ranks(self.group(), parameters)?;
        }
        Ok(steps)
    }

    /// Returns a hash of the current values of each parameter, as in [`StepHashes::parameters`]. Collective.
    ///
    /// # Errors
    /// Errors of the device, the groups and disks.
    pub fn hash_parameters(&mut self) -> Result<Vec<u64>> {
        let table = Arc::clone(self.model.table());
        let mut hashes = vec![0; table.parameters().len()];
        self.for_each_held_unit(self.class_of_weights(), false, |executor, unit| {
            let rank = executor.group().rank();
            let hasher = ParameterHasher { table: &table, placements: &executor.placements, rank };
            let (values, part) = (executor.shard(unit), &executor.parts()[unit]);
            hasher.add_unit(&mut hashes, unit, values, part, executor.shard_device())
        })?;
        sum_over_ranks(self.group(), &mut hashes)?;
        Ok(hashes)
    }
}
