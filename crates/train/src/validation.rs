//! Loss on held-out samples.

use crate::config::Training;
use crate::dataset::{Dataset, read_batch};
use crate::error::TrainError;
use trireme_base::ReduceOp;
use trireme_comm::Buffer;
use trireme_model::Batch;
use trireme_parallel::Executor;

/// The samples of a validation, divided among the ranks.
pub(crate) struct Validation {
    samples: Box<dyn Dataset>,
    num_samples: usize,
    batch_size: usize,
    /// For each batch, sum and rows of each unit's loss. A rank with the unit fills in its own, and the sum over ranks is exact, for the
    /// others add zeros.
    losses: Option<Buffer<f64>>,
}

impl Validation {
    /// The first samples, as many as the config says (0: all). Collective.
    pub(crate) fn new(
        samples: Box<dyn Dataset>,
        training: &Training,
        executor: &Executor,
    ) -> Result<Self, TrainError> {
        let batch_size = training.local_batch_size;
        let available = usize::try_from(samples.num_samples()).unwrap_or(usize::MAX);
        let num_samples = match training.validation_windows {
            0 => available,
            asked => available.min(asked),
        };
        let num_losses = executor.rehearsal().losses().count();
        let losses = Some(executor.group().buffer(num_samples.div_ceil(batch_size) * 2 * num_losses)?);
        Ok(Validation { samples, num_samples, batch_size, losses })
    }

    /// Mean loss, of a language model in nats a token; the same bits for any number of ranks. Collective.
    pub(crate) fn run(&mut self, executor: &mut Executor) -> Result<f64, TrainError> {
        let data = executor.ranks().data();
        let (rank, world_size) = (data.rank().0, data.world_size());
        let mut losses = self.losses.take().expect("validations follow each other");
        losses.fill(0.0);
        let num_batches = self.num_samples.div_ceil(self.batch_size);
        // A sum and a number of rows for each loss.
        let batch_len = losses.len() / num_batches;
        for first in (0..num_batches).step_by(world_size) {
            // Ranks that have no batch any more still help to gather sharded parameters.
            let index = Some(first + rank).filter(|&index| index < num_batches);
            let batch = index.map(|index| self.batch(index, executor)).transpose()?;
            let found = executor.evaluate(batch)?;
            if let Some(index) = index {
                let own = losses[index * batch_len..].chunks_exact_mut(2).zip(found);
                own.for_each(|(own, loss)| own.copy_from_slice(&[loss.sum, loss.num_rows as f64]));
            }
        }
        let losses = executor.group().all_reduce(losses, ReduceOp::Sum).wait()?;
        let sum = |first: usize| losses.iter().skip(first).step_by(batch_len).sum::<f64>();
        let loss = (0..batch_len).step_by(2).map(|first| sum(first) / sum(first + 1)).sum();
        self.losses = Some(losses);
        Ok(loss)
    }

    fn batch(&mut self, index: usize, executor: &Executor) -> Result<Batch, TrainError> {
        let first = index * self.batch_size;
        let specs = self.samples.specs(self.batch_size.min(self.num_samples - first));
        read_batch(&mut *self.samples, executor.device(), &specs, first as u64)
    }
}
