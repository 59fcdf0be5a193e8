use super::linear::weight_grad;
use crate::device::{Device, MatmulEpilogue, Result, Transpose};
use crate::kernels::Blocks;
use crate::kernels::cpu::cross_entropy::{STATISTICS, VocabularyChunk};
use crate::kernels::tanh;
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, GradTarget, Operation, OperationContext, Pointwise, Recorder,
    Sharding, Tanh, TensorAxis, Var, WeightLayout, declares,
};
use crate::tensor::{Tensor, View};
use trireme_base::{DType, ExchangeKind};

/// Bytes of logits held at once; part of the result's bits, for sums over the vocabulary are taken chunk by chunk.
const LOGITS_BYTES_MAX: usize = 32 << 20;

/// Chunks of the vocabulary are at least so wide: a product of fewer columns is mostly packing.
const CHUNK_COLS_MIN: usize = 2048;

/// The output layer with the cross-entropy: `loss = -log softmax(x W^T)[target]`, of `x` (`[.., cols]`, in the tape's precision) and
/// targets (u32, one a row). It has no output: it adds to the tape's [loss](crate::tape::Tape::loss). A third input, f32 and one a row, has
/// weights of the rows: the loss is the mean of weighted losses over all rows, and a row of weight 0 has no gradient.
///
/// A recording tape computes nothing in forward: backward makes the logits, and takes loss and gradients from them.
///
/// Logits are f32 and exist for a chunk of the vocabulary at a time. If there are several chunks, backward makes each twice:
/// for the sums of the softmax, and for the gradient (Wijmans et al., "Cut your losses in large-vocabulary language models",
/// 2024): a third more work in this layer, for memory that does not grow with the vocabulary.
///
/// Where ranks of the tensor axis have parts of the vocabulary, they gather three numbers for each row, and add up the gradients of `x`;
/// no rank has logits of the others.
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
        let (vocabulary, vocabulary_start) = self.vocabulary();
        let len = (LOGITS_BYTES_MAX / (size_of::<f32>() * rows.max(1))).max(CHUNK_COLS_MIN).min(vocabulary);
        let first = (0..vocabulary).step_by(len.max(1));
        first.map(move |first| VocabularyChunk { first, len: len.min(vocabulary - first), vocabulary_start })
    }

    /// How many rows of the vocabulary this rank has, and the first of them.
    fn vocabulary(&self) -> (usize, usize) {
        let Some(part) = self.weight.part else { return (self.weight.shape.rows(), 0) };
        assert_eq!(part.dim, 0, "an output layer is cut by its rows");
        (part.len, part.start)
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
    ) -> Result<Tensor> {
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

    /// The logits of the whole vocabulary, of which ranks have `part`s that are filled up to the same length.
    fn all_logits(&self, device: &Device, axis: &TensorAxis, part: &Tensor) -> Result<Tensor> {
        let (rows, cols, degree) = (part.shape().rows(), part.shape().cols(), axis.place().degree);
        let mut parts = device.activation([degree, rows, cols])?;
        axis.ops.exchange(device, ExchangeKind::AllGather, part.view(), parts.view_mut())?;
        let whole = self.weight.part.map_or(cols, |part| part.whole);
        let mut all = device.activation(part.shape().with_cols(whole))?;
        for (rank, first) in (0..whole).step_by(cols).enumerate() {
            let len = cols.min(whole - first);
            let from = Blocks { offset: rank * rows * cols, stride: cols };
            let to = Blocks { offset: first, stride: whole };
            device.copy_blocks((parts.view(), from), (all.view_mut(), to), (rows, len));
        }
        Ok(all)
    }

    /// What the softmax of every row sums to, and the logits if one chunk held all that are here.
    fn statistics(
        &self,
        cx: &OperationContext<'_>,
        x: View<'_>,
        targets: View<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (device, precision, parameters) = (cx.device(), cx.precision(), cx.parameters);
        let rows = x.shape().rows();
        let mut statistics = device.activation([rows, STATISTICS])?;
        let mut whole = None;
        for chunk in self.chunks(rows) {
            let logits = self.chunk_logits((device, precision), parameters, x, chunk)?;
            device.softmax_statistics(logits.view(), targets, chunk, statistics.view_mut());
            whole = (chunk.len == self.vocabulary().0).then_some(logits);
        }
        let Some(axis) = cx.axis().filter(|_| self.weight.part.is_some()) else {
            return Ok((statistics, whole));
        };
        let mut parts = device.activation([axis.place().degree, rows, STATISTICS])?;
        axis.ops.exchange(device, ExchangeKind::AllGather, statistics.view(), parts.view_mut())?;
        device.merge_statistics(parts.view(), statistics.view_mut());
        Ok((statistics, whole))
    }
}

/// The sum of the losses of the rows that have these statistics, each times its weight if there are weights.
pub(super) fn sum_of_losses(
    cx: &OperationContext<'_>,
    statistics: &Tensor,
    weights: Option<View<'_>>,
) -> Result<Tensor> {
    let mut sum = cx.empty([1], DType::F64)?;
    cx.device().sum_losses(statistics.view(), weights, sum.view_mut());
    Ok(sum)
}

impl Recorder<'_> {
    /// Logits of every row of `x` (`[.., cols]`): `[.., vocabulary]`, f32. For generation and tests; training never holds them
    /// all.
    ///
    /// # Panics
    /// If the tape records.
    pub fn logits(&mut self, head: &LossHead, x: &Var) -> Result<Var> {
        let (len, vocabulary_start) = (head.weight.shape.rows(), head.vocabulary().1);
        let whole = VocabularyChunk { first: 0, len, vocabulary_start };
        let (tape, parameters) = self.unrecorded();
        let value = &tape.values[x.0];
        assert_ne!(value.sharding, Sharding::Rows, "logits are made of rows that every rank has");
        let (device, x) = (&tape.device, value.tensor().view());
        let mut logits = head.chunk_logits((device, tape.pass.precision), parameters, x, whole)?;
        if let Some(axis) = tape.pass.axes.tensor.as_ref().filter(|_| head.weight.part.is_some()) {
            logits = head.all_logits(device, axis, &logits)?;
        }
        Ok(tape.constant(logits))
    }
}

impl Operation for LossHead {
    declares! { inputs: 2..=3, has_parameters, reads_inputs: BOTH }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        if cx.is_recording() {
            return Ok(());
        }
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let targets = cx.input(1).part(0, [x.view().shape().rows()].into());
        let (statistics, _) = self.statistics(cx, x.view(), targets)?;
        drop(x);
        let rows = statistics.shape().rows();
        let weights = (cx.num_inputs() == 3).then(|| cx.input(2).part(0, [rows].into()));
        let sum = sum_of_losses(cx, &statistics, weights)?;
        cx.add_loss(sum, rows)
    }

    /// Gradients of the mean loss over the rows, times the loss scale.
    fn backward(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let (statistics, mut whole) = self.statistics(cx, x.view(), self.targets(cx, x.view()))?;
        // Sums over the vocabulary, so f32 until they are complete.
        let mut dx = cx.empty(x.view().shape(), DType::F32)?;
        let mut target = self.target(cx.device(), sink)?;
        for chunk in self.chunks(x.view().shape().rows()) {
            let gradient = self.logits_grad(cx, (x.view(), statistics.view()), chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            self.add_weight_grad(cx, (x.view(), gradient.view()), chunk, &mut target)?;
        }
        sink.grad_ready(&self.weight);
        drop(x);
        self.give_input_grad(cx, dx)?;
        self.add_losses(cx, &statistics)
    }

    /// Of several chunks the weight half makes the logits again.
    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let (statistics, mut whole) = self.statistics(cx, x.view(), self.targets(cx, x.view()))?;
        let is_one_chunk = whole.is_some();
        // Sums over the vocabulary, so f32 until they are complete.
        let mut dx = cx.empty(x.view().shape(), DType::F32)?;
        let mut kept = None;
        for chunk in self.chunks(x.view().shape().rows()) {
            let gradient = self.logits_grad(cx, (x.view(), statistics.view()), chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            kept = is_one_chunk.then_some(gradient);
        }
        drop(x);
        self.give_input_grad(cx, dx)?;
        self.add_losses(cx, &statistics)?;
        cx.keep(statistics);
        if let Some(gradient) = kept {
            cx.keep(gradient);
        }
        Ok(())
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let mut target = self.target(cx.device(), sink)?;
        for chunk in self.chunks(x.view().shape().rows()) {
            match cx.kept(1) {
                Some(gradient) => self.add_weight_grad(cx, (x.view(), gradient), chunk, &mut target)?,
                None => {
                    let statistics = cx.kept(0).expect("the input half has kept them");
                    let gradient = self.logits_grad(cx, (x.view(), statistics), chunk, None)?;
                    self.add_weight_grad(cx, (x.view(), gradient.view()), chunk, &mut target)?;
                }
            }
        }
        sink.grad_ready(&self.weight);
        Ok(())
    }

    fn takes_rows(&self, input: usize) -> bool {
        input == 0
    }

    /// It has none; the loss is the same on all ranks.
    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        Some(Sharding::Replicated)
    }
}

/// The parts of backward.
impl LossHead {
    fn targets<'a>(&self, cx: &'a BackwardContext<'_>, x: View<'_>) -> View<'a> {
        cx.input(1).part(0, [x.shape().rows()].into())
    }

    /// The weights of the rows, if there are any.
    fn weights<'a>(&self, cx: &'a BackwardContext<'_>, rows: usize) -> Option<View<'a>> {
        (cx.num_inputs() == 3).then(|| cx.input(2).part(0, [rows].into()))
    }

    fn add_losses(&self, cx: &mut BackwardContext<'_>, statistics: &Tensor) -> Result<()> {
        let rows = statistics.shape().rows();
        let sum = sum_of_losses(cx, statistics, self.weights(cx, rows))?;
        cx.add_loss(sum, rows)
    }

    /// Gives the input its gradient, of which `dx` is what this rank's part of the vocabulary makes.
    fn give_input_grad(&self, cx: &mut BackwardContext<'_>, mut dx: Tensor) -> Result<()> {
        let (sharding, dtype) = (cx.input_sharding(0), cx.precision().dtype());
        if self.weight.part.is_some() {
            if dtype != DType::F32 {
                let mut rounded = cx.empty_term(dx.shape(), dtype)?;
                cx.device().convert(dx.view(), rounded.view_mut());
                dx = rounded;
            }
            dx = cx.sum_over_ranks(dx, sharding)?;
        } else if sharding == Sharding::Rows {
            dx = cx.split_rows(dx.view())?;
        }
        cx.add_grad(0, dx)
    }

    /// Where the gradient of the weight goes; zeros where rows fill up this rank's part.
    fn target<'a>(&self, device: &Device, sink: &'a mut dyn GradSink) -> Result<GradTarget<'a>> {
        let mut target = sink.target(&self.weight)?;
        let (rows, cols) = (self.vocabulary().0, self.weight.shape.cols());
        let num_more = self.weight.shape.rows() - rows;
        if num_more > 0 && !target.accumulate {
            device.zero(target.view.reborrow().into_part(rows * cols, [num_more, cols].into()));
        }
        Ok(target)
    }

    /// The gradient of a chunk of the logits, which are computed unless given.
    fn logits_grad(
        &self,
        cx: &BackwardContext<'_>,
        (x, statistics): (View<'_>, View<'_>),
        chunk: VocabularyChunk,
        logits: Option<Tensor>,
    ) -> Result<Tensor> {
        let (device, precision) = (cx.device(), cx.precision());
        let logits = match logits {
            Some(logits) => logits,
            None => {
                // The statistics were made of the same logits.
                device.count_repeated(&[2, x.shape().num_elements(), chunk.len]);
                self.chunk_logits((device, precision), cx.parameters, x, chunk)?
            }
        };
        let scale = cx.loss_scale() / x.shape().rows() as f32;
        let mut gradient = cx.empty(logits.shape(), precision.dtype())?;
        let targets = self.targets(cx, x);
        let scale = (scale, self.weights(cx, x.shape().rows()));
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
    ) -> Result<()> {
        let weight = (cx.parameter(&self.chunk_span(chunk)), Transpose::No);
        let epilogue = if chunk.first == 0 { MatmulEpilogue::Overwrite } else { MatmulEpilogue::Accumulate };
        let left = (gradient.view(), Transpose::No);
        cx.device().matmul(cx.precision(), left, weight, dx.view_mut(), epilogue)
    }

    fn add_weight_grad(
        &self,
        cx: &BackwardContext<'_>,
        (x, gradient): (View<'_>, View<'_>),
        chunk: VocabularyChunk,
        target: &mut GradTarget<'_>,
    ) -> Result<()> {
        let span = self.chunk_span(chunk);
        let out = target.view.reborrow().into_part(span.offset - self.weight.offset, span.shape);
        let layout = WeightLayout::OutputsFirst;
        weight_grad(cx.device(), cx.precision(), layout, x, gradient, out, target.accumulate)
    }
}
