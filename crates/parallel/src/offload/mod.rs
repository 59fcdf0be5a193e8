//! State that lives elsewhere than on the device between its uses: in the host's memory or on a disk.
//!
//! The program says when it moves ([`trireme_schedule::lowering::lay_out`]); this module moves it. What is updated in the
//! host's memory, as the optimizer's state is, needs no moves; what lives on a disk passes through that memory.

mod spill;
mod store;

use crate::error::Result;
pub use spill::Spill;
use std::path::PathBuf;
use store::Store;
use trireme_schedule::{Outline, Program, StateClass, StateLayout, StateOf};
use trireme_swap::{SwapFile, SwapOptions};
use trireme_tensor::{Device, Tensor, ViewMut};

/// What it takes to have state elsewhere than on the device between its uses.
#[derive(Debug, Clone)]
pub struct OffloadOptions {
    /// The host beside the device.
    pub host: Device,
    /// Folder of the files on disk.
    pub folder: PathBuf,
    /// How the disk is worked with.
    pub swap: SwapOptions,
}

impl OffloadOptions {
    /// Everything stays on `device`.
    pub fn none(device: &Device) -> Self {
        OffloadOptions { host: device.clone(), folder: PathBuf::new(), swap: SwapOptions::default() }
    }

    /// The device on which a class of state is worked with, which lies as `state` says.
    pub fn device_of<'a>(&'a self, state: &StateLayout, class: StateClass, device: &'a Device) -> &'a Device {
        // Activations are worked with on the device, wherever they wait.
        if class != StateClass::Activations && state.is_away(class) { &self.host } else { device }
    }
}

/// Memory that moves to another place and back.
pub(crate) trait Movable {
    fn num_bytes(&self) -> usize;

    fn view_mut(&mut self) -> ViewMut<'_>;

    /// Gives the memory back, and with it what it holds.
    fn release(&mut self);

    /// Takes memory again, with unspecified contents.
    fn restore(&mut self) -> Result<()>;
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

    fn restore(&mut self) -> Result<()> {
        Ok(Tensor::restore(self)?)
    }
}

/// Shows a function all memory that moves as one.
pub(crate) type Memory<'a> = &'a mut dyn FnMut(&mut dyn FnMut(&mut dyn Movable));

/// Visits all of `memory`, up to the first failure.
pub(crate) fn try_each(
    memory: Memory<'_>,
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

/// State that is away, and what is on its way back.
#[derive(Default)]
pub(crate) struct Offloaded {
    num_microbatches: usize,
    /// By class; absent where nothing moves. Blocks are units, of activations units and then microbatches.
    stores: [Option<Store>; StateClass::ALL.len()],
    /// Read and written by stores that these take the place of.
    pub(crate) earlier_disk_bytes: [u64; 2],
}

impl Offloaded {
    /// Stores for the classes that a program moves, for which nothing was evicted yet.
    pub(crate) fn new(options: &OffloadOptions, program: &Program, device: &Device) -> Self {
        let Outline { chain, num_microbatches, state, .. } = &program.outline;
        let mut stores = [const { None }; StateClass::ALL.len()];
        for class in StateClass::ALL.into_iter().filter(|&class| state.moves(class)) {
            let per_unit = if class == StateClass::Activations { *num_microbatches } else { 1 };
            let owner = options.device_of(state, class, device);
            let store = Store::new(state.of(class).tier, options, owner, chain.num_units * per_unit);
            stores[class as usize] = Some(store);
        }
        Offloaded { num_microbatches: *num_microbatches, stores, earlier_disk_bytes: [0, 0] }
    }

    /// Says how many bytes a state has, before any of its class is evicted.
    pub(crate) fn expect(&mut self, state: StateOf, num_bytes: usize) {
        if let Some((store, block)) = self.store(state) {
            store.expect(block, num_bytes);
        }
    }

    pub(crate) fn moves(&self, class: StateClass) -> bool {
        self.stores[class as usize].is_some()
    }

    fn store(&mut self, state: StateOf) -> Option<(&mut Store, usize)> {
        let block = match state.class {
            StateClass::Activations => state.unit * self.num_microbatches + state.microbatch,
            _ => state.unit,
        };
        self.stores[state.class as usize].as_mut().map(|store| (store, block))
    }

    fn files(&self) -> impl Iterator<Item = &SwapFile> {
        self.stores.iter().flatten().filter_map(Store::file)
    }

    /// Brings state to where it lives, and frees its memory. State that did not change since it was fetched is there already.
    pub(crate) fn evict(&mut self, state: StateOf, has_changed: bool, memory: Memory<'_>) -> Result<()> {
        self.store(state).map_or(Ok(()), |(store, block)| store.evict(block, has_changed, memory))
    }

    pub(crate) fn fetch(&mut self, state: StateOf) -> Result<()> {
        self.store(state).map_or(Ok(()), |(store, block)| store.fetch(block))
    }

    /// Waits until state is back, if it is away.
    pub(crate) fn restore(&mut self, state: StateOf, memory: Memory<'_>) -> Result<()> {
        self.store(state).map_or(Ok(()), |(store, block)| store.restore(block, memory))
    }

    pub(crate) fn describe(&self) -> Vec<String> {
        self.files().map(|file| file.describe().to_string()).collect()
    }

    pub(crate) fn disk_bytes(&self) -> [u64; 2] {
        self.files().map(SwapFile::statistics).fold(self.earlier_disk_bytes, |[read, written], file| {
            [read + file.bytes_read, written + file.bytes_written]
        })
    }
}
