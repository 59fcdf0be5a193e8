//! The batches of a validation, and which rank reads which.

use crate::layout::RankGrid;
use trireme_base::AxisPlace;

/// The batches of a validation: as many samples each as a microbatch has, but for the last one, which may have fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidationBatches {
    num_samples: usize,
    batch_size: usize,
}

/// A rank's part in a round, in which each rank evaluates one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidationRound {
    /// The index of the batch that the rank reads, if it reads one.
    pub read: Option<usize>,
    /// Whether the results count. If not, the rank reads a batch only because others need its experts.
    pub counts: bool,
}

impl ValidationBatches {
    /// The batches of `num_samples` samples.
    ///
    /// # Panics
    /// If there are no samples, or none in a batch.
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

    /// The first sample of a batch, and the number of its samples.
    pub fn batch(&self, index: usize) -> (usize, usize) {
        let first = index * self.batch_size;
        (first, self.batch_size.min(self.num_samples - first))
    }

    /// Returns this rank's part in each round; all ranks have the same number of rounds. A rank for which no batch is left still helps to gather sharded
    /// parameters and, where ranks have different experts, reads the last one.
    pub fn rounds(self, ranks: &RankGrid) -> impl Iterator<Item = ValidationRound> + use<> {
        let AxisPlace { rank, degree } = ranks.sample_place();
        let (num_batches, has_experts) = (self.num_batches(), ranks.experts().is_some());
        (0..num_batches).step_by(degree).map(move |first| {
            let own = Some(first + rank).filter(|&index| index < num_batches);
            ValidationRound { read: own.or(has_experts.then_some(num_batches - 1)), counts: own.is_some() }
        })
    }
}
