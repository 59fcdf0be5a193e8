//! Hashes of gradients and parameters, by which runs are compared.

use super::hashes::{add_unit, sum_over_ranks};
use super::{Executor, HashRecorder, StepHashes};
use crate::error::{ParallelError, Result};
use std::sync::Arc;

impl Executor {
    /// Records [`StepHashes`] of each step whose number `interval` divides, unless it is skipped; of none if that is 0. Alike on all ranks.
    ///
    /// A recorded step copies the gradients and parameters that this rank updates to the host, piece by piece, and hashes them.
    pub fn record_hashes(&mut self, interval: u64) {
        self.optimization.hashes = HashRecorder::new(interval);
    }

    /// Removes and returns what was recorded since the last call, of all ranks. Collective.
    pub fn take_hashes(&mut self) -> Result<Vec<StepHashes>> {
        let mut steps = self.optimization.hashes.take();
        for StepHashes { gradients, parameters, .. } in &mut steps {
            sum_over_ranks(self.group(), gradients)?;
            sum_over_ranks(self.group(), parameters)?;
        }
        Ok(steps)
    }

    /// A hash of each parameter as it is now, as in [`StepHashes::parameters`]. Collective.
    pub fn hash_parameters(&mut self) -> Result<Vec<u64>> {
        let table = Arc::clone(self.model.table());
        let mut hashes = vec![0; table.parameters().len()];
        self.for_each_held(self.class_of_weights(), false, |executor, unit| {
            let place = (&*table, &executor.placements, executor.group().rank());
            let values = (executor.shard(unit), &executor.parts()[unit]);
            add_unit(&mut hashes, unit, place, values, executor.shard_device());
            Ok::<_, ParallelError>(())
        })?;
        sum_over_ranks(self.group(), &mut hashes)?;
        Ok(hashes)
    }
}
