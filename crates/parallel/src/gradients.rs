//! Gradients of every unit: accumulated over microbatches, reduced over ranks.

use crate::compressed::Compressed;
use crate::error::ParallelError;
use crate::reduction::{Fusions, Reduction};
use crate::step::ExecutorOptions;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::DType;
use trireme_comm::{Buffer, CompressionStatistics, Compressor, Group, Round};
use trireme_tensor::{
    Category, Device, DeviceError, GradSink, GradTarget, ParameterSpan, ParameterTable, Shape, Tensor, View,
    ViewMut,
};

/// What decides the order of sums over the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Determinism {
    /// The global microbatch index: the same bits for any layout.
    Layout,
    /// The order in which gradients arrive: the same bits for the same layout, and no partial sums.
    Run,
}

/// A gradient of one unit, of one microbatch or the sum of several.
#[derive(Debug)]
enum Gradient {
    /// In the memory that the group reduces.
    Reducible(Buffer<f32>),
    /// A partial sum beside it.
    Partial(Tensor),
}

impl Gradient {
    fn view(&self, shape: Shape) -> View<'_> {
        match self {
            Gradient::Reducible(buffer) => View::from_f32s(buffer, shape),
            Gradient::Partial(tensor) => tensor.view(),
        }
    }

    fn view_mut(&mut self, shape: Shape) -> ViewMut<'_> {
        match self {
            Gradient::Reducible(buffer) => ViewMut::from_f32s(buffer, shape),
            Gradient::Partial(tensor) => tensor.view_mut(),
        }
    }
}

/// The gradient of one unit on its way to the optimizer.
struct UnitGradient {
    shape: Shape,
    /// Present while it is neither being written nor summed nor reduced.
    reducible: Option<Buffer<f32>>,
    /// Being written by backward.
    open: Option<Gradient>,
    sum: TreeSum<Gradient>,
    reduction: Reduction,
}

/// Gradients of all units of a rank.
pub(crate) struct Gradients {
    device: Device,
    determinism: Determinism,
    table: Arc<ParameterTable>,
    units: Vec<UnitGradient>,
    fusions: Fusions,
    /// For each parameter: the open gradient of its unit holds a part of it.
    written: Vec<bool>,
}

impl Gradients {
    /// Takes memory for every unit's gradient from the group.
    pub(crate) fn new(
        table: &Arc<ParameterTable>,
        device: &Device,
        group: &Arc<Group>,
        options: &ExecutorOptions,
    ) -> Result<Self, ParallelError> {
        device.memory().add(Category::Communication, group.fixed_bytes());
        let fusions = Fusions::new(group, options.fusion_bytes);
        let mut units = Vec::new();
        for (index, unit) in table.units().iter().enumerate() {
            let buffer = group.buffer::<f32>(unit.num_elements)?;
            device.memory().add(Category::Gradients, size_of_val(&*buffer));
            let reduction = match Compressed::new(table, index, options, device, group)? {
                Some(compressed) => Reduction::Compressed(compressed),
                None => Reduction::new(unit.num_elements, options.reduce_dtype, &fusions, device, group)?,
            };
            units.push(UnitGradient {
                shape: [unit.num_elements].into(),
                reducible: Some(buffer),
                open: None,
                sum: TreeSum::new(),
                reduction,
            });
        }
        // Backward starts with the last unit.
        let fused = units.iter().rev().filter(|unit| !matches!(unit.reduction, Reduction::Compressed(_)));
        let lens = fused.map(|unit| unit.shape.num_elements());
        fusions.reserve(lens, options.reduce_dtype, device, group)?;
        let written = vec![false; table.parameters().len()];
        let (device, table) = (device.clone(), Arc::clone(table));
        Ok(Gradients { device, determinism: options.determinism, table, units, fusions, written })
    }

    /// Ends a microbatch's backward of `unit`: its gradient joins the sum.
    pub(crate) fn close(&mut self, unit: usize) {
        if self.determinism == Determinism::Run {
            return;
        }
        let parameters = self.table.units()[unit].parameters.clone();
        debug_assert!(
            self.written[parameters.clone()].iter().all(|&written| written),
            "every gradient was written"
        );
        self.written[parameters].fill(false);
        let (device, state) = (&self.device, &mut self.units[unit]);
        let gradient = state.open.take().expect("backward of a unit writes its gradient");
        state.sum.push(gradient, |left, right| add(device, state.shape, left, right));
    }

    /// Starts the reduction of `unit`'s gradient over the ranks.
    pub(crate) fn reduce(&mut self, unit: usize, group: &Group) -> Result<(), ParallelError> {
        self.written[self.table.units()[unit].parameters.clone()].fill(false);
        let (device, state) = (&self.device, &mut self.units[unit]);
        let sum = state.sum.finish(|left, right| add(device, state.shape, left, right));
        let sum = sum.or(state.open.take()).expect("a gradient is reduced after backward");
        let Gradient::Reducible(buffer) = sum else {
            unreachable!("the first gradient lies in the group's memory, and sums grow to the left")
        };
        state.reduction.start(buffer, device, group)?;
        if self.units.iter().all(|state| state.reduction.is_under_way()) {
            self.fusions.flush();
        }
        Ok(())
    }

    /// Waits for every reduction.
    pub(crate) fn wait(&mut self, group: &Group, waiting: &mut Waiting) -> Result<(), ParallelError> {
        // A second message of one unit travels while the first ones of others are waited for.
        while self.units.iter().any(|state| state.reduction.is_under_way()) {
            // Backward starts with the last unit.
            for state in self.units.iter_mut().rev() {
                if let Some(sum) = state.reduction.advance(&self.device, group, waiting)? {
                    state.reducible = Some(sum);
                }
            }
        }
        Ok(())
    }

    /// The compressors, each with its unit's name.
    pub(crate) fn compressors(&self) -> impl Iterator<Item = (&str, &Compressor)> {
        let names = self.table.units().iter().map(|unit| unit.name.as_str());
        names.zip(&self.units).filter_map(|(name, state)| match &state.reduction {
            Reduction::Compressed(compressed) => Some((name, compressed.compressor())),
            _ => None,
        })
    }

    /// The same, to load.
    pub(crate) fn compressors_mut(&mut self) -> impl Iterator<Item = (&str, &mut Compressor)> {
        let names = self.table.units().iter().map(|unit| unit.name.as_str());
        names.zip(&mut self.units).filter_map(|(name, state)| match &mut state.reduction {
            Reduction::Compressed(compressed) => Some((name, compressed.compressor_mut())),
            _ => None,
        })
    }

    /// What compression did to all units in the last step, in the units of this rank's sums.
    pub(crate) fn compression_statistics(&self, world_size: usize) -> CompressionStatistics {
        let mut all = CompressionStatistics::default();
        let mut squares = 0.0;
        for state in &self.units {
            let of_unit = match &state.reduction {
                Reduction::Compressed(compressed) => compressed.compressor().statistics(),
                _ => {
                    let round = Round::AllReduce { dtype: DType::F32, len: state.shape.num_elements() };
                    let bytes = round.bytes_sent(world_size);
                    CompressionStatistics { error_norm: 0.0, bytes_sent: bytes, bytes_uncompressed: bytes }
                }
            };
            all.bytes_sent += of_unit.bytes_sent;
            all.bytes_uncompressed += of_unit.bytes_uncompressed;
            squares += f64::from(of_unit.error_norm).powi(2);
        }
        all.error_norm = squares.sqrt() as f32;
        all
    }

    /// The reduced gradient of `unit`: the sum over all microbatches of all ranks.
    pub(crate) fn reduced(&self, unit: usize) -> View<'_> {
        let state = &self.units[unit];
        let buffer = state.reducible.as_ref().expect("a gradient is read after its reduction");
        View::from_f32s(buffer, state.shape)
    }
}

fn add(device: &Device, shape: Shape, left: &mut Gradient, right: Gradient) {
    device.add_assign(left.view_mut(shape), right.view(shape));
}

impl UnitGradient {
    /// Opens a gradient to be written: the group's memory first, partial sums after.
    fn open(&mut self, device: &Device) -> Result<(), DeviceError> {
        if self.open.is_none() {
            self.open = Some(match self.reducible.take() {
                Some(buffer) => Gradient::Reducible(buffer),
                None => Gradient::Partial(device.empty(self.shape, DType::F32, Category::Gradients)?),
            });
        }
        Ok(())
    }
}

impl GradSink for Gradients {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        let accumulate = self.written[span.first.0];
        let state = &mut self.units[span.unit];
        state.open(&self.device)?;
        let gradient = state.open.as_mut().expect("it was opened in the line above");
        let view = gradient.view_mut(state.shape).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate })
    }

    fn grad_ready(&mut self, span: &ParameterSpan) {
        self.written[span.first.0..span.first.0 + span.num_parameters].fill(true);
    }
}
