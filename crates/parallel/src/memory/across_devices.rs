//! Access to values of one device by kernels of another one.

use crate::error::ParallelError;
use trireme_tensor::{Category, CowTensor, Device, DeviceError, Tensor, View, ViewMut};

/// Returns `values` in memory that kernels of `to` can read: the values themselves if the devices share memory, else a copy. Fails if there
/// is no memory for the copy, or if a device has failed.
pub(crate) fn on_device<'a>(
    values: View<'a>,
    from: &Device,
    to: &Device,
    category: Category,
) -> Result<CowTensor<'a>, DeviceError> {
    if from.shares_address_space(to) {
        return Ok(CowTensor::Borrowed(values));
    }
    let mut copy = to.empty(values.shape(), values.dtype(), category)?;
    copy_across(values, from, copy.view_mut(), to)?;
    Ok(CowTensor::Owned(copy))
}

/// `y = x`, for devices that share no memory, through host memory.
fn copy_across(x: View<'_>, from: &Device, y: ViewMut<'_>, to: &Device) -> Result<(), DeviceError> {
    let bytes: Vec<u8> = from.read(x.as_bytes())?;
    to.upload(&bytes, y);
    Ok(())
}

/// Lets `work` change `values` by kernels of `to`: in place if the devices share memory, else in a copy that is copied back. Fails if there
/// is no memory for the copy, or if `work` or a device fails.
pub(crate) fn update_on_device<E: From<ParallelError>>(
    mut values: ViewMut<'_>,
    from: &Device,
    to: &Device,
    category: Category,
    work: impl FnOnce(ViewMut<'_>) -> Result<(), E>,
) -> Result<(), E> {
    if from.shares_address_space(to) {
        return work(values);
    }
    let refused = |error: DeviceError| E::from(error.into());
    let copy: Result<Tensor, DeviceError> = to.empty(values.shape(), values.dtype(), category);
    let mut copy = copy.map_err(refused)?;
    copy_across(values.as_view(), from, copy.view_mut(), to).map_err(refused)?;
    work(copy.view_mut())?;
    copy_across(copy.view(), to, values.reborrow(), from).map_err(refused)
}
