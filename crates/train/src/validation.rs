//! Loss and metrics on held-out samples.

use crate::config::Training;
use crate::dataset::{Dataset, batch_specs, read_batch};
use crate::error::TrainError;
use crate::metrics::MetricValues;
use std::collections::BTreeMap;
use trireme_base::ReduceOp;
use trireme_comm::Buffer;
use trireme_model::{Batch, HostBatch, ModelProfile};
use trireme_parallel::{Executor, ValidationBatches, ValidationRound};

/// The samples of a validation, divided among the ranks.
pub(crate) struct Validation {
    samples: Box<dyn Dataset>,
    batches: ValidationBatches,
    /// For each batch, the sum and the number of rows of each report. A rank fills in the batches that it reads, for the units that it
    /// runs, and leaves zeros elsewhere, so the sum over ranks is exact. Ranks of the context axis hold partial sums of the same batch,
    /// which the all-reduce adds.
    reports: Option<Buffer<f64>>,
}

/// The result of a validation.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidationResult {
    /// The mean loss; for a language model, in nats per token.
    pub loss: f64,
    /// The means of the metrics that units report.
    pub metrics: MetricValues,
}

/// Returns the batches of a validation over the first of `available` samples: as many as the config says, or all if it says 0.
pub fn validation_batches(available: u64, training: &Training) -> ValidationBatches {
    let available = usize::try_from(available).unwrap_or(usize::MAX);
    let num_samples = match training.validation_samples {
        0 => available,
        asked => available.min(asked),
    };
    ValidationBatches::new(num_samples, training.local_batch_size)
}

impl Validation {
    /// Creates a validation over the first samples: as many as the config says, or all if it says 0. Collective.
    pub(crate) fn new(
        samples: Box<dyn Dataset>,
        training: &Training,
        executor: &mut Executor,
    ) -> Result<Self, TrainError> {
        let batches = validation_batches(samples.num_samples(), training);
        let reports = Some(executor.allocate_validation_reports(&batches)?);
        Ok(Validation { samples, batches, reports })
    }

    /// Returns the loss and the metrics. Their bits do not depend on the number of ranks, unless the context axis divides positions. `None`
    /// if nothing in the samples counts in the loss. Collective.
    pub(crate) fn run(&mut self, executor: &mut Executor) -> Result<Option<ValidationResult>, TrainError> {
        if !self.samples.announce_samples(0, self.batches.num_samples() as u64)? {
            return Ok(None);
        }
        let mut reports = self.reports.take().expect("validations follow each other");
        reports.fill(0.0);
        // A batch has a sum and a number of rows for each report.
        let batch_len = reports.len() / self.batches.num_batches();
        for ValidationRound { batch: read, counts } in self.batches.rounds(executor.ranks()) {
            let batch = read.map(|index| self.batch(index, executor)).transpose()?;
            let found = executor.evaluate(batch)?;
            if let Some(index) = read.filter(|_| counts) {
                let own = reports[index * batch_len..].chunks_exact_mut(2).zip(found);
                own.for_each(|(own, mean)| own.copy_from_slice(&[mean.sum, mean.num_rows as f64]));
            }
        }
        let reports = executor.group().all_reduce(reports, ReduceOp::Sum).wait()?;
        let validated = means(executor.profile(), &reports, batch_len);
        self.reports = Some(reports);
        Ok(Some(validated))
    }

    pub(crate) fn num_samples(&self) -> usize {
        self.batches.num_samples()
    }

    /// Returns the identity of the samples and of the tensors that are read. Losses of validations with the same identity are comparable.
    pub(crate) fn identity(&self) -> BTreeMap<String, String> {
        let mut identity = self.samples.identity();
        let tensors: Vec<&str> = self.samples.sample().iter().map(|spec| spec.name).collect();
        identity.extend([
            ("tensors".to_owned(), tensors.join(" ")),
            ("validation_samples".to_owned(), self.num_samples().to_string()),
        ]);
        identity
    }

    fn batch(&mut self, index: usize, executor: &Executor) -> Result<Batch, TrainError> {
        let (first, num_samples) = self.batches.batch(index);
        let specs = batch_specs(&*self.samples, num_samples);
        let context = executor.ranks().context_rank();
        read_batch(&mut *self.samples, executor.device(), &mut HostBatch::new(&specs), first as u64, context)
    }
}

/// Returns the means over all batches. The mean losses of units are added. A metric that several units report has one mean over all their
/// rows.
fn means(profile: &ModelProfile, reports: &[f64], batch_len: usize) -> ValidationResult {
    let sum = |first: usize| reports.iter().skip(first).step_by(batch_len).sum::<f64>();
    let of = |metric: Option<&'static str>| {
        let all = profile.reports().enumerate().filter(move |(_, (_, report))| report.metric == metric);
        all.map(|(index, _)| (sum(2 * index), sum(2 * index + 1)))
    };
    let mean = |name| {
        let (sum, num_rows) = of(Some(name)).fold((0.0, 0.0), |all, own| (all.0 + own.0, all.1 + own.1));
        (name, sum / num_rows)
    };
    let mut metrics = MetricValues::default();
    profile.metric_names().into_iter().map(mean).for_each(|metric| metrics.push(metric));
    ValidationResult { loss: of(None).map(|(sum, num_rows)| sum / num_rows).sum(), metrics }
}
