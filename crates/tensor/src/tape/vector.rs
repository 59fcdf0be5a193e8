//! Vectors of parameters.

use crate::device::{Device, DeviceError};
use crate::precision::Precision;
use crate::tensor::{Tensor, View};
use trireme_base::DType;

/// A vector of parameters as operations compute with it: in f32, rounded to their precision.
#[derive(Debug)]
pub enum Vector<'a> {
    /// As it is stored.
    Stored(View<'a>),
    /// Rounded.
    Rounded(Tensor),
}

impl<'a> Vector<'a> {
    /// `stored`, rounded to `precision`.
    ///
    /// # Errors
    /// If there is no memory for the rounded values.
    pub fn new(device: &Device, precision: Precision, stored: View<'a>) -> Result<Self, DeviceError> {
        if precision == Precision::F32 && stored.dtype() == DType::F32 {
            return Ok(Vector::Stored(stored));
        }
        let mut rounded = device.activation(stored.shape())?;
        device.round(precision, stored, rounded.view_mut());
        Ok(Vector::Rounded(rounded))
    }

    /// The values, in f32.
    pub fn view(&self) -> View<'_> {
        match self {
            Vector::Stored(view) => *view,
            Vector::Rounded(tensor) => tensor.view(),
        }
    }
}
