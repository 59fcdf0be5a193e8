//! Floats that both groups and the device know.

use trireme_base::{Bf16, F16};
use trireme_comm::Element;
use trireme_tensor::{Shape, View, ViewMut};

/// A float in which parameters are gathered and gradients reduced.
pub(crate) trait Stored: Element {
    fn view(values: &[Self], shape: Shape) -> View<'_>;
    fn view_mut(values: &mut [Self], shape: Shape) -> ViewMut<'_>;
}

impl Stored for f32 {
    fn view(values: &[Self], shape: Shape) -> View<'_> {
        View::from_f32s(values, shape)
    }

    fn view_mut(values: &mut [Self], shape: Shape) -> ViewMut<'_> {
        ViewMut::from_f32s(values, shape)
    }
}

impl Stored for Bf16 {
    fn view(values: &[Self], shape: Shape) -> View<'_> {
        View::from_bf16s(values, shape)
    }

    fn view_mut(values: &mut [Self], shape: Shape) -> ViewMut<'_> {
        ViewMut::from_bf16s(values, shape)
    }
}

impl Stored for F16 {
    fn view(values: &[Self], shape: Shape) -> View<'_> {
        View::from_f16s(values, shape)
    }

    fn view_mut(values: &mut [Self], shape: Shape) -> ViewMut<'_> {
        ViewMut::from_f16s(values, shape)
    }
}
