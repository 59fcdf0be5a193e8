//! What passes between the host and the memory of a device.

use super::{Device, Result};
use crate::kernels::OperandMut;
use crate::kernels::backend::{DeviceSide, copy_later};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::Block;
use crate::tensor::{View, ViewMut};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;
use trireme_base::{Category, Cost, DType, HostMemory, Pending};

/// Memory of the host that copies of devices work with, counted as what it is for.
#[derive(Debug)]
pub struct PinnedMemory {
    /// All of the block.
    memory: OperandMut,
    cpu: Arc<Cpu>,
    _block: Block,
}

impl HostMemory for PinnedMemory {
    fn bytes(&self) -> &[u8] {
        self.memory.as_operand().bytes(&self.cpu)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.bytes(&self.cpu)
    }
}

impl Device {
    /// Memory of the host beside a device, for copies, with unspecified contents.
    ///
    /// # Errors
    /// If there is none.
    ///
    /// # Panics
    /// If this is no host.
    pub fn pinned_memory(&self, num_bytes: usize, category: Category) -> Result<PinnedMemory> {
        assert!(self.reaches_host, "pinned memory is taken from the host beside a device");
        let block = self.arena.take(num_bytes, category)?;
        let memory = OperandMut::new(block.operand(([num_bytes].into(), DType::U8)));
        Ok(PinnedMemory { memory, cpu: Arc::clone(&self.cpu), _block: block })
    }

    /// Copies values of the host into memory of the device: those of the element type, or the bytes of any. The values may be
    /// overwritten once the call returns.
    ///
    /// # Panics
    /// If they have not as many bytes.
    pub fn upload<T: Pod>(&self, values: &[T], to: ViewMut<'_>) {
        let num_bytes = size_of_val(values);
        assert_eq!(num_bytes, to.num_bytes(), "{num_bytes} bytes for {:?}", to.shape());
        self.count("upload", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        self.backend.upload(bytemuck::cast_slice(values), to.into_operand());
    }

    /// Copies memory of the device into `to`, memory of the host, once what was issued has run: elements, or the bytes of any type.
    ///
    /// # Panics
    /// If it has not as many bytes.
    pub fn download<T: Pod>(&self, from: View<'_>, to: &mut [T]) {
        let num_bytes = size_of_val(to);
        assert_eq!(num_bytes, from.num_bytes(), "{num_bytes} bytes of {:?}", from.shape());
        self.count("download", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        self.backend.download(from.operand(), bytemuck::cast_slice_mut(to));
    }

    /// Copies memory of the device to that of the host from byte `at` on, beside what kernels do from now on: on a device of its own,
    /// when the kernels that were issued so far have run, and the memory has come back from an earlier copy.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn download_later<B: HostMemory>(&self, from: View<'_>, to: &mut Pending<B>, at: usize) {
        self.copy_later("download", DeviceSide::From(from.operand()), to, at);
    }

    /// Copies memory of the host from byte `at` on to that of the device, beside what kernels do from now on, when the kernels that were
    /// issued so far have run. Kernels that read it [wait](Device::wait_for) until the host's memory is back.
    ///
    /// # Panics
    /// If there are not as many bytes.
    pub fn upload_later<B: HostMemory>(&self, from: &mut Pending<B>, at: usize, to: ViewMut<'_>) {
        self.copy_later("upload", DeviceSide::To(to.into_operand()), from, at);
    }

    /// Copies between memory of the device and the memory of the host from byte `at` on. On the CPU it allocates nothing.
    fn copy_later<B: HostMemory>(
        &self,
        name: &'static str,
        mut device: DeviceSide,
        host: &mut Pending<B>,
        at: usize,
    ) {
        let num_bytes = device.num_bytes();
        self.count(name, Cost::ZERO.reads(num_bytes).writes(num_bytes));
        let range = at..at + num_bytes;
        match self.backend.as_cpu() {
            Some(cpu) => device.copy(cpu, &mut host.wait_mut().bytes_mut()[range]),
            None => copy_later(&*self.backend, device, host, range),
        }
    }

    /// Lets `write` make values of zeros on the host, and uploads them.
    ///
    /// # Errors
    /// Those of `write`; nothing is uploaded then.
    ///
    /// # Panics
    /// If the elements of `to` are of another size.
    pub fn fill<T: Pod + Zeroable, E>(
        &self,
        to: ViewMut<'_>,
        write: impl FnOnce(&mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut values = vec![T::zeroed(); to.shape().num_elements()];
        write(&mut values)?;
        self.upload(&values, to);
        Ok(())
    }

    /// The elements of `from` in memory of the host; zeros if the device only counts.
    ///
    /// # Panics
    /// If the elements are of another size.
    pub fn read<T: Pod + Zeroable>(&self, from: View<'_>) -> Vec<T> {
        let mut values = vec![T::zeroed(); from.shape().num_elements()];
        self.download(from, &mut values);
        values
    }
}
