//! Borrowed or owned values.

use crate::device::{Device, Result};
use crate::precision::Precision;
use crate::tensor::Tensor;
use crate::view::View;
use trireme_base::{Category, DType};

/// Tensor values that are borrowed, or owned if a conversion or an exchange produced a new tensor.
#[derive(Debug)]
pub enum CowTensor<'a> {
    /// Borrowed values.
    Borrowed(View<'a>),
    /// A tensor of its own, such as a converted or gathered copy.
    Owned(Tensor),
}

impl<'a> CowTensor<'a> {
    /// Returns `stored` in f32. A copy, if one is needed, is counted as `category`.
    ///
    /// # Errors
    /// If the device has no memory for the copy.
    pub fn in_f32(device: &Device, stored: View<'a>, category: Category) -> Result<Self> {
        if stored.dtype() == DType::F32 {
            return Ok(CowTensor::Borrowed(stored));
        }
        let mut converted = device.empty(stored.shape(), DType::F32, category)?;
        device.convert(stored, converted.view_mut());
        Ok(CowTensor::Owned(converted))
    }

    /// Returns `stored` rounded to `precision`. Only f32 values at [`Precision::F32`] are borrowed; others are copied into an activation in
    /// f32.
    ///
    /// # Errors
    /// If the device has no memory for the copy.
    pub fn rounded(device: &Device, precision: Precision, stored: View<'a>) -> Result<Self> {
        if precision == Precision::F32 && stored.dtype() == DType::F32 {
            return Ok(CowTensor::Borrowed(stored));
        }
        let mut rounded = device.activation(stored.shape())?;
        device.round(precision, stored, rounded.view_mut());
        Ok(CowTensor::Owned(rounded))
    }

    /// Returns the values.
    pub fn view(&self) -> View<'_> {
        match self {
            CowTensor::Borrowed(view) => *view,
            CowTensor::Owned(tensor) => tensor.view(),
        }
    }
}
