//! State that lives elsewhere than on the device between its uses: in the host's memory or on a disk.
//!
//! The program says when it moves ([`trireme_schedule::lowering::lay_out`]); this module moves it. What is updated in the
//! host's memory, as the optimizer's state is, needs no moves; what lives on a disk passes through that memory.

mod store;

use crate::error::ParallelError;
use std::path::PathBuf;
use store::Store;
use trireme_schedule::{Action, Keep, Program, StateClass, StateLayout, StateOf};
use trireme_swap::SwapOptions;
use trireme_tensor::{Device, Tensor};

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
        if state.is_away(class) { &self.host } else { device }
    }
}

/// Memory that moves to another place and back.
pub(crate) trait Movable {
    fn num_bytes(&self) -> usize;

    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];

    /// Gives the memory back, and with it what it holds.
    fn release(&mut self);

    /// Takes memory again, with unspecified contents.
    fn restore(&mut self) -> Result<(), ParallelError>;
}

impl Movable for Tensor {
    fn num_bytes(&self) -> usize {
        Tensor::num_bytes(self)
    }

    fn bytes(&self) -> &[u8] {
        Tensor::bytes(self)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        Tensor::bytes_mut(self)
    }

    fn release(&mut self) {
        Tensor::release(self);
    }

    fn restore(&mut self) -> Result<(), ParallelError> {
        Ok(Tensor::restore(self)?)
    }
}

/// Shows a function all memory that moves as one.
pub(crate) type Memory<'a> = &'a mut dyn FnMut(&mut dyn FnMut(&mut dyn Movable));

/// State that is away, and what is on its way back.
#[derive(Default)]
pub(crate) struct Offloaded {
    num_microbatches: usize,
    /// By class; absent where nothing moves.
    stores: [Option<Store>; 3],
    /// Of activations, by what forward keeps: of that only blocks of units are alike. Absent where none move.
    activations: [Option<Store>; Keep::ALL.len()],
    /// What forward of each unit keeps.
    keeps: Vec<Keep>,
    /// Read and written before these stores were there.
    earlier_disk_bytes: [u64; 2],
}

impl Offloaded {
    /// Stores for the classes that a program moves, for which nothing was evicted yet.
    pub(crate) fn new(options: &OffloadOptions, program: &Program) -> Result<Self, ParallelError> {
        let (num_units, num_microbatches) =
            (program.outline.chain.num_units, program.outline.num_microbatches);
        let state = &program.outline.state;
        let mut stores = [const { None }; 3];
        for class in [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients] {
            if state.moves(class) {
                let tier = state.of(class).tier;
                stores[class as usize] = Some(Store::new((class, tier), options, num_units)?);
            }
        }
        let mut keeps = vec![Keep::All; num_units];
        for action in &program.actions {
            if let Action::Forward { unit, keep, .. } = *action {
                keeps[unit] = keep;
            }
        }
        let class = StateClass::Activations;
        let mut activations = [const { None }; Keep::ALL.len()];
        let tier = state.of(class).tier;
        for keep in Keep::ALL.into_iter().filter(|keep| state.moves(class) && keeps.contains(keep)) {
            let num_blocks = num_units * num_microbatches;
            activations[keep as usize] = Some(Store::new((class, tier), options, num_blocks)?);
        }
        Ok(Offloaded { num_microbatches, stores, activations, keeps, earlier_disk_bytes: [0, 0] })
    }

    /// Counts the transfers of other stores, which these take the place of, as earlier ones.
    pub(crate) fn go_on_from(&mut self, earlier: &Offloaded) {
        self.earlier_disk_bytes = earlier.disk_bytes();
    }

    /// Says how many bytes a state has, before any of its class is evicted.
    pub(crate) fn expect(&mut self, state: StateOf, num_bytes: usize) {
        if let Some((store, block)) = self.store(state) {
            store.expect(block, num_bytes);
        }
    }

    /// Whether a class moves.
    pub(crate) fn moves(&self, class: StateClass) -> bool {
        match class {
            StateClass::Activations => self.activations.iter().any(Option::is_some),
            _ => self.stores[class as usize].is_some(),
        }
    }

    fn store(&mut self, state: StateOf) -> Option<(&mut Store, usize)> {
        let (store, block) = match state.class {
            StateClass::Activations => {
                let block = state.unit * self.num_microbatches + state.microbatch;
                (&mut self.activations[self.keeps[state.unit] as usize], block)
            }
            class => (&mut self.stores[class as usize], state.unit),
        };
        store.as_mut().map(|store| (store, block))
    }

    fn all(&self) -> impl Iterator<Item = &Store> {
        self.stores.iter().chain(&self.activations).flatten()
    }

    /// Brings state to where it lives, and frees its memory. State that did not change since it was fetched is there already.
    pub(crate) fn evict(
        &mut self,
        state: StateOf,
        has_changed: bool,
        memory: Memory<'_>,
    ) -> Result<(), ParallelError> {
        match self.store(state) {
            Some((store, block)) => store.evict(block, has_changed, memory),
            None => Ok(()),
        }
    }

    /// Starts to bring state back.
    pub(crate) fn fetch(&mut self, state: StateOf) -> Result<(), ParallelError> {
        match self.store(state) {
            Some((store, block)) => store.fetch(block),
            None => Ok(()),
        }
    }

    /// Waits until state is back, if it is away.
    pub(crate) fn restore(&mut self, state: StateOf, memory: Memory<'_>) -> Result<(), ParallelError> {
        match self.store(state) {
            Some((store, block)) => store.restore(block, memory),
            None => Ok(()),
        }
    }

    /// What users should know of the disks: a line for each.
    pub(crate) fn describe(&self) -> Vec<String> {
        self.all().filter_map(Store::describe).collect()
    }

    /// Bytes read from and written to disks since the beginning.
    pub(crate) fn disk_bytes(&self) -> [u64; 2] {
        let bytes = self.all().map(Store::disk_bytes);
        bytes.fold(self.earlier_disk_bytes, |sum, bytes| [sum[0] + bytes[0], sum[1] + bytes[1]])
    }
}
