use super::linear::weight_grad;
use crate::device::{Device, DeviceError, MatmulEpilogue, Transpose};
use crate::kernels::cpu::cross_entropy::{STATISTICS, VocabularyChunk};
use crate::kernels::tanh;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, GradTarget, Operation, OperationContext, Pointwise, Recorder,
    Tanh, Var, WeightLayout,
};
use crate::tensor::{Tensor, View};
use std::ops::RangeInclusive;
use trireme_base::DType;

/// Bytes of logits held at once; part of the result's bits, for sums over the vocabulary are taken chunk by chunk.
const LOGITS_BYTES_MAX: usize = 32 << 20;

/// Chunks of the vocabulary are at least so wide: a product of fewer columns is mostly packing.
const CHUNK_COLS_MIN: usize = 2048;

/// The output layer with the cross-entropy: `loss = -log softmax(x W^T)[target]`, of `x` (`[.., cols]`, in the tape's precision) and
/// targets (u32, one a row). It has no output: it adds to the tape's [loss](crate::tape::Tape::loss).
///
/// A recording tape computes nothing in forward: backward makes the logits, and takes loss and gradients from them.
///
/// Logits are f32 and exist for a chunk of the vocabulary at a time. If there are several chunks, backward makes each twice:
/// for the sums of the softmax, and for the gradient (Wijmans et al., "Cut your losses in large-vocabulary language models",
/// 2024): a third more work in this layer, for memory that does not grow with the vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct LossHead {
    /// `[vocabulary, cols]`; may belong to another unit (tied to the embedding).
    pub weight: ParameterSpan,
    /// Logits `z` become `c tanh(z / c)` (Gemma team, "Gemma 2", 2024).
    pub soft_cap: Option<f32>,
}

impl LossHead {
    /// Columns of the vocabulary whose logits are held at once for `rows` rows.
    pub(crate) fn chunks(&self, rows: usize) -> impl Iterator<Item = VocabularyChunk> + Clone + use<> {
        let vocabulary = self.weight.shape.rows();
        let len = (LOGITS_BYTES_MAX / (size_of::<f32>() * rows.max(1))).max(CHUNK_COLS_MIN).min(vocabulary);
        let first = (0..vocabulary).step_by(len.max(1));
        first.map(move |first| VocabularyChunk { first, len: len.min(vocabulary - first) })
    }

    /// The part of the weight that belongs to a chunk.
    fn chunk_span(&self, chunk: VocabularyChunk) -> ParameterSpan {
        let cols = self.weight.shape.cols();
        let (offset, shape) = (self.weight.offset + chunk.first * cols, Shape::from([chunk.len, cols]));
        ParameterSpan { offset, shape, ..self.weight }
    }

    fn chunk_logits(
        &self,
        (device, precision): (&Device, Precision),
        parameters: &dyn ParameterSource,
        x: View<'_>,
        chunk: VocabularyChunk,
    ) -> Result<Tensor, DeviceError> {
        let mut logits = device.activation(x.shape().with_cols(chunk.len))?;
        let weight = (parameters.span(&self.chunk_span(chunk)), Transpose::Yes);
        let (left, epilogue) = ((x, Transpose::No), MatmulEpilogue::Overwrite);
        device.matmul(precision, left, weight, logits.view_mut(), epilogue)?;
        if let Some(cap) = self.soft_cap {
            device
                .map_in_place(logits.view_mut(), Tanh::OPERATIONS + 2, move |logit| cap * tanh(logit / cap));
        }
        Ok(logits)
    }

    /// What the softmax of every row sums to, and the logits if one chunk held them all.
    fn statistics(
        &self,
        (device, precision): (&Device, Precision),
        parameters: &dyn ParameterSource,
        x: View<'_>,
        targets: View<'_>,
    ) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        let rows = x.shape().rows();
        let mut statistics = device.activation([rows, STATISTICS])?;
        let mut whole = None;
        for chunk in self.chunks(rows) {
            let logits = self.chunk_logits((device, precision), parameters, x, chunk)?;
            device.softmax_statistics(logits.view(), targets, chunk, statistics.view_mut());
            whole = (chunk.len == self.weight.shape.rows()).then_some(logits);
        }
        Ok((statistics, whole))
    }
}

/// Adds the losses of the rows that have these statistics.
pub(super) fn add_losses(cx: &mut OperationContext<'_>, statistics: &Tensor) -> Result<(), DeviceError> {
    let mut sum = cx.empty([1], DType::F64)?;
    cx.device().sum_losses(statistics.view(), sum.view_mut());
    cx.add_loss(sum, statistics.shape().rows())
}

impl Recorder<'_> {
    /// Logits of every row of `x` (`[.., cols]`): `[.., vocabulary]`, f32. For generation and tests; training never holds them
    /// all.
    ///
    /// # Errors
    /// If there is no memory for them.
    ///
    /// # Panics
    /// If the tape records.
    pub fn logits(&mut self, head: &LossHead, x: &Var) -> Result<Var, DeviceError> {
        let whole = VocabularyChunk { first: 0, len: head.weight.shape.rows() };
        let (tape, parameters) = self.unrecorded();
        let x = tape.values[x.0].tensor().view();
        let logits = head.chunk_logits((&tape.device, tape.precision), parameters, x, whole)?;
        Ok(tape.constant(logits))
    }
}

impl Operation for LossHead {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        if cx.is_recording() {
            return Ok(());
        }
        let x = cx.input(0);
        let targets = cx.input(1).part(0, [x.shape().rows()].into());
        let (statistics, _) = self.statistics((cx.device(), cx.precision()), cx.parameters(), x, targets)?;
        add_losses(cx, &statistics)
    }

    /// Gradients of the mean loss over the rows, times the loss scale.
    fn backward(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        let (statistics, mut whole) = self.statistics_again(cx)?;
        let mut dx = self.empty_input_grad(cx)?;
        let mut target = sink.target(&self.weight)?;
        for chunk in self.chunks(cx.input(0).shape().rows()) {
            let gradient = self.logits_grad(cx, statistics.view(), chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            self.add_weight_grad(cx, gradient.view(), chunk, &mut target)?;
        }
        sink.grad_ready(&self.weight);
        cx.add_grad(0, dx)?;
        add_losses(cx, &statistics)
    }

    /// Of several chunks the weight half makes the logits again.
    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let (statistics, mut whole) = self.statistics_again(cx)?;
        let is_one_chunk = whole.is_some();
        let mut dx = self.empty_input_grad(cx)?;
        let mut kept = None;
        for chunk in self.chunks(cx.input(0).shape().rows()) {
            let gradient = self.logits_grad(cx, statistics.view(), chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            kept = is_one_chunk.then_some(gradient);
        }
        cx.add_grad(0, dx)?;
        add_losses(cx, &statistics)?;
        cx.keep(statistics);
        if let Some(gradient) = kept {
            cx.keep(gradient);
        }
        Ok(())
    }

    fn backward_weight(
        &self,
        cx: &mut BackwardContext<'_>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let mut target = sink.target(&self.weight)?;
        for chunk in self.chunks(cx.input(0).shape().rows()) {
            match cx.kept(1) {
                Some(gradient) => self.add_weight_grad(cx, gradient, chunk, &mut target)?,
                None => {
                    let statistics = cx.kept(0).expect("the input half has kept them");
                    let gradient = self.logits_grad(cx, statistics, chunk, None)?;
                    self.add_weight_grad(cx, gradient.view(), chunk, &mut target)?;
                }
            }
        }
        sink.grad_ready(&self.weight);
        Ok(())
    }

    fn has_parameters(&self) -> bool {
        true
    }
}

/// The parts of backward.
impl LossHead {
    fn targets<'a>(&self, cx: &'a BackwardContext<'_>) -> View<'a> {
        cx.input(1).part(0, [cx.input(0).shape().rows()].into())
    }

    fn statistics_again(&self, cx: &BackwardContext<'_>) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        self.statistics((cx.device(), cx.precision()), cx.parameters(), cx.input(0), self.targets(cx))
    }

    /// Memory for the gradient of `x`: sums over the vocabulary, so f32 until they are complete.
    fn empty_input_grad(&self, cx: &BackwardContext<'_>) -> Result<Tensor, DeviceError> {
        cx.empty(cx.input(0).shape(), DType::F32)
    }

    /// The gradient of a chunk of the logits, which are computed unless given.
    fn logits_grad(
        &self,
        cx: &BackwardContext<'_>,
        statistics: View<'_>,
        chunk: VocabularyChunk,
        logits: Option<Tensor>,
    ) -> Result<Tensor, DeviceError> {
        let (device, precision, x) = (cx.device(), cx.precision(), cx.input(0));
        let logits = match logits {
            Some(logits) => logits,
            None => self.chunk_logits((device, precision), cx.parameters(), x, chunk)?,
        };
        let scale = cx.loss_scale() / x.shape().rows() as f32;
        let mut gradient = cx.empty(logits.shape(), precision.dtype())?;
        let targets = self.targets(cx);
        device.cross_entropy_gradient(logits.view(), targets, chunk, statistics, scale, gradient.view_mut());
        if let Some(cap) = self.soft_cap {
            let slope = move |grad: f32, capped: f32| grad * (1.0 - (capped / cap) * (capped / cap));
            device.zip_in_place(gradient.view_mut(), logits.view(), 4, slope);
        }
        Ok(gradient)
    }

    fn add_input_grad(
        &self,
        cx: &BackwardContext<'_>,
        gradient: &Tensor,
        chunk: VocabularyChunk,
        dx: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let weight = (cx.parameter(&self.chunk_span(chunk)), Transpose::No);
        let epilogue = if chunk.first == 0 { MatmulEpilogue::Overwrite } else { MatmulEpilogue::Accumulate };
        let left = (gradient.view(), Transpose::No);
        cx.device().matmul(cx.precision(), left, weight, dx.view_mut(), epilogue)
    }

    fn add_weight_grad(
        &self,
        cx: &BackwardContext<'_>,
        gradient: View<'_>,
        chunk: VocabularyChunk,
        target: &mut GradTarget<'_>,
    ) -> Result<(), DeviceError> {
        let span = self.chunk_span(chunk);
        let out = target.view.reborrow().into_part(span.offset - self.weight.offset, span.shape);
        let (x, layout) = (cx.input(0), WeightLayout::OutputsFirst);
        weight_grad(cx.device(), cx.precision(), layout, x, gradient, out, target.accumulate)
    }
}
