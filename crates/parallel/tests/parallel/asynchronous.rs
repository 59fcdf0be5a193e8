//! Pipelines that do not drain between updates: the weight versions for which gradients are computed, and the updates with these
//! gradients.

use crate::common::{
    ASYNCHRONOUS_STEPS, DEFAULT, Layout, NamedOptimizer, Pipeline, SHAPE, batches, change_shard,
    executor_with_layout, shard_values,
};
use std::ops::Range;
use trireme_comm::Group;
use trireme_model::{Batch, ModelConfig};
use trireme_optim::{OptimizerName, OptimizerSettings};
use trireme_parallel::{Executor, GradNorm, Skipped, StepOutcome, StepPlan};
use trireme_schedule::pipeline::{Costs, PassKind, Schedule, ScheduleKind, Sizes, StageCosts, generate};
use trireme_schedule::{Keep, StateLayout};
use trireme_testkit::{random_batch, run_ranks};

const LR: f64 = 0.3;
const SGD: NamedOptimizer = (OptimizerName::Sgd, OptimizerSettings { momentum: 0.0, ..DEFAULT });

/// A model of six units.
fn model() -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "tie_word_embeddings": false}"#;
    ModelConfig::from_json(text).unwrap()
}

fn layout(pipeline: Option<Pipeline>) -> Layout<'static> {
    Layout { optimizer: SGD, weight_decay: 0.0, pipeline, ..Layout::default() }
}

fn plan(step: usize, grad_norm: GradNorm) -> StepPlan {
    StepPlan { step: step as u64, lr: LR, grad_norm, has_loss: true }
}

/// Runs a program of [`ASYNCHRONOUS_STEPS`] steps, the first of which has the number `first`.
fn run_steps(executor: &mut Executor, first: usize, grad_norm: GradNorm) -> Vec<StepOutcome> {
    let header = &executor.program().header;
    let per_step = header.microbatches_per_step() * executor.ranks().data().world_size();
    let batch = |index| -> Batch {
        let place = executor.global_microbatch(index);
        let step = (first + place / per_step) as u64;
        random_batch(executor.device(), SHAPE, 61, step, place % per_step)
    };
    let batches: Vec<Batch> = (0..header.num_microbatches).map(batch).collect();
    let plans: Vec<StepPlan> =
        (first..first + ASYNCHRONOUS_STEPS).map(|step| plan(step, grad_norm)).collect();
    let mut outcomes = Vec::new();
    executor.run_steps(&plans, &mut batches.into_iter(), &mut outcomes).unwrap();
    outcomes
}

/// The losses of the steps, and all parameters.
type RunResult = (Vec<f64>, Vec<f32>);

fn parameters(executor: &mut Executor) -> Vec<f32> {
    let all = executor.gather_parameters().unwrap();
    let flat = |unit| all.as_ref().map(|all| all.values(unit).unwrap()).unwrap_or_default();
    (0..executor.model().num_units()).flat_map(flat).collect()
}

/// Runs two programs on the ranks of a pipeline. Returns the results of rank 0.
fn run_pipeline(
    layout: &Layout<'_>,
    world_size: usize,
    num_microbatches: usize,
    grad_norm: GradNorm,
) -> RunResult {
    let num_ranks = layout.pipeline.unwrap().num_ranks;
    let on_rank = |group: Group| {
        let accumulation = num_microbatches * num_ranks / world_size;
        let mut executor = executor_with_layout(&model(), group, 1, accumulation, layout);
        let mut losses = Vec::new();
        for first in [1, 1 + ASYNCHRONOUS_STEPS] {
            let outcomes = run_steps(&mut executor, first, grad_norm);
            losses.extend(outcomes.iter().map(|outcome| outcome.loss));
            assert!(outcomes.iter().all(|outcome| outcome.grad_norm.is_some_and(|norm| norm > 0.0)));
        }
        executor.check_replicas().unwrap();
        (losses, parameters(&mut executor))
    };
    let mut results = run_ranks(world_size, on_rank);
    assert!(results.iter().all(|(losses, _)| *losses == results[0].0), "ranks agree");
    results.swap_remove(0)
}

/// Returns, for each step of a schedule and each stage, the version of the weights that forward reads. It must be the same for all
/// microbatches.
fn versions(schedule: &Schedule) -> Vec<Vec<usize>> {
    let mut versions = vec![vec![None; schedule.num_stages()]; schedule.num_steps];
    for (passes, read) in schedule.ranks.iter().zip(schedule.versions_read()) {
        for (pass, version) in passes.iter().zip(read).filter(|(pass, _)| pass.kind == PassKind::Forward) {
            let slot = &mut versions[pass.microbatch / schedule.num_microbatches][pass.stage];
            assert!(slot.is_none_or(|found| found == version));
            *slot = Some(version);
        }
    }
    versions.into_iter().map(|stages| stages.into_iter().flatten().collect()).collect()
}

/// Emulates a schedule on one rank: computes the gradients of each step at the weights of the scheduled version, and applies them to the
/// newest weights.
fn emulated(kind: ScheduleKind, num_ranks: usize, num_microbatches: usize) -> RunResult {
    let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank: 1, num_steps: ASYNCHRONOUS_STEPS };
    let costs = Costs::equal(num_ranks, StageCosts::of(1, 1, 1)).unwrap();
    let versions = versions(&generate(kind, sizes, &costs, None).unwrap());
    let num_units = 6;
    let stage_of = |unit: usize| {
        let units = |stage: usize| -> Range<usize> {
            stage * num_units / num_ranks..(stage + 1) * num_units / num_ranks
        };
        (0..num_ranks).find(|&stage| units(stage).contains(&unit)).unwrap()
    };
    let on_rank = |group: Group| {
        let mut executor = executor_with_layout(&model(), group, 1, num_microbatches, &layout(None));
        let mut newest: Vec<Vec<f32>> = (0..num_units).map(|unit| shard_values(&executor, unit)).collect();
        let mut losses = Vec::new();
        for first in [1, 1 + ASYNCHRONOUS_STEPS] {
            let mut history = vec![newest.clone()];
            for (index, versions) in versions.iter().enumerate() {
                for unit in 0..num_units {
                    let stale = &history[versions[stage_of(unit)]][unit];
                    change_shard(&mut executor, unit, |values| values.copy_from_slice(stale));
                }
                let batches = batches(&executor, num_microbatches, (first + index) as u64);
                let plan = plan(first + index, GradNorm::Measure);
                losses.push(executor.run(plan, &mut batches.into_iter()).unwrap().loss);
                for (unit, newest) in newest.iter_mut().enumerate() {
                    let stale = &history[versions[stage_of(unit)]][unit];
                    let stepped = shard_values(&executor, unit);
                    let changes = stepped.iter().zip(stale).map(|(stepped, stale)| stepped - stale);
                    newest.iter_mut().zip(changes).for_each(|(value, change)| *value += change);
                }
                history.push(newest.clone());
            }
        }
        (losses, newest.into_iter().flatten().collect())
    };
    run_ranks(1, on_rank).swap_remove(0)
}

fn max_differences(left: &RunResult, right: &RunResult) -> (f64, f32) {
    assert_eq!((left.0.len(), left.1.len()), (right.0.len(), right.1.len()));
    let losses = left.0.iter().zip(&right.0).map(|(left, right)| (left - right).abs());
    let values = left.1.iter().zip(&right.1).map(|(left, right)| (left - right).abs());
    (losses.fold(0.0, f64::max), values.fold(0.0, f32::max))
}

#[test]
fn gradients_are_computed_at_the_scheduled_weight_versions() {
    for (kind, num_ranks, num_microbatches) in [
        (ScheduleKind::PipeDream, 2, 1),
        (ScheduleKind::PipeDream, 3, 1),
        (ScheduleKind::PipeDream2Bw, 2, 2),
        (ScheduleKind::PipeDream2Bw, 3, 4),
    ] {
        let pipeline = Some(Pipeline { kind, num_ranks, stages_per_rank: 1 });
        let found = run_pipeline(&layout(pipeline), num_ranks, num_microbatches, GradNorm::Measure);
        let expected = emulated(kind, num_ranks, num_microbatches);
        let (losses, values) = max_differences(&found, &expected);
        assert!(losses < 1e-5 && values < 1e-5, "{kind}, {num_ranks} ranks: {losses} {values}");
        // A pipeline of one rank always reads the newest weights.
        let fresh = emulated(ScheduleKind::PipeDream, 1, num_microbatches);
        let (losses, values) = max_differences(&found, &fresh);
        assert!(losses > 1e-3 && values > 1e-3, "{kind}, {num_ranks} ranks: staleness shows");
    }
}

#[test]
fn pipedream_2bw_has_the_same_bits_on_any_number_of_ranks() {
    let pipeline =
        |num_ranks| Some(Pipeline { kind: ScheduleKind::PipeDream2Bw, num_ranks, stages_per_rank: 1 });
    let oracle = run_pipeline(&layout(pipeline(1)), 1, 8, GradNorm::Measure);
    let keeps = [Keep::All, Keep::Input, Keep::Products, Keep::Input, Keep::All, Keep::All];
    for (layout, world_size) in [
        (layout(pipeline(2)), 2),
        (layout(pipeline(4)), 4),
        (Layout { keeps: &keeps, ..layout(pipeline(2)) }, 4),
        (Layout { state: StateLayout::zero(1), num_shards: 2, ..layout(pipeline(2)) }, 4),
    ] {
        assert!(run_pipeline(&layout, world_size, 8, GradNorm::Measure) == oracle, "{world_size} ranks");
    }
}

/// Runs one step for each learning rate.
fn run_at(executor: &mut Executor, first: usize, rates: &[f64], grad_norm: GradNorm) -> Vec<StepOutcome> {
    let plan = |(index, &lr): (usize, &f64)| StepPlan { lr, ..plan(first + index, grad_norm) };
    run_plans(executor, &rates.iter().enumerate().map(plan).collect::<Vec<_>>())
}

fn run_plans(executor: &mut Executor, plans: &[StepPlan]) -> Vec<StepOutcome> {
    let num_microbatches = executor.program().header.microbatches_per_step();
    let batch = |index: usize| -> Batch {
        let step = plans[index / num_microbatches].step;
        random_batch(executor.device(), SHAPE, 61, step, index % num_microbatches)
    };
    let batches: Vec<Batch> = (0..executor.program().header.num_microbatches).map(batch).collect();
    let mut outcomes = Vec::new();
    executor.run_steps(plans, &mut batches.into_iter(), &mut outcomes).unwrap();
    outcomes
}

/// Covers schedules that know the norm of the previous step, and one that knows only the norm of the step before that.
#[test]
fn ranks_clip_by_the_norm_of_all_gradients_of_an_earlier_step() {
    const CLIP: f64 = 0.4;
    const FIRST: [f64; 2] = [0.9, 1.7];
    for (kind, num_ranks, num_microbatches, lag) in [
        (ScheduleKind::PipeDream2Bw, 2, 2, 1),
        (ScheduleKind::PipeDream, 3, 2, 1),
        (ScheduleKind::PipeDream, 3, 1, 2),
    ] {
        let layout = layout(Some(Pipeline { kind, num_ranks, stages_per_rank: 1 }));
        let new = |group: Group| {
            let mut executor = executor_with_layout(&model(), group, 1, num_microbatches, &layout);
            executor.restore_earlier_norms(&FIRST);
            executor
        };
        let firsts = [1, 1 + ASYNCHRONOUS_STEPS];
        let clipped = run_ranks(num_ranks, |group| {
            let mut executor = new(group);
            let mut norms = Vec::new();
            for first in firsts {
                let outcomes = run_at(&mut executor, first, &[LR; ASYNCHRONOUS_STEPS], GradNorm::Clip(CLIP));
                norms.extend(outcomes.iter().map(|outcome| outcome.grad_norm.unwrap()));
            }
            assert_eq!(executor.earlier_norms(), norms[norms.len() - lag..]);
            (norms, parameters(&mut executor))
        });
        assert!(clipped.iter().all(|(norms, _)| *norms == clipped[0].0), "ranks agree");
        // The same steps without clipping, at learning rates that are reduced accordingly.
        let norms: Vec<f64> = FIRST[2 - lag..].iter().chain(&clipped[0].0).copied().collect();
        assert!(norms.iter().any(|norm| *norm > CLIP));
        let rates: Vec<f64> = norms.iter().map(|norm| LR * (CLIP / norm).min(1.0)).collect();
        let slower = run_ranks(num_ranks, |group| {
            let mut executor = new(group);
            for (first, rates) in firsts.into_iter().zip(rates.chunks(ASYNCHRONOUS_STEPS)) {
                run_at(&mut executor, first, rates, GradNorm::Measure);
            }
            parameters(&mut executor)
        });
        let apart = clipped[0].1.iter().zip(&slower[0]).map(|(left, right)| (left - right).abs());
        let apart = apart.fold(0.0, f32::max);
        assert!(apart < 1e-5, "{kind}, {num_ranks} ranks: {apart}");
    }
}

#[test]
fn a_clip_norm_above_all_norms_clips_nothing() {
    let pipeline = Some(Pipeline { kind: ScheduleKind::PipeDream2Bw, num_ranks: 2, stages_per_rank: 1 });
    let run = |grad_norm| run_pipeline(&layout(pipeline), 2, 2, grad_norm);
    let (unclipped, clipped) = (run(GradNorm::Clip(1e9)), run(GradNorm::Clip(0.1)));
    assert!(run(GradNorm::Measure) == unclipped && unclipped != clipped);
}

#[test]
fn a_step_without_loss_changes_no_weight() {
    for (kind, num_microbatches, grad_norm) in [
        (ScheduleKind::PipeDream, 1, GradNorm::Measure),
        (ScheduleKind::PipeDream2Bw, 2, GradNorm::Measure),
        (ScheduleKind::PipeDream2Bw, 2, GradNorm::Clip(1e9)),
    ] {
        let layout = layout(Some(Pipeline { kind, num_ranks: 2, stages_per_rank: 1 }));
        let run = |change: &(dyn Fn(&mut StepPlan) + Sync)| {
            run_ranks(2, |group| {
                let mut executor = executor_with_layout(&model(), group, 1, num_microbatches, &layout);
                let mut outcomes = Vec::new();
                for first in [1, 1 + ASYNCHRONOUS_STEPS] {
                    let mut plans: Vec<StepPlan> =
                        (first..first + ASYNCHRONOUS_STEPS).map(|step| plan(step, grad_norm)).collect();
                    change(&mut plans[1]);
                    outcomes.extend(run_plans(&mut executor, &plans));
                }
                (outcomes, parameters(&mut executor), executor.loss_scaler().skipped_steps())
            })
        };
        let skipped = run(&|plan| plan.has_loss = false);
        // Without momentum, a learning rate of zero does not change the weights either.
        let still = run(&|plan| plan.lr = 0.0);
        for ((outcomes, parameters, num_skipped), (expected, expected_parameters, _)) in
            skipped.iter().zip(&still)
        {
            assert!(parameters == expected_parameters, "{kind}");
            assert_eq!(*num_skipped, 2);
            for (index, (outcome, expected)) in outcomes.iter().zip(expected).enumerate() {
                match index % ASYNCHRONOUS_STEPS {
                    1 => {
                        assert_eq!((outcome.skipped, outcome.grad_norm), (Some(Skipped::NoLoss), None));
                        assert!(outcome.loss.is_nan());
                    }
                    _ => assert_eq!((outcome.loss, outcome.grad_norm), (expected.loss, expected.grad_norm)),
                }
            }
        }
    }
}
