//! The kernels of one training step, one by one.

mod optimizers;
mod rows;

use super::{
    KernelFigure, Limit, Peaks, Probe, ProductSizes, Ran, StepSizes, Timing, Traffic, Transposes, Unit, Work,
};
use crate::declaration::{Initial, Parameter};
use crate::device::{AttentionViews, DeviceError};
use crate::kernels::cpu::cross_entropy::{STATISTICS, VocabularyChunk};
use crate::kernels::{AttentionRule, AttentionShape, MatmulEpilogue, Rotary};
use crate::parameter_table::ParameterTable;
use crate::precision::Precision;
use crate::tape::LossHead;
use crate::tensor::Tensor;
use std::convert::Infallible;
use std::time::Instant;
use trireme_base::{Category, DType};

/// Operations of an exponential in the kernels.
const EXP: usize = 23;

/// Bytes of an f32.
const F32: usize = size_of::<f32>();

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

/// Work that is the same for each of `num` elements: operations, and bytes that are read, updated and written.
fn each(num: usize, operations: usize, [read, updated, written]: [usize; 3]) -> Work {
    Work {
        product_operations: 0.0,
        other_operations: num as f64 * operations as f64,
        traffic: Traffic { read: num * read, updated: num * updated, written: num * written },
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

    /// Times a kernel and its plain loops.
    fn kernel<R: Ran<Error: Into<DeviceError>>>(
        &mut self,
        (name, num_calls): (&str, f64),
        shape: &[usize],
        work: Work,
        run: impl FnMut(&mut Instant) -> R,
    ) -> Result<(), DeviceError> {
        if !name.contains(self.only) {
            return Ok(());
        }
        let timing = self.probe.time(run).map_err(Into::into)?;
        let shape = shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
        self.figure(name.to_owned(), num_calls, shape, work, timing)
    }

    fn figure(
        &mut self,
        name: String,
        num_calls: f64,
        shape: String,
        work: Work,
        timing: Timing,
    ) -> Result<(), DeviceError> {
        let bounds = [
            (work.product_operations / self.peaks.products, Limit::Products),
            (work.other_operations / self.peaks.arithmetic, Limit::Arithmetic),
            (self.probe.stream(work.traffic)?.best, Limit::Memory),
        ];
        let (bound, limit) = bounds.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).expect("there are three");
        (self.report)(KernelFigure { name, shape, num_calls, work, bound, limit, timing });
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
        if !name.contains(self.only) {
            return Ok(());
        }
        let left = factors[0].shape();
        let inner = if transposes == Transposes::TN { left.rows() } else { left.cols() };
        let sizes = ProductSizes { rows: out.shape().rows(), cols: out.shape().cols(), inner };
        let bytes = |tensor: &Tensor| tensor.shape().num_elements() * tensor.dtype().size();
        let mut traffic = Traffic { read: factors.map(bytes).iter().sum(), updated: 0, written: bytes(out) };
        match epilogue {
            MatmulEpilogue::Accumulate => (traffic.updated, traffic.written) = (traffic.written, 0),
            MatmulEpilogue::Add { residual: Some(residual), .. } => traffic.read += size_of_val(residual),
            MatmulEpilogue::Overwrite | MatmulEpilogue::Add { .. } => {}
        }
        let work = Work { product_operations: sizes.operations(), other_operations: 0.0, traffic };
        let timing = self.probe.time_product(self.precision, transposes, factors, out, epilogue)?;
        self.figure(name, num_calls, format!("{sizes} {transposes}"), work, timing)
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
            bias: has_bias.then(|| bias.view().f32s()),
            residual: into_residual.then(|| residual.view().f32s()),
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
        let (shape, num) = ([rows, chunk.len], rows * chunk.len);
        let work = each(num, EXP + 3, [F32, 0, 0]);
        self.kernel(("softmax statistics", num_chunks), &shape, work, |_| {
            device.softmax_statistics(logits.view(), targets.view(), chunk, statistics.view_mut());
        })?;
        let work = each(num, EXP + 2, [F32, 0, self.dtype().size()]);
        self.kernel(("cross-entropy gradient", num_chunks), &shape, work, |_| {
            let (logits, saved) = (logits.view(), statistics.view());
            device.cross_entropy_gradient(logits, targets.view(), chunk, saved, 1.0, gradient.view_mut());
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
        let (rows, size) = (self.rows(), self.dtype().size());
        let mut qkv = self.activation([rows, shape.qkv_cols()])?;
        let mut d_qkv = self.activation([rows, shape.qkv_cols()])?;
        let (mut y, dy) =
            (self.activation([rows, shape.output_cols()])?, self.activation([rows, shape.output_cols()])?);
        let mut log_sums = self.tensor([batch, num_heads, seq_len])?;

        let num_scores = (batch * num_heads * seq_len * (seq_len + 1) / 2) as f64;
        let (qkv_bytes, y_bytes) = (rows * shape.qkv_cols() * size, rows * shape.output_cols() * size);
        let sums_bytes = rows * num_heads * F32;
        let name = [batch, seq_len, num_heads, num_kv_heads, head_dim];
        let work = Work {
            product_operations: num_scores * 4.0 * head_dim as f64,
            other_operations: num_scores * (EXP + 4) as f64,
            traffic: Traffic { read: qkv_bytes, updated: 0, written: y_bytes + sums_bytes },
        };
        self.kernel(("attention: forward", layers), &name, work, |_| {
            let inputs = AttentionViews { queries: qkv.view(), keys_values: None, num_keys: None };
            device.attention(inputs, of, y.view_mut(), log_sums.view_mut())
        })?;
        let work = Work {
            product_operations: num_scores * 10.0 * head_dim as f64,
            other_operations: num_scores * (EXP + 5) as f64,
            traffic: Traffic { read: qkv_bytes + 2 * y_bytes + sums_bytes, updated: 0, written: qkv_bytes },
        };
        self.kernel(("attention: backward", layers), &name, work, |_| {
            let output = (y.view(), log_sums.view(), dy.view());
            let inputs = AttentionViews { queries: qkv.view(), keys_values: None, num_keys: None };
            device.attention_backward(inputs, of, output, (d_qkv.view_mut(), None))
        })?;
        if self.sizes.is_llama {
            let angles = self.tensor([seq_len, head_dim / 2])?;
            let angles = angles.view().f32s();
            let rotary = Rotary { cos: angles, sin: angles, first_position: 0 };
            let num = rows * (num_heads + num_kv_heads) * head_dim;
            self.kernel(("rotary", 2.0 * layers), &name, each(num, 3, [0, size, 0]), |_| {
                device.rotary(qkv.view_mut(), shape, rotary, false);
            })?;
        }
        Ok(())
    }
}
