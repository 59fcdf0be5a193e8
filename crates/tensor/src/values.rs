//! Values as their readers need them.

use crate::device::{Device, Result};
use crate::precision::Precision;
use crate::tensor::{Tensor, View};
use trireme_base::{Category, DType};

/// Values as they are stored, or converted for a reader that needs another type, which fails if there is no memory for it.
#[derive(Debug)]
pub enum Values<'a> {
    /// As they are.
    Stored(View<'a>),
    /// Converted.
    Converted(Tensor),
}

impl<'a> Values<'a> {
    /// `stored` in f32. Memory for it counts as `category`.
    pub fn in_f32(device: &Device, stored: View<'a>, category: Category) -> Result<Self> {
        if stored.dtype() == DType::F32 {
            return Ok(Values::Stored(stored));
        }
        let mut converted = device.empty(stored.shape(), DType::F32, category)?;
        device.convert(stored, converted.view_mut());
        Ok(Values::Converted(converted))
    }

    /// `stored`, in f32, rounded to `precision`.
    pub fn rounded(device: &Device, precision: Precision, stored: View<'a>) -> Result<Self> {
        if precision == Precision::F32 && stored.dtype() == DType::F32 {
            return Ok(Values::Stored(stored));
        }
        let mut rounded = device.activation(stored.shape())?;
        device.round(precision, stored, rounded.view_mut());
        Ok(Values::Converted(rounded))
    }

    /// The values.
    pub fn view(&self) -> View<'_> {
        match self {
            Values::Stored(view) => *view,
            Values::Converted(tensor) => tensor.view(),
        }
    }
}
