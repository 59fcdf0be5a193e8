//! Activation functions, as part of the layer that reads them.

use crate::device::{Device, Result};
use crate::kernels::Activation;
use crate::tape::{BackwardContext, ReadBy};
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};

/// A function that a linear layer applies to its input.
///
/// The activation belongs to the layer that reads it, not to the layer that computes its argument. Thus only the argument is saved, and the
/// pass that differentiates the activation also recomputes its output: both need the same exponential, which is computed once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputActivation {
    /// No activation.
    Identity,
    /// An elementwise function.
    Elementwise(Activation),
    /// `activation(gate) * up` for rows `gate | up` of twice the length.
    Gated(Activation),
}

impl InputActivation {
    /// Returns which halves of backward read the input of a layer. With an activation, the input half keeps the activated input for the
    /// weight half.
    pub(super) fn read_by(self) -> ReadBy {
        if self == InputActivation::Identity { ReadBy::WEIGHT_HALF } else { ReadBy::INPUT_HALF }
    }
}

/// Adds the gradient of input 0, given the gradient of the activated input. Keeps the activated input for the weight half.
pub(super) fn activation_grad(
    cx: &mut BackwardContext<'_>,
    activation: InputActivation,
    mut d_activated: Tensor,
) -> Result<()> {
    if activation == InputActivation::Identity {
        return cx.add_grad(0, d_activated);
    }
    let mut x = cx.take_or_copy_input(0)?;
    differentiate(cx.device(), activation, x.view_mut(), d_activated.view_mut());
    let [dx, activated] = grad_and_output(activation, x, d_activated);
    cx.add_grad(0, dx)?;
    cx.keep(activated);
    Ok(())
}

/// Computes the gradient of an activation's argument, and recomputes its output. Overwrites `x`, the argument, and `d_activated`, the
/// gradient of the output, with these two results. [`grad_and_output`] returns the gradient's buffer first.
pub(super) fn differentiate(
    device: &Device,
    activation: InputActivation,
    x: ViewMut<'_>,
    d_activated: ViewMut<'_>,
) {
    match activation {
        InputActivation::Identity => {}
        InputActivation::Elementwise(activation) => device.activate_backward(activation, x, d_activated),
        InputActivation::Gated(activation) => device.gate_backward(activation, x, d_activated),
    }
}

/// Orders the two buffers that [`differentiate`] has written: first the gradient of the activation's argument, then the activation's
/// output.
pub(super) fn grad_and_output<T>(activation: InputActivation, x: T, d_activated: T) -> [T; 2] {
    match activation {
        InputActivation::Gated(_) => [x, d_activated],
        InputActivation::Identity | InputActivation::Elementwise(_) => [d_activated, x],
    }
}

/// Returns the activated input; `None` if it is `x` itself.
pub(super) fn activate(device: &Device, activation: InputActivation, x: View<'_>) -> Result<Option<Tensor>> {
    Ok(match activation {
        InputActivation::Identity => None,
        InputActivation::Elementwise(activation) => {
            let mut y = device.activation_of(x.shape(), x.dtype())?;
            device.activate(activation, x, y.view_mut());
            Some(y)
        }
        InputActivation::Gated(activation) => {
            let mut y = device.activation_of(x.shape().with_cols(x.shape().cols() / 2), x.dtype())?;
            device.gate(activation, x, y.view_mut());
            Some(y)
        }
    })
}
