use crate::error::Result;
use std::sync::atomic::{AtomicUsize, Ordering};
use trireme_comm::Group;
use trireme_tensor::{Category, Device};

/// Counts memory of groups as [staging](Device::staging) memory of a device. Dropping it subtracts everything that is still counted.
pub(crate) struct CountedMemory {
    device: Device,
    bytes: [AtomicUsize; Category::ALL.len()],
    /// Bytes of memory of peers that this rank maps, counted as communication.
    mapped: AtomicUsize,
}

impl CountedMemory {
    pub(crate) fn new(device: &Device) -> Self {
        let bytes = std::array::from_fn(|_| AtomicUsize::new(0));
        CountedMemory { device: device.clone(), bytes, mapped: AtomicUsize::new(0) }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Counts a buffer of `group` that is about to be allocated, and the buffers of peers that this rank maps for it.
    pub(crate) fn charge_buffer(&self, group: &Group, num_bytes: usize) -> Result<()> {
        self.charge(Category::Communication, num_bytes)?;
        self.charge_mapped(group.peer_bytes_mapped(num_bytes))
    }

    pub(crate) fn charge(&self, category: Category, num_bytes: usize) -> Result<()> {
        self.device.staging().charge_outside_arena(category, num_bytes)?;
        self.bytes[category as usize].fetch_add(num_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Counts memory of peers that is about to be mapped.
    pub(crate) fn charge_mapped(&self, num_bytes: usize) -> Result<()> {
        self.device.staging().charge_mapped(Category::Communication, num_bytes)?;
        self.mapped.fetch_add(num_bytes, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn uncharge_mapped(&self, num_bytes: usize) {
        self.mapped.fetch_sub(num_bytes, Ordering::Relaxed);
        self.device.staging().uncharge_mapped(Category::Communication, num_bytes);
    }

    pub(crate) fn uncharge(&self, category: Category, num_bytes: usize) {
        self.bytes[category as usize].fetch_sub(num_bytes, Ordering::Relaxed);
        self.device.staging().uncharge_outside_arena(category, num_bytes);
    }
}

impl Drop for CountedMemory {
    fn drop(&mut self) {
        for (category, bytes) in Category::ALL.into_iter().zip(&mut self.bytes) {
            self.device.staging().uncharge_outside_arena(category, *bytes.get_mut());
        }
        self.device.staging().uncharge_mapped(Category::Communication, *self.mapped.get_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_tensor::DeviceOptions;

    #[test]
    fn dropping_subtracts_counted_memory() {
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let counted = CountedMemory::new(&device);
        counted.charge(Category::Gradients, 30).unwrap();
        counted.charge(Category::Communication, 5).unwrap();
        counted.uncharge(Category::Gradients, 10);
        assert_eq!(device.memory().total().current, 25);
        drop(counted);
        assert_eq!((device.memory().total().current, device.memory().total().peak), (0, 35));
        assert_eq!(device.memory().usage(Category::Gradients).current, 0);
    }
}
