//! Loss and metrics on held-out samples.

use crate::config::Training;
use crate::dataset::{Dataset, batch_specs, read_batch};
use crate::error::TrainError;
use crate::metrics::MetricValues;
use std::collections::BTreeMap;
use trireme_base::ReduceOp;
use trireme_comm::Buffer;
use trireme_model::{Batch, HostBatch, Rehearsal};
use trireme_parallel::{Executor, ValidationBatches, ValidationRound};

/// The samples of a validation, divided among the ranks.
pub(crate) struct Validation {
    samples: Box<dyn Dataset>,
    batches: ValidationBatches,
    /// For each batch, sum and rows of each report. A rank with the unit fills in its own, and the sum over ranks is exact, for
    /// the others add zeros; unless ranks have parts of the positions, whose sums are added up.
    reports: Option<Buffer<f64>>,
}

/// What a validation has found.
#[derive(Debug, Clone, PartialEq)]
pub struct Validated {
    /// The mean loss: of a language model in nats a token.
    pub loss: f64,
    /// The means of what units report as metrics.
    pub metrics: MetricValues,
}

/// The batches of a validation of the first samples of `available`, as many as the config says (0: all).
pub fn validation_batches(available: u64, training: &Training) -> ValidationBatches {
    let available = usize::try_from(available).unwrap_or(usize::MAX);
    let num_samples = match training.validation_samples {
        0 => available,
        asked => available.min(asked),
    };
    ValidationBatches::new(num_samples, training.local_batch_size)
}

impl Validation {
    /// The first samples, as many as the config says (0: all). Collective.
    pub(crate) fn new(
        samples: Box<dyn Dataset>,
        training: &Training,
        executor: &mut Executor,
    ) -> Result<Self, TrainError> {
        let batches = validation_batches(samples.num_samples(), training);
        let reports = Some(executor.validation_reports(&batches)?);
        Ok(Validation { samples, batches, reports })
    }

    /// The loss and the metrics; the same bits for any number of ranks, unless ranks have parts of the positions. `None` if nothing in the
    /// samples counts in the loss. Collective.
    pub(crate) fn run(&mut self, executor: &mut Executor) -> Result<Option<Validated>, TrainError> {
        if !self.samples.begin(0, self.batches.num_samples() as u64)? {
            return Ok(None);
        }
        let mut reports = self.reports.take().expect("validations follow each other");
        reports.fill(0.0);
        // A sum and a number of rows for each report.
        let batch_len = reports.len() / self.batches.num_batches();
        for ValidationRound { read, counts } in self.batches.rounds(executor.ranks()) {
            let batch = read.map(|index| self.batch(index, executor)).transpose()?;
            let found = executor.evaluate(batch)?;
            if let Some(index) = read.filter(|_| counts) {
                let own = reports[index * batch_len..].chunks_exact_mut(2).zip(found);
                own.for_each(|(own, mean)| own.copy_from_slice(&[mean.sum, mean.num_rows as f64]));
            }
        }
        let reports = executor.group().all_reduce(reports, ReduceOp::Sum).wait()?;
        let validated = means(executor.rehearsal(), &reports, batch_len);
        self.reports = Some(reports);
        Ok(Some(validated))
    }

    pub(crate) fn num_samples(&self) -> usize {
        self.batches.num_samples()
    }

    /// Identifies the samples and what is read of them: losses of validations with the same identity are comparable.
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
        let context = executor.ranks().context_place();
        read_batch(&mut *self.samples, executor.device(), &mut HostBatch::new(&specs), first as u64, context)
    }
}

/// Losses of units are added up; a metric that several units report is one mean.
fn means(rehearsal: &Rehearsal, reports: &[f64], batch_len: usize) -> Validated {
    let sum = |first: usize| reports.iter().skip(first).step_by(batch_len).sum::<f64>();
    let of = |metric: Option<&'static str>| {
        let all = rehearsal.reports().enumerate().filter(move |(_, (_, report))| report.metric == metric);
        all.map(|(index, _)| (sum(2 * index), sum(2 * index + 1)))
    };
    let mean = |name| {
        let (sum, num_rows) = of(Some(name)).fold((0.0, 0.0), |all, own| (all.0 + own.0, all.1 + own.1));
        (name, sum / num_rows)
    };
    let mut metrics = MetricValues::default();
    rehearsal.metric_names().into_iter().map(mean).for_each(|metric| metrics.push(metric));
    Validated { loss: of(None).map(|(sum, num_rows)| sum / num_rows).sum(), metrics }
}
