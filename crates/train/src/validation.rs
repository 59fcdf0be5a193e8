//! Loss on held-out text.

use crate::config::Training;
use crate::error::TrainError;
use trireme_base::ReduceOp;
use trireme_comm::Buffer;
use trireme_data::{Sampler, TokenFile};
use trireme_model::{Batch, empty_batch, set_window, token_specs};
use trireme_parallel::Executor;

/// The windows of a validation, divided among the ranks.
pub(crate) struct Validation {
    tokens: TokenFile,
    sampler: Sampler,
    num_windows: usize,
    batch_size: usize,
    seq_len: usize,
    /// For each batch, sum and rows of each unit's loss. A rank with the unit fills in its own, and the sum over ranks is exact, for the
    /// others add zeros.
    losses: Option<Buffer<f64>>,
    window: Vec<u32>,
}

impl Validation {
    /// The first windows of `tokens` in the order of the file, as many as the config says (0: all). Collective.
    pub(crate) fn new(
        tokens: TokenFile,
        training: &Training,
        executor: &Executor,
    ) -> Result<Self, TrainError> {
        let (seq_len, batch_size) = (training.seq_len, training.local_batch_size);
        let sampler = Sampler::sequential(tokens.num_tokens(), seq_len)?;
        let available = usize::try_from(sampler.num_windows()).unwrap_or(usize::MAX);
        let num_windows = match training.validation_windows {
            0 => available,
            asked => available.min(asked),
        };
        let num_losses = executor.rehearsal().losses().count();
        let losses = Some(executor.group().buffer(num_windows.div_ceil(batch_size) * 2 * num_losses)?);
        let window = vec![0; seq_len + 1];
        Ok(Validation { tokens, sampler, num_windows, batch_size, seq_len, losses, window })
    }

    /// The tokens validated on.
    pub(crate) fn tokens(&self) -> &TokenFile {
        &self.tokens
    }

    /// Mean loss, of a language model in nats a token; the same bits for any number of ranks. Collective.
    pub(crate) fn run(&mut self, executor: &mut Executor) -> Result<f64, TrainError> {
        let data = executor.ranks().data();
        let (rank, world_size) = (data.rank().0, data.world_size());
        let mut losses = self.losses.take().expect("validations follow each other");
        losses.fill(0.0);
        let num_batches = self.num_windows.div_ceil(self.batch_size);
        let num_losses = losses.len() / num_batches;
        for first in (0..num_batches).step_by(world_size) {
            // Ranks that have no batch any more still help to gather sharded parameters.
            let index = Some(first + rank).filter(|&index| index < num_batches);
            let batch = index.map(|index| self.batch(index, executor)).transpose()?;
            let found = executor.evaluate(batch)?;
            if let Some(index) = index {
                let own = losses[index * num_losses..].chunks_exact_mut(2).zip(found);
                own.for_each(|(own, loss)| own.copy_from_slice(&[loss.sum, loss.num_rows as f64]));
            }
        }
        let losses = executor.group().all_reduce(losses, ReduceOp::Sum).wait()?;
        let sum = |first: usize| losses.iter().skip(first).step_by(num_losses).sum::<f64>();
        let loss = (0..num_losses).step_by(2).map(|first| sum(first) / sum(first + 1)).sum();
        self.losses = Some(losses);
        Ok(loss)
    }

    fn batch(&mut self, index: usize, executor: &Executor) -> Result<Batch, TrainError> {
        let first = index * self.batch_size;
        let rows = self.batch_size.min(self.num_windows - first);
        let mut batch = empty_batch(executor.device(), &token_specs(rows, self.seq_len))?;
        for row in 0..rows {
            let window = self.sampler.window((first + row) as u64);
            self.tokens.read_window(window.start, &mut self.window)?;
            set_window(&mut batch, row, &self.window);
        }
        Ok(batch)
    }
}
