//! What passes between the host and the memory of a device.

use super::detached::Stream;
use super::{Device, DeviceError};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::Block;
use crate::kernels::{Operand, OperandMut};
use crate::tensor::{View, ViewMut};
use bytemuck::{Pod, Zeroable};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{Category, Cost, DType, Event, HostMemory, Pending};

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
    pub fn pinned_memory(&self, num_bytes: usize, category: Category) -> Result<PinnedMemory, DeviceError> {
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
        let (cost, mut to) = (Cost::ZERO.reads(num_bytes).writes(num_bytes), to.into_operand());
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.count("upload", cost);
        if let Some(detached) = &self.detached {
            let bytes = bytes.to_vec();
            detached.queue().copy(Stream::Compute, move |cpu| to.bytes(cpu).copy_from_slice(&bytes));
        } else if !self.is_counting() {
            to.bytes(&self.cpu).copy_from_slice(bytes);
        }
    }

    /// Copies memory of the device into `to`, memory of the host, once what was issued has run: elements, or the bytes of any type.
    ///
    /// # Panics
    /// If it has not as many bytes.
    pub fn download<T: Pod>(&self, from: View<'_>, to: &mut [T]) {
        let num_bytes = size_of_val(to);
        assert_eq!(num_bytes, from.num_bytes(), "{num_bytes} bytes of {:?}", from.shape());
        let (cost, from) = (Cost::ZERO.reads(num_bytes).writes(num_bytes), from.operand());
        let to: &mut [u8] = bytemuck::cast_slice_mut(to);
        self.count("download", cost);
        if let Some(detached) = &self.detached {
            let copied = Arc::new(Mutex::new(Vec::new()));
            let shared = Arc::clone(&copied);
            let copy = move |cpu: &Cpu| {
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = from.bytes(cpu).to_vec();
            };
            detached.queue().copy(Stream::Compute, copy);
            self.synchronize();
            return to.copy_from_slice(&copied.lock().unwrap_or_else(PoisonError::into_inner));
        }
        if !self.is_counting() {
            to.copy_from_slice(from.bytes(&self.cpu));
        }
    }

    /// Copies memory of the device to that of the host from byte `at` on, beside what kernels do from now on: on a device of its own,
    /// when the kernels that were issued so far have run, and the memory has come back from an earlier copy.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn download_later<B: HostMemory>(&self, from: View<'_>, to: &mut Pending<B>, at: usize) {
        let (from, bytes) = (from.operand(), at..at + from.num_bytes());
        self.copy_later("download", Stream::ToHost, from, to, move |cpu, to| {
            to.bytes_mut()[bytes].copy_from_slice(from.bytes(cpu));
        });
    }

    /// Copies memory of the host from byte `at` on to that of the device, beside what kernels do from now on, when the kernels that were
    /// issued so far have run. Kernels that read it [wait](Device::wait_for) until the host's memory is back.
    ///
    /// # Panics
    /// If there are not as many bytes.
    pub fn upload_later<B: HostMemory>(&self, from: &mut Pending<B>, at: usize, to: ViewMut<'_>) {
        let (bytes, mut to) = (at..at + to.num_bytes(), to.into_operand());
        self.copy_later("upload", Stream::FromHost, to.as_operand(), from, move |cpu, from| {
            to.bytes(cpu).copy_from_slice(&from.bytes()[bytes]);
        });
    }

    /// Issues a copy between memory of the device and memory of the host to a stream.
    fn copy_later<B: HostMemory>(
        &self,
        name: &'static str,
        stream: Stream,
        operand: Operand,
        host: &mut Pending<B>,
        copy: impl FnOnce(&Cpu, &mut B) + Send + 'static,
    ) {
        self.count(name, Cost::ZERO.reads(operand.num_bytes()).writes(operand.num_bytes()));
        let Some(detached) = &self.detached else {
            let host = host.wait_mut();
            if !self.is_counting() {
                copy(&self.cpu, host);
            }
            return;
        };
        let queue = detached.queue();
        queue.wait(stream, &self.record());
        queue.wait(stream, &host.event());
        let returned = Arc::new(Mutex::new(None));
        let lent = std::mem::replace(host, Pending::until(Event::DONE, Arc::clone(&returned)));
        let has_run = Arc::new(AtomicBool::new(false));
        let (copied, ended) = (Arc::clone(&returned), Arc::clone(&has_run));
        let position = queue.copy(stream, move |cpu| {
            let mut memory = lent.try_take().unwrap_or_else(|_| panic!("a copy runs after the one before"));
            copy(cpu, &mut memory);
            // The host may take the memory back before the event.
            ended.store(true, Ordering::Release);
            *copied.lock().unwrap_or_else(PoisonError::into_inner) = Some(memory);
        });
        let event = queue.record(stream);
        queue.keep_until((stream, position), operand, (has_run, &event));
        *host = Pending::until(event, returned);
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
