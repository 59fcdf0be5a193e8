use super::linear::weight_grad;
use crate::device::{Device, MatmulEpilogue, Result, Transposition};
use crate::kernels::StridedBlocks;
use crate::kernels::cpu::cross_entropy::{NUM_STATISTICS, RowFactors, VocabularyChunk};
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, GradTarget, Operation, OperationContext, Pointwise, Recorder,
    Sharding, Tanh, TensorAxis, Var, WeightLayout, declares,
};
use crate::tensor::Tensor;
use crate::view::View;
use trireme_base::{DType, ExchangeKind};

/// Maximum bytes of logits in memory, unless [`CHUNK_COLS_MIN`] columns need more. Affects the bits of results, because sums over the
/// vocabulary are computed chunk by chunk.
const LOGITS_BYTES_MAX: usize = 32 << 20;

/// Minimum columns of a chunk of the vocabulary. In a matmul with fewer columns, packing dominates.
const CHUNK_COLS_MIN: usize = 2048;

/// The output layer fused with the cross-entropy: `loss = -log softmax(x W^T)[target]` for `x` (`[.., cols]`, in the tape's precision) and
/// targets (u32, one per row). It has no output: it adds to the tape's [loss](crate::tape::Tape::loss). An optional third input, f32 and
/// one per row, holds weights of the rows: the loss is the mean of the weighted losses over all rows, and a row of weight 0 has no
/// gradient.
///
/// A recording tape computes nothing in forward: backward computes the logits, the loss and the gradients.
///
/// Logits are f32 and exist only for one chunk of the vocabulary at a time. If there are several chunks, backward computes each chunk
/// twice: for the sums of the softmax, and for the gradient (Wijmans et al., "Cut your losses in large-vocabulary language models", 2024).
/// This is a third more work in this layer, for memory that does not grow with the vocabulary.
///
/// If ranks of the tensor axis shard the vocabulary, they all-gather three numbers per row and sum the gradients of `x`. No rank has logits
/// of another rank.
#[derive(Debug, Clone, Copy)]
pub struct LossHead {
    /// `[vocabulary, cols]`. May belong to another unit, if it is tied to the embedding.
    pub weight: ParameterSpan,
    /// Replaces logits `z` by `c tanh(z / c)` (Gemma team, "Gemma 2", 2024).
    pub soft_cap: Option<f32>,
}

impl LossHead {
    /// Splits this rank's vocabulary into chunks whose logits for `rows` rows take at most [`LOGITS_BYTES_MAX`], but which have at least
    /// [`CHUNK_COLS_MIN`] columns, except the last one.
    pub(crate) fn chunks(&self, rows: usize) -> impl Iterator<Item = VocabularyChunk> + Clone + use<> {
        let (vocabulary, vocabulary_start) = self.vocabulary();
        let len = (LOGITS_BYTES_MAX / (size_of::<f32>() * rows.max(1))).max(CHUNK_COLS_MIN).min(vocabulary);
        let first = (0..vocabulary).step_by(len.max(1));
        first.map(move |first| VocabularyChunk { first, len: len.min(vocabulary - first), vocabulary_start })
    }

    /// Returns the number of this rank's vocabulary rows, and the first of them.
    fn vocabulary(&self) -> (usize, usize) {
        let Some(part) = self.weight.shard else { return (self.weight.shape.rows(), 0) };
        assert_eq!(part.dim, 0, "an output layer is cut by its rows");
        (part.len, part.start)
    }

    /// Returns the part of the weight that belongs to a chunk.
    fn chunk_span(&self, chunk: VocabularyChunk) -> ParameterSpan {
        let cols = self.weight.shape.cols();
        let (offset, shape) = (self.weight.offset + chunk.first * cols, Shape::from([chunk.len, cols]));
        ParameterSpan { offset, shape, ..self.weight }
    }

    fn chunk_logits(
        &self,
        device: &Device,
        precision: Precision,
        parameters: &dyn ParameterSource,
        x: View<'_>,
        chunk: VocabularyChunk,
    ) -> Result<Tensor> {
        let mut logits = device.activation(x.shape().with_cols(chunk.len))?;
        let weight = (parameters.span(&self.chunk_span(chunk)), Transposition::Yes);
        let (left, epilogue) = ((x, Transposition::No), MatmulEpilogue::Overwrite);
        device.matmul(precision, left, weight, logits.view_mut(), epilogue)?;
        if let Some(cap) = self.soft_cap {
            device.map_in_place(logits.view_mut(), Tanh::OPERATIONS + 2, |logit| cap * (logit / cap).tanh());
        }
        Ok(logits)
    }

    /// Gathers the logits of the full vocabulary from ranks with shards that are padded to equal length.
    fn all_logits(&self, device: &Device, axis: &TensorAxis, part: &Tensor) -> Result<Tensor> {
        let (rows, cols, degree) = (part.shape().rows(), part.shape().cols(), axis.axis_rank().degree);
        let mut parts = device.activation([degree, rows, cols])?;
        axis.ops.exchange(device, ExchangeKind::AllGather, part.view(), parts.view_mut())?;
        let whole = self.weight.shard.map_or(cols, |part| part.full_len);
        let mut all = device.activation(part.shape().with_cols(whole))?;
        for (rank, first) in (0..whole).step_by(cols).enumerate() {
            let len = cols.min(whole - first);
            let from = StridedBlocks { offset: rank * rows * cols, stride: cols };
            let to = StridedBlocks { offset: first, stride: whole };
            device.copy_blocks(parts.view(), from, all.view_mut(), to, rows, len);
        }
        Ok(all)
    }

    /// Computes the softmax statistics of every row. Also returns the logits if one chunk covers this rank's vocabulary.
    fn statistics(
        &self,
        cx: &OperationContext<'_>,
        x: View<'_>,
        targets: View<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (device, precision, parameters) = (cx.device(), cx.precision(), cx.parameters);
        let rows = x.shape().rows();
        let mut statistics = device.activation([rows, NUM_STATISTICS])?;
        let mut whole = None;
        for chunk in self.chunks(rows) {
            let logits = self.chunk_logits(device, precision, parameters, x, chunk)?;
            device.softmax_statistics(logits.view(), targets, chunk, statistics.view_mut());
            whole = (chunk.len == self.vocabulary().0).then_some(logits);
        }
        let Some(axis) = cx.tensor_axis().filter(|_| self.weight.shard.is_some()) else {
            return Ok((statistics, whole));
        };
        let mut parts = device.activation([axis.axis_rank().degree, rows, NUM_STATISTICS])?;
        axis.ops.exchange(device, ExchangeKind::AllGather, statistics.view(), parts.view_mut())?;
        device.merge_statistics(parts.view(), statistics.view_mut());
        Ok((statistics, whole))
    }
}

/// Sums the losses of the rows with these statistics, each multiplied by its weight if there are weights.
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
    /// Computes the logits of every row of `x` (`[.., cols]`): `[.., vocabulary]`, f32. For generation and tests; training never stores all
    /// logits.
    ///
    /// # Errors
    /// If there is no memory for the logits, or if an exchange with other ranks fails.
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
        let mut logits = head.chunk_logits(device, tape.pass.precision, parameters, x, whole)?;
        if let Some(axis) = tape.pass.axes.tensor.as_ref().filter(|_| head.weight.shard.is_some()) {
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

    /// Computes the gradients of the mean loss over the rows, times the loss scale.
    fn backward(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let (statistics, mut whole) = self.statistics(cx, x.view(), self.targets(cx, x.view()))?;
        // Sums over the vocabulary stay in f32 until they are complete.
        let mut dx = cx.empty(x.view().shape(), DType::F32)?;
        let mut target = self.weight_grad_target(cx.device(), sink)?;
        for chunk in self.chunks(x.view().shape().rows()) {
            let gradient = self.logits_grad(cx, x.view(), statistics.view(), chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            self.add_weight_grad(cx, x.view(), gradient.view(), chunk, &mut target)?;
        }
        sink.grad_ready(&self.weight);
        drop(x);
        self.finish_input_grad(cx, dx)?;
        self.add_losses(cx, &statistics)
    }

    /// With several chunks, the weight half recomputes the logits.
    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let (statistics, mut whole) = self.statistics(cx, x.view(), self.targets(cx, x.view()))?;
        let is_one_chunk = whole.is_some();
        // Sums over the vocabulary stay in f32 until they are complete.
        let mut dx = cx.empty(x.view().shape(), DType::F32)?;
        let mut kept = None;
        for chunk in self.chunks(x.view().shape().rows()) {
            let gradient = self.logits_grad(cx, x.view(), statistics.view(), chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            kept = is_one_chunk.then_some(gradient);
        }
        drop(x);
        self.finish_input_grad(cx, dx)?;
        self.add_losses(cx, &statistics)?;
        cx.keep(statistics);
        if let Some(gradient) = kept {
            cx.keep(gradient);
        }
        Ok(())
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        let x = cx.all_rows(cx.input(0), cx.input_sharding(0))?;
        let mut target = self.weight_grad_target(cx.device(), sink)?;
        for chunk in self.chunks(x.view().shape().rows()) {
            match cx.kept(1) {
                Some(gradient) => self.add_weight_grad(cx, x.view(), gradient, chunk, &mut target)?,
                None => {
                    let statistics = cx.kept(0).expect("the input half has kept them");
                    let gradient = self.logits_grad(cx, x.view(), statistics, chunk, None)?;
                    self.add_weight_grad(cx, x.view(), gradient.view(), chunk, &mut target)?;
                }
            }
        }
        sink.grad_ready(&self.weight);
        Ok(())
    }

    fn accepts_sharded_rows(&self, input: usize) -> bool {
        input == 0
    }

    /// The operation has no output. The loss is the same on all ranks.
    fn output_sharding(&self, _: &TensorAxis) -> Option<Sharding> {
        Some(Sharding::Replicated)
    }
}

/// Helpers of backward.
impl LossHead {
    fn targets<'a>(&self, cx: &'a BackwardContext<'_>, x: View<'_>) -> View<'a> {
        cx.input(1).part(0, [x.shape().rows()].into())
    }

    /// Returns the weights of the rows, if there are any.
    fn weights<'a>(&self, cx: &'a BackwardContext<'_>, rows: usize) -> Option<View<'a>> {
        (cx.num_inputs() == 3).then(|| cx.input(2).part(0, [rows].into()))
    }

    fn add_losses(&self, cx: &mut BackwardContext<'_>, statistics: &Tensor) -> Result<()> {
        let rows = statistics.shape().rows();
        let sum = sum_of_losses(cx, statistics, self.weights(cx, rows))?;
        cx.add_loss(sum, rows)
    }

    /// Adds the gradient of the input. `dx` is the contribution of this rank's vocabulary.
    fn finish_input_grad(&self, cx: &mut BackwardContext<'_>, mut dx: Tensor) -> Result<()> {
        let (sharding, dtype) = (cx.input_sharding(0), cx.precision().dtype());
        if self.weight.shard.is_some() {
            if dtype != DType::F32 {
                let mut rounded = cx.empty_partial_sum(dx.shape(), dtype)?;
                cx.device().convert(dx.view(), rounded.view_mut());
                dx = rounded;
            }
            dx = cx.sum_over_ranks(dx, sharding)?;
        } else if sharding == Sharding::Rows {
            dx = cx.split_rows(dx.view())?;
        }
        cx.add_grad(0, dx)
    }

    /// Returns the memory for the weight gradient, with zeros in the padding rows of this rank's shard.
    fn weight_grad_target<'a>(&self, device: &Device, sink: &'a mut dyn GradSink) -> Result<GradTarget<'a>> {
        let mut target = sink.target(&self.weight)?;
        let (rows, cols) = (self.vocabulary().0, self.weight.shape.cols());
        let num_more = self.weight.shape.rows() - rows;
        if num_more > 0 && !target.accumulate {
            device.zero(target.view.reborrow().into_part(rows * cols, [num_more, cols].into()));
        }
        Ok(target)
    }

    /// Computes the gradient of a chunk of logits. Recomputes the logits unless they are given.
    fn logits_grad(
        &self,
        cx: &BackwardContext<'_>,
        x: View<'_>,
        statistics: View<'_>,
        chunk: VocabularyChunk,
        logits: Option<Tensor>,
    ) -> Result<Tensor> {
        let (device, precision) = (cx.device(), cx.precision());
        let logits = match logits {
            Some(logits) => logits,
            None => {
                // The statistics were computed from the same logits.
                device.count_recomputed(&[2, x.shape().num_elements(), chunk.len]);
                self.chunk_logits(device, precision, cx.parameters, x, chunk)?
            }
        };
        let scale = cx.loss_grad_factor() / x.shape().rows() as f32;
        let mut gradient = cx.empty(logits.shape(), precision.dtype())?;
        let targets = self.targets(cx, x);
        let factors = RowFactors { scale, weights: self.weights(cx, x.shape().rows()) };
        device.cross_entropy_gradient(
            logits.view(),
            targets,
            chunk,
            statistics,
            factors,
            gradient.view_mut(),
        );
        if let Some(cap) = self.soft_cap {
            device.zip_in_place(gradient.view_mut(), logits.view(), 4, |grad, capped| {
                grad * (1.0 - (capped / cap) * (capped / cap))
            });
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
        let weight = (cx.parameter(&self.chunk_span(chunk)), Transposition::No);
        let epilogue = if chunk.first == 0 { MatmulEpilogue::Overwrite } else { MatmulEpilogue::Accumulate };
        let left = (gradient.view(), Transposition::No);
        cx.device().matmul(cx.precision(), left, weight, dx.view_mut(), epilogue)
    }

    fn add_weight_grad(
        &self,
        cx: &BackwardContext<'_>,
        x: View<'_>,
        gradient: View<'_>,
        chunk: VocabularyChunk,
        target: &mut GradTarget<'_>,
    ) -> Result<()> {
        let span = self.chunk_span(chunk);
        let out = target.view.reborrow().into_part(span.offset - self.weight.offset, span.shape);
        let layout = WeightLayout::OutputsFirst;
        weight_grad(cx.device(), cx.precision(), layout, x.into(), gradient.into(), out, target.accumulate)
    }
}
