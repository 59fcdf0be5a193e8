//! Loss and metrics on held-out samples.

use crate::config::Training;
use crate::dataset::{Dataset, batch_specs, read_batch};
use crate::error::TrainError;
use crate::metrics::MetricValues;
use std::collections::BTreeMap;
use trireme_base::{AxisPlace, ReduceOp};
use trireme_comm::Buffer;
use trireme_model::{Batch, HostBatch, Rehearsal};
use trireme_parallel::Executor;

/// The samples of a validation, divided among the ranks.
pub(crate) struct Validation {
    samples: Box<dyn Dataset>,
    num_samples: usize,
    batch_size: usize,
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

impl Validation {
    /// The first samples, as many as the config says (0: all). Collective.
    pub(crate) fn new(
        samples: Box<dyn Dataset>,
        training: &Training,
        executor: &Executor,
    ) -> Result<Self, TrainError> {
        let batch_size = training.local_batch_size;
        let available = usize::try_from(samples.num_samples()).unwrap_or(usize::MAX);
        let num_samples = match training.validation_samples {
            0 => available,
            asked => available.min(asked),
        };
        let num_reports = executor.rehearsal().reports().count();
        let reports = Some(executor.group().buffer(num_samples.div_ceil(batch_size) * 2 * num_reports)?);
        Ok(Validation { samples, num_samples, batch_size, reports })
    }

    /// The loss and the metrics; the same bits for any number of ranks, unless ranks have parts of the positions. `None` if nothing in the
    /// samples counts in the loss. Collective.
    pub(crate) fn run(&mut self, executor: &mut Executor) -> Result<Option<Validated>, TrainError> {
        if !self.samples.begin(0, self.num_samples as u64)? {
            return Ok(None);
        }
        let AxisPlace { rank, degree } = executor.ranks().sample_place();
        let mut reports = self.reports.take().expect("validations follow each other");
        reports.fill(0.0);
        let num_batches = self.num_samples.div_ceil(self.batch_size);
        // A sum and a number of rows for each report.
        let batch_len = reports.len() / num_batches;
        for first in (0..num_batches).step_by(degree) {
            // Ranks that have no batch any more still help to gather sharded parameters, and run their experts: they read the last one, for nothing.
            let index = Some(first + rank).filter(|&index| index < num_batches);
            let read = index.or(executor.ranks().experts().map(|_| num_batches - 1));
            let batch = read.map(|index| self.batch(index, executor)).transpose()?;
            let found = executor.evaluate(batch)?;
            if let Some(index) = index {
                let own = reports[index * batch_len..].chunks_exact_mut(2).zip(found);
                own.for_each(|(own, mean)| own.copy_from_slice(&[mean.sum, mean.num_rows as f64]));
            }
        }
        let reports = executor.group().all_reduce(reports, ReduceOp::Sum).wait()?;
        let validated = means(executor.rehearsal(), &reports, batch_len);
        self.reports = Some(reports);
        Ok(Some(validated))
    }

    /// How many samples it has.
    pub(crate) fn num_samples(&self) -> usize {
        self.num_samples
    }

    /// Identifies the samples and what is read of them: losses of validations with the same identity are comparable.
    pub(crate) fn identity(&self) -> BTreeMap<String, String> {
        let mut identity = self.samples.identity();
        let tensors: Vec<&str> = self.samples.sample().iter().map(|spec| spec.name).collect();
        identity.extend([
            ("tensors".to_owned(), tensors.join(" ")),
            ("validation_samples".to_owned(), self.num_samples.to_string()),
        ]);
        identity
    }

    fn batch(&mut self, index: usize, executor: &Executor) -> Result<Batch, TrainError> {
        let first = index * self.batch_size;
        let specs = batch_specs(&*self.samples, self.batch_size.min(self.num_samples - first));
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
