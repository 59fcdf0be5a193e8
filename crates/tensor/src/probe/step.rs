//! The kernels of one training step, one by one.

mod optimizers;
mod rows;

use super::{KernelFigure, Limit, Peaks, Probe, ProductSizes, Ran, StepSizes, Transposes, Unit};
use crate::declaration::{Initial, Parameter};
use crate::device::{DeviceError, MatmulEpilogue};
use crate::kernels::cpu::cross_entropy::{STATISTICS, VocabularyChunk};
use crate::kernels::{AttentionInputs, AttentionOutput, AttentionRule, AttentionShape, Rotary};
use crate::parameter_table::ParameterTable;
use crate::precision::Precision;
use crate::tape::LossHead;
use crate::tensor::Tensor;
use std::convert::Infallible;
use std::time::Instant;
use trireme_base::{Category, DType, Positions};

impl Probe {
    /// The peaks that bound kernels of a precision on this device.
    pub fn peaks(&self, precision: Precision) -> Peaks {
        let peak = |precision| self.peak(Unit::of(self.device.cpu_features(), precision));
        Peaks { products: peak(precision), arithmetic: peak(Precision::F32) }
    }

    /// Measures each kernel of a training step whose name contains `only`, and gives it to `report`. A kernel works on the
    /// same operands again and again, which lie in whatever caches they fit into.
    ///
    /// # Errors
    /// If the device has no memory for the operands of a kernel.
    pub fn step(
        &self,
        precision: Precision,
        peaks: Peaks,
        sizes: &StepSizes,
        only: &str,
        report: &mut dyn FnMut(KernelFigure),
    ) -> Result<(), DeviceError> {
        let mut step = Step { probe: self, precision, sizes, peaks, only, report };
        step.linear_layers()?;
        step.head()?;
        step.attention()?;
        step.norms()?;
        step.activations()?;
        step.column_sums()?;
        step.embedding()?;
        step.whole_buffers()?;
        step.matrix_updates()
    }
}

/// A linear layer of every block.
struct LinearLayer {
    name: &'static str,
    inputs: usize,
    outputs: usize,
    has_bias: bool,
    /// The result is added to the residual stream, which is f32, and so is its gradient.
    into_residual: bool,
}

struct Step<'a> {
    probe: &'a Probe,
    precision: Precision,
    sizes: &'a StepSizes,
    peaks: Peaks,
    only: &'a str,
    report: &'a mut dyn FnMut(KernelFigure),
}

impl From<Infallible> for DeviceError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl Step<'_> {
    fn rows(&self) -> usize {
        self.sizes.attention.rows()
    }

    /// Type of activations.
    fn dtype(&self) -> DType {
        self.precision.dtype()
    }

    fn tensor<const N: usize>(&self, shape: [usize; N]) -> Result<Tensor, DeviceError> {
        self.probe.random(shape, DType::F32)
    }

    fn activation<const N: usize>(&self, shape: [usize; N]) -> Result<Tensor, DeviceError> {
        self.probe.random(shape, self.dtype())
    }

    /// Times a kernel, and plain loops that go through as much memory.
    fn kernel<R: Ran<Error: Into<DeviceError>>>(
        &mut self,
        call: (&str, f64),
        shape: &[usize],
        run: impl FnMut(&mut Instant) -> R,
    ) -> Result<(), DeviceError> {
        let shape = shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        self.figure(call, shape, run)
    }

    fn figure<R: Ran<Error: Into<DeviceError>>>(
        &mut self,
        (name, num_calls): (&str, f64),
        shape: String,
        mut run: impl FnMut(&mut Instant) -> R,
    ) -> Result<(), DeviceError> {
        if !name.contains(self.only) {
            return Ok(());
        }
        let device = &self.probe.device;
        device.restart_cost();
        run(&mut Instant::now()).result().map_err(Into::into)?;
        let cost = device.cost();
        let timing = self.probe.time(run).map_err(Into::into)?;
        let bounds = [
            (cost.product_operations as f64 / self.peaks.products, Limit::Products),
            (cost.other_operations as f64 / self.peaks.arithmetic, Limit::Arithmetic),
            (self.probe.stream(cost.traffic)?.best, Limit::Memory),
        ];
        let (bound, limit) = bounds.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are three");
        (self.report)(KernelFigure { name: name.to_owned(), shape, num_calls, cost, bound, limit, timing });
        Ok(())
    }

    /// Times a product of factors as they lie in memory.
    fn product(
        &mut self,
        (name, num_calls): (String, f64),
        transposes: Transposes,
        factors: [&Tensor; 2],
        out: &mut Tensor,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<(), DeviceError> {
        let left = factors[0].shape();
        let inner = if transposes == Transposes::TN { left.rows() } else { left.cols() };
        let sizes = ProductSizes { rows: out.shape().rows(), cols: out.shape().cols(), inner };
        let (probe, precision) = (self.probe, self.precision);
        self.figure((&name, num_calls), format!("{sizes} {transposes}"), |_| {
            probe.run_product(precision, transposes, factors, out, epilogue)
        })
    }

    fn linear_layers(&mut self) -> Result<(), DeviceError> {
        let StepSizes { attention, hidden, intermediate, is_llama, attention_bias, mlp_bias, .. } =
            *self.sizes;
        let mlp_in = if is_llama { 2 * intermediate } else { intermediate };
        for (name, inputs, outputs, has_bias, into_residual) in [
            ("qkv", hidden, attention.qkv_cols(), attention_bias, false),
            ("attention output", attention.output_cols(), hidden, attention_bias, true),
            ("mlp in", hidden, mlp_in, mlp_bias, false),
            ("mlp out", intermediate, hidden, mlp_bias, true),
        ] {
            self.linear(LinearLayer { name, inputs, outputs, has_bias, into_residual })?;
        }
        Ok(())
    }

    fn linear(&mut self, layer: LinearLayer) -> Result<(), DeviceError> {
        let LinearLayer { name, inputs, outputs, has_bias, into_residual } = layer;
        let rows = self.rows();
        let mut x = self.activation([rows, inputs])?;
        let y_dtype = if into_residual { DType::F32 } else { self.dtype() };
        let mut y = self.probe.random([rows, outputs], y_dtype)?;
        let (bias, residual) = (self.tensor([outputs])?, self.tensor([rows, outputs])?);
        let (forward, backward, weight_shape) = match self.sizes.is_llama {
            false => (Transposes::NN, Transposes::NT, [inputs, outputs]),
            true => (Transposes::NT, Transposes::NN, [outputs, inputs]),
        };
        let mut weight = self.tensor(weight_shape)?;
        let epilogue = MatmulEpilogue::Add {
            bias: has_bias.then(|| bias.view()),
            residual: into_residual.then(|| residual.view()),
        };
        let num_calls = self.sizes.num_layers as f64;
        let call = |part: &str| (format!("{name}: {part}"), num_calls);
        self.product(call("forward"), forward, [&x, &weight], &mut y, epilogue)?;
        let epilogue = MatmulEpilogue::Overwrite;
        self.product(call("input gradient"), backward, [&y, &weight], &mut x, epilogue)?;
        let factors = if self.sizes.is_llama { [&y, &x] } else { [&x, &y] };
        self.product(call("weight gradient"), Transposes::TN, factors, &mut weight, epilogue)
    }

    /// The output layer with the loss, for one chunk of the vocabulary.
    fn head(&mut self) -> Result<(), DeviceError> {
        let (rows, hidden) = (self.rows(), self.sizes.hidden);
        let mut table = ParameterTable::default();
        table.begin_unit("head");
        let head = LossHead {
            weight: table.add(Parameter::matrix("weight", &[self.sizes.vocabulary, hidden], Initial::ZEROS)),
            soft_cap: None,
        };
        let chunk: VocabularyChunk = head.chunks(rows).next().expect("a vocabulary is not empty");
        let num_chunks = self.sizes.vocabulary as f64 / chunk.len as f64;
        // Of several chunks backward makes the logits anew.
        let num_forward = if num_chunks > 1.0 { 2.0 * num_chunks } else { 1.0 };

        let (x, mut dx) = (self.activation([rows, hidden])?, self.tensor([rows, hidden])?);
        let (weight, mut d_weight) = (self.tensor([chunk.len, hidden])?, self.tensor([chunk.len, hidden])?);
        let mut logits = self.tensor([rows, chunk.len])?;
        let call = |part: &str, num_calls| (format!("head: {part}"), num_calls);
        let epilogue = MatmulEpilogue::Overwrite;
        self.product(call("forward", num_forward), Transposes::NT, [&x, &weight], &mut logits, epilogue)?;

        let device = &self.probe.device;
        let targets = device.zeros([rows].into(), DType::U32, Category::Activations)?;
        let mut statistics = self.tensor([rows, STATISTICS])?;
        let mut gradient = self.activation([rows, chunk.len])?;
        let shape = [rows, chunk.len];
        self.kernel(("softmax statistics", num_chunks), &shape, |_| {
            device.softmax_statistics(logits.view(), targets.view(), chunk, statistics.view_mut());
        })?;
        self.kernel(("cross-entropy gradient", num_chunks), &shape, |_| {
            let (logits, saved) = (logits.view(), statistics.view());
            device.cross_entropy_gradient(
                logits,
                targets.view(),
                chunk,
                saved,
                (1.0, None),
                gradient.view_mut(),
            );
        })?;

        let epilogue = MatmulEpilogue::Accumulate;
        let factors = [&gradient, &weight];
        self.product(call("input gradient", num_chunks), Transposes::NN, factors, &mut dx, epilogue)?;
        let factors = [&gradient, &x];
        self.product(call("weight gradient", num_chunks), Transposes::TN, factors, &mut d_weight, epilogue)
    }

    fn attention(&mut self) -> Result<(), DeviceError> {
        let (device, layers, shape) =
            (&self.probe.device, self.sizes.num_layers as f64, self.sizes.attention);
        let AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, .. } = shape;
        let of = (shape, AttentionRule::causal(head_dim));
        let rows = self.rows();
        let mut qkv = self.activation([rows, shape.qkv_cols()])?;
        let mut d_qkv = self.activation([rows, shape.qkv_cols()])?;
        let (mut y, dy) =
            (self.activation([rows, shape.output_cols()])?, self.activation([rows, shape.output_cols()])?);
        let mut log_sums = self.tensor([batch, num_heads, seq_len])?;

        let name = [batch, seq_len, num_heads, num_kv_heads, head_dim];
        self.kernel(("attention: forward", layers), &name, |_| {
            device.attention(AttentionInputs::together(qkv.view()), of, y.view_mut(), log_sums.view_mut())
        })?;
        self.kernel(("attention: backward", layers), &name, |_| {
            let output = AttentionOutput { y: y.view(), log_sums: log_sums.view(), dy: dy.view() };
            let inputs = AttentionInputs::together(qkv.view());
            device.attention_backward(inputs, of, output, (d_qkv.view_mut(), None))
        })?;
        if self.sizes.is_llama {
            let angles = self.tensor([seq_len, head_dim / 2])?;
            let positions = Positions::run(0, seq_len);
            let rotary = Rotary { cos: angles.view(), sin: angles.view(), positions };
            self.kernel(("rotary", 2.0 * layers), &name, |_| {
                device.rotary(qkv.view_mut(), shape, rotary, false);
            })?;
        }
        Ok(())
    }
}
