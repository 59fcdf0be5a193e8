//! With any sharding, losses, norms and weights have the bits of plain data parallelism.

use crate::common::{Layout, OPTIONS, STEPS, batches, dynamic, executor_with_layout};
use trireme_model::ModelConfig;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::{Keep, Portion, StateClass, StateLayout, Tier};
use trireme_tensor::Precision;
use trireme_testkit::{run_ranks, small_models};

/// The losses and norms of a few steps, the loss of an evaluation, and all weights, as bits.
type Found = (Vec<u64>, Vec<u32>);

fn train(executor: &mut Executor, num_microbatches: usize) -> Found {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(executor, num_microbatches, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        found.extend([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    // Rank 0 evaluates a batch, and the other ranks only take part in the gathers of parameters.
    let batch = (executor.group().rank().0 == 0)
        .then(|| batches(executor, executor.group().world_size(), 99).remove(0));
    let evaluated = executor.evaluate(batch).unwrap()[0].sum;
    let evaluated = executor.group().all_gather_bytes(&evaluated.to_le_bytes()).wait().unwrap();
    found.push(u64::from_le_bytes(evaluated[0][..].try_into().unwrap()));
    executor.check_replicas().unwrap();
    let weights = executor.gather_parameters().unwrap();
    let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.values(unit).unwrap());
    let weights = (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect();
    (found, weights)
}

/// Returns the results of rank 0. Losses and norms must be the same on all ranks.
fn run(config: &ModelConfig, layout: &Layout<'_>, world_size: usize, num_microbatches: usize) -> Found {
    let mut results = run_ranks(world_size, |group| {
        let accumulation = num_microbatches / world_size;
        let mut executor = executor_with_layout(config, group, 1, accumulation, layout);
        train(&mut executor, num_microbatches)
    });
    let first = results.remove(0);
    assert!(results.iter().all(|(found, _)| *found == first.0), "ranks agree");
    first
}

/// Returns the stages of ZeRO, a layout with only gradients sharded, and one with all state except gradients sharded.
fn layouts() -> [StateLayout; 5] {
    let with = |stage, gradients| {
        let mut state = StateLayout::zero(stage);
        state.gradients.portion = gradients;
        state
    };
    let [one, two, three] = [1, 2, 3].map(StateLayout::zero);
    [one, two, three, with(0, Portion::Shard), with(3, Portion::Full)]
}

#[test]
fn every_layout_of_state_has_the_bits_of_plain_data_parallelism() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let f16 = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(256), ..OPTIONS };
    for options in [OPTIONS, bf16, f16] {
        let plain = Layout { options, ..Layout::default() };
        for config in small_models() {
            for num_microbatches in [4, 8] {
                let oracle = run(&config, &plain, 1, num_microbatches);
                for sharded in layouts() {
                    for (grid, gather_ahead, keep_gathered) in
                        [((1, 1), 1, false), ((2, 2), 0, false), ((4, 4), 1, false), ((4, 2), 2, true)]
                    {
                        let state = StateLayout { gather_ahead, keep_gathered, ..sharded };
                        let (world_size, num_shards) = grid;
                        let layout = Layout { num_shards, state, ..plain.clone() };
                        let found = run(&config, &layout, world_size, num_microbatches);
                        assert!(
                            found == oracle,
                            "{}{state} {grid:?} {num_microbatches} microbatches, {}",
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
        let plain = Layout { options, ..Layout::default() };
        for (world_size, num_shards, num_microbatches) in [(2, 2, 2), (4, 4, 4), (2, 2, 4)] {
            let oracle = run(config, &plain, world_size, num_microbatches);
            for zero_stage in 1..=3 {
                // The bits of sums that are rounded after each microbatch differ from the bits of sums that are rounded once.
                if zero_stage >= 2 && num_microbatches > world_size {
                    continue;
                }
                let state = StateLayout::zero(zero_stage);
                let layout = Layout { num_shards, state, ..plain.clone() };
                let found = run(config, &layout, world_size, num_microbatches);
                assert!(found == oracle, "stage {zero_stage} on {world_size}, {}", options.precision);
            }
        }
    }
}

#[test]
fn recomputation_keeps_the_bits() {
    use Keep::{All, Input, Nothing, Products};
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for options in [OPTIONS, bf16] {
        let plain = Layout { options, ..Layout::default() };
        for config in small_models() {
            let num_blocks = config.num_layers;
            let oracle = run(&config, &plain, 1, 4);
            // All choices for each kind of unit, including the embedding and the output layer.
            for block in [[All, Products], [Input, Nothing], [Products, Input]] {
                for ends in [[All, All], [Input, Input], [Products, Nothing], [Products, Products]] {
                    let mut keeps = vec![ends[0]];
                    keeps.extend((0..num_blocks).map(|index| block[index % 2]));
                    keeps.push(ends[1]);
                    let is_recomputable =
                        keeps.windows(2).all(|pair| pair[1] != Nothing || matches!(pair[0], Input | Nothing));
                    if !is_recomputable {
                        continue;
                    }
                    for (grid, stage) in [((1, 1), 0), ((2, 2), 3)] {
                        let (world_size, num_shards) = grid;
                        let state = StateLayout::zero(stage);
                        let layout = Layout { num_shards, state, keeps: &keeps, ..plain.clone() };
                        let found = run(&config, &layout, world_size, 4);
                        assert!(found == oracle, "{keeps:?} {grid:?} {}", options.precision);
                    }
                }
            }
        }
    }
}

#[test]
fn offloading_keeps_the_bits() {
    use Tier::{Device, Disk, Host};
    let folder = tempfile::tempdir().unwrap();
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for options in [OPTIONS, bf16] {
        let plain = Layout { options, ..Layout::default() };
        for config in small_models() {
            for num_microbatches in [2, 4] {
                let oracle = run(&config, &plain, 1, num_microbatches);
                for (zero_stage, tiers) in [
                    (0, [Device, Device, Device, Host]),
                    (0, [Device, Device, Device, Disk]),
                    (1, [Host, Device, Device, Device]),
                    (1, [Disk, Device, Device, Device]),
                    (2, [Disk, Device, Host, Disk]),
                    (3, [Host, Host, Host, Host]),
                    (3, [Disk, Disk, Disk, Disk]),
                    (3, [Host, Disk, Device, Host]),
                ] {
                    if tiers[2] == Disk && num_microbatches > 2 {
                        continue;
                    }
                    for keeps in [
                        &[][..],
                        &[Keep::All, Keep::Input, Keep::Products, Keep::All],
                        &[Keep::All, Keep::Products, Keep::All, Keep::All],
                    ] {
                        // Moves the activations of one unit, or of all units.
                        let num_moved =
                            if keeps.len() == 4 && keeps[1] == Keep::Input { 1 } else { usize::MAX };
                        let state =
                            StateLayout { num_offloaded_units: num_moved, ..StateLayout::zero(zero_stage) };
                        let classes = StateClass::ALL.into_iter().zip(tiers);
                        let state = classes.fold(state, |state, (class, tier)| state.with_tier(class, tier));
                        let layout = Layout {
                            num_shards: if zero_stage == 0 { 1 } else { 2 },
                            keeps,
                            state,
                            folder: folder.path(),
                            ..plain.clone()
                        };
                        let found = run(&config, &layout, 2, num_microbatches);
                        assert!(
                            found == oracle,
                            "stage {zero_stage} {tiers:?} {keeps:?} {}",
                            options.precision
                        );
                    }
                }
            }
        }
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "files are gone");
}
