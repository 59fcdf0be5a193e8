//! Model FLOPs utilization (MFU): the floating-point operations that the model needs for a step, relative to the peak of the workers'
//! devices over the time of the step (Chowdhery et al., "PaLM", 2022, appendix B). docs/performance.md has the conventions.

use crate::all_gather_json::all_gather_json;
use crate::config::Config;
use crate::error::TrainError;
use crate::model_profile::infer_profile_at;
use crate::task::Task;
use trireme_base::ContextRank;
use trireme_comm::Group;
use trireme_model::{ModelProfile, TensorSpec};
use trireme_tensor::ModelRank;

/// The operations of a step, and the peaks of the workers that share it. Equal on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Utilization {
    /// Floating-point operations that the model needs for a step, over the samples of all workers: the matrix products of forward and
    /// backward, without recomputation.
    pub(crate) model_flops: f64,
    /// Peak FLOP/s of each worker, by rank. `None` if it is unknown.
    pub(crate) peaks: Vec<Option<f64>>,
}

impl Utilization {
    /// Counts the operations of the model on a single worker, so that they do not depend on the layout, and gathers the peaks. `profile`
    /// is this worker's, `batch` has all positions, and `measured_peak` counts unless the config gives a peak. Collective.
    pub(crate) fn new(
        config: &Config,
        task: &dyn Task,
        profile: &ModelProfile,
        batch: &[TensorSpec],
        group: &Group,
        num_threads: usize,
        measured_peak: Option<f64>,
    ) -> Result<Self, TrainError> {
        let (place, context) = (config.model_rank(group.rank()), config.context_rank(group.rank()));
        let of_microbatch = if place == ModelRank::ALONE && context == ContextRank::ALONE {
            profile.model_operations()
        } else {
            infer_profile_at(config, task, ModelRank::ALONE, ContextRank::ALONE, num_threads, batch)?
                .model_operations()
        };
        let training = config.training();
        let num_microbatches = training.global_batch_size / training.local_batch_size;
        let configured = config.metrics().peak_flops;
        let own = if configured > 0.0 { Some(configured) } else { measured_peak };
        let peaks = all_gather_json(group, &own)?;
        Ok(Utilization {
            model_flops: of_microbatch as f64 * num_microbatches as f64,
            peaks: peaks.into_iter().map(|peak| peak.filter(|peak| *peak > 0.0)).collect(),
        })
    }

    /// Returns the MFU of a step with this duration, or `None` if the peak of any worker is unknown.
    pub(crate) fn mfu(&self, step_seconds: f64) -> Option<f64> {
        let peak: f64 = self.peaks.iter().copied().sum::<Option<f64>>()?;
        Some(self.model_flops / (peak * step_seconds))
    }
}
