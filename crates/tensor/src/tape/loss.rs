use super::linear::weight_grad;
use super::{Backward, GradSink, GradTarget, Node, Recording, Tape, Var, WeightLayout};
use crate::device::{Device, DeviceError, Transpose};
use crate::kernels::MatmulEpilogue;
use crate::kernels::cpu::cross_entropy::{STATISTICS, VocabularyChunk, row_loss};
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::{Tensor, View};

/// Bytes of logits held at once; part of the result's bits, for sums over the vocabulary are taken chunk by chunk.
const LOGITS_BYTES_MAX: usize = 32 << 20;

/// Chunks of the vocabulary are at least so wide: a product of fewer columns is mostly packing.
const CHUNK_COLS_MIN: usize = 2048;

/// The output layer with the cross-entropy: `loss = -log softmax(x W^T)[target]`.
///
/// Logits are f32 and exist for a chunk of the vocabulary at a time. If there are several chunks, backward makes each twice:
/// for the sums of the softmax, and for the gradient (Wijmans et al., "Cut your losses in large-vocabulary language models",
/// 2024): a third more work in this layer, for memory that does not grow with the vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct LossHead {
    /// `[vocabulary, cols]`; may belong to another unit (tied to the embedding).
    pub weight: ParameterSpan,
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
        let mut logits = device.activation([x.shape().rows(), chunk.len])?;
        let weight = (parameters.span(&self.chunk_span(chunk)), Transpose::Yes);
        let (left, epilogue) = ((x, Transpose::No), MatmulEpilogue::Overwrite);
        device.matmul(precision, left, weight, logits.view_mut(), epilogue)?;
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

#[derive(Debug)]
pub(super) struct LossNode {
    op: LossHead,
    x: Var,
    targets: Var,
    loss_scale: f32,
}

impl Tape {
    /// The loss of predicting `targets` (u32, one a row) from `x` (`[rows, cols]`, in the tape's precision).
    ///
    /// A recording tape computes nothing yet: backward makes the logits, and takes loss and gradients from them. Without
    /// recording the loss is there at once ([`Tape::loss_sum`]). Memory: the logits of a chunk of the vocabulary, at most 32 MiB or
    /// 2048 columns.
    ///
    /// Every gradient of the backward pass that starts here is multiplied by `loss_scale`; the loss itself is not.
    pub fn loss(
        &mut self,
        parameters: &dyn ParameterSource,
        op: &LossHead,
        x: Var,
        targets: Var,
        loss_scale: f32,
    ) -> Result<(), DeviceError> {
        if self.recording == Recording::On {
            self.nodes.push(Node::Loss(LossNode { op: *op, x, targets, loss_scale }));
            return Ok(());
        }
        let (x, targets) = (self.values.get(x), self.values.get(targets));
        let targets = targets.part(0, [x.shape().rows()].into());
        let (statistics, _) = op.statistics((&self.device, self.precision), parameters, x, targets)?;
        self.loss_sum = Some(sum_of_losses(&statistics));
        Ok(())
    }

    /// Logits of every row: `[rows, vocabulary]`, f32. For generation and tests; training never holds them all.
    pub fn logits(
        &mut self,
        parameters: &dyn ParameterSource,
        op: &LossHead,
        x: Var,
    ) -> Result<Var, DeviceError> {
        let x = self.values.get(x);
        let whole = VocabularyChunk { first: 0, len: op.weight.shape.rows() };
        let logits = op.chunk_logits((&self.device, self.precision), parameters, x, whole)?;
        Ok(self.input(logits))
    }
}

fn sum_of_losses(statistics: &Tensor) -> f64 {
    statistics.view().f32s().chunks_exact(STATISTICS).map(|row| f64::from(row_loss(row))).sum()
}

impl LossNode {
    /// Gradients of the mean loss over the rows, times the loss scale; returns the sum of the losses.
    pub(super) fn backward(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<f64, DeviceError> {
        let (statistics, mut whole) = self.statistics(cx)?;
        let mut dx = self.empty_input_grad(cx)?;
        let mut target = sink.target(&self.op.weight)?;
        for chunk in self.chunks(cx) {
            let gradient = self.logits_grad(cx, &statistics, chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            self.add_weight_grad(cx, &gradient, chunk, &mut target)?;
        }
        sink.grad_ready(&self.op.weight);
        cx.add_grad(self.x, dx);
        Ok(sum_of_losses(&statistics))
    }

    /// The input half. Of several chunks the weight half makes the logits again.
    pub(super) fn backward_input(self, cx: &mut Backward<'_>) -> Result<(f64, LossWeights), DeviceError> {
        let (statistics, mut whole) = self.statistics(cx)?;
        let is_one_chunk = whole.is_some();
        let mut dx = self.empty_input_grad(cx)?;
        let mut kept = None;
        for chunk in self.chunks(cx) {
            let gradient = self.logits_grad(cx, &statistics, chunk, whole.take())?;
            self.add_input_grad(cx, &gradient, chunk, &mut dx)?;
            kept = is_one_chunk.then_some(gradient);
        }
        cx.add_grad(self.x, dx);
        Ok((sum_of_losses(&statistics), LossWeights { node: self, statistics, gradient: kept }))
    }

    fn targets<'a>(&self, cx: &'a Backward<'_>) -> View<'a> {
        cx.values.get(self.targets).part(0, [cx.values.get(self.x).shape().rows()].into())
    }

    fn chunks(&self, cx: &Backward<'_>) -> impl Iterator<Item = VocabularyChunk> + use<> {
        self.op.chunks(cx.values.get(self.x).shape().rows())
    }

    fn statistics(&self, cx: &Backward<'_>) -> Result<(Tensor, Option<Tensor>), DeviceError> {
        let (x, targets) = (cx.values.get(self.x), self.targets(cx));
        self.op.statistics((cx.device, cx.precision), cx.parameters, x, targets)
    }

    /// Memory for the gradient of `x`: sums over the vocabulary, so f32 until they are complete.
    fn empty_input_grad(&self, cx: &Backward<'_>) -> Result<Tensor, DeviceError> {
        cx.device.activation(cx.values.get(self.x).shape())
    }

    /// The gradient of a chunk of the logits, which are made unless they are at hand.
    fn logits_grad(
        &self,
        cx: &Backward<'_>,
        statistics: &Tensor,
        chunk: VocabularyChunk,
        logits: Option<Tensor>,
    ) -> Result<Tensor, DeviceError> {
        let (device, precision, x) = (cx.device, cx.precision, cx.values.get(self.x));
        let logits = match logits {
            Some(logits) => logits,
            None => self.op.chunk_logits((device, precision), cx.parameters, x, chunk)?,
        };
        let scale = self.loss_scale / x.shape().rows() as f32;
        let mut gradient = device.activation_of(logits.shape(), precision.dtype())?;
        let (targets, saved) = (self.targets(cx), statistics.view());
        device.cross_entropy_gradient(logits.view(), targets, chunk, saved, scale, gradient.view_mut());
        Ok(gradient)
    }

    fn add_input_grad(
        &self,
        cx: &Backward<'_>,
        gradient: &Tensor,
        chunk: VocabularyChunk,
        dx: &mut Tensor,
    ) -> Result<(), DeviceError> {
        let weight = (cx.parameters.span(&self.op.chunk_span(chunk)), Transpose::No);
        let epilogue = if chunk.first == 0 { MatmulEpilogue::Overwrite } else { MatmulEpilogue::Accumulate };
        cx.device.matmul(cx.precision, (gradient.view(), Transpose::No), weight, dx.view_mut(), epilogue)
    }

    fn add_weight_grad(
        &self,
        cx: &Backward<'_>,
        gradient: &Tensor,
        chunk: VocabularyChunk,
        target: &mut GradTarget<'_>,
    ) -> Result<(), DeviceError> {
        let span = self.op.chunk_span(chunk);
        let out = target.view.reborrow().into_part(span.offset - self.op.weight.offset, span.shape);
        let (x, layout) = (cx.values.get(self.x), WeightLayout::OutputsFirst);
        weight_grad(cx.device, cx.precision, layout, x, gradient.view(), out, target.accumulate)
    }
}

/// The weight half of a loss's backward.
#[derive(Debug)]
pub(super) struct LossWeights {
    node: LossNode,
    statistics: Tensor,
    /// That of all logits, if one chunk holds them.
    gradient: Option<Tensor>,
}

impl LossWeights {
    pub(super) fn reads(&self) -> [Var; 2] {
        [self.node.x, self.node.targets]
    }

    pub(super) fn run(self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        let LossWeights { node, statistics, mut gradient } = self;
        let mut target = sink.target(&node.op.weight)?;
        for chunk in node.chunks(cx) {
            let gradient = match gradient.take() {
                Some(gradient) => gradient,
                None => node.logits_grad(cx, &statistics, chunk, None)?,
            };
            node.add_weight_grad(cx, &gradient, chunk, &mut target)?;
        }
        sink.grad_ready(&node.op.weight);
        Ok(())
    }
}
