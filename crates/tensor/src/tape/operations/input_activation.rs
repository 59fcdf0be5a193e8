use crate::device::{Device, Result};
use crate::kernels::Activation;
use crate::tape::{BackwardContext, ReadBy};
use crate::tensor::{Tensor, View, ViewMut};

/// What is applied to a linear layer's input first.
///
/// The activation belongs to the layer that reads it, not to the one that makes its argument: then only the argument is
/// saved, and backward gets the activation again in the pass that differentiates it, for one exponential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InputActivation {
    /// Nothing.
    Identity,
    /// A function.
    Of(Activation),
    /// `activation(gate) * up` of rows `gate | up`, twice as long.
    Gated(Activation),
}

impl InputActivation {
    /// Which halves of backward read the input of a layer: what an activation makes of it is kept for the weight half.
    pub(super) fn read_by(self) -> ReadBy {
        if self == InputActivation::Identity { ReadBy::WEIGHT_HALF } else { ReadBy::INPUT_HALF }
    }
}

/// Gives input 0 its gradient, from that of what the activation makes of it. Keeps what the activation makes, for the weight half.
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

/// Computes the gradient of an activation's argument and its output, in the memory of the argument and of the output's gradient: [which is where](grad_and_output) depends on the activation.
pub(super) fn differentiate(
    device: &Device,
    activation: InputActivation,
    x: ViewMut<'_>,
    d_activated: ViewMut<'_>,
) {
    match activation {
        InputActivation::Identity => {}
        InputActivation::Of(activation) => device.activate_backward(activation, x, d_activated),
        InputActivation::Gated(activation) => device.gate_backward(activation, x, d_activated),
    }
}

/// The gradient of an activation's argument, and its output, of the two memories in which [`differentiate`] leaves them.
pub(super) fn grad_and_output<T>(activation: InputActivation, x: T, d_activated: T) -> [T; 2] {
    match activation {
        InputActivation::Gated(_) => [x, d_activated],
        InputActivation::Identity | InputActivation::Of(_) => [d_activated, x],
    }
}

/// What a layer's products read for `x`; `None` for `x` itself.
pub(super) fn activate(device: &Device, activation: InputActivation, x: View<'_>) -> Result<Option<Tensor>> {
    Ok(match activation {
        InputActivation::Identity => None,
        InputActivation::Of(activation) => {
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
