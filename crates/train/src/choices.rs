//! What of a step is left open by its layout.

use crate::config::{self, Config};
use trireme_model::Model;
use trireme_schedule::lowering::{Offload, Tier};
use trireme_schedule::{Keep, StateClass};

/// What of a step is open once its layout is known, and does not change its bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepChoices {
    /// What each unit's forward pass keeps.
    pub keeps: Vec<Keep>,
    /// Where state lives.
    pub places: Offload,
}

impl StepChoices {
    /// As the config says. What it leaves to a plan stays: all that backward reads is kept, on the device.
    pub fn given(config: &Config, model: &Model) -> Self {
        StepChoices { keeps: given_keeps(config, model), places: given_places(config) }
    }

    /// As a message to the other ranks: where each class lives in a byte, the number of blocks and of uses ahead in eight
    /// each, and what each unit keeps in a byte.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Offload { num_blocks, prefetch, .. } = self.places;
        let numbers = [num_blocks, prefetch].map(|number| (number as u64).to_le_bytes());
        let tiers = StateClass::ALL.map(|class| self.places.tier(class) as u8);
        let keeps = self.keeps.iter().map(|&keep| keep as u8);
        tiers.into_iter().chain(numbers.into_iter().flatten()).chain(keeps).collect()
    }

    /// Reads the message, if it is one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (tiers, rest) = bytes.split_first_chunk::<4>()?;
        let (num_blocks, rest) = rest.split_first_chunk::<8>()?;
        let (prefetch, keeps) = rest.split_first_chunk::<8>()?;
        let number = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).ok();
        let mut places =
            Offload { num_blocks: number(num_blocks)?, prefetch: number(prefetch)?, ..Offload::default() };
        for (class, &tier) in StateClass::ALL.into_iter().zip(tiers) {
            places = places.with(class, *Tier::ALL.get(usize::from(tier))?);
        }
        let keeps = keeps.iter().map(|&keep| Keep::ALL.get(usize::from(keep)).copied());
        Some(StepChoices { keeps: keeps.collect::<Option<_>>()?, places })
    }
}

/// What each unit's forward pass keeps by the config; with `mode = "auto"`, which leaves it to a plan, all. The embedding has
/// nothing but its input, and the head runs backward at once.
fn given_keeps(config: &Config, model: &Model) -> Vec<Keep> {
    let (checkpoint, num_units) = (config.activation_checkpoint(), model.num_units());
    let keep = |unit: usize| match checkpoint.mode {
        _ if unit == 0 || unit + 1 == num_units => Keep::All,
        config::ActivationCheckpointMode::None | config::ActivationCheckpointMode::Auto => Keep::All,
        config::ActivationCheckpointMode::Selective => Keep::Products,
        config::ActivationCheckpointMode::Block => Keep::Input,
        config::ActivationCheckpointMode::EveryK if (unit - 1).is_multiple_of(checkpoint.every_k) => {
            Keep::Input
        }
        config::ActivationCheckpointMode::EveryK => Keep::Nothing,
    };
    (0..num_units).map(keep).collect()
}

fn given_places(config: &Config) -> Offload {
    let tier = |tier: config::Tier| match tier {
        config::Tier::Device | config::Tier::Auto => Tier::Device,
        config::Tier::Host => Tier::Host,
        config::Tier::Disk => Tier::Disk,
    };
    let offload = config.offload();
    Offload {
        optimizer: tier(offload.optimizer),
        parameters: tier(offload.parameters),
        gradients: tier(offload.gradients),
        activations: tier(offload.activations),
        num_blocks: usize::MAX,
        prefetch: offload.prefetch,
    }
}
