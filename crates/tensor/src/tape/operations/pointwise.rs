//! Elementwise operations.

use crate::device::Expr;
use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, declares};
use std::fmt;

/// An elementwise function, computed in f32. Types that implement this trait are [`Operation`]s.
pub trait Pointwise: fmt::Debug + Send + Sync + 'static {
    /// Floating-point operations per value; a derivative takes about as many.
    const OPERATIONS: usize;

    /// Whether the derivative is computed from the output. If so, the tape keeps the output instead of the input.
    const DERIVATIVE_OF_OUTPUT: bool;

    /// Returns the value at `x`.
    fn value<'f>(&self, x: Expr<'f>) -> Expr<'f>;

    /// Returns the derivative at the input `read`, or at the input whose output is `read` if
    /// [`DERIVATIVE_OF_OUTPUT`](Pointwise::DERIVATIVE_OF_OUTPUT).
    fn derivative<'f>(&self, read: Expr<'f>) -> Expr<'f>;
}

impl<F: Pointwise> Operation for F {
    declares! { accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.empty(cx.input(0).shape(), cx.input(0).dtype())?;
        cx.device().map(cx.input(0), y.view_mut(), F::OPERATIONS, |x| self.value(x));
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut grad = cx.take_output_grad();
        let read = if F::DERIVATIVE_OF_OUTPUT { cx.output(0) } else { cx.input(0) };
        let device = cx.device();
        device.zip_in_place(grad.view_mut(), read, F::OPERATIONS + 1, |dy, read| dy * self.derivative(read));
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        if F::DERIVATIVE_OF_OUTPUT { ReadBy::NEITHER } else { ReadBy::INPUT_HALF }
    }

    fn reads_output(&self, _: usize) -> ReadBy {
        if F::DERIVATIVE_OF_OUTPUT { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}
