//! Runs units on a real device instead of a counting device, so that kernels can be timed.

use crate::bundle::{Batch, Bundle};
use crate::error::{ModelError, Result};
use crate::model::Model;
use crate::profile::{ModelProfile, PassOptions, Profiler, RecordingAxes, TrackedParameters};
use std::cell::Cell;
use trireme_base::DType;
use trireme_tensor::{Category, Device, Fp8State, Parameters, Precision};

/// A unit and its parameters, ready to run on their own.
#[derive(Debug)]
pub struct UnitBenchmark<'a> {
    model: &'a Model,
    unit: usize,
    device: &'a Device,
    precision: Precision,
    fp8: Option<Fp8State>,
    axes: RecordingAxes,
    profile: &'a ModelProfile,
    parameters: Parameters,
}

impl Model {
    /// Creates a benchmark of a unit. Allocates the unit's parameters with their initial values. If the unit reads a tied weight of another
    /// unit, the parameters of that unit are allocated, too.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn unit_benchmark<'a>(
        &'a self,
        unit: usize,
        device: &'a Device,
        options: PassOptions,
        profile: &'a ModelProfile,
    ) -> Result<UnitBenchmark<'a>> {
        let PassOptions { precision, fp8, .. } = options;
        let table = self.table();
        let owner = table.tie().filter(|tie| tie.reader == unit).map(|tie| tie.span.unit);
        let mut parts = table.shards(0, 1);
        let others =
            parts.iter_mut().enumerate().filter(|(other, _)| *other != unit && Some(*other) != owner);
        others.for_each(|(_, part)| *part = 0..0);
        let mut parameters = Parameters::zeros_of(table, parts, DType::F32, device, Category::Parameters)?;
        parameters.load(|info, held, values| {
            info.initialize(0, held, values);
            Ok::<(), ModelError>(())
        })?;
        let fp8 = fp8.map(|recipe| Fp8State::of_matrices(recipe, table, device)).transpose()?;
        let axes = self.recording_axes(options);
        Ok(UnitBenchmark { model: self, unit, device, precision, fp8, axes, profile, parameters })
    }
}

impl UnitBenchmark<'_> {
    /// Runs the passes that [`Model::profile`] measures, on random values: forward, recomputation and backward, and then forward and the
    /// two halves of backward. To time the kernels, [keep a journal](Device::keep_journal), in which pauses separate the passes.
    /// `before_pass` is called before each pass that is timed.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn run(&self, before_pass: &dyn Fn()) -> Result<()> {
        let parameters = TrackedParameters { parameters: &self.parameters, was_read: Cell::new(false) };
        let profiler = Profiler {
            model: self.model,
            device: self.device,
            precision: self.precision,
            fp8: self.fp8.as_ref().map(Fp8State::scales),
            axes: self.axes.clone(),
            parameters: &parameters,
            before_pass,
        };
        let specs: Vec<_> = self.profile.batch.iter().map(|tensor| tensor.spec).collect();
        let mut batch: Batch = profiler.tensors(&specs)?;
        let inputs = match self.unit.checked_sub(1) {
            Some(below) => profiler.tensors(&self.profile.units[below].outputs)?,
            None => Bundle::new(),
        };
        profiler.measure_unit(self.unit, inputs, &mut batch)?;
        Ok(())
    }
}
