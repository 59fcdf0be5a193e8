//! Memory of communication that is compressed, rounded or quantized.

use super::*;
use trireme_codec::{CodecName, CompressionOptions};
use trireme_optim::{OptimizerName, OptimizerSettings};
use trireme_tensor::IntegerFormat;

fn compressed(options: CompressionOptions) -> ExecutorOptions {
    let compression = Compression::new(&options).unwrap();
    ExecutorOptions { compression, determinism: Determinism::Run, ..OPTIONS }
}

fn replicated(options: ExecutorOptions, optimizer: OptimizerOptions) -> Case {
    Case { options, optimizer, num_microbatches: 2, keep: Keep::Products, ..Case::default() }
}

#[test]
fn every_codec() {
    for codec in CodecName::ALL {
        let has = |option| codec.options().contains(&option);
        let plain = CompressionOptions { codec, ..CompressionOptions::default() };
        // A run has enough steps to pass the warm-up and reach the final kind of step. With top_k there are three kinds.
        let changed = CompressionOptions {
            warmup_steps: has("warmup_steps").then_some(2),
            warmup_codec: has("warmup_codec").then_some(CodecName::Int8),
            ratio: has("ratio").then_some(0.05),
            momentum: has("momentum").then_some(0.5),
            error_feedback: has("error_feedback").then_some(true),
            normalize: has("normalize").then_some(0.9),
            ..plain.clone()
        };
        for options in [plain, changed].map(compressed) {
            for world_size in [1, 2] {
                replicated(options, adamw()).check(&medium_model(), world_size);
            }
            // Units that are too short to be compressed, next to others.
            replicated(options, adamw()).check(&small_models()[0], 4);
        }
    }
}

#[test]
fn uncompressed_gradients_are_rounded() {
    for codec in [CodecName::TopK, CodecName::PowerSgd] {
        let options = compressed(CompressionOptions { codec, ..CompressionOptions::default() });
        let options = ExecutorOptions { reduce_dtype: Precision::Bf16, ..options };
        for config in [small_models()[0].clone(), medium_model()] {
            replicated(options, adamw()).check(&config, 4);
        }
    }
}

#[test]
fn momentum_that_may_be_restored() {
    let dynamic = LossScaling::Dynamic { initial: 256, growth_interval: 100 };
    let settings = OptimizerSettings { freeze_step: 1, var_update_scaler: 1, ..OptimizerSettings::DEFAULT };
    for (name, loss_scaling) in [OptimizerName::OneBitAdam, OptimizerName::ZeroOneAdam]
        .into_iter()
        .flat_map(|name| [(name, LossScaling::Off), (name, dynamic)])
    {
        let optimizer = OptimizerOptions { name, settings, ..adamw() };
        for codec in [CodecName::None, CodecName::OneBit, CodecName::PowerSgd] {
            let options = compressed(CompressionOptions { codec, ..CompressionOptions::default() });
            let options = ExecutorOptions { loss_scaling, ..options };
            replicated(options, optimizer.clone()).check(&medium_model(), 2);
        }
    }
}

#[test]
fn zero_plus_plus_communication() {
    let methods = |quantized_weights, secondary_shards, quantized_gradients| ZeroPlusPlus {
        quantized_weights,
        secondary_shards,
        quantized_gradients,
    };
    let (int8, int4) = (Some(IntegerFormat::Int8), Some(IntegerFormat::Int4));
    let parts = [
        methods(true, false, None),
        methods(false, true, None),
        methods(false, false, int8),
        methods(true, true, int4),
    ];
    let places: [(&[usize], usize); 5] =
        [(&[0, 0, 1, 1], 4), (&[0, 1], 2), (&[0, 0], 2), (&[0, 1, 2, 3], 2), (&[0, 1, 1], 1)];
    let layouts = [
        (Precision::F32, StateLayout { gather_ahead: 0, ..StateLayout::zero(3) }, 1),
        (Precision::Bf16, StateLayout { gather_ahead: 2, ..StateLayout::zero(3) }, 3),
        (Precision::Bf16, StateLayout { keep_gathered: true, ..StateLayout::zero(3) }, 2),
    ];
    for (zero_plus_plus, (hosts, num_shards)) in
        parts.into_iter().flat_map(|methods| places.map(|place| (methods, place)))
    {
        for (precision, state, num_microbatches) in layouts {
            let options = ExecutorOptions { precision, reduce_dtype: precision, zero_plus_plus, ..OPTIONS };
            let keep = Keep::Nothing;
            let case = Case { options, num_microbatches, num_shards, state, keep, ..Case::default() };
            case.check_on(&medium_model(), hosts);
            case.check_on(&small_models()[0], hosts);
        }
    }
}
