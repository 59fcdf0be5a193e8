//! Sizes of state for the planner.

use std::ops::Range;
use trireme_model::{BatchTensor, ModelProfile, UnitProfile};
use trireme_optim::Optimizer;
use trireme_parallel::ExecutorOptions;
use trireme_planner::{BatchTensorSize, ModelSizes, UnitSizes};
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::Device;

/// Returns the sizes of the state of the units that a worker holds. The worker updates `parts` of the units with `optimizer` and is one
/// of `num_shards`.
pub(super) fn state_sizes(
    profile: &ModelProfile,
    options: &ExecutorOptions,
    mut optimizer: Optimizer,
    parts: &[Range<usize>],
    num_shards: usize,
    header: &ProgramHeader,
) -> ModelSizes {
    let gather_bytes = options.gather_precision().dtype().size();
    let bytes_per_parameter = options.parameter_dtype().size();
    let as_integers = options.zero_plus_plus.quantized_gradients.is_some();
    let [_, gradient_dtype] = options.gradient_dtypes(header, num_shards, as_integers);
    // If a worker keeps full 16-bit copies of the parameters, its f32 master weights are optimizer state.
    let is_separate = gather_bytes < bytes_per_parameter && num_shards > 1;
    let has_masters = is_separate && header.state.class_of_weights() == StateClass::Optimizer;
    let aligned = |num_bytes: usize| num_bytes.next_multiple_of(Device::ALIGNMENT);
    let mut unit = |(index, found): (usize, &UnitProfile)| {
        let shard_len = parts[index].len();
        let mut optimizer_bytes = 0;
        optimizer.for_each_state_tensor(index, |tensor| optimizer_bytes += aligned(tensor.num_bytes()));
        let parameter_bytes = aligned(shard_len * bytes_per_parameter);
        let masters = if has_masters { parameter_bytes } else { 0 };
        let state = [optimizer_bytes + masters, parameter_bytes, shard_len * gradient_dtype.size()];
        UnitSizes { state, shard_len, passes: found.passes }
    };
    let units = profile.units.iter().enumerate().map(&mut unit).collect();
    ModelSizes {
        units,
        gathered_bytes_per_element: gather_bytes,
        gradient_bytes_per_element: gradient_dtype.size(),
    }
}

pub(super) fn batch_memory(profile: &ModelProfile) -> Vec<BatchTensorSize> {
    let memory =
        |tensor: &BatchTensor| BatchTensorSize { bytes: tensor.bytes, readers: tensor.readers.clone() };
    profile.batch.iter().map(memory).collect()
}
