//! The batches of a validation, and their assignment to ranks.

use crate::layout::RankGrid;
use trireme_base::AxisRank;

/// The batches of a validation. Each has as many samples as a microbatch; the last one may have fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidationBatches {
    num_samples: usize,
    batch_size: usize,
}

/// A rank's part in a round of a validation, in which each rank evaluates at most one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidationRound {
    /// Index of the batch that the rank evaluates, or `None`.
    pub batch: Option<usize>,
    /// Whether the results count. If false, the rank evaluates a batch only because other ranks need its experts.
    pub counts: bool,
}

impl ValidationBatches {
    /// Splits `num_samples` samples into batches of `batch_size`.
    ///
    /// # Panics
    /// If either number is 0.
    pub fn new(num_samples: usize, batch_size: usize) -> Self {
        assert!(num_samples > 0 && batch_size > 0, "{num_samples} samples in batches of {batch_size}");
        ValidationBatches { num_samples, batch_size }
    }

    /// Number of batches.
    pub fn num_batches(&self) -> usize {
        self.num_samples.div_ceil(self.batch_size)
    }

    /// Number of samples.
    pub fn num_samples(&self) -> usize {
        self.num_samples
    }

    /// Returns the index of a batch's first sample, and the number of its samples.
    pub fn batch(&self, index: usize) -> (usize, usize) {
        let first = index * self.batch_size;
        (first, self.batch_size.min(self.num_samples - first))
    }

    /// Returns this rank's part in each round. All ranks have the same number of rounds. A rank for which no batch is left has a round
    /// without a batch, in which it takes part in the gathers of sharded parameters; if ranks have different experts, it evaluates the last
    /// batch again.
    pub fn rounds(self, ranks: &RankGrid) -> impl Iterator<Item = ValidationRound> + use<> {
        let AxisRank { rank, degree } = ranks.sample_rank();
        let (num_batches, has_experts) = (self.num_batches(), ranks.experts().is_some());
        (0..num_batches).step_by(degree).map(move |first| {
            let own = Some(first + rank).filter(|&index| index < num_batches);
            ValidationRound { batch: own.or(has_experts.then_some(num_batches - 1)), counts: own.is_some() }
        })
    }
}
