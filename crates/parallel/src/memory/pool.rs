use crate::error::Result;
use crate::memory::{CountedMemory, DevicePart, ExchangeVector};
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{DType, Pending};
use trireme_comm::{Buffer, Group, PageSize, Untyped};
use trireme_tensor::{Category, Device, Tensor, View, ViewMut};

/// A pool of vectors that kernels access and a group exchanges. Memory is reused, so that steps do not allocate.
pub(crate) struct Pool {
    group: Arc<Group>,
    dtype: DType,
    category: Category,
    /// Whether peers access the buffers directly, so that memory of peers is mapped and counted.
    peers_map_buffers: bool,
    page_size: PageSize,
    memory: PoolMemory,
    shared: Arc<Shared>,
}

/// Where the vectors of a pool are exchanged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PoolMemory {
    /// Nowhere.
    None,
    /// In memory of the group.
    Group,
    /// In memory of the device.
    Device,
}

/// The state that clones of a pool share. Memory of the pool stays counted until the last clone is dropped.
struct Shared {
    free: Mutex<Vec<(usize, Pending<Buffer<Untyped>>)>>,
    counted: CountedMemory,
}

impl Clone for Pool {
    fn clone(&self) -> Self {
        Pool { group: Arc::clone(&self.group), shared: Arc::clone(&self.shared), ..*self }
    }
}

impl Pool {
    /// Creates an empty pool. Its buffers are counted as `category`. If peers access them directly (`is_exchanged`), the buffers of peers
    /// that this rank maps are counted as communication.
    pub(crate) fn new(
        group: &Arc<Group>,
        device: &Device,
        dtype: DType,
        category: Category,
        is_exchanged: bool,
    ) -> Self {
        let memory = match group.world_size() {
            // A group of one rank exchanges nothing, so its vectors need no group memory.
            1 => PoolMemory::None,
            _ if group.has_device_transport() && !device.reaches_host() => PoolMemory::Device,
            _ => PoolMemory::Group,
        };
        if memory == PoolMemory::Device && is_exchanged {
            group.need_devices();
        }
        Pool { memory, ..Self::in_group_memory(group, device, dtype, category, is_exchanged) }
    }

    /// Creates a pool like [`new`](Pool::new). Its vectors are exchanged in memory of the group even if the group has one rank or a device
    /// transport, because the host or another group accesses them.
    pub(crate) fn in_group_memory(
        group: &Arc<Group>,
        device: &Device,
        dtype: DType,
        category: Category,
        is_exchanged: bool,
    ) -> Self {
        Pool {
            group: Arc::clone(group),
            dtype,
            category,
            peers_map_buffers: is_exchanged,
            page_size: PageSize::Base,
            memory: PoolMemory::Group,
            shared: Arc::new(Shared { free: Mutex::default(), counted: CountedMemory::new(device) }),
        }
    }

    /// Uses huge pages, for vectors that are exchanged many times per step.
    pub(crate) fn in_huge_pages(self) -> Self {
        Pool { page_size: PageSize::Huge, ..self }
    }

    pub(crate) fn is_clone_of(&self, other: &Pool) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn group(&self) -> &Arc<Group> {
        &self.group
    }

    pub(crate) fn device(&self) -> &Device {
        self.shared.counted.device()
    }

    /// Returns a vector of `len` elements with unspecified contents.
    pub(crate) fn take(&self, len: usize) -> Result<ExchangeVector> {
        let device_tensor = self.take_device_tensor(len)?;
        Ok(ExchangeVector { buffer: self.take_buffer(self.buffer_len(len))?, device_tensor })
    }

    /// Allocates device memory for `len` elements. Returns `None` if kernels work in the group's memory instead.
    fn take_device_tensor(&self, len: usize) -> Result<Option<Tensor>> {
        let (device, shape) = (self.device(), [len].into());
        match self.memory {
            PoolMemory::Group if device.reaches_host() => Ok(None),
            PoolMemory::Group | PoolMemory::None => {
                Ok(Some(device.empty(shape, self.dtype, self.category)?))
            }
            PoolMemory::Device => Ok(Some(device.exchange_tensor(shape, self.dtype, self.category)?)),
        }
    }

    /// Returns the number of elements of group memory for a vector of `len` elements.
    fn buffer_len(&self, len: usize) -> usize {
        if self.memory == PoolMemory::Group { len } else { 0 }
    }

    /// Returns memory that the group exchanges, for `len` elements with unspecified contents.
    pub(crate) fn take_buffer(&self, len: usize) -> Result<Pending<Buffer<Untyped>>> {
        if self.is_on_device() && len > 0 {
            let tensor = self.device().exchange_tensor([len].into(), self.dtype, self.category)?;
            let memory = tensor.exchange_memory().expect("it is for exchanges");
            return Ok(Pending::new(Buffer::on_device(memory, self.dtype, len)));
        }
        let mut free = self.shared.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = free.iter().position(|(other, _)| *other == len) {
            return Ok(free.swap_remove(index).1);
        }
        let (own, mapped) = self.num_bytes(len);
        self.shared.counted.charge(self.category, own)?;
        self.shared.counted.charge_mapped(mapped)?;
        // The group would allocate a page even for an empty buffer.
        Ok(Pending::new(match len {
            0 => Buffer::private_of(self.dtype, 0)?,
            _ => self.group.buffer_of(self.dtype, len, self.page_size)?,
        }))
    }

    /// Makes a vector of `len` elements from a received buffer of this pool, and copies the elements to the device if needed.
    #[track_caller]
    pub(crate) fn wrap_received(
        &self,
        mut buffer: Pending<Buffer<Untyped>>,
        len: usize,
    ) -> Result<ExchangeVector> {
        if let Some(tensor) = self.on_device(&mut buffer, self.dtype) {
            return Ok(ExchangeVector { buffer: self.take_buffer(0)?, device_tensor: Some(tensor) });
        }
        let device_tensor = self.take_device_tensor(len)?;
        let part = DevicePart { device_tensor, arriving: 0..len, exchanged: None };
        Ok(ExchangeVector::end_exchange(buffer, part, self.device()))
    }

    /// Whether vectors are exchanged in memory of the device.
    pub(crate) fn is_on_device(&self) -> bool {
        self.memory == PoolMemory::Device
    }

    /// Returns the elements of a buffer as a tensor, if they are in memory of the device. Blocks until the group does not use it. After a
    /// failed operation, the buffer is zeroed host memory.
    pub(crate) fn on_device(&self, buffer: &mut Pending<Buffer<Untyped>>, dtype: DType) -> Option<Tensor> {
        // `wait_mut` would panic.
        if !self.is_on_device() || buffer.event().outcome().is_err() {
            return None;
        }
        let memory = buffer.wait_mut().device_memory()?;
        let len = memory.num_bytes() / dtype.size();
        Some(Tensor::from_exchange_memory(memory, [len].into(), dtype))
    }

    /// Copies `values` into a buffer, from byte `at` on, after the kernels that have been issued.
    pub(crate) fn copy_in(
        &self,
        device: &Device,
        values: View<'_>,
        buffer: &mut Pending<Buffer<Untyped>>,
        at: usize,
    ) {
        match self.on_device(buffer, DType::U8) {
            Some(mut bytes) => {
                let values = values.as_bytes();
                device.copy(values, bytes.view_mut().into_part(at, values.shape()));
            }
            None => device.download_async(values, buffer, at),
        }
    }

    /// Copies elements from byte `at` of an exchanged buffer on to `result`. Kernels that read it must wait for the buffer's event.
    pub(crate) fn copy_out(
        &self,
        device: &Device,
        buffer: &mut Pending<Buffer<Untyped>>,
        at: usize,
        result: ViewMut<'_>,
    ) {
        match self.on_device(buffer, DType::U8) {
            Some(bytes) => {
                let result = result.into_bytes();
                device.copy(bytes.view().part(at, result.shape()), result);
            }
            None => device.upload_async(buffer, at, result),
        }
    }

    /// Passes a buffer of `len` elements to the group, which accesses it after the kernels and copies that have been issued.
    pub(crate) fn pass_on(
        &self,
        device: &Device,
        mut buffer: Pending<Buffer<Untyped>>,
        len: usize,
    ) -> Buffer<Untyped> {
        match self.on_device(&mut buffer, self.dtype) {
            Some(_) => buffer.wait().after(device.record_event()),
            None => Buffer::pending(buffer, self.dtype, len),
        }
    }

    /// Returns a buffer of `len` elements for the group to exchange. `values` are copied into it from element `at` on, after the kernels
    /// that have been issued.
    pub(crate) fn copy_to_buffer(
        &self,
        device: &Device,
        values: View<'_>,
        at: usize,
        len: usize,
    ) -> Result<Buffer<Untyped>> {
        let mut buffer = self.take_buffer(len)?;
        self.copy_in(device, values, &mut buffer, at * self.dtype.size());
        Ok(self.pass_on(device, buffer, len))
    }

    /// Copies the exchanged elements that start at element `at` of a buffer of `len` elements to `result`, for kernels issued later.
    /// Returns the buffer to the pool.
    #[track_caller]
    pub(crate) fn copy_from_buffer(
        &self,
        device: &Device,
        mut buffer: Pending<Buffer<Untyped>>,
        len: usize,
        at: usize,
        result: ViewMut<'_>,
    ) {
        self.copy_out(device, &mut buffer, at * self.dtype.size(), result);
        device.wait_for(&buffer.event());
        self.release_buffer(len, buffer);
    }

    /// Returns the bytes of a buffer, and the bytes of peers' buffers that are mapped for it.
    fn num_bytes(&self, len: usize) -> (usize, usize) {
        let own = len * self.dtype.size();
        (own, if self.peers_map_buffers { self.group.peer_bytes_mapped_in(own, self.page_size) } else { 0 })
    }

    pub(crate) fn release(&self, vector: ExchangeVector) {
        let len = self.buffer_len(vector.len());
        self.release_buffer(len, vector.buffer);
    }

    pub(crate) fn release_buffer(&self, len: usize, buffer: Pending<Buffer<Untyped>>) {
        if self.memory == PoolMemory::Device {
            drop_exchanged(buffer);
            return;
        }
        self.shared.free.lock().unwrap_or_else(PoisonError::into_inner).push((len, buffer));
    }

    /// Frees the memory of a vector instead of reusing it.
    pub(crate) fn discard(&self, vector: ExchangeVector) {
        let (own, mapped) = self.num_bytes(self.buffer_len(vector.len()));
        drop_exchanged(vector.buffer);
        drop(vector.device_tensor);
        self.shared.counted.uncharge(self.category, own);
        self.shared.counted.uncharge_mapped(mapped);
    }
}

/// Frees a buffer, which the group holds until its exchange is done. A failure is returned where the outcomes of operations are awaited.
fn drop_exchanged(buffer: Pending<Buffer<Untyped>>) {
    let _ = buffer.event().outcome();
    // Taken, because the thread of the group may hold on to the place of the buffer.
    drop(buffer.try_take());
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;
    use trireme_testkit::run_ranks;

    /// Returns the bytes of a vector of 1000 f32 on the device, and in memory of the group.
    fn bytes(group: Group, page_size: PageSize) -> [usize; 2] {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let pool = Pool::new(&Arc::new(group), &device, DType::F32, Category::Gradients, true);
        let pool = if page_size == PageSize::Huge { pool.in_huge_pages() } else { pool };
        let vector = pool.take(1000).unwrap();
        let buffer_len = vector.buffer.wait().len();
        [device.memory().usage(Category::Gradients).peak, buffer_len * size_of::<f32>()]
    }

    #[test]
    fn vectors_of_a_single_rank_have_no_group_memory() {
        assert_eq!(bytes(trireme_comm::single(), PageSize::Base), [4032, 0]);
        for page_size in [PageSize::Base, PageSize::Huge] {
            let found = run_ranks(2, |group| bytes(group, page_size));
            assert!(found.iter().all(|[_, of_group]| *of_group == 4000), "{found:?}");
        }
    }
}
