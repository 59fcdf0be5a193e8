//! Notices about the effect of settings on results.

use crate::config::{Config, DeviceName, Fp8, QuantizedGradients};
use crate::dataset::Dataset;
use crate::fp8::FP8_NOTICE;
use crate::observer::Observer;
use trireme_parallel::Determinism;
use trireme_tensor::Precision;

/// Number of passes up to which repeated text is nearly as good as new text (Muennighoff et al., "Scaling data-constrained language
/// models", 2023, section 6).
const EPOCHS_MAX: f64 = 4.0;

const CUDA_NOTICE: &str = "the kernels for GPUs have run on a stand-in for NVIDIA's driver only, and not on hardware yet; compare the \
                           losses of a short run with those of device = \"cpu\" before you rely on them";

/// Notifies the user if the bits of results depend on the layout, unless the config asks for `determinism = "run"`.
pub(crate) fn notice_determinism(config: &Config, world_size: usize, observer: &mut dyn Observer) {
    if config.training().determinism == Determinism::Run {
        return;
    }
    let reduce_dtype = config.training().reduce_dtype;
    let num_microbatches = config.num_microbatches();
    let is_canonical = world_size.is_power_of_two() && num_microbatches.is_power_of_two();
    if reduce_dtype != Precision::F32 && world_size > 1 {
        observer.notice(&format!(
            "gradients are rounded to {} and summed over {world_size} workers: bits are reproducible, but differ for \
             other numbers of workers",
            reduce_dtype
        ));
    } else if config.parallelism().zero_quantized_weights
        || config.parallelism().zero_quantized_gradients != QuantizedGradients::None
    {
        observer.notice(
            "workers exchange parameters or gradients as integers: bits are reproducible, but differ for other layouts",
        );
    } else if !is_canonical {
        observer.notice(&format!(
            "{world_size} workers x {num_microbatches} microbatches: bits are reproducible, but match those of other \
             numbers of workers only if both numbers are powers of two"
        ));
    }
}

/// Recommends settings for schedules with stale gradients.
pub(crate) fn notice_staleness(config: &Config, observer: &mut dyn Observer) {
    let optimizer = config.optimizer();
    let has_nu = optimizer.name.settings().contains(&"nu");
    if config.parallelism().is_asynchronous() && has_nu && optimizer.settings.nu == 1.0 {
        observer.notice(
            "this schedule applies stale gradients; a smaller [optimizer] nu, such as 0.78, and a longer warm-up \
             cope with them better",
        );
    }
}

pub(crate) fn notice_cuda(config: &Config, observer: &mut dyn Observer) {
    if config.training().device == DeviceName::Cuda {
        observer.notice(CUDA_NOTICE);
    }
}

pub(crate) fn notice_fp8(config: &Config, observer: &mut dyn Observer) {
    if config.training().fp8 != Fp8::Off {
        observer.notice(FP8_NOTICE);
    }
}

/// Notifies the user if a run repeats its text often.
pub(crate) fn notice_epochs(config: &Config, train: &dyn Dataset, observer: &mut dyn Observer) {
    let training = config.training();
    let num_passes = (training.steps * training.global_batch_size as u64) as f64 / train.num_samples() as f64;
    if num_passes > EPOCHS_MAX && train.tokens_per_sample().is_some() {
        observer.notice(&format!(
            "the run makes {num_passes:.1} passes over its data; beyond about four, repeated data helps less and less"
        ));
    }
}
