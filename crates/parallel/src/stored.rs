//! Elements that both groups and the device know.

use trireme_base::{Bf16, F16};
use trireme_comm::Element;
use trireme_tensor::{View, ViewMut};

/// What passes between groups and the device: floats in which parameters are gathered and gradients reduced, and messages of bytes.
pub(crate) trait Stored: Element {
    /// All values, in one dim.
    fn view(values: &[Self]) -> View<'_> {
        View::from_bytes(bytemuck::cast_slice(values), Self::DTYPE, [values.len()].into())
    }

    /// As [`view`](Stored::view), to write.
    fn view_mut(values: &mut [Self]) -> ViewMut<'_> {
        let shape = [values.len()].into();
        ViewMut::from_bytes(bytemuck::cast_slice_mut(values), Self::DTYPE, shape)
    }
}

impl Stored for u8 {}
impl Stored for f32 {}
impl Stored for f64 {}
impl Stored for Bf16 {}
impl Stored for F16 {}
