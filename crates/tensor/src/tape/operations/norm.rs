use crate::cow_tensor::CowTensor;
use crate::device::Result;
use crate::kernels::cpu::norm::{NormKind, NormedRows};
use crate::parameter_table::ParameterSpan;
use crate::tape::{
    BackwardContext, ForwardContext, GradSink, Operation, OperationContext, declares, write_grad,
};
use trireme_base::DType;

/// A layer or RMS normalization of the rows of `x` (`[.., cols]`). Computed in f32; the output is in the tape's precision.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// One weight per column.
    pub weight: ParameterSpan,
    /// Added to the weights. With 1, weights are initialized to 0 (Gemma team, "Gemma", 2024).
    pub weight_offset: f32,
    /// One bias per column.
    pub bias: Option<ParameterSpan>,
    /// Added to the variance or to the mean square.
    pub epsilon: f32,
    /// Whether the mean is subtracted: layer normalization; otherwise RMS normalization.
    pub is_centered: bool,
}

impl Norm {
    fn kind(&self) -> NormKind {
        NormKind { epsilon: self.epsilon, is_centered: self.is_centered }
    }

    /// Returns the weights plus the offset.
    fn weight<'a>(&self, cx: &'a OperationContext<'_>) -> Result<CowTensor<'a>> {
        let weight = cx.parameter_in_f32(&self.weight)?;
        if self.weight_offset == 0.0 {
            return Ok(weight);
        }
        let mut sum = cx.empty(weight.view().shape(), DType::F32)?;
        let offset = self.weight_offset;
        cx.device().map(weight.view(), sum.view_mut(), 1, |weight| weight + offset);
        Ok(CowTensor::Owned(sum))
    }
}

impl Operation for Norm {
    declares! { has_parameters, reads_inputs: BOTH, accepts_f32_grads, is_recomputable, accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape();
        let mut statistics = cx.empty_to_save([shape.rows(), 2], DType::F32)?;
        let mut y = cx.empty(shape, cx.precision().dtype())?;
        let weight = self.weight(cx)?;
        let bias = self.bias.as_ref().map(|bias| cx.parameter_in_f32(bias)).transpose()?;
        let (weight_view, bias_view) = (weight.view(), bias.as_ref().map(|bias| bias.view()));
        let (y_view, statistics_view) = (y.view_mut(), statistics.view_mut());
        let x = cx.in_f32(cx.input(0))?;
        cx.device().norm(x.view(), weight_view, bias_view, self.kind(), y_view, statistics_view);
        drop((weight, bias, x));
        cx.save(statistics);
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        if !cx.requires_grad(0) {
            return Ok(());
        }
        let (shape, dtype) = (cx.input(0).shape(), cx.input(0).dtype());
        // If the residual stream has already added its gradient, add to it in the same pass.
        let sum = if dtype == DType::F32 { cx.take_grad_sum(0) } else { None };
        let (mut dx, accumulate) = match sum {
            Some(sum) => (sum, true),
            None => (cx.empty(shape, DType::F32)?, false),
        };
        let weight = self.weight(cx)?;
        let x = cx.in_f32(cx.input(0))?;
        let statistics = cx.saved(0).expect("forward has saved the statistics");
        let rows = NormedRows { x: x.view(), weight: weight.view(), statistics };
        cx.device().norm_backward_input(rows, self.kind(), cx.grad(), dx.view_mut(), accumulate);
        drop((weight, x));
        if dtype == DType::F32 {
            cx.set_grad_sum(0, dx);
        } else {
            let mut rounded = cx.empty(shape, dtype)?;
            cx.device().convert(dx.view(), rounded.view_mut());
            cx.add_grad(0, rounded)?;
        }
        Ok(())
    }

    fn backward_weight(&self, cx: &mut BackwardContext<'_>, sink: &mut dyn GradSink) -> Result<()> {
        if let Some(bias) = &self.bias {
            write_grad(sink, bias, |out, accumulate| {
                cx.device().column_sums(cx.grad(), out, accumulate);
                Ok(())
            })?;
        }
        write_grad(sink, &self.weight, |out, accumulate| {
            let statistics = cx.saved(0).expect("forward has saved the statistics");
            let x = cx.in_f32(cx.input(0))?;
            cx.device().norm_backward_weight(x.view(), cx.grad(), statistics, out, accumulate);
            Ok(())
        })
    }
}
