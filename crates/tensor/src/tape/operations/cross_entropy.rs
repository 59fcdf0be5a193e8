use super::loss_head::sum_of_losses;
use crate::device::{Device, Result};
use crate::kernels::cpu::cross_entropy::{NUM_STATISTICS, RowFactors, VocabularyChunk};
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use crate::tensor::Tensor;
use crate::view::View;

/// The mean cross-entropy of the softmax of logits (`[.., classes]`) and target classes (u32, one per row). It has no output: it adds to
/// the tape's [loss](crate::tape::Tape::loss). For an output layer over a large vocabulary, use [`LossHead`](crate::tape::LossHead), which
/// never stores all logits.
#[derive(Debug)]
pub struct CrossEntropy;

fn whole(shape: Shape) -> VocabularyChunk {
    VocabularyChunk { first: 0, len: shape.cols(), vocabulary_start: 0 }
}

fn statistics(device: &Device, logits: View<'_>, classes: View<'_>) -> Result<Tensor> {
    let mut statistics = device.activation([logits.shape().rows(), NUM_STATISTICS])?;
    device.softmax_statistics(logits, classes, whole(logits.shape()), statistics.view_mut());
    Ok(statistics)
}

impl Operation for CrossEntropy {
    declares! { inputs: 2..=2, reads_inputs: INPUT_HALF, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        if cx.is_recording() {
            return Ok(());
        }
        let logits = cx.in_f32(cx.input(0))?;
        let statistics = statistics(cx.device(), logits.view(), cx.input(1))?;
        drop(logits);
        let sum = sum_of_losses(cx, &statistics, None)?;
        cx.add_loss(sum, statistics.shape().rows())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let (shape, classes) = (cx.input_shape(0), cx.input(1));
        let values = cx.in_f32(cx.input(0))?;
        let logits = values.view();
        let statistics = statistics(cx.device(), logits, classes)?;
        let mut grad = cx.empty(shape, cx.input(0).dtype())?;
        let factors = RowFactors { scale: cx.loss_grad_factor() / shape.rows() as f32, weights: None };
        let (saved, chunk) = (statistics.view(), whole(shape));
        cx.device().cross_entropy_gradient(logits, classes, chunk, saved, factors, grad.view_mut());
        drop(values);
        cx.add_grad(0, grad)?;
        let sum = sum_of_losses(cx, &statistics, None)?;
        cx.add_loss(sum, statistics.shape().rows())
    }
}
