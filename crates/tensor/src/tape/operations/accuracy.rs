use crate::device::Result;
use crate::tape::{ForwardContext, Operation, has_no_gradient};
use std::ops::RangeInclusive;
use trireme_base::DType;

/// The fraction of rows of scores (`[.., classes]`) whose largest score belongs to the class of the row (u32). Of equal scores the
/// first counts. A row with NaN, or whose class has no score, counts as wrong. It has no gradient: it is for [metrics](crate::tape::Recorder::apply_metric).
#[derive(Debug)]
pub struct Accuracy;

impl Operation for Accuracy {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape();
        let (mut hits, mut num_hits) = (cx.empty([shape.rows()], DType::F32)?, cx.empty([1], DType::F64)?);
        let scores = cx.in_f32(cx.input(0))?;
        cx.device().hits(scores.view(), cx.input(1), hits.view_mut());
        drop(scores);
        cx.device().sum_elements(hits.view(), 1.0, num_hits.view_mut());
        cx.add_loss(num_hits, shape.rows())
    }

    has_no_gradient!();
}
