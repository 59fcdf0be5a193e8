//! Whatever the ranks shard, losses, norms and weights have the bits of plain data parallelism.

mod common;

use common::{Layout, OPTIONS, STEPS, batches, dynamic, laid_out};
use trireme_model::ModelConfig;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::lowering::{Offload, Sharding, Tier};
use trireme_schedule::{Keep, ZeroStage};
use trireme_tensor::Precision;
use trireme_testkit::{run_ranks, small_models};

/// Losses and norms of a few steps, the loss of an evaluation, and all weights.
type Found = (Vec<u64>, Vec<u32>);

fn train(executor: &mut Executor, num_microbatches: usize) -> Found {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(executor, num_microbatches, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5) };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        found.extend([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    // Rank 0 evaluates a batch, and the others help to gather parameters.
    let batch = (executor.group().rank().0 == 0)
        .then(|| batches(executor, executor.group().world_size(), 99).remove(0));
    let evaluated = executor.evaluate(batch).unwrap()[0].sum;
    let evaluated = executor.group().all_gather_bytes(&evaluated.to_le_bytes()).wait().unwrap();
    found.push(u64::from_le_bytes(evaluated[0][..].try_into().unwrap()));
    executor.check_replicas().unwrap();
    let weights = executor.gather_parameters().unwrap();
    let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.flat(unit).f32s().to_vec());
    let weights = (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect();
    (found, weights)
}

/// What rank 0 has found, and what all ranks have found of losses and norms.
fn run(
    config: &ModelConfig,
    options: ExecutorOptions,
    keeps: &[Keep],
    (world_size, num_shards): (usize, usize),
    num_microbatches: usize,
) -> Found {
    let layout = Layout { options, num_shards, keeps, ..Layout::default() };
    run_layout(config, &layout, world_size, num_microbatches)
}

fn run_layout(
    config: &ModelConfig,
    layout: &Layout<'_>,
    world_size: usize,
    num_microbatches: usize,
) -> Found {
    let mut results = run_ranks(world_size, |group| {
        let accumulation = num_microbatches / world_size;
        let mut executor = laid_out(config, group, 1, accumulation, layout);
        train(&mut executor, num_microbatches)
    });
    let first = results.remove(0);
    assert!(results.iter().all(|(found, _)| *found == first.0), "ranks agree");
    first
}

#[test]
fn every_stage_has_the_bits_of_plain_data_parallelism() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let f16 = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(256), ..OPTIONS };
    for options in [OPTIONS, bf16, f16] {
        for config in small_models() {
            for num_microbatches in [4, 8] {
                let oracle = run(&config, options, &[], (1, 1), num_microbatches);
                for zero_stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                    for (grid, prefetch, keep_after_forward) in
                        [((1, 1), 1, false), ((2, 2), 0, false), ((4, 4), 1, false), ((4, 2), 2, true)]
                    {
                        let sharding = Sharding { zero_stage, prefetch, keep_after_forward };
                        let found = run(
                            &config,
                            ExecutorOptions { sharding, ..options },
                            &[],
                            grid,
                            num_microbatches,
                        );
                        assert!(
                            found == oracle,
                            "{} {sharding:?} {grid:?} {num_microbatches} microbatches, {}",
                            config.family.name(),
                            options.precision
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rounded_gradients_have_the_bits_of_plain_data_parallelism_on_as_many_ranks() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, reduce_dtype: Precision::Bf16, ..OPTIONS };
    let f16 = Precision::F16;
    let f16 = ExecutorOptions { precision: f16, reduce_dtype: f16, loss_scaling: dynamic(256), ..OPTIONS };
    let config = &small_models()[0];
    for options in [bf16, f16] {
        for (world_size, num_shards, num_microbatches) in [(2, 2, 2), (4, 4, 4), (2, 2, 4)] {
            let oracle = run(config, options, &[], (world_size, 1), num_microbatches);
            for zero_stage in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                // Rounded after each microbatch, sums have other bits than rounded once.
                if zero_stage >= ZeroStage::Two && num_microbatches > world_size {
                    continue;
                }
                let sharding = Sharding { zero_stage, ..options.sharding };
                let found = run(
                    config,
                    ExecutorOptions { sharding, ..options },
                    &[],
                    (world_size, num_shards),
                    num_microbatches,
                );
                assert!(found == oracle, "{zero_stage:?} on {world_size}, {}", options.precision);
            }
        }
    }
}

#[test]
fn what_is_recomputed_has_the_bits_of_what_is_kept() {
    use Keep::{All, Input, Nothing, Products};
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let sharded = Sharding { zero_stage: ZeroStage::Three, prefetch: 1, keep_after_forward: false };
    for options in [OPTIONS, bf16] {
        for config in small_models() {
            let num_blocks = config.num_layers;
            let oracle = run(&config, options, &[], (1, 1), 4);
            // Each kind of unit as it may be, the head and the embedding, too.
            for block in [[All, Products], [Input, Nothing], [Products, Input]] {
                for ends in [[All, All], [Input, Input], [Products, Nothing], [Products, Products]] {
                    let mut keeps = vec![ends[0]];
                    keeps.extend((0..num_blocks).map(|index| block[index % 2]));
                    keeps.push(ends[1]);
                    let is_made_again =
                        keeps.windows(2).all(|pair| pair[1] != Nothing || matches!(pair[0], Input | Nothing));
                    if !is_made_again {
                        continue;
                    }
                    for (grid, sharding) in [((1, 1), options.sharding), ((2, 2), sharded)] {
                        let found = run(&config, ExecutorOptions { sharding, ..options }, &keeps, grid, 4);
                        assert!(found == oracle, "{keeps:?} {grid:?} {}", options.precision);
                    }
                }
            }
        }
    }
}

#[test]
fn state_that_lives_elsewhere_has_the_bits_of_state_on_the_device() {
    use Tier::{Device, Disk, Host};
    let folder = tempfile::tempdir().unwrap();
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for options in [OPTIONS, bf16] {
        for config in small_models() {
            for num_microbatches in [2, 4] {
                let oracle = run(&config, options, &[], (1, 1), num_microbatches);
                for (zero_stage, tiers) in [
                    (ZeroStage::Zero, [Device, Device, Device, Host]),
                    (ZeroStage::Zero, [Device, Device, Device, Disk]),
                    (ZeroStage::One, [Host, Device, Device, Device]),
                    (ZeroStage::One, [Disk, Device, Device, Device]),
                    (ZeroStage::Two, [Disk, Device, Host, Disk]),
                    (ZeroStage::Three, [Host, Host, Host, Host]),
                    (ZeroStage::Three, [Disk, Disk, Disk, Disk]),
                    (ZeroStage::Three, [Host, Disk, Device, Host]),
                ] {
                    if tiers[2] == Disk && num_microbatches > 2 {
                        continue;
                    }
                    for keeps in [
                        &[][..],
                        &[Keep::All, Keep::Input, Keep::Products, Keep::All],
                        &[Keep::All, Keep::Products, Keep::All, Keep::All],
                    ] {
                        let sharding = Sharding { zero_stage, ..options.sharding };
                        let [optimizer, parameters, gradients, activations] = tiers;
                        // Of few units or of all of them.
                        let num_units =
                            if keeps.len() == 4 && keeps[1] == Keep::Input { 1 } else { usize::MAX };
                        let places =
                            Offload { optimizer, parameters, gradients, activations, num_units, prefetch: 1 };
                        let layout = Layout {
                            options: ExecutorOptions { sharding, ..options },
                            num_shards: if zero_stage == ZeroStage::Zero { 1 } else { 2 },
                            keeps,
                            places,
                            folder: folder.path(),
                            ..Layout::default()
                        };
                        let found = run_layout(&config, &layout, 2, num_microbatches);
                        assert!(found == oracle, "{zero_stage:?} {tiers:?} {keeps:?} {}", options.precision);
                    }
                }
            }
        }
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "files are gone");
}
