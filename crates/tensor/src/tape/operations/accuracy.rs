use crate::device::DeviceError;
use crate::tape::{BackwardContext, ForwardContext, Operation};
use std::ops::RangeInclusive;
use trireme_base::DType;

/// The fraction of rows of scores (`[.., classes]`) whose largest score belongs to the class of the row (u32). Of equal scores the
/// first counts. A row with NaN, or whose class has no score, counts as wrong. It has no gradient: it is for [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct Accuracy;

/// Whether the score of `class` is the first of the largest ones.
fn is_largest(scores: &[f32], class: usize) -> bool {
    let Some(&own) = scores.get(class) else { return false };
    scores[..class].iter().all(|score| *score < own) && scores[class..].iter().all(|score| *score <= own)
}

impl Operation for Accuracy {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let shape = cx.input(0).shape();
        let mut hits = cx.empty([shape.rows(), 1], DType::F32)?;
        let scores = cx.in_f32(cx.input(0))?;
        let classes = cx.input(1).u32s();
        cx.device().for_each_row([scores.view()], hits.view_mut(), shape.cols(), |[scores], row, hit| {
            let scores = &scores[row * shape.cols()..][..shape.cols()];
            hit[0] = f32::from(is_largest(scores, classes[row] as usize));
        });
        drop(scores);
        let num_hits = hits.view().f32s().iter().filter(|&&hit| hit > 0.0).count();
        cx.add_loss(num_hits as f64, shape.rows());
        Ok(())
    }

    fn backward_input(&self, _: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        Ok(())
    }
}
