//! What passes between the host and the memory of a device.

use super::detached::Stream;
use super::{Device, DeviceError};
use crate::kernels::PlaceMut;
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::arena::Block;
use crate::tensor::{View, ViewMut};
use bytemuck::{Pod, Zeroable};
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{Category, Cost, DType, Held, HostMemory};

/// Memory of the host that copies of devices work with, counted as what it is for.
#[derive(Debug)]
pub struct PinnedMemory {
    /// All of the block.
    place: PlaceMut,
    cpu: Arc<Cpu>,
    _block: Block,
}

impl HostMemory for PinnedMemory {
    fn bytes(&self) -> &[u8] {
        self.place.as_place().bytes(&self.cpu)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.place.bytes(&self.cpu)
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
        assert!(self.reaches_host, "a host has memory of the host");
        let block = self.arena.take(num_bytes, category)?;
        let place = PlaceMut::new(block.start(), num_bytes, DType::U8);
        Ok(PinnedMemory { place, cpu: Arc::clone(&self.cpu), _block: block })
    }

    /// Copies values of the host into memory of the device: those of the element type, or the bytes of any. The values may be
    /// overwritten once the call returns.
    ///
    /// # Panics
    /// If they have not as many bytes.
    pub fn upload<T: Pod>(&self, values: &[T], to: ViewMut<'_>) {
        let num_bytes = size_of_val(values);
        assert_eq!(num_bytes, to.num_bytes(), "{num_bytes} bytes for {:?}", to.shape());
        let (cost, mut to) = (Cost::ZERO.reads(num_bytes).writes(num_bytes), to.into_place());
        if self.is_counting() {
            return self.count("upload", cost);
        }
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if self.detached.is_some() {
            let bytes = bytes.to_vec();
            return self.issue("upload", cost, move |cpu| to.bytes(cpu).copy_from_slice(&bytes));
        }
        self.count("upload", cost);
        to.bytes(&self.cpu).copy_from_slice(bytes);
    }

    /// Copies memory of the device into `to`, memory of the host, once what was issued has run: elements, or the bytes of any type.
    ///
    /// # Panics
    /// If it has not as many bytes.
    pub fn download<T: Pod>(&self, from: View<'_>, to: &mut [T]) {
        let num_bytes = size_of_val(to);
        assert_eq!(num_bytes, from.num_bytes(), "{num_bytes} bytes of {:?}", from.shape());
        let (cost, from) = (Cost::ZERO.reads(num_bytes).writes(num_bytes), from.place());
        if self.is_counting() {
            return self.count("download", cost);
        }
        let to: &mut [u8] = bytemuck::cast_slice_mut(to);
        if self.detached.is_some() {
            let copied = Arc::new(Mutex::new(Vec::new()));
            let shared = Arc::clone(&copied);
            let copy = move |cpu: &Cpu| {
                *shared.lock().unwrap_or_else(PoisonError::into_inner) = from.bytes(cpu).to_vec();
            };
            self.issue("download", cost, copy);
            self.synchronize();
            return to.copy_from_slice(&copied.lock().unwrap_or_else(PoisonError::into_inner));
        }
        self.count("download", cost);
        to.copy_from_slice(from.bytes(&self.cpu));
    }

    /// Copies memory of the device to that of the host from byte `at` on, beside what kernels do from now on: on a device of its own,
    /// when the kernels that were issued so far have run, and the memory has come back from an earlier copy.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn download_later<B: HostMemory>(&self, from: View<'_>, to: Held<B>, at: usize) -> Held<B> {
        let num_bytes = from.num_bytes();
        self.count("download", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        let from = from.place();
        let Some(detached) = &self.detached else {
            let mut to = to.wait();
            if !self.is_counting() {
                to.bytes_mut()[at..at + num_bytes].copy_from_slice(from.bytes(&self.cpu));
            }
            return Held::new(to);
        };
        let queue = detached.queue();
        queue.wait(Stream::ToHost, &self.record());
        queue.wait(Stream::ToHost, &to.until());
        let (place, mut lent) = lend(to);
        queue.run(Stream::ToHost, move |cpu| {
            let mut to = lent.take();
            to.bytes_mut()[at..at + num_bytes].copy_from_slice(from.bytes(cpu));
            lent.give(to);
        });
        let until = queue.record(Stream::ToHost);
        queue.lend(from, &until);
        Held::lent(place, until)
    }

    /// Copies memory of the host from byte `at` on to that of the device, beside what kernels do from now on, when the kernels that were
    /// issued so far have run. Kernels that read it [wait](Device::wait_for) until the host's memory is back.
    ///
    /// # Panics
    /// If there are not as many bytes.
    pub fn upload_later<B: HostMemory>(&self, from: Held<B>, at: usize, to: ViewMut<'_>) -> Held<B> {
        let num_bytes = to.num_bytes();
        self.count("upload", Cost::ZERO.reads(num_bytes).writes(num_bytes));
        let mut to = to.into_place();
        let Some(detached) = &self.detached else {
            let from = from.wait();
            if !self.is_counting() {
                to.bytes(&self.cpu).copy_from_slice(&from.bytes()[at..at + num_bytes]);
            }
            return Held::new(from);
        };
        let queue = detached.queue();
        queue.wait(Stream::FromHost, &self.record());
        queue.wait(Stream::FromHost, &from.until());
        let (written, (place, mut lent)) = (to.as_place(), lend(from));
        queue.run(Stream::FromHost, move |cpu| {
            let from = lent.take();
            to.bytes(cpu).copy_from_slice(&from.bytes()[at..at + num_bytes]);
            lent.give(from);
        });
        let until = queue.record(Stream::FromHost);
        queue.lend(written, &until);
        Held::lent(place, until)
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

/// Host memory on its way through a copy.
struct Lent<B> {
    from: Option<Held<B>>,
    to: Arc<Mutex<Option<B>>>,
}

/// Where memory will lie after a copy, and the copy's end of it.
fn lend<B>(memory: Held<B>) -> (Arc<Mutex<Option<B>>>, Lent<B>) {
    let place = Arc::new(Mutex::new(None));
    (Arc::clone(&place), Lent { from: Some(memory), to: place })
}

impl<B> Lent<B> {
    /// The memory.
    ///
    /// # Panics
    /// If an earlier copy still works with it: a stream has not waited for it.
    fn take(&mut self) -> B {
        let from = self.from.take().expect("a copy takes its memory once");
        from.try_take().expect("an earlier copy works with the memory of a later one")
    }

    fn give(self, memory: B) {
        *self.to.lock().unwrap_or_else(PoisonError::into_inner) = Some(memory);
    }
}
