//! What of a step is left open by its layout.

use crate::config::{self, Config};
use crate::error::TrainError;
use std::ops::Range;
use trireme_base::UnitPasses;
use trireme_schedule::lowering::{Offload, Tier};
use trireme_schedule::pipeline::{self, Costs, Kind, Sizes, StageCosts};
use trireme_schedule::{Keep, Program, StateClass, single};

/// What of a step is open once its layout is known, and does not change its bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepChoices {
    /// What each unit's forward pass keeps.
    pub keeps: Vec<Keep>,
    /// Where state lives.
    pub places: Offload,
    /// The units of each stage of a pipeline, in the model's order; none without a pipeline.
    pub stages: Vec<Range<usize>>,
}

impl StepChoices {
    /// As the config says. What it leaves to a plan stays: all that backward reads is kept, on the device.
    ///
    /// Stages are cut so that the one with most floating-point operations has as few as possible; `passes` are those of each
    /// unit.
    ///
    /// # Errors
    /// If there are fewer units than stages.
    pub fn given(config: &Config, passes: &[UnitPasses]) -> Result<Self, TrainError> {
        let keeps = given_keeps(config, passes.len());
        Ok(StepChoices { keeps, places: given_places(config), stages: stages(config, passes)? })
    }

    /// As a message to the other ranks: where each class lives in a byte, the number of blocks and of uses ahead in eight
    ///     /// each; the number of stages and the units at which they end in eight each, and what each unit keeps in a byte.
    pub fn to_bytes(&self) -> Vec<u8> {
        let Offload { num_blocks, prefetch, .. } = self.places;
        let ends = self.stages.iter().map(|units| units.end);
        let numbers = [num_blocks, prefetch, self.stages.len()].into_iter().chain(ends);
        let numbers = numbers.map(|number| (number as u64).to_le_bytes());
        let tiers = StateClass::ALL.map(|class| self.places.tier(class) as u8);
        let keeps = self.keeps.iter().map(|&keep| keep as u8);
        tiers.into_iter().chain(numbers.flatten()).chain(keeps).collect()
    }

    /// Reads the message, if it is one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (tiers, rest) = bytes.split_first_chunk::<4>()?;
        let (num_blocks, rest) = rest.split_first_chunk::<8>()?;
        let (prefetch, rest) = rest.split_first_chunk::<8>()?;
        let (num_stages, mut rest) = rest.split_first_chunk::<8>()?;
        let number = |bytes: &[u8; 8]| usize::try_from(u64::from_le_bytes(*bytes)).ok();
        let (mut stages, mut start) = (Vec::new(), 0);
        for _ in 0..number(num_stages)? {
            let (end, others) = rest.split_first_chunk::<8>()?;
            let end = number(end).filter(|&end| end > start)?;
            stages.push(start..end);
            (start, rest) = (end, others);
        }
        let keeps = rest;
        let mut places =
            Offload { num_blocks: number(num_blocks)?, prefetch: number(prefetch)?, ..Offload::default() };
        for (class, &tier) in StateClass::ALL.into_iter().zip(tiers) {
            places = places.with(class, *Tier::ALL.get(usize::from(tier))?);
        }
        let keeps = keeps.iter().map(|&keep| Keep::ALL.get(usize::from(keep)).copied());
        Some(StepChoices { keeps: keeps.collect::<Option<_>>()?, places, stages })
    }
}

/// What each unit's forward pass keeps by the config; with `mode = "auto"`, which leaves it to a plan, all. The embedding has
/// nothing but its input, and the head runs backward at once.
fn given_keeps(config: &Config, num_units: usize) -> Vec<Keep> {
    let checkpoint = config.activation_checkpoint();
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

fn stages(config: &Config, passes: &[UnitPasses]) -> Result<Vec<Range<usize>>, TrainError> {
    let num_stages = config.parallelism().pipeline_parallel_degree * config.stages_per_rank();
    match num_stages {
        1 => Ok(Vec::new()),
        _ if num_stages > passes.len() => {
            Err(TrainError::TooManyStages { num_stages, num_units: passes.len() })
        }
        _ => {
            let cost = |passes: &UnitPasses| passes.forward_operations + passes.backward_operations;
            Ok(pipeline::cut(&passes.iter().map(cost).collect::<Vec<u64>>(), num_stages))
        }
    }
}

/// The schedule of a config's pipeline.
///
/// # Errors
/// If its sizes do not fit the schedule.
pub fn pipeline_schedule(config: &Config, costs: &Costs) -> Result<pipeline::Schedule, TrainError> {
    let kind = match config.parallelism().pipeline_parallel_schedule {
        config::PipelineSchedule::Gpipe => Kind::GPipe,
        config::PipelineSchedule::OneFOneB => Kind::OneFOneB,
        config::PipelineSchedule::Interleaved => Kind::Interleaved,
        config::PipelineSchedule::BreadthFirst => Kind::BreadthFirst,
    };
    let sizes = Sizes {
        num_ranks: config.parallelism().pipeline_parallel_degree,
        num_microbatches: config.num_microbatches(),
        stages_per_rank: config.stages_per_rank(),
        num_steps: 1,
    };
    Ok(pipeline::generate(kind, sizes, costs, None)?)
}

/// The program, before it is lowered, of each rank of the pipeline; of one rank without one.
pub(crate) fn base_programs(
    config: &Config,
    num_units: usize,
    ties: &[(usize, usize)],
    stages: &[Range<usize>],
) -> Result<Vec<Program>, TrainError> {
    if stages.is_empty() {
        return Ok(vec![single::program(num_units, config.num_microbatches(), ties)]);
    }
    // Costs order messages only, and all ranks have to agree on that.
    let costs = Costs::equal(stages.len(), StageCosts::of(1, 1, 1)).expect("these are costs");
    let schedule = pipeline_schedule(config, &costs)?;
    let timeline = pipeline::simulate(&schedule, &costs).expect("a schedule that was generated is valid");
    Ok(pipeline::programs(&schedule, &timeline, stages, ties))
}
