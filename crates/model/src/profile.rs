//! Shape and cost inference: runs units on a counting device, and records their shapes, memory, costs and exchanges.

use crate::bundle::{Batch, Bundle, TensorSpec};
use crate::error::{ModelError, Result};
use crate::model::Model;
use crate::unit::UnitPass;
use std::cell::Cell;
use std::ops::Add;
use std::sync::Arc;
use trireme_base::{
    AxisRank, ContextRank, Cost, DType, JournalEntry, PassExchanges, RandomKey, UnitAxis, UnitPasses,
};
use trireme_tensor::tape::{
    AxisOps, ContextAxis, DryRunAxis, ExchangeLog, ExpertAxis, Metric, PassAxes, Recording, TensorAxis,
};
use trireme_tensor::{
    Category, Device, DeviceError, DeviceOptions, Fp8Recipe, Fp8Scales, Fp8State, GradSink, GradTarget,
    ParameterSource, ParameterSpan, ParameterTable, Parameters, PassState, Precision, Tape, Tensor, View,
    ViewMut,
};

/// Options of the passes of units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassOptions {
    /// Precision of matrix products and activations.
    pub precision: Precision,
    /// Recipe for fp8 operands of matrix products; `None` if operands have `precision`.
    pub fp8: Option<Fp8Recipe>,
    /// Whether values between tensor-parallel layers are sharded by rows over the tensor axis (sequence parallelism).
    pub sequence_parallel: bool,
    /// This rank's place among the ranks that share the positions of a sequence. Batches hold only this rank's positions.
    pub context: ContextRank,
}

impl From<Precision> for PassOptions {
    fn from(precision: Precision) -> Self {
        PassOptions { precision, fp8: None, sequence_parallel: false, context: ContextRank::ALONE }
    }
}

/// The measured passes of a model over microbatches of one shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelProfile {
    /// The units, in forward order.
    pub units: Vec<UnitProfile>,
    /// The tensors of a microbatch.
    pub batch: Vec<BatchTensor>,
}

/// The measured passes of a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitProfile {
    /// Memory and cost of the passes.
    pub passes: UnitPasses,
    /// Bytes of the tensors that forward keeps for backward. The device may count more.
    pub kept_bytes: KeptBytes,
    /// Specs of the unit's outputs.
    pub outputs: Vec<TensorSpec>,
    /// The losses and metrics that the unit reports.
    pub reports: Vec<MeanReport>,
    /// Whether backward reads parameters if its halves run together.
    pub backward_reads: bool,
    /// Whether the weight half of backward reads parameters if it runs separately.
    pub weight_half_reads: bool,
    /// Table indices of the parameters for which backward computes only this rank's partial gradient. The ranks of the tensor axis that
    /// hold the same elements must sum these gradients.
    pub partial_grads: Vec<usize>,
    /// The exchanges of the passes with other ranks.
    pub exchanges: PassExchanges,
}

impl UnitProfile {
    /// Returns whether the unit's experts have a capacity. Such a unit reports the fraction of dropped choices.
    pub fn has_capacity(&self) -> bool {
        self.reports.iter().any(|report| report.metric == Some(EXPERT_DROPS))
    }
}

/// Name of the metric for the fraction of expert choices that a capacity drops.
pub(crate) const EXPERT_DROPS: &str = "expert_drops";

/// A mean over rows that a unit reports for each microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeanReport {
    /// Name of a metric; `None` for the unit's contribution to the loss.
    pub metric: Option<&'static str>,
    /// Number of rows.
    pub num_rows: usize,
}

/// Bytes of the tensors that the forward pass of a unit may keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptBytes {
    /// All tensors that backward needs.
    pub all: usize,
    /// The tensors that remain if only the results of matrix products and attention are kept.
    pub products: usize,
    /// The outputs of the previous unit.
    pub inputs: usize,
}

/// A tensor of a microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchTensor {
    /// Name, shape and dtype.
    pub spec: TensorSpec,
    /// Bytes that the device counts for it.
    pub bytes: usize,
    /// Indices of the units that read it, in order.
    pub readers: Vec<usize>,
}

impl ModelProfile {
    /// Builds a model on a counting device, and [profiles](Model::profile) it.
    ///
    /// # Errors
    /// Errors of `build` and of [`Model::profile`].
    pub fn of(
        build: impl FnOnce(&Device) -> Result<Model>,
        device_options: DeviceOptions,
        options: impl Into<PassOptions>,
        batch: &[TensorSpec],
    ) -> Result<Self> {
        let device = Device::counting(DeviceOptions { budget: None, ..device_options })?;
        build(&device)?.profile(&device, options, batch)
    }

    /// Returns memory and cost of the passes of all units.
    pub fn passes(&self) -> Vec<UnitPasses> {
        self.units.iter().map(|unit| unit.passes).collect()
    }

    /// Returns the number of operations of the matrix products in forward and backward of a microbatch on this rank. Excludes recomputation
    /// of activations, and values that an operation's backward recomputes.
    pub fn model_operations(&self) -> u64 {
        let costs = self.units.iter().map(|unit| unit.passes.forward_cost + unit.passes.backward_cost);
        costs.fold(Cost::ZERO, Cost::add).model_operations()
    }

    /// Returns the number of samples in a microbatch.
    pub fn num_samples(&self) -> usize {
        self.batch.first().map_or(1, |tensor| tensor.spec.shape.dims()[0])
    }

    /// Returns all reports with the indices of their units, in order.
    pub fn reports(&self) -> impl Iterator<Item = (usize, MeanReport)> + '_ {
        let units = self.units.iter().enumerate();
        units.flat_map(|(unit, found)| found.reports.iter().map(move |&report| (unit, report)))
    }

    /// Returns the names of all metrics, without duplicates.
    pub fn metric_names(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        for name in self.reports().filter_map(|(_, report)| report.metric) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

impl Model {
    /// Returns axes on which this rank can run passes without the other ranks: exchanges are recorded, but not performed.
    pub(crate) fn recording_axes(
        &self,
        PassOptions { sequence_parallel: shards_rows, context, .. }: PassOptions,
    ) -> RecordingAxes {
        let log = ExchangeLog::default();
        let dry_run_axis = |axis, place: AxisRank| -> Option<Arc<dyn AxisOps>> {
            (place.degree > 1).then(|| Arc::new(DryRunAxis::new(axis, place, &log)) as Arc<dyn AxisOps>)
        };
        let tensor = dry_run_axis(UnitAxis::Tensor, self.table().tensor_rank());
        let (ring, heads) =
            (dry_run_axis(UnitAxis::Ring, context.ring), dry_run_axis(UnitAxis::Heads, context.heads));
        let experts = dry_run_axis(UnitAxis::Expert, self.table().expert_rank());
        let axes = PassAxes {
            experts: experts.map(|ops| ExpertAxis { ops, shadowed: Arc::default() }),
            tensor: tensor.map(|ops| TensorAxis { ops, shards_rows }),
            context: (context.degree() > 1).then_some(ContextAxis { ring, heads }),
        };
        RecordingAxes { axes, log }
    }

    /// Measures the passes over microbatches of these tensors.
    ///
    /// Each unit runs forward, recomputation and backward once, and then forward and the halves of backward separately. `device` is the
    /// device on which the model was built. It must be a [counting](Device::counting) device. Cost: a few microseconds per operation.
    ///
    /// # Errors
    /// If the device cannot address the memory, or if dim 0 of an output is not a multiple of the number of samples.
    pub fn profile(
        &self,
        device: &Device,
        options: impl Into<PassOptions>,
        batch: &[TensorSpec],
    ) -> Result<ModelProfile> {
        let options = options.into();
        let PassOptions { precision, fp8, .. } = options;
        let fp8 = fp8.map(|recipe| Fp8State::of_matrices(recipe, self.table(), device)).transpose()?;
        let fp8 = fp8.as_ref().map(Fp8State::scales);
        let parameters = Parameters::zeros(self.table(), device, Category::Parameters)?;
        let parameters = TrackedParameters { parameters: &parameters, was_read: Cell::new(false) };
        let axes = self.recording_axes(options);
        let (parameters, before_pass) = (&parameters, &|| ());
        let profiler = Profiler { model: self, device, precision, fp8, axes, parameters, before_pass };
        let mut tensors = Batch::new();
        let mut found = ModelProfile { units: Vec::new(), batch: Vec::new() };
        for &spec in batch {
            let before = profiler.in_use();
            tensors.push(spec.name, device.empty(spec.shape, spec.dtype, Category::Activations)?);
            let bytes = profiler.in_use() - before;
            found.batch.push(BatchTensor { spec, bytes, readers: Vec::new() });
        }
        let mut inputs = Bundle::new();
        for unit in 0..self.num_units() {
            let (passes, outputs, names) = profiler.measure_unit(unit, inputs, &mut tensors)?;
            for tensor in found.batch.iter_mut().filter(|tensor| names.contains(&tensor.spec.name)) {
                tensor.readers.push(unit);
            }
            check_outputs(self, unit, &passes.outputs, found.num_samples())?;
            found.units.push(passes);
            inputs = outputs;
        }
        Ok(found)
    }
}

/// Checks that dim 0 of the outputs is a multiple of the number of samples, because it scales with the batch size.
fn check_outputs(model: &Model, unit: usize, outputs: &[TensorSpec], num_samples: usize) -> Result<()> {
    let is_multiple =
        |spec: &&TensorSpec| spec.shape.dims().first().is_some_and(|dim| dim.is_multiple_of(num_samples));
    match outputs.iter().find(|spec| !is_multiple(spec)) {
        None => Ok(()),
        Some(spec) => Err(ModelError::Output {
            unit: model.table().units()[unit].name.clone(),
            name: spec.name,
            dims: spec.shape.dims().to_vec(),
            num_samples,
        }),
    }
}

#[derive(Debug, Clone)]
pub(crate) struct RecordingAxes {
    axes: PassAxes,
    log: ExchangeLog,
}

/// Parameters that record whether they are read.
#[derive(Debug)]
pub(crate) struct TrackedParameters<'a> {
    pub(crate) parameters: &'a Parameters,
    pub(crate) was_read: Cell<bool>,
}

impl ParameterSource for TrackedParameters<'_> {
    fn unit(&self, unit: usize) -> View<'_> {
        self.was_read.set(true);
        self.parameters.unit(unit)
    }
}

pub(crate) struct Profiler<'a> {
    pub(crate) model: &'a Model,
    pub(crate) device: &'a Device,
    pub(crate) precision: Precision,
    pub(crate) fp8: Option<&'a Arc<Fp8Scales>>,
    pub(crate) axes: RecordingAxes,
    pub(crate) parameters: &'a TrackedParameters<'a>,
    pub(crate) before_pass: &'a dyn Fn(),
}

impl Profiler<'_> {
    fn in_use(&self) -> usize {
        self.device.memory().usage(Category::Activations).current
    }

    /// Runs `pass`, and returns its result, the peak of activation bytes in use, and its cost.
    fn measure<T>(&self, pass: impl FnOnce() -> Result<T, DeviceError>) -> Result<(T, usize, Cost)> {
        (self.before_pass)();
        self.device.reset_cost();
        self.device.memory().reset_peaks();
        self.parameters.was_read.set(false);
        let made = pass()?;
        if let Some(journal) = self.device.journal() {
            journal.record(JournalEntry::Pause);
        }
        let peak = self.device.memory().usage(Category::Activations).peak;
        Ok((made, peak, self.device.cost()))
    }

    /// Runs the passes of a unit. Returns their measurements, the outputs, and the names of the batch tensors that the unit reads.
    pub(crate) fn measure_unit(
        &self,
        unit: usize,
        inputs: Bundle<Tensor>,
        batch: &mut Batch,
    ) -> Result<(UnitProfile, Bundle<Tensor>, Vec<&'static str>)> {
        let (input_specs, input) = (inputs.specs().collect::<Vec<_>>(), self.bytes_of(&inputs)?);
        let base = self.in_use() - input;
        let ((mut pass, outputs), forward_peak, forward_cost) =
            self.measure(|| self.forward(unit, inputs, batch))?;
        let forward = self.axes.log.take();
        let report =
            |metric: &Metric| MeanReport { metric: Some(metric.name), num_rows: metric.mean.num_rows };
        let metrics: Vec<MeanReport> = pass.metrics().iter().map(report).collect();
        let output = self.bytes_of(&outputs)?;
        // From here on, the outputs count as the next unit's inputs.
        let base_of_backward = base + output;
        let saved = self.in_use() - base_of_backward;
        let kept = pass.num_bytes();
        pass.keep_products();
        let products = self.in_use() - base_of_backward;
        let inputs_bytes = input_specs.iter().map(TensorSpec::num_bytes).sum();
        let kept_bytes = KeptBytes { all: kept, products: pass.num_bytes(), inputs: inputs_bytes };
        let (_, recompute_peak, recompute_cost) = self.measure(|| pass.recompute(self.parameters, batch))?;
        let exchanged = self.axes.log.take();
        debug_assert!(exchanged.is_empty(), "each rank recomputes without the others");
        let output_specs: Vec<TensorSpec> = outputs.specs().collect();
        let grads = self.grads(&output_specs)?;
        let mut sink = DiscardingSink::new(self);
        let (input_grads, backward_peak, backward_cost) = self.measure(|| {
            pass.backward(self.parameters, grads, batch, &mut sink)?;
            pass.take_input_grads()
        })?;
        let partial_grads = sink.partial;
        let backward = self.axes.log.take();
        let backward_reads = self.parameters.was_read.get();
        let input_grad = self.bytes_of(&input_grads)?;
        drop(input_grads);
        let loss = pass.loss().map(|loss| MeanReport { metric: None, num_rows: loss.num_rows });
        let reports = loss.into_iter().chain(metrics).collect();
        let names = pass.batch.iter().map(|(name, _)| name).collect();
        drop(pass);
        let base_of_halves = self.in_use();
        let inputs = self.tensors(&input_specs)?;
        let (halves, weight_half_reads, half_exchanges) =
            self.measure_halves(unit, inputs, batch, base_of_halves)?;
        let passes = UnitPasses {
            input,
            output,
            input_grad,
            saved,
            products,
            forward_peak: forward_peak - base,
            recompute_peak: recompute_peak - base_of_backward,
            backward_peak: backward_peak - base_of_backward,
            forward_cost,
            backward_cost,
            recompute_cost,
            ..halves
        };
        let found = UnitProfile {
            passes,
            kept_bytes,
            outputs: output_specs,
            reports,
            backward_reads,
            weight_half_reads,
            partial_grads,
            exchanges: PassExchanges { forward, backward, ..half_exchanges },
        };
        Ok((found, outputs, names))
    }

    /// Runs the halves of backward separately. Returns their memory above `base` bytes and their costs, whether the weight half reads
    /// parameters, and the exchanges.
    fn measure_halves(
        &self,
        unit: usize,
        inputs: Bundle<Tensor>,
        batch: &mut Batch,
        base: usize,
    ) -> Result<(UnitPasses, bool, PassExchanges)> {
        let (mut pass, outputs) = self.forward(unit, inputs, batch)?;
        self.axes.log.take();
        let output_specs: Vec<TensorSpec> = outputs.specs().collect();
        drop(outputs);
        let grads = self.grads(&output_specs)?;
        let (input_grads, _, input_half_cost) = self.measure(|| {
            pass.backward_input(self.parameters, grads, batch)?;
            pass.take_input_grads()
        })?;
        drop(input_grads);
        let input_half = self.axes.log.take();
        let between_halves = self.in_use() - base;
        let (_, _, weight_half_cost) =
            self.measure(|| pass.backward_weight(self.parameters, batch, &mut DiscardingSink::new(self)))?;
        let passes =
            UnitPasses { between_halves, input_half_cost, weight_half_cost, ..UnitPasses::default() };
        let exchanges =
            PassExchanges { input_half, weight_half: self.axes.log.take(), ..PassExchanges::default() };
        Ok((passes, self.parameters.was_read.get(), exchanges))
    }

    /// Runs a unit forward on a new tape.
    fn forward(
        &self,
        unit: usize,
        inputs: Bundle<Tensor>,
        batch: &mut Batch,
    ) -> Result<(UnitPass, Bundle<Tensor>), DeviceError> {
        let (fp8, axes) = (self.fp8.cloned(), self.axes.axes.clone());
        let pass = PassState { fp8, axes, ..self.precision.into() };
        let tape = Tape::new(self.device, Recording::On, pass);
        UnitPass::forward(self.model.unit(unit), tape, self.parameters, inputs, batch, None)
    }

    /// Creates tensors of these specs. On a device that computes, floats are normal random numbers and integers are zeros.
    pub(crate) fn tensors<'a>(
        &self,
        specs: impl IntoIterator<Item = &'a TensorSpec>,
    ) -> Result<Bundle<Tensor>, DeviceError> {
        let tensor = |spec: &TensorSpec| {
            let mut tensor = self.device.empty(spec.shape, spec.dtype, Category::Activations)?;
            if !self.device.is_counting() {
                fill(self.device, tensor.view_mut())?;
            }
            Ok((spec.name, tensor))
        };
        specs.into_iter().map(tensor).collect()
    }

    fn grads(&self, outputs: &[TensorSpec]) -> Result<Bundle<Tensor>, DeviceError> {
        self.tensors(outputs.iter().filter(|spec| spec.has_grad()))
    }

    fn bytes_of(&self, tensors: &Bundle<Tensor>) -> Result<usize, DeviceError> {
        let before = self.in_use();
        let _alike = self.tensors(&tensors.specs().collect::<Vec<_>>())?;
        Ok(self.in_use() - before)
    }
}

fn fill(device: &Device, values: ViewMut<'_>) -> Result<(), DeviceError> {
    if values.dtype() == DType::U32 {
        device.zero(values);
        return Ok(());
    }
    let mut floats = device.empty(values.shape(), DType::F32, Category::Activations)?;
    device.fill(floats.view_mut(), |floats| {
        RandomKey::new(0, "values").fill_normal(floats, 1.0);
        Ok::<_, DeviceError>(())
    })?;
    device.convert(floats.view(), values);
    if let Some(journal) = device.journal() {
        journal.record(JournalEntry::Pause);
    }
    Ok(())
}

/// A sink that discards gradients, and records which of them are partial sums.
struct DiscardingSink<'a> {
    device: &'a Device,
    table: &'a ParameterTable,
    target: Option<Tensor>,
    are_partial: bool,
    partial: Vec<usize>,
    /// One for each parameter.
    was_written: Vec<bool>,
}

impl<'a> DiscardingSink<'a> {
    fn new(profiler: &Profiler<'a>) -> Self {
        let (device, table) = (profiler.device, &**profiler.model.table());
        let was_written = vec![false; table.parameters().len()];
        DiscardingSink { device, table, target: None, are_partial: false, partial: Vec::new(), was_written }
    }
}

impl GradSink for DiscardingSink<'_> {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        for id in span.first.0..span.first.0 + span.num_parameters {
            let info = &self.table.parameters()[id];
            // Ranks that share key-value heads have different query heads, so each computes only a partial gradient.
            let is_partial = info.num_replicas() > 1 && (self.are_partial || info.split.is_some());
            if self.was_written[id] {
                let name = &info.name;
                assert_eq!(
                    is_partial,
                    self.partial.contains(&id),
                    "{name} is read for rows and for values that every rank has"
                );
            } else if is_partial {
                self.partial.push(id);
            }
            self.was_written[id] = true;
        }
        let target = self.device.empty(span.shape, DType::F32, Category::Gradients)?;
        Ok(GradTarget { view: self.target.insert(target).view_mut(), accumulate: false })
    }

    fn grad_ready(&mut self, _: &ParameterSpan) {
        self.target = None;
    }

    fn expect_partial_grads(&mut self, are_partial: bool) {
        self.are_partial = are_partial;
    }
}
