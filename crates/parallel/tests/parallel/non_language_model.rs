//! A model that is not a language model, under different layouts.

use crate::common::{Layout, OPTIONS, Pipeline, executor_of_model, train_classifier};
use trireme_parallel::ExecutorOptions;
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, StateClass, StateLayout, Tier};
use trireme_tensor::{Device, DeviceOptions, Precision};
use trireme_testkit::{build_classifier, classifier_batch, classifier_specs, run_ranks};

const SAMPLES: usize = 4;

type Found = (Vec<[u64; 2]>, Vec<u32>);

fn run(layout: &Layout<'_>, world_size: usize, accumulation: usize) -> Found {
    train_classifier(build_classifier, SAMPLES, layout, world_size, accumulation)
}

/// Returns the number of labels of class 0 in the first step.
fn num_of_first_class() -> usize {
    let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
    let of_batch = |index| {
        let batch = classifier_batch(&device, SAMPLES, 1, index);
        device
            .read::<u32>(batch.get("labels").unwrap().view())
            .unwrap()
            .into_iter()
            .filter(|&label| label == 0)
            .count()
    };
    (0..4).map(of_batch).sum()
}

#[test]
fn any_chain_of_units_gives_the_bits_of_one_rank() {
    for precision in [Precision::F32, Precision::Bf16] {
        let options = ExecutorOptions { precision, seed: 9, ..OPTIONS };
        let plain = Layout { options, ..Layout::default() };
        let oracle = run(&plain, 1, 4);
        let [loss, distance, accuracy, recall, cross_entropy, next_loss] =
            [0, 1, 2, 3, 4, 5].map(|index| f64::from_bits(oracle.0[index][0]));
        assert_ne!(loss, next_loss, "it learns");
        // Two units penalise the distance from the features; each of their losses has a weight of a quarter.
        assert!((loss - cross_entropy - 0.5 * distance).abs() < 1e-6, "{loss} {cross_entropy} {distance}");
        assert!((0.0..=1.0).contains(&accuracy) && (accuracy * 16.0).fract() == 0.0, "{accuracy}");
        // The rows of recall are the samples of one class.
        let hits = recall * num_of_first_class() as f64;
        assert!((0.0..=1.0).contains(&recall) && (hits - hits.round()).abs() < 1e-9, "{recall}");
        let keeps = [Keep::Input, Keep::Nothing, Keep::Products, Keep::Input, Keep::All];
        let recomputed = Layout { options, keeps: &keeps, ..Layout::default() };
        assert!(run(&recomputed, 1, 4) == oracle, "recomputed in {precision}");
        let folder = std::env::temp_dir();
        for (tier, keeps) in [(Tier::Host, &[][..]), (Tier::Disk, &[][..]), (Tier::Disk, &keeps[..])] {
            let state = StateLayout::UNSHARDED.with_tier(StateClass::Activations, tier);
            let moved = Layout { options, state, keeps, folder: &folder, ..Layout::default() };
            assert!(run(&moved, 1, 4) == oracle, "activations on {tier:?} in {precision}");
        }
        let (steps, _) = run(&plain, 2, 2);
        assert!(steps == oracle.0, "two replicas in {precision}");
        for zero_stage in 1..=3 {
            let state = StateLayout::zero(zero_stage);
            let sharded = Layout { options, num_shards: 2, state, ..Layout::default() };
            let (steps, _) = run(&sharded, 2, 2);
            assert!(steps == oracle.0, "stage {zero_stage} in {precision}");
        }
        for (kind, stages_per_rank) in [
            (ScheduleKind::OneFOneB, 1),
            (ScheduleKind::GPipe, 1),
            (ScheduleKind::Interleaved, 2),
            (ScheduleKind::ZeroBubbleV, 2),
        ] {
            let pipeline = Some(Pipeline { kind, num_ranks: 2, stages_per_rank });
            let stages = Layout { options, pipeline, ..Layout::default() };
            let found = run(&stages, 2, 4);
            assert!(found.0 == oracle.0, "{kind:?} in {precision}");
            let (mut weights, mut expected) = (found.1, oracle.1.clone());
            weights.sort_unstable();
            expected.sort_unstable();
            assert!(weights == expected, "{kind:?} in {precision} has other weights");
        }
    }
}

#[test]
fn a_batch_of_other_tensors_is_refused() {
    let mut found = run_ranks(1, |group| {
        let specs = classifier_specs(SAMPLES);
        let mut executor = executor_of_model(&build_classifier, &specs, group, 1, 1, &Layout::default());
        let mut batch = classifier_batch(executor.device(), SAMPLES, 1, 0);
        batch.take("ids");
        executor.evaluate(Some(batch)).unwrap_err().to_string()
    });
    assert_eq!(
        found.remove(0),
        "tensor 'ids' of a microbatch: found none, expected u32 [4, 2], as in the dry run of the model"
    );
}
