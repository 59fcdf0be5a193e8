//! Choices about a step that the layout leaves open.

use crate::as_text;
use crate::config::{self, Config};
use crate::error::TrainError;
use crate::schedule_file::read_schedule;
use crate::stages::{StageChoice, are_contiguous, split_evenly, split_stages};
use serde::{Deserialize, Serialize};
use trireme_base::{Rank, UnitPasses};
use trireme_comm::{CONTROL_BYTES_MAX, CommError, Group};
use trireme_schedule::pipeline::Schedule;
use trireme_schedule::{Keep, StateLayout, Tier};

/// Choices that a step's layout leaves open. None of them changes the step's bits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepChoices {
    /// The activations that each unit's forward pass keeps.
    pub keeps: Vec<Keep>,
    /// The placement of the training state on the workers.
    #[serde(with = "as_text")]
    pub state: StateLayout,
    /// The stages of the pipeline in the model's order. Empty without a pipeline.
    pub stages: Vec<StageChoice>,
    /// The custom schedule of the pipeline, if the config names a file.
    #[serde(with = "as_text::option")]
    pub schedule: Option<Schedule>,
}

impl StepChoices {
    /// Returns the choices that the config makes. Choices that it leaves to the planner (`auto`) have their defaults: forward keeps all
    /// activations that backward reads, and all state is on the device.
    ///
    /// Unless the config gives split points, units are split into stages so that the maximum number of floating-point operations per stage
    /// is as small as possible. `passes` holds the costs of each unit.
    ///
    /// # Errors
    /// Fails if the model has fewer units than stages or than the config's split points need, or if the schedule file cannot be read.
    pub fn from_config(config: &Config, passes: &[UnitPasses]) -> Result<Self, TrainError> {
        let keeps = configured_keeps(config, passes);
        let schedule = read_schedule(config)?;
        let num_stages = schedule.as_ref().map_or(config.parallelism().num_stages(), Schedule::num_stages);
        let stages = split_stages(config, num_stages, passes, &keeps)?;
        Ok(StepChoices { keeps, state: configured_state(config), stages, schedule })
    }

    /// Returns the stages of the pipeline, or one stage with all units without a pipeline.
    pub fn stages_or_one(&self, passes: &[UnitPasses]) -> Vec<StageChoice> {
        match &self.stages[..] {
            [] => split_evenly(passes, &self.keeps, 1),
            stages => stages.to_vec(),
        }
    }

    /// Returns the choices of rank 0, which passes them as `own`. Returns `None` on a rank that cannot parse them. Collective: sends as
    /// many control messages as the text needs.
    ///
    /// # Errors
    /// If the exchange between the ranks fails.
    #[expect(clippy::missing_panics_doc, reason = "choices can be written as JSON")]
    pub fn broadcast_from_root(own: Option<&StepChoices>, group: &Group) -> Result<Option<Self>, TrainError> {
        let own = own.map_or_else(Vec::new, |own| serde_json::to_vec(own).expect("choices are JSON"));
        let broadcast = |bytes: &[u8]| -> Result<Vec<u8>, CommError> {
            Ok(group.all_gather_bytes(bytes).wait()?.swap_remove(Rank::ROOT.0))
        };
        let Ok(len) = <[u8; 8]>::try_from(broadcast(&(own.len() as u64).to_le_bytes())?) else {
            return Ok(None);
        };
        let (mut message, mut pieces) = (Vec::new(), own.chunks(CONTROL_BYTES_MAX));
        while (message.len() as u64) < u64::from_le_bytes(len) {
            let piece = broadcast(pieces.next().unwrap_or_default())?;
            if piece.is_empty() {
                return Ok(None);
            }
            message.extend(piece);
        }
        let choices = serde_json::from_slice(&message).ok();
        Ok(choices.filter(|choices: &StepChoices| are_contiguous(&choices.stages)))
    }
}

/// Returns the activations that each unit's forward pass keeps according to the config. `mode = "auto"` leaves this to the planner, and
/// keeps all. A unit without activations [to keep](UnitPasses::keeps_activations) has `Keep::All`, because it has nothing to recompute.
fn configured_keeps(config: &Config, passes: &[UnitPasses]) -> Vec<Keep> {
    let checkpoint = config.activation_checkpoint();
    // Number of units since the last unit with `Keep::All`. Every `every_k`-th of these units keeps its input. The units after it keep
    // nothing, and are recomputed from that input.
    let mut num_before = 0_usize;
    let keep = |passes: &UnitPasses| match checkpoint.mode {
        _ if !passes.keeps_activations() => {
            num_before = 0;
            Keep::All
        }
        config::ActivationCheckpointMode::None | config::ActivationCheckpointMode::Auto => Keep::All,
        config::ActivationCheckpointMode::Selective => Keep::Products,
        config::ActivationCheckpointMode::Block => Keep::Input,
        config::ActivationCheckpointMode::EveryK => {
            let is_first = num_before.is_multiple_of(checkpoint.every_k);
            num_before += 1;
            if is_first { Keep::Input } else { Keep::Nothing }
        }
    };
    passes.iter().map(keep).collect()
}

fn configured_state(config: &Config) -> StateLayout {
    let tier = |tier: config::Tier| match tier {
        config::Tier::Device | config::Tier::Auto => Tier::Device,
        config::Tier::Host => Tier::Host,
        config::Tier::Disk => Tier::Disk,
    };
    let offload = config.offload();
    let state = StateLayout {
        fetch_ahead: offload.prefetch,
        updates_early: config.memory().free_gradients,
        ..config.parallelism().state_layout()
    };
    offload.tiers().into_iter().fold(state, |state, (class, given)| state.with_tier(class, tier(given)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_schedule::pipeline::{Pass, WeightVersions};
    use trireme_testkit::run_ranks;

    #[test]
    fn rank_0_broadcasts_choices_of_any_length() {
        let passes =
            |stage: usize, count: usize| (0..count).map(|index| Pass::forward(stage, index)).collect();
        // The text of the longer schedule takes four messages.
        for count in [1, 150_000] {
            let schedule = Schedule {
                num_microbatches: count,
                num_steps: 1,
                weights: WeightVersions::Drained,
                stage_ranks: vec![0, 1],
                ranks: vec![passes(0, count), passes(1, count)],
            };
            let chosen = StepChoices {
                keeps: vec![Keep::All, Keep::Input],
                state: StateLayout { num_offloaded_units: 3, ..StateLayout::zero(2) },
                stages: Vec::new(),
                schedule: Some(schedule),
            };
            assert_eq!(serde_json::to_vec(&chosen).unwrap().len() > 3 * CONTROL_BYTES_MAX, count > 1);
            let found = run_ranks(3, |group| {
                let own = (group.rank() == Rank::ROOT).then_some(&chosen);
                StepChoices::broadcast_from_root(own, &group).unwrap()
            });
            assert_eq!(found, [Some(chosen.clone()), Some(chosen.clone()), Some(chosen)]);
        }
    }
}
