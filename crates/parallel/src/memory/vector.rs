//! Vectors that kernels access and ranks exchange.

use crate::error::Result;
use crate::memory::WaitTracker;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{DType, DeviceMemory, HostMemory, Pending};
use trireme_comm::{Buffer, Element, FusedWork, Group, PageSize, Untyped};
use trireme_tensor::{Category, Device, DeviceError, Tensor, View, ViewMut};

/// A vector that kernels access and ranks exchange.
///
/// If kernels can access host memory and the group has other ranks, the vector is stored in memory of the group, and nothing is copied.
/// Otherwise it is stored on the device. If the devices of the group communicate, exchanges are in place. If not, they pass through memory
/// of the group; the copies to and from it overlap with kernels.
pub(crate) struct ExchangeVector {
    /// The group's memory. Empty if the vector is on the device and is never exchanged. If it is exchanged in place, the handle of the last
    /// exchange, which may not be done.
    pub(super) buffer: Pending<Buffer<Untyped>>,
    /// The device's memory; `None` if kernels work in the group's memory.
    pub(super) device_tensor: Option<Tensor>,
}

/// The device side of a vector during an exchange: its memory on the device, and the elements that are copied back to it.
pub(crate) struct DevicePart {
    pub(super) device_tensor: Option<Tensor>,
    pub(super) arriving: Range<usize>,
    /// The memory of the tensor in this exchange, if it is in place.
    pub(super) exchanged: Option<Arc<dyn DeviceMemory>>,
}

pub(crate) struct PendingVector {
    work: FusedWork,
    dtype: DType,
    /// Length of the group's memory in elements.
    len: usize,
    part: DevicePart,
}

/// Returns a tensor's memory for an exchange after the kernels that have been issued, if it is [for
/// exchanges](Tensor::exchange_memory).
pub(crate) fn exchanged_in_place(tensor: &Tensor, device: &Device) -> Option<Buffer<Untyped>> {
    let (dtype, len) = (tensor.dtype(), tensor.shape().num_elements());
    Some(Buffer::on_device(tensor.exchange_memory()?, dtype, len).after(device.record_event()))
}

impl ExchangeVector {
    /// Allocates a vector that the host reads after each exchange.
    pub(crate) fn new_for_host(group: &Group, device: &Device, dtype: DType, len: usize) -> Result<Self> {
        let needs_device_memory = !device.reaches_host();
        let device_tensor = needs_device_memory
            .then(|| device.zeros([len].into(), dtype, Category::Communication))
            .transpose()?;
        Ok(ExchangeVector {
            buffer: Pending::new(group.buffer_of(dtype, len, PageSize::Base)?),
            device_tensor,
        })
    }

    pub(crate) fn len(&self) -> usize {
        match &self.device_tensor {
            Some(own) => own.shape().num_elements(),
            None => self.group_buffer().len(),
        }
    }

    fn group_buffer(&self) -> &Buffer<Untyped> {
        self.buffer.get().expect("no copies work with memory that kernels reach")
    }

    pub(crate) fn view(&self) -> View<'_> {
        match &self.device_tensor {
            Some(own) => own.view(),
            None => {
                let buffer = self.group_buffer();
                View::from_bytes(buffer.bytes(), buffer.dtype(), [buffer.len()].into())
            }
        }
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        match &mut self.device_tensor {
            Some(own) => own.view_mut(),
            None => {
                let buffer = self.buffer.get_mut().expect("no copies work with memory that kernels reach");
                let (dtype, shape) = (buffer.dtype(), [buffer.len()].into());
                ViewMut::from_bytes(buffer.bytes_mut(), dtype, shape)
            }
        }
    }

    pub(crate) fn part(&self, range: Range<usize>) -> View<'_> {
        self.view().part(range.start, [range.len()].into())
    }

    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        self.view_mut().into_part(range.start, [range.len()].into())
    }

    /// Prepares the vector for an exchange. The group gets the elements `leaving`, after the kernels that have been issued; the elements
    /// `arriving` are copied back to the device afterwards.
    pub(crate) fn begin_exchange(
        self,
        device: &Device,
        leaving: Range<usize>,
        arriving: Range<usize>,
    ) -> (Buffer<Untyped>, DevicePart) {
        let ExchangeVector { mut buffer, device_tensor } = self;
        let Some(own) = device_tensor else {
            return (buffer.wait(), DevicePart { device_tensor: None, arriving, exchanged: None });
        };
        if let Some(exchanged) = exchanged_in_place(&own, device) {
            let memory = exchanged.device_memory();
            return (exchanged, DevicePart { device_tensor: Some(own), arriving: 0..0, exchanged: memory });
        }
        let has_buffer = buffer.get().is_none_or(|buffer| !buffer.is_empty());
        let (len, arriving) = if has_buffer { (own.shape().num_elements(), arriving) } else { (0, 0..0) };
        if has_buffer && !leaving.is_empty() {
            let part = own.view().part(leaving.start, [leaving.len()].into());
            device.download_async(part, &mut buffer, leaving.start * own.dtype().size());
        }
        let dtype = own.dtype();
        let part = DevicePart { device_tensor: Some(own), arriving, exchanged: None };
        (Buffer::pending(buffer, dtype, len), part)
    }

    /// Takes the vector back after an exchange. Kernels issued later read the received elements.
    #[track_caller]
    pub(crate) fn end_exchange(
        mut buffer: Pending<Buffer<Untyped>>,
        part: DevicePart,
        device: &Device,
    ) -> Self {
        let DevicePart { mut device_tensor, arriving, exchanged } = part;
        if let Some(memory) = exchanged {
            device.wait_for_exchange(&*memory, &buffer.event());
            return ExchangeVector { buffer, device_tensor };
        }
        if let Some(own) = device_tensor.as_mut().filter(|_| !arriving.is_empty()) {
            let first = arriving.start * own.dtype().size();
            let part = own.view_mut().into_part(arriving.start, [arriving.len()].into());
            device.upload_async(&mut buffer, first, part);
            device.wait_for(&buffer.event());
        }
        ExchangeVector { buffer, device_tensor }
    }

    /// Starts an exchange of the vector with `start`, for example an all-reduce; see [`begin_exchange`](ExchangeVector::begin_exchange).
    pub(crate) fn exchange<W: Into<FusedWork>>(
        self,
        device: &Device,
        leaving: Range<usize>,
        arriving: Range<usize>,
        start: impl FnOnce(Buffer<Untyped>) -> W,
    ) -> PendingVector {
        let (buffer, part) = self.begin_exchange(device, leaving, arriving);
        let (dtype, len) = (buffer.dtype(), buffer.len());
        PendingVector { work: start(buffer).into(), dtype, len, part }
    }

    /// Copies the elements to the host, after the kernels that have been issued.
    pub(crate) fn download<T: Element>(&mut self, device: &Device) -> Result<&mut [T]> {
        // `wait_mut` would panic.
        self.buffer.event().outcome().map_err(DeviceError::Failed)?;
        let buffer = self.buffer.wait_mut().elements_mut();
        if let Some(own) = &self.device_tensor {
            device.download(own.view(), buffer)?;
        }
        Ok(buffer)
    }

    /// Returns the host's copy of the elements, as an earlier [`download`](ExchangeVector::download) or [exchange for the
    /// host](PendingVector::take_to_host) has left it.
    ///
    /// # Panics
    /// If the device has failed.
    pub(crate) fn host_elements<T: Element>(&mut self) -> &mut [T] {
        self.buffer.wait_mut().elements_mut()
    }

    /// Copies the [host's elements](ExchangeVector::host_elements) to the device.
    pub(crate) fn upload<T: Element>(&mut self, device: &Device) {
        if let Some(own) = &mut self.device_tensor {
            device.upload(self.buffer.wait_mut().elements::<T>(), own.view_mut());
        }
    }
}

impl PendingVector {
    /// Waits for the exchange of a vector that another group reads next. Nothing is copied to the device.
    pub(crate) fn wait_on_host(self, waiting: &mut WaitTracker) -> Result<(Buffer<Untyped>, DevicePart)> {
        let mut buffer = waiting.wait_fused(self.work)?;
        buffer.wait()?;
        Ok((buffer, DevicePart { arriving: 0..0, ..self.part }))
    }

    /// Returns the vector for kernels. Waits for the exchange as [`WaitTracker::wait_on_device`] does.
    #[track_caller]
    pub(crate) fn wait(self, device: &Device, waiting: &mut WaitTracker) -> Result<ExchangeVector> {
        let PendingVector { work, dtype, len, part } = self;
        Ok(ExchangeVector::end_exchange(waiting.wait_on_device(work, dtype, len, device)?, part, device))
    }

    /// Waits for the exchange of a vector for the [host](ExchangeVector::new_for_host), and takes it back without a copy to the device.
    pub(crate) fn take_to_host(self, waiting: &mut WaitTracker) -> Result<ExchangeVector> {
        let (buffer, part) = self.wait_on_host(waiting)?;
        Ok(ExchangeVector { buffer: Pending::new(buffer), device_tensor: part.device_tensor })
    }
}
