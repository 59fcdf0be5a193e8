use super::{Backward, Forward, GradSink, Operation, ReadBy, write_grad};
use crate::device::DeviceError;
use crate::kernels::cpu::norm::NormKind;
use crate::parameter_table::ParameterSpan;
use trireme_base::DType;

/// A normalisation of rows: of `x` (`[.., cols]`, f32), in the tape's precision.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// One weight a column.
    pub weight: ParameterSpan,
    /// One bias a column.
    pub bias: Option<ParameterSpan>,
    /// Added to the variance or mean square.
    pub epsilon: f32,
    /// Layer normalisation, which subtracts the mean; else RMS normalisation.
    pub centred: bool,
}

impl Norm {
    fn kind(&self) -> NormKind {
        NormKind { epsilon: self.epsilon, centred: self.centred }
    }
}

impl Operation for Norm {
    fn forward(&self, cx: &mut Forward<'_>) -> Result<(), DeviceError> {
        let shape = cx.input(0).shape();
        let mut statistics = cx.empty_to_save([shape.rows(), 2], DType::F32)?;
        let mut y = cx.empty(shape, cx.precision().dtype())?;
        let weight = cx.vector(&self.weight)?;
        let bias = self.bias.as_ref().map(|bias| cx.vector(bias)).transpose()?;
        let (weight_view, bias_view) = (weight.view(), bias.as_ref().map(|bias| bias.view()));
        let (y_view, statistics_view) = (y.view_mut(), statistics.view_mut());
        cx.device().norm(cx.input(0), weight_view, bias_view, self.kind(), y_view, statistics_view);
        drop((weight, bias));
        cx.save(statistics);
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut Backward<'_>) -> Result<(), DeviceError> {
        if !cx.wants_grad(0) {
            return Ok(());
        }
        // The residual stream has left its gradient here already: add to it in the same pass.
        let (mut dx, accumulate) = match cx.take_grad_sum(0) {
            Some(sum) => (sum, true),
            None => (cx.empty(cx.input(0).shape(), DType::F32)?, false),
        };
        let weight = cx.vector(&self.weight)?;
        let rows = (cx.input(0), weight.view(), cx.saved(0).expect("the statistics"));
        cx.device().norm_backward_input(rows, self.kind(), cx.grad(), dx.view_mut(), accumulate);
        drop(weight);
        cx.set_grad_sum(0, dx);
        Ok(())
    }

    fn backward_weight(&self, cx: &mut Backward<'_>, sink: &mut dyn GradSink) -> Result<(), DeviceError> {
        if let Some(bias) = &self.bias {
            write_grad(sink, bias, |out, accumulate| {
                cx.device().column_sums(cx.grad(), out, accumulate);
                Ok(())
            })?;
        }
        write_grad(sink, &self.weight, |out, accumulate| {
            let statistics = cx.saved(0).expect("the statistics");
            cx.device().norm_backward_weight(cx.input(0), cx.grad(), statistics, out, accumulate);
            Ok(())
        })
    }

    fn has_parameters(&self) -> bool {
        true
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy { input_half: true, weight_half: true }
    }

    fn is_cheap(&self) -> bool {
        true
    }
}
