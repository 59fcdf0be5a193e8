//! Shape and cost inference of a model on a worker, by a dry pass.

use crate::config::Config;
use crate::device::device_options;
use crate::error::TrainError;
use crate::executor::executor_options;
use crate::task::Task;
use trireme_base::{ContextRank, Rank};
use trireme_model::{Model, ModelProfile, TensorSpec};
use trireme_tensor::{Device, ModelRank};

/// Returns the tensors of a microbatch, restricted to the positions that one worker of the context axis has.
///
/// # Errors
/// [`TrainError::NoPositions`] or [`TrainError::UnequalPositions`] if the positions cannot be split evenly over the context axis.
pub fn positions_of_batch(
    batch: &[TensorSpec],
    context: ContextRank,
    has_positions: bool,
) -> Result<Vec<TensorSpec>, TrainError> {
    let degree = context.degree();
    if degree > 1 && !has_positions {
        return Err(TrainError::NoPositions { degree });
    }
    let of_worker = |spec: &TensorSpec| match spec.num_positions() {
        Some(len) if degree > 1 && !len.is_multiple_of(2 * degree) => {
            Err(TrainError::UnequalPositions { tensor: format!("'{}' ({spec})", spec.name), len, degree })
        }
        _ => Ok(spec.for_context_rank(context)),
    };
    batch.iter().map(of_worker).collect()
}

/// Returns the costs and shapes of a model's passes on a worker. `batch` has all positions.
pub(crate) fn infer_profile(
    config: &Config,
    task: &dyn Task,
    rank: Rank,
    num_threads: usize,
    batch: &[TensorSpec],
) -> Result<ModelProfile, TrainError> {
    let (place, context) = (config.model_rank(rank), config.context_rank(rank));
    infer_profile_at(config, task, place, context, num_threads, batch)
}

/// Like [`infer_profile`], for a worker with these ranks on the model and context axes.
pub(crate) fn infer_profile_at(
    config: &Config,
    task: &dyn Task,
    place: ModelRank,
    context: ContextRank,
    num_threads: usize,
    batch: &[TensorSpec],
) -> Result<ModelProfile, TrainError> {
    let build = |device: &Device, table| task.build(device, table);
    let build_part = |device: &Device| Model::build_at(place, device, build);
    let passes = executor_options(config).pass_options(context);
    let batch = positions_of_batch(batch, context, task.has_positions())?;
    Ok(ModelProfile::of(build_part, device_options(config, num_threads), passes, &batch)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::{AxisRank, DType};

    #[test]
    fn workers_have_equal_parts_of_the_positions_of_a_batch_or_are_refused() {
        let specs = |len| {
            [("rows", &[3, len, 5][..]), ("lens", &[3])]
                .map(|(name, dims)| TensorSpec::new(name, dims, DType::U32))
        };
        let context = ContextRank::new(AxisRank::new(1, 2), 1);
        let found = positions_of_batch(&specs(8), context, true).unwrap();
        assert_eq!(found.iter().map(|spec| spec.shape.dims()).collect::<Vec<_>>(), [&[3, 4, 5][..], &[3]]);
        let refused = positions_of_batch(&specs(6), context, true).unwrap_err().to_string();
        assert!(refused.contains("rows") && refused.contains("6, which is not a multiple of 4"), "{refused}");
        let refused = positions_of_batch(&specs(8), context, false).unwrap_err().to_string();
        assert!(refused.contains("has_positions"), "{refused}");
        assert_eq!(positions_of_batch(&specs(6), ContextRank::ALONE, false).unwrap(), specs(6));
    }
}
