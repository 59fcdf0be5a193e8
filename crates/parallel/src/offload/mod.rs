//! State that resides in host memory or on a disk between its uses.
//!
//! The program contains the moves ([`trireme_schedule::lowering::apply_layout`]), and this module executes them. State that is updated in
//! host memory, such as optimizer state, does not move. State on a disk passes through host memory.

mod spill;
mod store;

use crate::error::Result;
pub use spill::Spill;
use std::path::PathBuf;
use store::Store;
use trireme_schedule::{Program, ProgramHeader, StateClass, StateKey, StateLayout};
use trireme_swap::{SwapFile, SwapOptions};
use trireme_tensor::{Device, Tensor, ViewMut};

/// Devices and files for state that resides off the device between its uses.
#[derive(Debug, Clone)]
pub struct OffloadOptions {
    /// The host of the device, as a separate device.
    pub host: Device,
    /// Folder of the files on disk.
    pub folder: PathBuf,
    /// Options of reads and writes.
    pub swap: SwapOptions,
}

impl OffloadOptions {
    /// Options without a separate host: all state stays on `device`.
    pub fn none(device: &Device) -> Self {
        OffloadOptions { host: device.clone(), folder: PathBuf::new(), swap: SwapOptions::default() }
    }

    /// Returns the device whose kernels work with a class of state, in the layout `state`.
    pub fn device_of<'a>(&'a self, state: &StateLayout, class: StateClass, device: &'a Device) -> &'a Device {
        // Kernels use activations on the device, wherever activations reside between their uses.
        if class != StateClass::Activations && state.is_offloaded(class) { &self.host } else { device }
    }
}

/// Memory that can be released, and allocated again.
pub(crate) trait Movable {
    fn num_bytes(&self) -> usize;

    fn view_mut(&mut self) -> ViewMut<'_>;

    /// Frees the memory. Its contents are lost.
    fn release(&mut self);

    /// Allocates the memory again, with unspecified contents.
    fn reallocate(&mut self) -> Result<()>;
}

impl Movable for Tensor {
    fn num_bytes(&self) -> usize {
        Tensor::num_bytes(self)
    }

    fn view_mut(&mut self) -> ViewMut<'_> {
        Tensor::view_mut(self)
    }

    fn release(&mut self) {
        Tensor::release(self);
    }

    fn reallocate(&mut self) -> Result<()> {
        Ok(Tensor::restore(self)?)
    }
}

/// A function that visits all memory of one state, which moves as a whole.
pub(crate) type VisitMemory<'a> = &'a mut dyn FnMut(&mut dyn FnMut(&mut dyn Movable));

/// Visits all of `memory`, and returns the first failure. Memory after the failure is not visited.
pub(crate) fn try_each(
    memory: VisitMemory<'_>,
    mut visit: impl FnMut(&mut dyn Movable) -> Result<()>,
) -> Result<()> {
    let mut result = Ok(());
    memory(&mut |part| {
        if result.is_ok() {
            result = visit(part);
        }
    });
    result
}

/// The stores of evicted state, for each class that moves.
#[derive(Default)]
pub(crate) struct OffloadStores {
    num_microbatches: usize,
    /// The store of each class, `None` if it does not move. A store has a block for each unit; for activations, a block for each microbatch
    /// of each unit.
    stores: [Option<Store>; StateClass::ALL.len()],
    /// Bytes read and written by earlier stores, which these stores have replaced.
    pub(crate) earlier_disk_bytes: [u64; 2],
}

impl OffloadStores {
    /// Creates empty stores for the classes that a program moves.
    pub(crate) fn new(options: &OffloadOptions, program: &Program, device: &Device) -> Self {
        let ProgramHeader { chain, num_microbatches, state, .. } = &program.header;
        let mut stores = [const { None }; StateClass::ALL.len()];
        for class in StateClass::ALL.into_iter().filter(|&class| state.is_fetched(class)) {
            let per_unit = if class == StateClass::Activations { *num_microbatches } else { 1 };
            let owner = options.device_of(state, class, device);
            let store = Store::new(state.of(class).tier, options, owner, chain.num_units * per_unit);
            stores[class as usize] = Some(store);
        }
        OffloadStores { num_microbatches: *num_microbatches, stores, earlier_disk_bytes: [0, 0] }
    }

    /// Declares the maximum size of a state, before any state of its class is evicted.
    pub(crate) fn declare_size(&mut self, state: StateKey, num_bytes: usize) {
        if let Some((store, block)) = self.store(state) {
            store.declare_size(block, num_bytes);
        }
    }

    pub(crate) fn moves(&self, class: StateClass) -> bool {
        self.stores[class as usize].is_some()
    }

    fn store(&mut self, state: StateKey) -> Option<(&mut Store, usize)> {
        let block = match state.class {
            StateClass::Activations => state.unit * self.num_microbatches + state.microbatch,
            _ => state.unit,
        };
        self.stores[state.class as usize].as_mut().map(|store| (store, block))
    }

    fn files(&self) -> impl Iterator<Item = &SwapFile> {
        self.stores.iter().flatten().filter_map(Store::file)
    }

    /// Moves state to where it resides between uses, and frees its memory. State on a disk that has not changed since it was fetched is not
    /// written again.
    pub(crate) fn evict(
        &mut self,
        state: StateKey,
        has_changed: bool,
        memory: VisitMemory<'_>,
    ) -> Result<()> {
        self.store(state).map_or(Ok(()), |(store, block)| store.evict(block, has_changed, memory))
    }

    pub(crate) fn fetch(&mut self, state: StateKey) -> Result<()> {
        self.store(state).map_or(Ok(()), |(store, block)| store.fetch(block))
    }

    /// Waits until state is in memory, and fetches it if necessary.
    pub(crate) fn restore(&mut self, state: StateKey, memory: VisitMemory<'_>) -> Result<()> {
        self.store(state).map_or(Ok(()), |(store, block)| store.restore(block, memory))
    }

    pub(crate) fn describe(&self) -> Vec<String> {
        self.files().map(|file| file.description().to_string()).collect()
    }

    pub(crate) fn disk_bytes(&self) -> [u64; 2] {
        self.files().map(SwapFile::statistics).fold(self.earlier_disk_bytes, |[read, written], file| {
            [read + file.bytes_read, written + file.bytes_written]
        })
    }
}
