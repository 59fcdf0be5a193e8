use crate::device::DeviceError;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy};
use trireme_base::DType;

/// The `k` largest elements of each row of `x` (`[.., cols]`, f32), from the largest on, and which they are (u32): two outputs of `[.., k]`.
/// Of equal elements the first comes first; NaN counts as no larger than any number. Where elements are divided by their sum, it must not be 0.
///
/// Cost: `k` searches of each row, which pass over what was found before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    /// How many; at most `cols`.
    pub k: usize,
    /// Whether they are divided by their sum.
    pub normalizes: bool,
}

impl Operation for TopK {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let shape = cx.input(0).shape().with_cols(self.k);
        let (mut values, mut ids) = (cx.empty(shape, DType::F32)?, cx.empty(shape, DType::U32)?);
        cx.device().top_k(cx.input(0), self.normalizes, [values.view_mut(), ids.view_mut()]);
        cx.output(values);
        cx.output(ids);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let mut dx = cx.empty(cx.input_shape(0), DType::F32)?;
        let found = [cx.output(1), cx.grad()];
        cx.device().top_k_backward(cx.input(0), self.normalizes, found, dx.view_mut());
        cx.add_grad(0, dx)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::INPUT_HALF
    }

    fn reads_output(&self, output: usize) -> ReadBy {
        if output == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}
