//! The losses and metrics that units report for each microbatch, gathered from all ranks and averaged. Requests of ranks are sent along.
//!
//! On a device that runs kernels synchronously, the gather starts as soon as the last loss is known, ahead of the first gradients, so
//! losses do not wait behind long messages.

use crate::error::Result;
use crate::gradients::TreeSum;
use crate::layout::RankGrid;
use crate::memory::{CountedMemory, ExchangeVector, PendingVector, WaitTracker};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use trireme_base::{DType, Rank};
use trireme_comm::Group;
use trireme_model::{MeanReport, ModelProfile};
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::Device;
use trireme_tensor::tape::{PendingMean, RowMean};

/// Returns the position of microbatch `index` of the data-parallel rank `rank` in the global order of microbatches. A program of several
/// steps orders steps first. The context ranks of a microbatch are adjacent.
pub(super) fn report_index(header: &ProgramHeader, ranks: &RankGrid, rank: Rank, index: usize) -> usize {
    let num_shards = ranks.shards().world_size();
    let num_microbatches = header.microbatches_per_step();
    let (step, index) = (index / num_microbatches, index % num_microbatches);
    let within = if header.state.is_sharded(StateClass::Gradients) {
        let (replica, shard) = (rank.0 / num_shards, rank.0 % num_shards);
        (replica * num_microbatches + index) * num_shards + shard
    } else {
        let context = ranks.context_rank().degree();
        (rank.0 / context * num_microbatches + index) * context + rank.0 % context
    };
    step * num_microbatches * ranks.data().world_size() + within
}

/// The reports of all microbatches of a program, gathered from all ranks. The reports of a step are summed in the global order of
/// microbatches: first for each unit alone, then over the units.
pub(super) struct StepReports {
    world: Arc<Group>,
    num_microbatches: usize,
    num_steps: usize,
    reported_means: Vec<ReportedMean>,
    metric_names: Vec<&'static str>,
    num_losses: usize,
    /// Number of losses that this rank has recorded in the current program.
    num_recorded: usize,
    /// The reports of all ranks: sums and numbers of rows, by rank, then by entry of `reported_means`, then by microbatch. The reports of a
    /// rank are followed by its requests. Zeros between programs; `None` while being gathered.
    reports: Option<ExchangeVector>,
    pending: Option<PendingVector>,
    _counted: CountedMemory,
    device: Device,
    tree: TreeSum<f64>,
    losses: Vec<f64>,
    /// By step, then name: sums, from which means are computed.
    metrics: Vec<RowMean>,
    /// Bits of this rank's requests to all ranks.
    pub(super) requests: Arc<AtomicU32>,
    /// Bits that any rank had set in the last program.
    pub(super) requested: u32,
}

/// The reports of one unit for one loss or metric.
struct ReportedMean {
    unit: usize,
    report: MeanReport,
    /// Index of the first sum within a rank's reports. There is a sum for each microbatch; for a metric, the number of rows follows each
    /// sum.
    first: usize,
    /// For each microbatch of all ranks, in the global order: the index of its sum within the reports of all ranks. The sum is read from a
    /// rank that runs the unit.
    sum_indices: Vec<usize>,
}

/// Returns how many values a report has for each microbatch. A loss has a fixed number of rows, so it needs only the sum.
fn width(report: MeanReport) -> usize {
    if report.metric.is_none() { 1 } else { 2 }
}

impl StepReports {
    pub(super) fn new(
        header: &ProgramHeader,
        ranks: &RankGrid,
        profile: &ModelProfile,
        device: &Device,
        requests: Arc<AtomicU32>,
    ) -> Result<Self> {
        let (world, num_microbatches) = (Arc::clone(ranks.world()), header.num_microbatches);
        let (data_degree, tensor_degree) = (ranks.data().world_size(), ranks.tensor().world_size());
        let num_all = data_degree * num_microbatches;
        let numbers = |reports: &mut dyn Iterator<Item = (usize, MeanReport)>| {
            reports.map(|(_, report)| width(report)).sum::<usize>() * num_microbatches
        };
        let len = numbers(&mut profile.reports()) + 1;
        let term = |(index, (unit, report)): (usize, (usize, MeanReport))| {
            let first = numbers(&mut profile.reports().take(index));
            let mut order = vec![0; num_all];
            for place in 0..num_all {
                let (rank, microbatch) = (Rank(place / num_microbatches), place % num_microbatches);
                // All ranks of the tensor axis report the same, so the first one is read.
                let holder = (header.rank_of(unit) * data_degree + rank.0) * tensor_degree;
                order[report_index(header, ranks, rank, microbatch)] =
                    holder * len + first + microbatch * width(report);
            }
            ReportedMean { unit, report, first, sum_indices: order }
        };
        let terms: Vec<ReportedMean> = profile.reports().enumerate().map(term).collect();
        let is_loss = |term: &&ReportedMean| term.report.metric.is_none() && header.holds(term.unit);
        let num_losses = terms.iter().filter(is_loss).count();
        let len = world.world_size() * len;
        let counted = CountedMemory::new(device);
        counted.charge_buffer(&world, len * size_of::<f64>())?;
        let reports = Some(ExchangeVector::new_for_host(&world, device, DType::F64, len)?);
        let (num_steps, metric_names) = (header.num_steps(), profile.metric_names());
        Ok(StepReports {
            world,
            num_microbatches,
            num_steps,
            reported_means: terms,
            num_losses,
            num_recorded: 0,
            reports,
            pending: None,
            _counted: counted,
            device: device.clone(),
            tree: TreeSum::new(),
            losses: vec![0.0; num_steps],
            metrics: vec![RowMean::default(); num_steps * metric_names.len()],
            metric_names,
            requests,
            requested: 0,
        })
    }

    /// Records a report of a unit for this rank's microbatch `microbatch`: its loss, or a metric.
    ///
    /// If kernels can access host memory, recording the last loss of the program sends all reports, because every forward has run by then.
    /// Ranks with an asynchronous device send their reports in [`wait`](StepReports::wait). So do ranks without losses: an earlier
    /// gather would only wait for the losses of other ranks.
    ///
    /// # Panics
    /// If the unit did not report this loss or metric during shape and cost inference, or if the number of rows of a loss differs.
    pub(super) fn push(
        &mut self,
        unit: usize,
        metric: Option<&'static str>,
        microbatch: usize,
        mean: &PendingMean,
    ) {
        let is_own = |term: &ReportedMean| term.unit == unit && term.report.metric == metric;
        let index = self.reported_means.iter().position(is_own);
        let index = index.unwrap_or_else(|| panic!("unit {unit} reports {metric:?} in some passes only"));
        let own = self.own().start;
        let reports = self.reports.as_mut().expect("reports are gathered once a program");
        let ReportedMean { report, first, .. } = self.reported_means[index];
        let place = own + first + microbatch * width(report);
        self.device.copy(mean.sum.view(), reports.part_mut(place..place + 1));
        if metric.is_some() {
            self.device.upload(&[mean.num_rows as f64], reports.part_mut(place + 1..place + 2));
            return;
        }
        assert_eq!(
            mean.num_rows, report.num_rows,
            "rows of the loss of unit {unit}: gradients are means over them"
        );
        self.num_recorded += 1;
        // By sending reports, a rank declares that all of its earlier exchanges have succeeded. On an asynchronous device, this is known
        // only at the end of the step.
        if self.num_recorded == self.num_microbatches * self.num_losses && self.device.reaches_host() {
            self.send();
        }
    }

    fn own(&self) -> Range<usize> {
        let len = self.reports.as_ref().map_or(0, ExchangeVector::len) / self.world.world_size();
        let rank = self.world.rank().0;
        rank * len..(rank + 1) * len
    }

    fn send(&mut self) {
        self.num_recorded = 0;
        let own = self.own();
        let requests = f64::from(self.requests.load(Ordering::Relaxed));
        let gather = |reports| self.world.all_gather(reports);
        let mut reports = self.reports.take();
        if let Some(reports) = &mut reports {
            self.device.upload(&[requests], reports.part_mut(own.end - 1..own.end));
        }
        self.pending = reports.map(|reports| reports.exchange(&self.device, own, 0..0, gather));
    }

    /// Waits for the reports of all ranks. Returns the mean loss of each step, and computes [metrics](StepReports::metrics).
    pub(super) fn wait(&mut self, waiting: &mut WaitTracker) -> Result<&[f64]> {
        if self.pending.is_none() {
            self.send();
        }
        let under_way = self.pending.take().expect("the reports were sent");
        let mut gathered = under_way.take_to_host(waiting)?;
        let reports = gathered.host_elements::<f64>();
        let of_ranks = reports.chunks_exact(reports.len() / self.world.world_size());
        self.requested = of_ranks.fold(0, |all, of_rank| all | of_rank[of_rank.len() - 1] as u32);
        self.losses.fill(0.0);
        self.metrics.fill(RowMean::default());
        for ReportedMean { report, sum_indices: order, .. } in &self.reported_means {
            let place = |name| self.metric_names.iter().position(|&own| own == name);
            let metric = report.metric.map(|name| place(name).expect("its name is known"));
            for (step, places) in order.chunks_exact(order.len() / self.num_steps).enumerate() {
                for &place in places {
                    self.tree.push(reports[place], |left, right| *left += right);
                }
                let sum = self.tree.finish(|left, right| *left += right).expect("a step has microbatches");
                match metric {
                    None => self.losses[step] += sum / (places.len() * report.num_rows) as f64,
                    Some(metric) => {
                        let mean = &mut self.metrics[step * self.metric_names.len() + metric];
                        mean.sum += sum;
                        // Sums of integers are exact in f64.
                        let rows = places.iter().map(|&place| reports[place + 1]);
                        mean.num_rows += rows.sum::<f64>() as usize;
                    }
                }
            }
        }
        self.device.zero(gathered.view_mut());
        self.reports = Some(gathered);
        Ok(&self.losses)
    }

    /// Returns the metrics of a step of the last program: names and means. The mean of a metric without rows is NaN.
    pub(super) fn metrics(&self, step: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let num_names = self.metric_names.len();
        let means = &self.metrics[step * num_names..][..num_names];
        let values = means.iter().map(|mean| mean.sum / mean.num_rows as f64);
        self.metric_names.iter().copied().zip(values)
    }
}
