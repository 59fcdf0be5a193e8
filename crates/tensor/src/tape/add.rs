use super::{BackwardContext, ForwardContext, Operation, ReadBy};
use crate::device::DeviceError;
use std::ops::RangeInclusive;

/// `left + right`, of values of one shape and type of floats; the sum has both.
#[derive(Debug)]
pub struct Add;

impl Operation for Add {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let sum = |left, right| left + right;
        let mut y = cx.take_input(0);
        let mut other = 1;
        if y.is_none() {
            (y, other) = (cx.take_input(1), 0);
        }
        let y = match y {
            Some(mut y) => {
                cx.device().zip_in_place(y.view_mut(), cx.input(other), 1, sum);
                y
            }
            None => {
                let mut y = cx.empty(cx.input(0).shape(), cx.input(0).dtype())?;
                cx.device().zip((cx.input(0), cx.input(1)), y.view_mut(), 1, sum);
                y
            }
        };
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        cx.pass_grad(0);
        cx.pass_grad(1);
        Ok(())
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::NEITHER
    }
}
