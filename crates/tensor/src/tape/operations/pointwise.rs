//! Elementwise operations.

use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, declares};
use std::fmt;

/// An elementwise function, computed in f32. Types that implement this trait are [`Operation`]s. Cloned into kernels, which may run later.
pub trait Pointwise: fmt::Debug + Clone + Send + Sync + 'static {
    /// Floating-point operations per value; a derivative takes about as many.
    const OPERATIONS: usize;

    /// Whether the derivative is computed from the output. If so, the tape keeps the output instead of the input.
    const DERIVATIVE_OF_OUTPUT: bool;

    /// Returns the value at `x`.
    fn value(&self, x: f32) -> f32;

    /// Returns the derivative at the input `read`, or at the input whose output is `read` if
    /// [`DERIVATIVE_OF_OUTPUT`](Pointwise::DERIVATIVE_OF_OUTPUT).
    fn derivative(&self, read: f32) -> f32;
}

impl<F: Pointwise> Operation for F {
    declares! { accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.empty(cx.input(0).shape(), cx.input(0).dtype())?;
        let function = self.clone();
        cx.device().map(cx.input(0), y.view_mut(), F::OPERATIONS, move |x| function.value(x));
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut grad = cx.take_output_grad();
        let read = if F::DERIVATIVE_OF_OUTPUT { cx.output(0) } else { cx.input(0) };
        let function = self.clone();
        let product = move |dy, read| dy * function.derivative(read);
        cx.device().zip_in_place(grad.view_mut(), read, F::OPERATIONS + 1, product);
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        if F::DERIVATIVE_OF_OUTPUT { ReadBy::NEITHER } else { ReadBy::INPUT_HALF }
    }

    fn reads_output(&self, _: usize) -> ReadBy {
        if F::DERIVATIVE_OF_OUTPUT { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}
