//! Copies between host memory and device memory.

use super::{Device, DeviceError, Result};
use crate::kernels::OperandMut;
use crate::kernels::backend::{DeviceSide, copy_later};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::Block;
use crate::view::{View, ViewMut};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;
use trireme_base::{Bf16, Category, Cost, DType, HostMemory, Pending};

/// Host memory for asynchronous copies, counted in a [host device](Device::host)'s memory.
#[derive(Debug)]
pub struct PinnedMemory {
    /// The bytes of `_block`.
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
    /// Allocates host memory for copies, with unspecified contents.
    ///
    /// # Errors
    /// If there is not enough memory.
    ///
    /// # Panics
    /// If this device does not [reach the host's memory](Device::reaches_host). Call it on [`host`](Device::host).
    pub fn pinned_memory(&self, num_bytes: usize, category: Category) -> Result<PinnedMemory> {
        assert!(self.reaches_host, "pinned memory is allocated on the host of a device");
        let bytes = ([num_bytes].into(), DType::U8);
        let block = self.arena.allocate(bytes, category)?;
        let memory = OperandMut::new(block.operand(bytes));
        Ok(PinnedMemory { memory, cpu: Arc::clone(&self.cpu), _block: block })
    }

    /// Copies host values into device memory. `T` has the element type of `to`, or is `u8` for the bytes of any type. `values` may be
    /// overwritten once the call returns.
    ///
    /// # Panics
    /// If the sizes in bytes differ.
    pub fn upload<T: Pod>(&self, values: &[T], to: ViewMut<'_>) {
        let num_bytes = size_of_val(values);
        assert_eq!(num_bytes, to.num_bytes(), "{num_bytes} bytes for {:?}", to.shape());
        self.count("upload", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        self.backend.upload(bytemuck::cast_slice(values), to.into_operand());
    }

    /// Copies device memory to the host, after all kernels issued so far have run. `T` has the element type of `from`, or is `u8` for the
    /// bytes of any type. Blocks until done.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the device has failed.
    ///
    /// # Panics
    /// If the sizes in bytes differ.
    pub fn download<T: Pod>(&self, from: View<'_>, to: &mut [T]) -> Result<()> {
        let num_bytes = size_of_val(to);
        assert_eq!(num_bytes, from.num_bytes(), "{num_bytes} bytes of {:?}", from.shape());
        self.count("download", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        self.backend.download(from.operand(), bytemuck::cast_slice_mut(to)).map_err(DeviceError::Failed)
    }

    /// Copies device memory asynchronously into the host memory `to`, starting at byte `at`. The copy starts when all kernels issued so far
    /// have run and an earlier copy that uses `to` has completed. It runs concurrently with later kernels, except on backends that run
    /// kernels during the call.
    ///
    /// # Panics
    /// If the bytes do not fit.
    pub fn download_async<B: HostMemory>(&self, from: View<'_>, to: &mut Pending<B>, at: usize) {
        self.copy_later("download", DeviceSide::From(from.operand()), to, at);
    }

    /// Copies the bytes of the host memory `from`, starting at byte `at`, asynchronously to the device, after all kernels issued so far
    /// have run. Kernels that read `to` must [wait](Device::wait_for) until the copy has returned the host memory.
    ///
    /// # Panics
    /// If there are too few bytes.
    pub fn upload_async<B: HostMemory>(&self, from: &mut Pending<B>, at: usize, to: ViewMut<'_>) {
        self.copy_later("upload", DeviceSide::To(to.into_operand()), from, at);
    }

    /// Copies between device memory and the host memory, starting at byte `at` of the latter. Does not allocate on a CPU device.
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

    /// Calls `write` with zeros on the host and uploads the values that it writes.
    ///
    /// # Errors
    /// If `write` fails; nothing is uploaded then.
    ///
    /// # Panics
    /// If `T` and the elements of `to` differ in size.
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

    /// Like [`fill`](Device::fill), with f32s that are rounded to nearest even in the dtype of `to`, which is f32 or bf16.
    ///
    /// # Errors
    /// If `write` fails; nothing is uploaded then.
    ///
    /// # Panics
    /// If `to` has another dtype.
    pub fn fill_f32s<E>(
        &self,
        to: ViewMut<'_>,
        write: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        if to.dtype() == DType::F32 {
            return self.fill(to, write);
        }
        assert_eq!(to.dtype(), DType::Bf16, "the tensor is f32 or bf16");
        let mut values = vec![0.0; to.shape().num_elements()];
        write(&mut values)?;
        self.upload(&values.into_iter().map(Bf16::from_f32).collect::<Vec<_>>(), to);
        Ok(())
    }

    /// Copies the elements of `from`, in f32 or bf16, to the host as f32s.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the device has failed.
    ///
    /// # Panics
    /// If `from` has another dtype.
    pub fn read_f32s(&self, from: View<'_>) -> Result<Vec<f32>> {
        let mut values = vec![0.0; from.shape().num_elements()];
        self.download_f32s(from, &mut values)?;
        Ok(values)
    }

    /// Like [`download`](Device::download), widened to f32 if the elements are bf16.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the device has failed.
    ///
    /// # Panics
    /// If `from` has another dtype, or another number of elements than `to`.
    pub fn download_f32s(&self, from: View<'_>, to: &mut [f32]) -> Result<()> {
        if from.dtype() == DType::F32 {
            return self.download(from, to);
        }
        assert_eq!((from.dtype(), from.shape().num_elements()), (DType::Bf16, to.len()), "f32 or bf16");
        to.iter_mut().zip(self.read::<Bf16>(from)?).for_each(|(to, value)| *to = value.to_f32());
        Ok(())
    }

    /// Copies the elements of `from` to the host. Returns zeros on a counting device.
    ///
    /// # Errors
    /// [`DeviceError::Failed`] if the device has failed.
    ///
    /// # Panics
    /// If `T` and the elements of `from` differ in size.
    pub fn read<T: Pod + Zeroable>(&self, from: View<'_>) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); from.shape().num_elements()];
        self.download(from, &mut values)?;
        Ok(values)
    }
}
