//! The stages of a pipeline: the split of units into stages, and the costs of stages.

use crate::config::Config;
use crate::error::TrainError;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trireme_base::{Bytes, UnitPasses};
use trireme_schedule::Keep;
use trireme_schedule::pipeline::{self, Costs, StageCosts, TICKS_MAX};

/// The duration of the longest stage's forward pass, in ticks. A tick is shorter than the error of measured times.
const LONGEST_FORWARD_TICKS: u64 = 1000;

/// A stage of a pipeline: consecutive units, and the costs of their passes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageChoice {
    /// The indices of the units.
    pub units: Range<usize>,
    /// Times in ticks, where the longest stage's forward pass takes 1000 ticks, and activations in bytes.
    pub costs: StageCosts,
}

/// Returns whether the stages are contiguous, begin at unit 0, and have at least one unit each.
pub(crate) fn are_contiguous(stages: &[StageChoice]) -> bool {
    let starts = [0].into_iter().chain(stages.iter().map(|stage| stage.units.end));
    starts.zip(stages).all(|(start, stage)| stage.units.start == start && !stage.units.is_empty())
}

/// Splits units into `num_stages` stages at the config's split points, or [evenly](split_evenly) if it has none. Empty without a pipeline.
/// Fails if there are fewer units than stages, or if the split points do not fit the units or the stages.
pub(crate) fn split_stages(
    config: &Config,
    num_stages: usize,
    passes: &[UnitPasses],
    keeps: &[Keep],
) -> Result<Vec<StageChoice>, TrainError> {
    let num_units = passes.len();
    let given = &config.parallelism().pipeline_parallel_split_points;
    match (config.parallelism().pipeline_parallel_degree, given.last()) {
        (1, _) => Ok(Vec::new()),
        _ if num_stages > num_units => Err(TrainError::TooManyStages { num_stages, num_units }),
        (_, None) => Ok(split_evenly(passes, keeps, num_stages)),
        (_, Some(&split_point)) if split_point >= num_units => {
            Err(TrainError::SplitPointBeyondUnits { split_point, num_units })
        }
        _ if given.len() + 1 != num_stages => Err(TrainError::SplitPoints { num_stages, found: given.len() }),
        _ => {
            let bounds = [&[0], &given[..], &[num_units]].concat();
            let units = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
            Ok(stages_with_costs(&counted_costs(passes, keeps), units))
        }
    }
}

/// Splits units into stages so that the maximum number of floating-point operations per stage is as small as possible.
pub(crate) fn split_evenly(passes: &[UnitPasses], keeps: &[Keep], num_stages: usize) -> Vec<StageChoice> {
    let costs = counted_costs(passes, keeps);
    let totals: Vec<u64> = costs.iter().map(StageCosts::total).collect();
    stages_with_costs(&costs, pipeline::partition_units(&totals, num_stages))
}

/// Returns stages with these units, and with costs in ticks. `costs` has the costs of each unit, with times in any measure.
pub(crate) fn stages_with_costs(costs: &[StageCosts], stages: Vec<Range<usize>>) -> Vec<StageChoice> {
    let sums: Vec<StageCosts> = stages.iter().map(|units| sum(&costs[units.clone()])).collect();
    let longest = sums.iter().map(|costs| costs.forward).max().unwrap_or(0).max(1);
    let ticks =
        |cost: u64| (u128::from(cost) * u128::from(LONGEST_FORWARD_TICKS) / u128::from(longest)) as u64;
    let in_ticks = |costs: StageCosts| StageCosts {
        // No pass takes zero time, because messages follow the passes that produce them.
        forward: ticks(costs.forward).max(1),
        backward_input: ticks(costs.backward_input).max(1),
        backward_weight: ticks(costs.backward_weight).max(1),
        update: ticks(costs.update),
        ..costs
    };
    let choice = |(units, costs)| StageChoice { units, costs: in_ticks(costs) };
    stages.into_iter().zip(sums).map(choice).collect()
}

fn sum(units: &[StageCosts]) -> StageCosts {
    let mut sum = StageCosts { activation: 0, weight_activation: 0, ..StageCosts::of(0, 0, 0) };
    for unit in units {
        // Counts of operations saturate.
        sum.forward = sum.forward.saturating_add(unit.forward);
        sum.backward_input = sum.backward_input.saturating_add(unit.backward_input);
        sum.backward_weight = sum.backward_weight.saturating_add(unit.backward_weight);
        sum.update = sum.update.saturating_add(unit.update);
        sum.activation = sum.activation.saturating_add(unit.activation);
        sum.weight_activation = sum.weight_activation.saturating_add(unit.weight_activation);
    }
    sum
}

/// Returns the costs of each unit: passes in floating-point operations, and activations in bytes.
pub(crate) fn counted_costs(passes: &[UnitPasses], keeps: &[Keep]) -> Vec<StageCosts> {
    passes.iter().zip(keeps).map(|(passes, &keep)| unit_costs(passes, keep)).collect()
}

/// Returns the costs of a unit: passes in floating-point operations, and activations in bytes. Recomputation counts as part of the input
/// half.
fn unit_costs(passes: &UnitPasses, keep: Keep) -> StageCosts {
    let activation = keep.kept_bytes(passes);
    StageCosts {
        forward: passes.forward_cost.operations(),
        backward_input: passes.input_half_cost.operations().saturating_add(keep.recompute_operations(passes)),
        backward_weight: passes.weight_half_cost.operations(),
        update: 0,
        activation: activation as u64,
        // Limited to the bytes that forward keeps. If most activations are recomputed, more bytes are in use between the halves of
        // backward, but only for one microbatch at a time.
        weight_activation: passes.between_halves.min(activation) as u64,
    }
}

/// Returns the maximum number of activation bytes on each rank of the pipeline: the product of the activations of the largest stage,
/// `stages_per_rank`, and the number of microbatches that the config allows in flight. Without a limit in the config,
/// `default_in_flight_max` is that number. Returns `None` if neither is set.
pub(crate) fn activation_bounds(
    config: &Config,
    stages: &[StageChoice],
    stages_per_rank: usize,
    default_in_flight_max: Option<usize>,
) -> Option<Vec<u64>> {
    let parallelism = config.parallelism();
    let in_flight_max = match parallelism.pipeline_parallel_in_flight_max {
        0 => default_in_flight_max?,
        given => given,
    };
    let largest = stages.iter().map(|stage| stage.costs.activation).max().unwrap_or(0);
    let bound = largest.saturating_mul((in_flight_max * stages_per_rank) as u64);
    Some(vec![bound; parallelism.pipeline_parallel_degree])
}

/// Returns the costs of stages for a schedule. Messages take no time, because they overlap with passes.
///
/// # Errors
/// [`TrainError::StageTooLarge`] if a stage keeps more activation bytes than a schedule can count.
#[expect(
    clippy::missing_panics_doc,
    reason = "the activation bytes were checked, and the other costs are small"
)]
pub fn pipeline_costs(stages: &[StageChoice]) -> Result<Costs, TrainError> {
    if let Some(stage) = stages.iter().position(|stage| stage.costs.activation > TICKS_MAX) {
        let (kept, kept_max) = (Bytes(stages[stage].costs.activation), Bytes(TICKS_MAX));
        return Err(TrainError::StageTooLarge { stage, kept, kept_max });
    }
    let stages = stages.iter().map(|stage| stage.costs).collect();
    Ok(Costs::new(stages, 0).expect("a thousand ticks are within bounds, and the bytes were checked"))
}
