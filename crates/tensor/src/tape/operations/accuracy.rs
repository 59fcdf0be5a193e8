use crate::device::Result;
use crate::tape::{ForwardContext, Operation, declares};
use trireme_base::DType;

/// The fraction of rows of scores (`[.., classes]`) in which the row's class (u32) has the largest score. Of equal scores, the first one
/// counts as the largest. A row with NaN, or whose class is out of range, counts as wrong. It has no gradient: use it for
/// [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct Accuracy;

impl Operation for Accuracy {
    declares! { inputs: 2..=2, has_no_gradient }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape();
        let mut hits = cx.empty([shape.rows()], DType::F32)?;
        let scores = cx.in_f32(cx.input(0))?;
        cx.device().hits(scores.view(), cx.input(1), hits.view_mut());
        drop(scores);
        cx.add_sum_to_loss(hits.view(), 1.0, shape.rows())
    }
}
