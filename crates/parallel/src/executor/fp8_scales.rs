//! Keeps the fp8 scales equal on all ranks.

use crate::error::Result;
use crate::memory::WaitTracker;
use trireme_base::ReduceOp;
use trireme_comm::{Buffer, Group};
use trireme_model::Model;
use trireme_tensor::{Device, Fp8Recipe, Fp8State};

/// The fp8 scales of a model. A maximum over all ranks keeps them equal, so they do not depend on which rank had which microbatch.
pub(super) struct SynchronizedScales {
    pub(super) state: Fp8State,
    /// The largest magnitudes of this step; `None` while they are reduced.
    amaxes: Option<Buffer<f32>>,
}

impl SynchronizedScales {
    /// Creates the scales of `model`'s linear layers for the first step.
    pub(super) fn new(recipe: Fp8Recipe, model: &Model, device: &Device, group: &Group) -> Result<Self> {
        let state = Fp8State::of_matrices(recipe, model.table(), device)?;
        let amaxes = Some(group.buffer(state.num_amaxes())?);
        Ok(SynchronizedScales { state, amaxes })
    }

    /// Ends a step: computes the scales of the next step from the largest magnitudes on all ranks. Collective.
    pub(super) fn advance(
        &mut self,
        device: &Device,
        group: &Group,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        let mut amaxes = self.amaxes.take().expect("a step ends after the one before");
        self.state.take_amaxes(device, &mut amaxes)?;
        let amaxes = waiting.wait(group.all_reduce(amaxes, ReduceOp::Max))?;
        self.state.advance(&amaxes);
        self.amaxes = Some(amaxes);
        Ok(())
    }
}
