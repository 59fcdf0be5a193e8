//! Generation with programs that only run forward passes.

use crate::common::*;
use trireme_model::{ModelConfig, ModelProfile, token_specs};
use trireme_parallel::{Executor, Generation};
use trireme_schedule::{StateClass, StateLayout, Tier};
use trireme_tensor::{Category, Device, DeviceError, DeviceOptions, Parameters, Precision};
use trireme_testkit::{run_ranks, small_models};

fn device() -> Device {
    Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap()
}

fn forward_only(config: &ModelConfig, device: &Device) -> Executor {
    let build = |device: &Device| config.build(1, device);
    let profile =
        ModelProfile::of(build, DeviceOptions::default(), Precision::F32, &token_specs(1, 1)).unwrap();
    let model = config.build(8, device).unwrap();
    let mut parameters = Parameters::zeros(model.table(), device, Category::Parameters).unwrap();
    let initialized = parameters.load(|info, held, values| {
        info.initialize(7, held, values);
        Ok::<(), DeviceError>(())
    });
    initialized.unwrap();
    let before = device.memory().usage(Category::Parameters).peak;
    let executor = Executor::forward_only(model, profile, parameters, device).unwrap();
    assert_eq!(
        device.memory().usage(Category::Parameters).peak,
        before,
        "it takes the parameters that are there"
    );
    executor
}

/// Returns the logits after each part of a sequence.
fn logits(executor: &mut Executor) -> Vec<Vec<f32>> {
    let mut generation = Generation::new(executor, 8);
    let logits = [&[1, 2, 3][..], &[4], &[5, 6]].map(|tokens| generation.append(tokens).unwrap());
    logits.into()
}

#[test]
fn generation_has_the_same_bits_with_sharded_and_offloaded_parameters() {
    for config in small_models() {
        check(&config);
    }
}

fn check(config: &ModelConfig) {
    let mut alone = forward_only(config, &device());
    let expected = logits(&mut alone);
    let folder = tempfile::tempdir().unwrap();
    for state in [StateLayout::zero(3), StateLayout::zero(3).with_tier(StateClass::Parameters, Tier::Disk)] {
        let found = run_ranks(2, |group| {
            let layout = Layout { num_shards: 2, state, folder: folder.path(), ..Layout::default() };
            let mut executor = executor_with_layout(config, group, 1, 1, &layout);
            executor.initialize(7).unwrap();
            logits(&mut executor)
        });
        assert_eq!(found, [expected.clone(), expected.clone()], "{state}");
    }
}

#[test]
fn memory_holds_parameters_and_used_positions_only() {
    let [_, llama] = small_models();
    let config = ModelConfig { max_position_embeddings: 1 << 24, ..llama };
    let device = device();
    let mut executor = forward_only(&config, &device);
    for category in [Category::Gradients, Category::Optimizer] {
        assert_eq!(device.memory().usage(category).peak, 0, "{category}");
    }
    let mut generation = Generation::new(&mut executor, 16);
    for _ in 0..4 {
        generation.append(&[1, 2, 3, 4]).unwrap();
    }
    assert!(device.memory().total().peak < 1 << 20, "{:?}", device.memory().total());
}
